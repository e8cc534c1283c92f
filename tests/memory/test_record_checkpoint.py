"""Records in Orbax checkpoints: real folders, real processes, killed with SIGKILL at any moment."""

import json
import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jmoe.memory import record_checkpoint
from jmoe.memory.record_checkpoint import (
    ITEM,
    RecordCheckpoints,
    RecordsHandler,
    RecordsSave,
)
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import MANIFEST
from jmoe.memory.saved_records import read_record_lists
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import PINS, SEAL, VersionStore
from tests.fakes import wait_for
from tests.train_runs import Run

NUM_RECORDS = 12
LAYOUTS = {
    "weights": RecordLayout.from_arrays({"w": ((900,), np.float32)}),
    "moments": RecordLayout.from_arrays({"m": ((900,), np.float32), "v": ((900,), np.float32)}),
}


def is_durable(folder: Path) -> bool:
    """Whether every process has copied its records of this step."""
    lists = read_record_lists(folder)
    return bool(lists) and all((folder / f"durable-{process}.json").is_file() for process in lists)


def copied(folder: Path) -> int:
    """How many records process 0 has copied to make this step durable; the others are links."""
    return int(json.loads((folder / "durable-0.json").read_text())["copied"])


def open_stores(folder: Path, process: int = 0, num_processes: int = 1) -> dict[str, VersionStore]:
    """The stores of one process, every record that was never written at 0."""
    owned = range(process, NUM_RECORDS, num_processes)
    stores = {
        name: VersionStore.open(
            folder / f"process-{process}" / name, layout, NUM_RECORDS, fingerprint="a", owned=owned
        )
        for name, layout in LAYOUTS.items()
    }
    for store in stores.values():
        if len(store._current) < len(store.owned):
            store.write_all_records(lambda index, views: None)
    return stores


def train(caches: dict[str, TieredStore], step: int) -> None:
    """One step: half of the records become a function of what they were, as an optimizer would
    do it.
    """
    rng = np.random.default_rng(step)
    for name, cache in caches.items():
        assert cache._versions is not None
        for index in rng.choice(NUM_RECORDS, 6, replace=False).tolist():
            if index not in cache._versions.owned:
                continue
            with cache.get(index, writable=True) as record:
                for array in (record[f.name] for f in LAYOUTS[name].fields):
                    array[:] = array * np.float32(0.97) + np.float32(step + index) * np.float32(
                        1e-3
                    )
                record.close_as_changed()
        cache.count_step(range(NUM_RECORDS))


def content(stores: dict[str, VersionStore]) -> dict[tuple[str, int], bytes]:
    """The arrays of every record of one or several processes, without the seal."""
    found = {}
    for name, store in stores.items():
        with TieredStore(store, cache_bytes=8 * store.layout.record_bytes) as cache:
            for index in store.owned:
                with cache.get(index) as record:
                    found[name, index] = b"".join(
                        record[f.name].tobytes() for f in LAYOUTS[name].fields
                    )
    return found


