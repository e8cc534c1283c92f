"""Packs on a real disk: what is written comes back, and nothing half-made is taken for a whole
one.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from jmoe.memory import record_store
from jmoe.memory.buffers import PAGE_BYTES, allocate_slots
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import MANIFEST, PackError, RecordStore
from jmoe.memory.tiered_store import TieredStore
from tests.damage import flip
from tests.fakes import run_in_threads
from tests.train_runs import Run

ARRAYS = {
    "gate": ((3, 5), np.float32),
    "up": ((1000, 7), ml_dtypes.bfloat16),
    "scale": ((), np.int8),
}
LAYOUT = RecordLayout.from_arrays(ARRAYS)
NUM_RECORDS = 6


def content(index: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng((seed, index))
    return {
        f.name: rng.integers(-100, 100, f.shape).astype(f.dtype)
        if f.shape
        else np.asarray(rng.integers(-100, 100), f.dtype)
        for f in LAYOUT.fields
    }


def fill(index: int, views: dict[str, NDArray[Any]], seed: int = 0) -> None:
    for name, array in content(index, seed).items():
        views[name][...] = array


def fill_other(index: int, views: dict[str, NDArray[Any]]) -> None:
    fill(index, views, seed=1)


def refuse(index: int, views: dict[str, NDArray[Any]]) -> None:
    raise AssertionError("packed again")


def pack(
    folder: Path, fill: record_store.Fill = fill, fingerprint: str = "a", **options: Any
) -> RecordStore:
    return RecordStore.open_or_pack(
        folder, LAYOUT, NUM_RECORDS, fill, fingerprint=fingerprint, **options
    )


def check_content(store: RecordStore, seed: int = 0) -> None:
    buffer = store.layout.zeros()
    for index in reversed(range(store.num_records)):
        store.read_into(index, buffer)
        for name, array in content(index, seed).items():
            got = store.layout.views(buffer)[name]
            assert got.dtype == array.dtype
            np.testing.assert_array_equal(got, array)
        padding = buffer[store.layout.data_bytes :]
        assert not padding.any()


def test_layout() -> None:
    gate, up, scale = LAYOUT.fields
    assert (gate.offset_bytes, gate.num_bytes) == (0, 60)
    assert (up.offset_bytes, up.num_bytes) == (64, 14000)
    assert (scale.offset_bytes, scale.num_bytes) == (14080, 1)  # 14064 rounded up to 64
    assert (LAYOUT.data_bytes, LAYOUT.record_bytes) == (14081, 16384)
    for slot, record_R in enumerate(allocate_slots(3, LAYOUT.record_bytes)):
        assert record_R.ctypes.data % PAGE_BYTES == 0
        views = LAYOUT.views(record_R)
        assert {name: (view.shape, view.dtype) for name, view in views.items()} == {
            name: (shape, np.dtype(dtype)) for name, (shape, dtype) in ARRAYS.items()
        }
        views["scale"][...] = slot + 1
        assert record_R[14080] == slot + 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "at least one array"),
        ({"w": ((3, 0), np.float32)}, r"w\.shape = \(3, 0\)"),
        ({"w": ((3,), object)}, r"w\.dtype"),
        ({"w": ((3,), ">f4")}, r"w\.dtype"),
    ],
)
def test_layouts_that_make_no_sense(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecordLayout.from_arrays(arrays)


def test_buffers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="slot_bytes = 5000"):
        allocate_slots(1, 5000)
    with pytest.raises(ValueError, match="num_slots = 0"):
        allocate_slots(0, 4096)
    with pytest.raises(OSError, match="bytes of host memory"):
        allocate_slots(2**40, 2**20)


def test_what_is_packed_comes_back(tmp_path: Path) -> None:
    with pack(tmp_path / "a" / "b") as store:
        check_content(store)
        assert store.path.stat().st_size == NUM_RECORDS * LAYOUT.record_bytes
        raw = store.path.read_bytes()  # the same bytes through the page cache
        buffer = LAYOUT.zeros()
        store.read_into(3, buffer)
        assert buffer.tobytes() == raw[3 * LAYOUT.record_bytes : 4 * LAYOUT.record_bytes]
    with pack(tmp_path / "a" / "b", refuse) as store:  # it is there already
        check_content(store)


def drop_from_page_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def in_page_cache(path: Path) -> bool:
    """Whether the file's first page is in memory; asking brings it there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(PAGE_BYTES)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def test_reads_bypass_the_page_cache(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(PAGE_BYTES))
    drop_from_page_cache(other)
    with pack(tmp_path) as store:
        if store.io != "O_DIRECT" or in_page_cache(other):
            pytest.skip("a file system without O_DIRECT, or in memory")
        for _ in range(5):  # a page that something else holds at that moment is not dropped
            drop_from_page_cache(store.path)
            check_content(store)
            if not in_page_cache(store.path):
                break
        else:
            pytest.fail("reads leave the file in the page cache")
        other.read_bytes()
        assert in_page_cache(other)


