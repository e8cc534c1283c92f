"""Records that change: versions on a real disk and in mapped memory, damaged, crowded out and
killed at every step.
"""

import errno
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jmoe.memory import direct_io, version_store
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import PackError
from jmoe.memory.version_store import PINS, SEAL, SYNC_EVERY, Version, VersionStore
from tests.damage import flip
from tests.fakes import run_in_threads
from tests.records import got, missing, pinned, put
from tests.train_runs import Run, Start

LAYOUT = RecordLayout.from_arrays(
    {"w": ((700,), np.float32), "m": ((700,), np.float32), "v": ((700,), np.float32)}
)
NUM_RECORDS = 5


def open_store(folder: Path, **options: Any) -> VersionStore:
    return VersionStore.open(folder, LAYOUT, NUM_RECORDS, **{"fingerprint": "a", **options})


def file_of(store: VersionStore, index: int) -> Path:
    return store.path / store._current[index].name


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path / "store"
    elif not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no file system of its own here")
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
            yield Path(made) / "store"


def test_versions_come_and_go(folder: Path) -> None:
    with open_store(folder) as store:
        assert store.io == ("mapped" if folder.is_relative_to("/dev/shm") else "O_DIRECT")
        assert missing(store) == list(range(NUM_RECORDS))
        with pytest.raises(ValueError, match=r"record 2 of .* has never been written"):
            got(store, 2)
        store.write_all_records(lambda index, views: views["w"].fill(0))
        assert missing(store) == []
        for round_ in range(20):
            for index in range(NUM_RECORDS):
                put(store, index, 100 * index + round_)
                assert got(store, index) == 100 * index + round_
        stats = store.stats()
        assert stats.writes == 21 * NUM_RECORDS
        assert stats.written_bytes == stats.writes * store.layout.record_bytes
        assert stats.recycled > 14 * NUM_RECORDS
        files = [entry for entry in folder.iterdir() if Version.parse_or_none(entry.name)]
        assert len(files) <= NUM_RECORDS + SYNC_EVERY + 1
    with open_store(folder) as store:
        assert [got(store, index) for index in range(NUM_RECORDS)] == [19, 119, 219, 319, 419]
        assert store.stats().writes == 0


def test_a_mapped_version_stays_as_it_is(folder: Path) -> None:
    """Whatever is written meanwhile, and when its file has no name any more; its file is not
    used for another.
    """
    with open_store(folder) as store:
        for index in range(NUM_RECORDS):
            put(store, index, 10 * index)
        mapped, file = store.map_version(3), file_of(store, 3)
        w, ramp = store.layout.views(mapped.record_R)["w"], np.arange(700) / 1024
        assert not w.flags.writeable
        for round_ in range(3 * SYNC_EVERY):
            put(store, 3, round_)
        store.sync()
        np.testing.assert_array_equal(w, np.float32(30 + ramp))
        assert got(store, 3) == 3 * SYNC_EVERY - 1
        mapped.close()
        store.sync()  # now it is a file to write into
        assert file in store._spare
        other = store.map_version(4)
        file_of(store, 4).unlink()
        np.testing.assert_array_equal(
            store.layout.views(other.record_R)["w"], np.float32(40 + ramp)
        )
        other.close()


def test_a_version_is_checked_when_it_is_first_mapped(folder: Path) -> None:
    with open_store(folder) as store:
        for index in range(NUM_RECORDS):
            put(store, index, index)
        flip(file_of(store, 2), 5000, 4)
        os.truncate(file_of(store, 1), 8192)
        for index, message in (
            (2, "record 2: damaged"),
            (1, "record 1: .*the file ends after 8192"),
        ):
            with pytest.raises(OSError, match=message) as caught:
                store.map_version(index)
            assert str(file_of(store, index)) in str(caught.value)
        for index in (1, 2):
            put(store, index, 7)
            mapped = store.map_version(index)
            assert store.layout.views(mapped.record_R)["m"][0] == 7
            mapped.close()
        checks: list[Path] = []
        with mock.patch.object(version_store, "check_seal", lambda path, *_: checks.append(path)):
            for index in (1, 2, 3, 3):
                store.map_version(index).close()
        assert checks == [file_of(store, 3)]