def expected(num_steps: int) -> dict[tuple[str, int], bytes]:
    """What `num_steps` steps without any interruption give."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        stores = open_stores(Path(folder))
        caches = open_caches(stores)
        for step in range(num_steps):
            train(caches, step)
        close(caches, {})
        found = content(stores)
        close({}, stores)
    return found


def open_caches(stores: dict[str, VersionStore]) -> dict[str, TieredStore]:
    return {
        name: TieredStore(store, cache_bytes=5 * store.layout.record_bytes)
        for name, store in stores.items()
    }


def close(caches: dict[str, TieredStore], stores: dict[str, VersionStore]) -> None:
    for cache in caches.values():
        cache.flush()
        cache.close()
    for store in stores.values():
        store.close()


class TrainingRun:
    """A training run of one process: stores, caches, an Orbax manager with the records and one
    number.
    """

    def __init__(self, local: Path, checkpoints: Path, keep: int = 2) -> None:
        self.stores = open_stores(local)
        self.records = RecordCheckpoints(self.stores)
        self.manager = ocp.CheckpointManager(
            checkpoints,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
            ),
            item_names=(ITEM, "dense"),
            item_handlers={ITEM: RecordsHandler(), "dense": ocp.JsonCheckpointHandler()},
        )
        self.checkpoints = checkpoints
        self.step = self.resume()
        self.caches = open_caches(self.stores)

    def resume(self) -> int:
        for step in sorted(self.manager.all_steps(), reverse=True):
            if not self.records.verify_records(self.folder(step)).missing:
                args = ocp.args.Composite(dense=ocp.args.JsonRestore())
                assert self.manager.restore(step, args=args).dense == {"step": step}
                self.records.restore_records(self.folder(step))
                return step
        for store in self.stores.values():
            shutil.rmtree(store.path / PINS)  # nothing was committed: begin again
            (store.path / PINS).mkdir()
            for index in store.owned:
                zero = np.frombuffer(bytearray(2 * store.layout.record_bytes), np.uint8)
                store.write(index, zero[-zero.ctypes.data % 4096 :][: store.layout.record_bytes])
        return 0

    def folder(self, step: int) -> Path:
        return self.checkpoints / str(step) / ITEM

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            train(self.caches, self.step)
            self.step += 1

    def save(self) -> None:
        self.saved = self.step
        for cache in self.caches.values():
            cache.flush()
        args = ocp.args.Composite(
            **{
                ITEM: RecordsSave(self.records, self.step),
                "dense": ocp.args.JsonSave({"step": self.step}),
            }
        )
        self.manager.save(self.step, args=args)

    def commit(self) -> None:
        self.manager.wait_until_finished()
        self.records.begin_drain(self.folder(self.saved), list(self.manager.all_steps()))

    def save_durably(self) -> None:
        self.save()
        self.commit()
        self.records.wait_until_drained()

    def go_back(self) -> None:
        """To the step just saved: what was trained since does not count."""
        for cache in self.caches.values():
            cache.close()
        self.manager.wait_until_finished()
        self.records.restore_records(self.folder(self.saved))
        self.step = self.saved
        self.caches = open_caches(self.stores)

    def close(self) -> None:
        close(self.caches, {})
        self.records.close()
        self.manager.close()
        close({}, self.stores)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "local", tmp_path / "checkpoints")
    run.train(4)
    run.save()
    run.train(3)  # goes on while the step is written
    run.commit()
    run.records.wait_until_drained()
    assert is_durable(run.folder(4))
    assert copied(run.folder(4)) == 0  # one file system: links
    run.close()
    again = TrainingRun(tmp_path / "local", tmp_path / "checkpoints")
    assert again.step == 4
    assert content(again.stores) == expected(4)
    again.train(6)
    again.close()
    stores = open_stores(tmp_path / "local")
    assert content(stores) == expected(10)
    close({}, stores)


def test_saving_writes_no_record(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "local", tmp_path / "checkpoints")
    run.train(2)
    for cache in run.caches.values():
        cache.flush()
    before = {name: store.stats().written_bytes for name, store in run.stores.items()}
    blocks = sum(
        path.stat().st_blocks
        for path in (tmp_path / "local").glob("**/*")
        if path.stat().st_nlink == 1
    )
    run.save_durably()
    assert {name: store.stats().written_bytes for name, store in run.stores.items()} == before
    inodes = {
        path.stat().st_ino: path.stat().st_blocks
        for path in tmp_path.glob("**/*")
        if path.is_file()
    }
    assert sum(inodes.values()) <= blocks + 200  # lists and Orbax's own files
    run.close()


def test_retention_frees_versions(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "local", tmp_path / "checkpoints", keep=2)
    for _ in range(6):
        run.train(2)
        run.save_durably()
    assert sorted(run.manager.all_steps()) == [10, 12]
    for store in run.stores.values():
        assert sorted(path.name for path in (store.path / PINS).iterdir()) == ["10", "12"]
    files = {
        path.stat().st_ino
        for path in tmp_path.glob("**/*.*.*")
        if path.is_file() and "process-" not in path.name
    }
    assert len(files) <= 2 * (3 * NUM_RECORDS + 20)  # three generations, and some to write into
    run.close()


def test_drained_to_another_file_system(tmp_path: Path) -> None:
    """Copied once, linked where a version has not changed; enough to go on from when the local
    folder is gone.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        local = Path(made) / "local"
        run = TrainingRun(local, tmp_path / "checkpoints")
        run.train(1)
        for expected_copies in (2 * NUM_RECORDS, 12):
            run.train(1)
            run.save_durably()
            assert copied(run.folder(run.step)) == expected_copies
        run.close()
        shutil.rmtree(local)
        again = TrainingRun(local, tmp_path / "checkpoints")
        assert again.step == 3
        assert content(again.stores) == expected(3)
        again.close()