@pytest.mark.parametrize("refused_at", ["open", "read"])
def test_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_at: str) -> None:
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()

    def refusing_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT and refused_at == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags, *args, **kwargs)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def refusing_preadv(fd: int, *args: Any) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, *args)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "preadv", refusing_preadv)
    with pack(tmp_path) as store:
        assert store.io.startswith("buffered: ")
        check_content(store)


def test_on_tmpfs() -> None:
    folder = Path("/dev/shm") / f"jmoe-test-{os.getpid()}"
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no file system of its own here")
    try:
        with pack(folder, repair=fill) as store:
            assert store.io == "mapped"
            check_content(store)
            flip(store.path, 2 * LAYOUT.record_bytes + 5, 3)
            with TieredStore(store.map_records()) as tiers:
                tiers.prefetch(range(NUM_RECORDS))
                for index in range(NUM_RECORDS):  # the damaged one is mended
                    with tiers.get(index) as record:
                        for name, array in content(index).items():
                            np.testing.assert_array_equal(record[name], array)
                stats = tiers.stats()
                assert (tiers.host_bytes, stats.nvme.num_bytes) == (0, 0)
                assert stats.host.num_bytes == NUM_RECORDS * LAYOUT.record_bytes
                with pytest.raises(
                    ValueError, match="writable = True: must be False for a file that is mapped"
                ):
                    tiers.get(0, writable=True)
                os.truncate(store.path, LAYOUT.record_bytes)
                with pytest.raises(
                    OSError, match=r"reading record 3: the file ends after .*records-.*\.bin"
                ):
                    tiers.get(3)
    finally:
        shutil.rmtree(folder)


def test_a_mapped_record_that_cannot_be_mended(tmp_path: Path) -> None:
    with pack(tmp_path) as store:
        flip(store.path, 2 * LAYOUT.record_bytes + 5, 3)
        with TieredStore(store.map_records()) as tiers:
            tiers.get(1).close()
            with pytest.raises(
                OSError, match="record 2: damaged, its content is not what was written"
            ):
                tiers.get(2)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv = os.preadv
    with pack(tmp_path) as store:
        monkeypatch.setattr(
            os, "preadv", lambda fd, buffers, offset: real_preadv(fd, [buffers[0][:4096]], offset)
        )
        check_content(store)


def test_bad_reads(tmp_path: Path) -> None:
    record_R, read_only = allocate_slots(2, LAYOUT.record_bytes)
    with pack(tmp_path) as store:
        for index in (-1, NUM_RECORDS):
            with pytest.raises(
                ValueError, match=rf"index = {index}: must be in \[0, {NUM_RECORDS}\)"
            ):
                store.read_into(index, record_R)
        with pytest.raises(ValueError, match="writable bytes, has 4096"):
            store.read_into(0, record_R[:4096])
        flat = np.zeros(2 * LAYOUT.record_bytes, np.uint8)
        misaligned = flat[-flat.ctypes.data % PAGE_BYTES + 64 :][: LAYOUT.record_bytes]
        with pytest.raises(ValueError, match="must begin at a multiple of 4096"):
            store.read_into(0, misaligned)
        read_only.flags.writeable = False
        with pytest.raises(ValueError, match="writable"):
            store.read_into(0, read_only)
        os.truncate(store.path, 2 * LAYOUT.record_bytes + 4096)
        store.read_into(1, record_R)
        with pytest.raises(
            OSError, match=r"reading record 2 .* the file ends after 4096 bytes of it"
        ) as caught:
            store.read_into(2, record_R)
        assert caught.value.filename == str(store.path)