def test_a_pin_stays_as_it_is(folder: Path) -> None:
    with open_store(folder) as store:
        for round_ in range(3):
            for index in range(NUM_RECORDS):
                put(store, index, index + 10 * round_)
            names = store.pin_versions(str(round_))
            assert sorted(names) == sorted(
                path.name for path in pinned(folder, str(round_)).values()
            )
        written = store.stats().written_bytes
        for round_ in range(3, 30):
            put(store, 0, 10 * round_)
        for round_ in range(3):
            files = pinned(folder, str(round_))
            assert [got(store, index, files[index]) for index in range(NUM_RECORDS)] == [
                index + 10 * round_ for index in range(NUM_RECORDS)
            ]
        # pinning wrote none
        assert store.stats().written_bytes - written == 27 * store.layout.record_bytes
        store.restore_versions(pinned(folder, "1"))
        assert [got(store, index) for index in range(NUM_RECORDS)] == [10, 11, 12, 13, 14]
        put(store, 1, 99)
        files = pinned(folder, "2")
        assert got(store, 1, files[1]) == 21
    with open_store(folder) as store:
        assert [got(store, index) for index in range(NUM_RECORDS)] == [10, 99, 12, 13, 14]
        shutil.rmtree(folder / PINS / "1")
        put(store, 2, 5)
        store.sync()
        assert (
            sum(
                path.stat().st_nlink == 1
                for path in folder.iterdir()
                if Version.parse_or_none(path.name)
            )
            >= 2
        )


def test_a_pin_of_some_records_comes_back_without_the_others(folder: Path) -> None:
    with open_store(folder) as store:
        for index in (1, 3, 4):
            put(store, index, 10 * index)
        assert sorted(int(name.split(".")[0]) for name in store.pin_versions("1", only=[4, 1])) == [
            1,
            4,
        ]
        for index in range(NUM_RECORDS):
            put(store, index, 7)
        files = pinned(folder, "1")
        with pytest.raises(
            ValueError, match=r"files = 2: must name every owned record; lacks \[0, 2, 3\]"
        ):
            store.restore_versions(files)
        store.restore_versions(files, partial=True)
        assert [got(store, index) for index in (1, 4)] == [10, 40]
        assert missing(store) == [0, 2, 3]
        put(store, 3, 30)
        assert got(store, 3) == 30


def test_a_killed_writer_leaves_the_pins_alone(folder: Path) -> None:
    """Versions replaced but not buried when the process dies are not written into by the next,
    where pinned.
    """
    store = open_store(folder)
    for index in range(NUM_RECORDS):
        put(store, index, index)
    store.pin_versions("1")
    for index in range(NUM_RECORDS):
        put(store, index, 10 + index)
    store._held.close()  # all that the kernel does for a killed process
    with open_store(folder) as store:
        for value in range(20, 40):
            for index in range(NUM_RECORDS):
                put(store, index, value)
        files = pinned(folder, "1")
        assert [got(store, index, files[index]) for index in range(NUM_RECORDS)] == [0, 1, 2, 3, 4]