@pytest.mark.parametrize("drains_again", [True, False])
def test_not_durable_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drains_again: bool
) -> None:
    """A committed step whose drain failed serves while the local folder is there, and is drained
    when restored.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        local = Path(made) / "local"
        run = TrainingRun(local, tmp_path / "checkpoints")
        run.train(1)
        run.save_durably()
        gate = threading.Event()
        real = record_checkpoint._copy_record

        def held_up(*args: Any) -> None:
            assert gate.wait(240)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(record_checkpoint, "_copy_record", held_up)
        run.train(1)
        run.save()
        run.commit()
        assert not is_durable(run.folder(2))
        gate.set()
        with pytest.raises(OSError, match="No space left"):
            run.records.wait_until_drained()
        if drains_again:
            monkeypatch.setattr(record_checkpoint, "_copy_record", real)
        run.close()
        again = TrainingRun(local, tmp_path / "checkpoints")
        assert again.step == 2
        assert content(again.stores) == expected(2)
        if drains_again:
            again.records.wait_until_drained()
            assert is_durable(again.folder(2))
            again.close()
            return
        with pytest.raises(OSError, match="No space left"):
            again.close()
        close({}, again.stores)
        shutil.rmtree(local)
        last = TrainingRun(local, tmp_path / "checkpoints")
        assert last.step == 1
        assert content(last.stores) == expected(1)
        missing = last.records.verify_records(last.folder(2)).missing
        assert missing
        with pytest.raises(
            FileNotFoundError, match=f"{len(missing)} records, the first .* neither on this machine"
        ):
            last.records.restore_records(last.folder(2))
        last.close()


def test_a_drain_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take any time as long as records are copied; its thread keeps nothing from ending.

    One record is copied in each second of a clock of the test's own.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        stores = open_stores(Path(made))
        records = RecordCheckpoints(stores, stall_limit_s=2)
        turns, now_s = threading.Semaphore(0), 0.0
        copy, wait = record_checkpoint._copy_record, record_checkpoint.wait

        def copy_in_turn(*args: Any) -> None:
            assert turns.acquire(timeout=240)
            copy(*args)

        def wait_a_second(drains: Any, timeout_s: float) -> Any:
            nonlocal now_s
            assert timeout_s == 1.0
            now_s += timeout_s
            before, _ = records._drained
            if before < 9:
                turns.release()
                wait_for(lambda: records._drained[0] > before)
            return wait(drains, 0)

        monkeypatch.setattr(record_checkpoint, "_copy_record", copy_in_turn)
        monkeypatch.setattr(record_checkpoint, "wait", wait_a_second)
        clock = SimpleNamespace(monotonic=lambda: now_s)
        monkeypatch.setattr(record_checkpoint, "time", clock)
        folder = tmp_path / "checkpoints" / "1" / ITEM
        folder.mkdir(parents=True)
        records.write_record_list(folder, records.pin_versions(1))
        records.begin_drain(folder, [1])
        with pytest.raises(
            TimeoutError,
            match=rf"drain of records to {folder}: .* 9 of {2 * NUM_RECORDS} are there",
        ):
            records.wait_until_drained()
        assert now_s == 9 + 3
        records.close()
        turns.release(2 * NUM_RECORDS)
        wait_for(lambda: is_durable(folder))
        close({}, stores)


def test_damage_is_noticed_when_drained(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        run = TrainingRun(Path(made) / "local", tmp_path / "checkpoints")
        run.train(1)
        run.save()
        run.manager.wait_until_finished()
        store = run.stores["moments"]
        path = next((store.path / PINS / "1").iterdir())
        with path.open("r+b") as file:
            file.write(b"rotten")
        run.records.begin_drain(run.folder(1), [1])
        # it is never forgotten
        for call in (
            run.records.wait_until_drained,
            run.records.raise_drain_error,
            partial(run.records.pin_versions, 2),
        ):
            with pytest.raises(OSError, match="damaged, its content is not what was written"):
                call()
        assert not is_durable(run.folder(1))
        run.close()


def train_process(folder: Path, process: int, num_processes: int, first: int, last: int) -> None:
    """One of several processes: steps first..last of its records; their content is left in a
    file.
    """
    checkpoints = folder / "checkpoints"
    stores = open_stores(folder / "local", process, num_processes)
    records = RecordCheckpoints(stores, process=process, num_processes=num_processes)
    if first:
        records.restore_records(checkpoints / str(first) / ITEM)
    caches = open_caches(stores)
    for step in range(first, last):
        train(caches, step)
    for cache in caches.values():
        cache.flush()
    step_folder = checkpoints / str(last) / ITEM
    step_folder.mkdir(parents=True, exist_ok=True)
    records.write_record_list(step_folder, records.pin_versions(last))
    records.begin_drain(step_folder, [first, last])
    records.close()
    found = {f"{name} {index}": array.hex() for (name, index), array in content(stores).items()}
    (folder / f"content-{last}-{process}").write_text(json.dumps(found))


PROCESSES = """
import os, sys
from functools import partial
import tests.memory.test_record_checkpoint as t
from tests.processes import forked
folder, num, first, last = t.Path(sys.argv[1]), *map(int, sys.argv[2:])
each = [partial(t.train_process, folder, process, num, first, last) for process in range(num)]
sys.exit(any([os.waitpid(child, 0)[1] for child in map(forked, each)]))
"""


def run_processes(
    run_python: Run, folder: Path, num: int, first: int, last: int
) -> dict[tuple[str, int], bytes]:
    """Steps first..last on `num` processes, each with its share of the records; returns all
    records' content.
    """
    done = run_python(["-c", PROCESSES, folder, str(num), str(first), str(last)])
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, int], bytes] = {}
    for process in range(num):
        for key, text in json.loads((folder / f"content-{last}-{process}").read_text()).items():
            name, index = key.split()
            found[name, int(index)] = bytes.fromhex(text)
    return found


def test_other_numbers_of_processes_go_on(run_python: Run, tmp_path: Path) -> None:
    """3 processes, one of whose local folders is lost; 2 go on from the durable step, then 4, to
    the same end.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        (tmp_path / "local").symlink_to(made)
        for num, first, last in ((3, 0, 3), (2, 3, 5), (4, 5, 7)):
            assert run_processes(run_python, tmp_path, num, first, last) == expected(last)
            assert is_durable(tmp_path / "checkpoints" / str(last) / ITEM)
            shutil.rmtree(tmp_path / "local" / "process-1")