def swap_records(path: Path) -> None:
    content = path.read_bytes()
    size = LAYOUT.record_bytes
    path.write_bytes(content[size : 2 * size] + content[:size] + content[2 * size :])


DAMAGES: list[Callable[[Path], None]] = [
    lambda path: flip(path, 0),
    lambda path: flip(path, LAYOUT.record_bytes + 5000),
    lambda path: flip(path, NUM_RECORDS * LAYOUT.record_bytes - 1),
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    swap_records,
]


@pytest.mark.parametrize(
    "damage", DAMAGES, ids=["first byte", "second record", "padding", "zeros", "swapped"]
)
def test_a_damaged_record_is_not_given_out(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """An error without a source of the records; with one they are mended, in the file too."""
    with pack(tmp_path) as store:
        path, whole = store.path, store.path.read_bytes()
    damage(path)
    with (
        RecordStore.open(tmp_path, LAYOUT, NUM_RECORDS, fingerprint="a") as store,
        pytest.raises(
            OSError, match=r"record \d: damaged, its content is not what was written"
        ) as caught,
    ):
        check_content(store)
    assert caught.value.filename == str(path)
    with pack(tmp_path, refuse, repair=fill) as store:
        check_content(store)
        assert path.read_bytes() == whole
        assert "mended from its source" in caplog.text
        caplog.clear()
        check_content(store)
    with pack(tmp_path, refuse, repair=refuse) as store:
        check_content(store)
    assert not caplog.text


def test_a_record_that_the_disk_cannot_read_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_preadv = os.preadv

    def bad_sector(fd: int, buffers: Any, offset: int) -> int:
        if 4096 <= offset - LAYOUT.record_bytes < 8192 or offset == LAYOUT.record_bytes:
            raise OSError(errno.EIO, "Input/output error")
        return real_preadv(fd, buffers, offset)

    with pack(tmp_path) as store, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", bad_sector)
        with pytest.raises(OSError, match=r"reading record 1 .*Input/output error"):
            check_content(store)
        with pack(tmp_path, refuse, repair=fill) as mending:
            check_content(mending)


def test_a_file_that_its_server_no_longer_knows_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, once the server has started anew; of a file that is gone, records come from their
    source.
    """
    real, stale = {name: getattr(os, name) for name in ("preadv", "fstat", "open")}, [True]

    def known_again(*arguments: Any, **options: Any) -> int:
        stale[0] = False
        return real["open"](*arguments, **options)

    def refused_to_old(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if stale[0]:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real[name](*arguments)

        return call

    with pack(tmp_path, repair=fill) as store, monkeypatch.context() as patch:
        for name in ("preadv", "fstat"):
            patch.setattr(os, name, refused_to_old(name))
        patch.setattr(os, "open", known_again)
        check_content(store)
        assert not stale[0]
        store.path.unlink()
        stale[0] = True
        patch.setattr(os, "open", real["open"])
        check_content(store)


def test_a_damaged_record_that_cannot_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a file that may not be written to it is given out all the same; from another source or
    none it is not.
    """

    def gone(index: int, views: dict[str, NDArray[Any]]) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "model.safetensors")

    with pack(tmp_path) as store:
        flip(store.path, 100)
    real_open = os.open

    def reading(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_WRONLY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, flags, *args, **kwargs)

    with pack(tmp_path, refuse, repair=fill) as store, monkeypatch.context() as patch:
        patch.setattr(os, "open", reading)
        check_content(store)
        assert "not mended: [Errno 13] Permission denied" in caplog.text
    for repair, why in (
        (fill_other, "its source has changed"),
        (gone, "its source cannot be read: .*model.safetensors"),
    ):
        with (
            pack(tmp_path, refuse, repair=repair) as store,
            pytest.raises(OSError, match=f"record 0: damaged, .*, and {why}"),
        ):
            check_content(store)


def in_manifest(edit: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / MANIFEST).write_text(edit((folder / MANIFEST).read_text()))