def test_restored_from_another_file_system(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made, open_store(Path(made) / "far") as far:
        for index in range(NUM_RECORDS):
            put(far, index, index)
        far.pin_versions("7")
        files = pinned(far.path, "7")
        with open_store(tmp_path / "near") as store:
            for index in range(NUM_RECORDS):
                put(store, index, 50)
            store.restore_versions(files)
            assert [got(store, index) for index in range(NUM_RECORDS)] == [0, 1, 2, 3, 4]
            put(store, 3, 60)
            assert got(store, 3) == 60
            file_of(store, 2).unlink()
            # a dead version's file, overwritten: not to be trusted
            shutil.copyfile(files[1], file_of(store, 2))
            store.restore_versions(files)
            assert [got(store, index) for index in range(NUM_RECORDS)] == [0, 1, 2, 3, 4]
            with files[4].open("r+b") as file:
                file.write(b"bits")
            with pytest.raises(OSError, match="record 4: damaged") as caught:
                store.restore_versions(
                    {**files, 4: files[4]} if file_of(store, 4).unlink() is None else files
                )
            assert str(files[4]) in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip(path, 5000, 4), "record 2: damaged"),
        (lambda path: flip(path, 8450, 4), "record 2: damaged"),  # the seal
        (lambda path: flip(path, 12000, 4), "record 2: damaged"),  # the padding
        (lambda path: os.truncate(path, 8192), "record 2: .*the file ends after 8192"),
        (lambda path: os.truncate(path, 0), "record 2: .*the file ends after 0"),
        (lambda path: path.unlink(), "record 2: No such file"),
        (lambda path: shutil.copyfile(path.parent / "other", path), "record 2: damaged"),
        (lambda path: swap_pages(path), "record 2: damaged"),
        (lambda path: tear(path), "record 2: damaged"),
    ],
)
def test_damage_is_noticed(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    with open_store(folder) as store:
        for index in range(NUM_RECORDS):
            put(store, index, index)
        store.pin_versions("1")
        shutil.copyfile(file_of(store, 3), folder / "other")
        put(store, 2, 42)
        damage(file_of(store, 2))
        with pytest.raises(OSError, match=message) as caught:
            got(store, 2)
        assert str(file_of(store, 2)) in str(caught.value)
        assert [got(store, index) for index in (0, 1, 3, 4)] == [0, 1, 3, 4]
        assert got(store, 2, pinned(folder, "1")[2]) == 2
        put(store, 2, 43)
        assert got(store, 2) == 43


def swap_pages(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[4096:8192] + content[:4096] + content[8192:])


def tear(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(4096) + content[8192:])


def test_other_records_are_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with pytest.raises(PackError, match="fingerprint"):
        open_store(tmp_path, fingerprint="b")
    with pytest.raises(PackError, match="layout"):
        VersionStore.open(
            tmp_path, RecordLayout.from_arrays({"w": ((3,), np.int8)}), NUM_RECORDS, fingerprint="a"
        )
    with pytest.raises(ValueError, match="must not name 'seal'"):
        VersionStore.open(
            tmp_path,
            RecordLayout.from_arrays({SEAL: ((3,), np.int8)}),
            NUM_RECORDS,
            fingerprint="a",
        )
    with pytest.raises(ValueError, match=r"index = 5: must be in \[0, 5\)"):
        open_store(tmp_path, owned=[5])
    with open_store(tmp_path) as store:
        put(store, 1, 1)
        with pytest.raises(TimeoutError, match="another process has held it"):
            open_store(tmp_path, lock_limit_s=0.1)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(PackError, match="no manifest"):  # records of whom?
        open_store(tmp_path)


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(folder) as store:
        for index in range(NUM_RECORDS):
            put(store, index, index)

        def full(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        files = set(folder.iterdir())
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(
                OSError, match=r"No space left on device: new-6 needs 12288 bytes, \d+ are free"
            ) as caught:
                put(store, 1, 77)
        assert caught.value.errno == errno.ENOSPC
        assert set(folder.iterdir()) == files
        assert [got(store, index) for index in range(NUM_RECORDS)] == [0, 1, 2, 3, 4]
        put(store, 1, 78)
        assert got(store, 1) == 78


DENIED = """
import os, pathlib, resource, signal, sys
import tests.memory.test_version_store as t
folder = pathlib.Path(sys.argv[1])
store = t.open_store(folder)
for index in range(t.NUM_RECORDS):
    t.put(store, index, index)
if sys.argv[2] == "denied":
    folder.chmod(0o555)
    if os.getuid() == 0:
        os.seteuid(65534)
else:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    t.put(store, 1, 77)
except OSError as error:
    print(error)
if os.getuid() == 0:
    os.seteuid(0)
print([t.got(store, index) for index in range(t.NUM_RECORDS)])
"""


@pytest.mark.parametrize(
    ("how", "message"), [("denied", "Permission denied"), ("limited", "File too large")]
)
def test_a_folder_that_takes_no_more(
    run_python: Run, tmp_path: Path, how: str, message: str
) -> None:
    folder = tmp_path / "store"
    done = run_python(["-c", DENIED, folder, how])
    folder.chmod(0o755)
    assert message in done.stdout, done.stderr
    assert str(folder) in done.stdout
    assert "[0.0, 1.0, 2.0, 3.0, 4.0]" in done.stdout
    with open_store(folder) as store:
        assert [got(store, index) for index in range(NUM_RECORDS)] == [0, 1, 2, 3, 4]


OWNER = """
import pathlib, sys
import tests.memory.test_version_store as t
rank = int(sys.argv[2])
with t.open_store(pathlib.Path(sys.argv[1]) / f"process-{rank}", owned=range(rank, t.NUM_RECORDS, 2)) as store:
    for round_ in range(40):
        for index in store.owned:
            t.put(store, index, 100 * index + round_)
    store.pin_versions("9")
"""


def test_processes_own_disjoint_records(start_python: Start, tmp_path: Path) -> None:
    """Two processes write their records at the same time; one process then takes all of them."""
    owners = [
        start_python(["-c", OWNER, tmp_path, str(rank)], tmp_path / f"log-{rank}")
        for rank in range(2)
    ]
    for rank, owner in enumerate(owners):
        assert owner.wait(300) == 0, (tmp_path / f"log-{rank}").read_text()
    files = pinned(tmp_path / "process-0", "9") | pinned(tmp_path / "process-1", "9")
    with open_store(tmp_path / "process-0", owned=[0, 2, 4]) as store:
        assert [got(store, index) for index in (0, 2, 4)] == [39, 239, 439]
        with pytest.raises(ValueError, match="index = 1: must be one of the 3 records"):
            got(store, 1)
    with open_store(tmp_path / "process-0") as store:
        assert missing(store) == [1, 3]
        with pytest.raises(ValueError, match=r"must name every owned record; lacks \[1, 3\]"):
            store.restore_versions({index: files[index] for index in (0, 2, 4)})
        store.restore_versions(files)
        assert [got(store, index) for index in range(NUM_RECORDS)] == [39, 139, 239, 339, 439]


def test_reading_while_it_is_replaced(folder: Path) -> None:
    """Threads read records that others replace, with recycled files: every read is of one whole
    version.
    """
    with open_store(folder) as store:
        for index in range(NUM_RECORDS):
            put(store, index, 0)
        writing = [threading.Event(), threading.Event()]

        def read() -> None:
            last = [0.0] * NUM_RECORDS
            while not all(done.is_set() for done in writing):
                for index in range(NUM_RECORDS):
                    value = got(store, index)
                    assert value >= last[index]
                    last[index] = value

        def write(first: int) -> None:
            try:
                for value in range(1, 120):
                    for index in range(first, NUM_RECORDS, 2):
                        put(store, index, value)
            finally:
                writing[first].set()

        run_in_threads(lambda number: write(number) if number < 2 else read(), 4)
        assert [got(store, index) for index in range(NUM_RECORDS)] == [119] * NUM_RECORDS


def test_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    with open_store(tmp_path) as store:
        assert store.io == "buffered"
        put(store, 0, 8)
        assert got(store, 0) == 8


def test_mounts(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    line = f"36 35 {os.major(device)}:{os.minor(device)} / {{}}\n"
    for rest, expected in [
        ("/ rw - ext4 /dev/pmem0 rw,dax=always", True),
        ("/ rw shared:1 - xfs /dev/pmem0 rw,dax", True),
        ("/ rw - ext4 /dev/vda rw,discard", False),
        ("/ rw - tmpfs tmpfs rw,size=1k", True),
    ]:
        mounts.write_text("1 1 0:999 / /proc rw - tmpfs none rw\n" + line.format(rest))
        assert direct_io.is_byte_addressable(tmp_path, mounts) is expected
    assert not direct_io.is_byte_addressable(tmp_path, tmp_path / "none")


def write_pin_and_restore(folder: Path) -> None:
    """Four rounds of writes, each synced; a pin after the second, to which the third goes back.
    All is logged.
    """
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with mock.patch.object(version_store, "SYNC_EVERY", 3):
        store = open_store(folder)
        for round_ in range(1, 5):
            for index in range(NUM_RECORDS):
                os.write(log, f"begun {index} {round_}\n".encode())
                put(store, index, round_)
            store.sync()
            os.write(log, f"synced {round_}\n".encode())
            if round_ == 2:
                store.pin_versions("2")
                os.write(log, b"pinned\n")
            if round_ == 3:
                store.restore_versions(pinned(folder, "2"))
        store.close()


def examine(folder: Path) -> None:
    """Whole versions, none older than the last sync, and the pin as it was; the store can be
    written to.
    """
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    synced = max([int(line.split()[1]) for line in lines if line.startswith("synced")], default=0)
    with open_store(folder) as store:
        for index in range(NUM_RECORDS):
            begun = max(
                [int(line.split()[2]) for line in lines if line.startswith(f"begun {index}")],
                default=0,
            )
            if index in missing(store):
                assert synced == 0, (index, lines)
                continue
            value = got(store, index)
            # from then on it is restored
            least, most = (2, 4) if "synced 3" in lines else (synced, begun)
            assert least <= value <= most, (index, value, lines)
        if "pinned" in lines:
            files = pinned(folder, "2")
            assert [got(store, index, files[index]) for index in range(NUM_RECORDS)] == [
                2.0
            ] * NUM_RECORDS
            store.restore_versions(files)
            assert [got(store, index) for index in range(NUM_RECORDS)] == [2.0] * NUM_RECORDS
        for index in range(NUM_RECORDS):
            put(store, index, 50)
            assert got(store, index) == 50


KILLED_AT = [
    *((os, name) for name in ("pwritev", "fdatasync", "fsync", "link", "posix_fallocate")),
    (Path, "rename"),
    (Path, "unlink"),
]
KILLED = """
import pathlib, sys
import tests.memory.test_version_store as t
from tests.processes import kill_at_every_call
folder, every = pathlib.Path(sys.argv[1]), int(sys.argv[2])
print(kill_at_every_call(folder, t.KILLED_AT, t.write_pin_and_restore, t.examine, every))
"""


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step(run_python: Run, tmp_path: Path, every: int) -> None:
    """SIGKILL at every write, flush, rename and link."""
    done = run_python(["-c", KILLED, tmp_path, str(every)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 100


def test_killed_at_any_moment(start_python: Start, tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; import tests.memory.test_version_store as t, threading\n"
        "store = t.open_store(pathlib.Path(sys.argv[1]))\n"
        "def work(index):\n"
        "    for n in range(1, 10**6): t.put(store, index, n % 1000)\n"
        "for index in range(t.NUM_RECORDS): threading.Thread(target=work, args=(index,)).start()\n"
        "print('begun', flush=True)\n"
    )
    for attempt in range(3):
        log = tmp_path / f"log-{attempt}"
        process = start_python(["-c", script, tmp_path / "store"], log)
        deadline_s = time.monotonic() + 300
        while "begun" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.01)
        time.sleep(0.2 + 0.1 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open_store(tmp_path / "store") as store:
            assert missing(store) == []
            assert all(got(store, index) >= 0 for index in range(NUM_RECORDS))


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_named_at_the_start(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FUSE and vfat are; not at the first checkpoint, hours later."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match=r"has no hard links, .*: give tiers.path a local disk: '.*'"):
        open_store(tmp_path)
    monkeypatch.undo()
    with open_store(tmp_path) as store:
        assert not [path for path in store.path.iterdir() if path.name.startswith(".link")]