def test_processes_with_the_same_records_share_the_saving(tmp_path: Path) -> None:
    """Each record is saved once, of a store or of memory; every process restores all of them."""
    step, memory = tmp_path / "checkpoints" / "1" / ITEM, {"memory": LAYOUTS["weights"]}
    step.mkdir(parents=True)
    content_of = {index: {"w": np.full(900, index, np.float32)} for index in range(NUM_RECORDS)}
    everyone = []
    for process in range(2):
        store = open_stores(tmp_path / "local" / str(process))["moments"]
        store.write_all_records(lambda index, views: views["m"].fill(index + 1))
        store.sync()
        records = RecordCheckpoints(
            {"moments": store},
            memory=memory,
            owned=range(NUM_RECORDS),
            process=process,
            num_processes=2,
        )
        records.memory["memory"] = content_of.items
        records.save_only = dict.fromkeys(("moments", "memory"), range(process, NUM_RECORDS, 2))
        pinned = records.pin_versions(1)
        records.write_memory_records(step, pinned)
        records.write_record_list(step, pinned)
        everyone.append((store, records))
    for _, records in everyone:
        records.begin_drain(step, [1])
        records.wait_until_drained()
    assert is_durable(step)
    for kind in ("moments", "memory"):
        assert sorted(int(path.name.split(".")[0]) for path in (step / kind).iterdir()) == list(
            range(NUM_RECORDS)
        )
    for store, records in everyone:
        store.write_all_records(lambda index, views: None)
        records.restore_records(step)
        record_R = store.layout.zeros()
        for index in range(NUM_RECORDS):
            store.read_into(index, record_R)
            assert np.all(store.layout.views(record_R)["m"] == index + 1)
        assert records.verify_records(step).files["memory"].keys() == content_of.keys()
        records.close()
        store.close()