def in_data(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: damage(next(folder.glob("records-*.bin")))


def without_sums(text: str) -> str:
    return json.dumps({name: value for name, value in json.loads(text).items() if name != "sums"})


def with_other_sums(text: str) -> str:
    at = text.index('"sums": "') + 20
    return text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            in_data(lambda path: os.truncate(path, path.stat().st_size - 4096)),
            r"94208 bytes, expected 6 records of 16384 bytes",
        ),
        (in_data(Path.unlink), r"records-.*\.bin, which the manifest names, is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), r"no manifest\.json"),
        (in_manifest(lambda text: text[: len(text) // 2]), "not readable as JSON"),
        (in_manifest(lambda text: "[]"), "must be a JSON object"),
        (in_manifest(with_other_sums), "the checksums in manifest.json are damaged"),
        (in_manifest(without_sums), "manifest.json has no checksums"),
    ],
)
def test_damage_is_noticed_and_repaired(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    pack(tmp_path).close()
    damage(tmp_path)
    with pytest.raises(PackError, match=message):
        RecordStore.open(tmp_path, LAYOUT, NUM_RECORDS, fingerprint="a")
    with pack(tmp_path) as store:
        check_content(store)
    assert len(list(tmp_path.glob("records-*.bin"))) == 1


def test_a_foreign_pack_is_replaced(tmp_path: Path) -> None:
    old = pack(tmp_path)
    for layout, num_records, fingerprint, named in (
        (LAYOUT, NUM_RECORDS, "b", "fingerprint"),
        (LAYOUT, NUM_RECORDS - 1, "a", "num_records"),
        (
            RecordLayout.from_arrays(ARRAYS | {"gate": ((5, 3), np.float32)}),
            NUM_RECORDS,
            "a",
            "layout",
        ),
    ):
        with pytest.raises(PackError, match=f"holds .*'{named}'"):
            RecordStore.open(tmp_path, layout, num_records, fingerprint=fingerprint)
    with pack(tmp_path, fill_other, "b") as store:
        check_content(store, seed=1)
        check_content(old)  # who has the old one open may go on reading
        assert list(tmp_path.glob("records-*.bin")) == [store.path]
    old.close()
    with pytest.raises(PackError):
        RecordStore.open(tmp_path, LAYOUT, NUM_RECORDS, fingerprint="a")


def test_a_read_only_folder_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(tmp_path).close()

    def denied(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(record_store, "folder_lock", denied)
    monkeypatch.setattr(Path, "mkdir", denied)
    with pack(tmp_path, refuse) as store:
        check_content(store)


def test_a_failing_fill_leaves_nothing(tmp_path: Path) -> None:
    def failing(index: int, views: dict[str, NDArray[Any]]) -> None:
        if index == 3:
            raise KeyError("model.layers.3")
        fill(index, views)

    with pytest.raises(KeyError, match=r"model\.layers\.3"):
        pack(tmp_path, failing)
    assert [path.name for path in tmp_path.iterdir()] == [record_store.LOCK]
    pack(tmp_path).close()
    with pytest.raises(KeyError):
        pack(tmp_path, failing, "b")
    with pack(tmp_path, refuse) as store:  # the pack that was there is still there
        check_content(store)


def test_a_field_not_filled_is_zero(tmp_path: Path) -> None:
    def partly(index: int, views: dict[str, NDArray[Any]]) -> None:
        if index % 2 == 0:
            fill(index, views)

    buffer = LAYOUT.zeros()
    with pack(tmp_path, partly) as store:
        store.read_into(3, buffer)
    assert not buffer.any()


def test_a_full_disk_is_seen_beforehand(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    num_records = free_bytes // LAYOUT.record_bytes * 2
    with pytest.raises(
        OSError, match=f"{num_records} records need {num_records * 16384} bytes, .* are free"
    ) as caught:
        RecordStore.open_or_pack(tmp_path, LAYOUT, num_records, refuse, fingerprint="a")
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == [record_store.LOCK]


LIMITED = """
import pathlib, resource, signal, sys
from tests.memory.test_record_store import LAYOUT, NUM_RECORDS, fill, pack
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * LAYOUT.record_bytes, 3 * LAYOUT.record_bytes))
try:
    pack(pathlib.Path(sys.argv[1]))
except OSError as error:
    print(error)
"""


def test_a_disk_that_fills_up_while_packing(run_python: Run, tmp_path: Path) -> None:
    done = run_python(["-c", LIMITED, tmp_path])
    assert f"{NUM_RECORDS} records need {NUM_RECORDS * 16384} bytes" in done.stdout, done.stderr
    assert "are free" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [record_store.LOCK]


def pack_twice(folder: Path) -> None:
    pack(folder).close()
    (folder / "first").touch()
    pack(folder, fill_other, "b").close()
    (folder / "second").touch()


def examine(folder: Path) -> None:
    """One of the two packs is whole, from the moment on that the first one is; the lock died
    with its packer.
    """
    whole = []
    for seed, fingerprint in enumerate("ab"):
        with (
            contextlib.suppress(PackError),
            RecordStore.open(folder, LAYOUT, NUM_RECORDS, fingerprint=fingerprint) as store,
        ):
            check_content(store, seed)
            whole.append(fingerprint)
    assert len(whole) == 1 or not (folder / "first").exists()
    assert whole == ["b"] or not (folder / "second").exists()
    with pack(folder, fingerprint="c") as store:
        check_content(store)
        assert list(folder.glob("records-*.bin")) == [store.path]


KILLED = """
import os, pathlib, sys
import tests.memory.test_record_store as t
from tests.processes import kill_at_every_call
calls = [(os, "posix_fallocate"), (os, "pwritev"), (os, "fsync"), (pathlib.Path, "replace")]
print(kill_at_every_call(pathlib.Path(sys.argv[1]), calls, t.pack_twice, t.examine))
"""


def test_killed_between_any_two_steps(run_python: Run, tmp_path: Path) -> None:
    """SIGKILL at every write, fsync and rename of a packer, also of one that replaces an older
    pack.
    """
    done = run_python(["-c", KILLED, tmp_path])
    assert done.returncode == 0, done.stdout + done.stderr
    # records; data, folder, manifest, rename, folder
    assert int(done.stdout) >= 2 * (1 + NUM_RECORDS + 5)


def test_packers_take_turns(tmp_path: Path) -> None:
    """Many threads pack one folder: one packs, the others find the work done."""
    packers: list[int] = []
    start = threading.Barrier(6)

    def work(me: int) -> None:
        def slow_fill(index: int, views: dict[str, NDArray[Any]]) -> None:
            if not index:
                packers.append(me)
            time.sleep(0.01)
            fill(index, views)

        start.wait()
        with pack(tmp_path, slow_fill) as store:
            check_content(store)

    run_in_threads(work, 6)
    assert len(packers) == 1
    assert len(list(tmp_path.glob("records-*.bin"))) == 1


def test_packers_of_different_sources_do_not_mix(tmp_path: Path) -> None:
    """Two threads replace each other's pack for a while; whatever opens is what its fingerprint
    says.
    """

    def work(seed: int) -> None:
        for _ in range(10):
            with pack(tmp_path, (fill, fill_other)[seed], "ab"[seed]) as store:
                check_content(store, seed)

    run_in_threads(work, 2)
    fingerprint = json.loads((tmp_path / MANIFEST).read_text())["fingerprint"]
    with RecordStore.open(tmp_path, LAYOUT, NUM_RECORDS, fingerprint=fingerprint) as store:
        check_content(store, seed="ab".index(fingerprint))


def test_a_lock_held_too_long_is_an_error(tmp_path: Path) -> None:
    with (
        record_store.folder_lock(tmp_path, 10),
        pytest.raises(
            TimeoutError, match=r"pack\.lock: another process has held it for more than 0\.1 s"
        ),
    ):
        pack(tmp_path, lock_limit_s=0.1)


def lacking(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """What FUSE, vfat and network file systems may lack: O_DIRECT, room ahead, locks, flushing
    of folders.
    """
    really_open, really_fsync = os.open, os.fsync

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    def open_buffered(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            refuse()
        return really_open(path, flags, *rest, **named)

    def fsync_files(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            refuse()
        really_fsync(fd)

    monkeypatch.setattr(os, "open", open_buffered)
    monkeypatch.setattr(os, "fsync", fsync_files)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr("fcntl.flock", refuse)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_that_lack_much(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking(monkeypatch, code)
    with pack(tmp_path) as store:
        assert store.io.startswith("buffered")
        check_content(store)
    assert f"{tmp_path}: cannot be locked ({os.strerror(code)})" in caplog.text