def train_and_save(folder: Path, last: int) -> None:
    """Resume and go on to a last step, with a save every second step, and now and then back to
    it.
    """
    run = TrainingRun(folder / "local", folder / "checkpoints")
    (folder / "resumed").write_text(str(run.step))
    while run.step < last:
        run.train(2)
        run.save()
        if run.saved % 4:
            run.train(1)
            run.go_back()
        run.commit()
    run.close()


KILLED = """
import os, random, signal, sys, time
import tests.memory.test_record_checkpoint as t
from tests.processes import forked
folder, rng = t.Path(sys.argv[1]), random.Random(0)

def newest():
    return max((int(entry.name) for entry in (folder / "checkpoints").glob("*") if entry.name.isdigit()), default=0)

def wait_until(done):
    while not done() and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)

for kill in range(6):
    (folder / "resumed").unlink(missing_ok=True)
    before = newest()
    child = forked(lambda: t.train_and_save(folder, 10**9))
    wait_until((folder / "resumed").exists)
    if kill % 2:
        wait_until(lambda: newest() > before)
    time.sleep(rng.uniform(0, 0.3))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
last = newest() + 4
t.train_and_save(folder, last)
print(last, (folder / "resumed").read_text())
"""


def test_killed_at_any_moment_resumes_bit_for_bit(run_python: Run, tmp_path: Path) -> None:
    """SIGKILL six times, after fractions of a second, in training, write-back, save and drain."""
    done = run_python(["-c", KILLED, tmp_path])
    assert done.returncode == 0, done.stdout + done.stderr
    last, resumed = map(int, done.stdout.split()[-2:])
    assert 0 < resumed < last
    stores = open_stores(tmp_path / "local")
    assert content(stores) == expected(last)
    close({}, stores)


def test_records_of_processes_that_are_no_more_are_freed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once no step that is kept names them; what another run or user has there stays."""
    root = tmp_path / "records"

    def stores_of(process: int, num_processes: int) -> dict[str, VersionStore]:
        stores = open_stores(root, process, num_processes)
        for store in stores.values():
            store.write_all_records(
                lambda index, views: [
                    view.fill(index) for name, view in views.items() if name != SEAL
                ]
            )
        return stores

    def save(step: int, processes: list[RecordCheckpoints], kept: list[int]) -> Path:
        folder = tmp_path / "checkpoints" / str(step) / ITEM
        folder.mkdir(parents=True)
        for records in processes:
            records.write_record_list(folder, records.pin_versions(step))
        for records in processes:
            records.begin_drain(folder, kept)
            records.wait_until_drained()
        return folder

    two = [
        RecordCheckpoints(stores_of(process, 2), process=process, num_processes=2)
        for process in range(2)
    ]
    first = save(1, two, [1])
    before = {key: value for records in two for key, value in content(dict(records.stores)).items()}
    for records in two:
        records.close()
        close({}, dict(records.stores))
    foreign = [
        root / name / "moments" / "file"
        for name in ("process-notes", "process-5", "freed-space", "freed-1")
    ]
    (root / "process-9").mkdir()
    foreign += [
        root / "process-0" / "moments" / PINS / "a stray file",
        root / "process-6" / MANIFEST,
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    other_run = {
        name: VersionStore.open(root / "process-7" / name, layout, NUM_RECORDS, fingerprint="b")
        for name, layout in LAYOUTS.items()
    }
    close({}, other_run)
    live = VersionStore.open(
        root / "process-8" / "moments", LAYOUTS["moments"], NUM_RECORDS, fingerprint="a"
    )
    one = RecordCheckpoints(stores_of(0, 1))
    one.restore_records(first)
    assert content(dict(one.stores)) == before
    save(2, [one], [1, 2])
    assert (root / "process-1").is_dir()
    save(3, [one], [2, 3])
    assert not (root / "process-1").exists()
    assert f"{root / 'process-1'}: removed records" in capsys.readouterr().out
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)
    assert all((root / "process-7" / name / MANIFEST).is_file() for name in LAYOUTS)
    assert (live.path / MANIFEST).is_file() and (root / "process-9").is_dir()
    live.close()
    assert content(dict(one.stores)) == before
    one.close()
    close({}, dict(one.stores))
