"""Records that are saved and restored with the rest of a step, in one process and in several."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import CheckpointConfig
from jmoe.memory.record_checkpoint import ITEM, RecordCheckpoints
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.saved_records import read_record_lists
from jmoe.memory.version_store import VersionStore
from jmoe.run.checkpoint import MANIFEST, Checkpoints
from tests.train_runs import Start, free_port

NUM_RECORDS = 6
LAYOUT = RecordLayout.from_arrays({"w": ((500,), np.float32)})


def is_durable(folder: Path) -> bool:
    """Whether every process has copied its records of this step."""
    lists = read_record_lists(folder)
    return bool(lists) and all((folder / f"durable-{process}.json").is_file() for process in lists)


def open_store(folder: Path, process: int = 0, num_processes: int = 1) -> VersionStore:
    owned = range(process, NUM_RECORDS, num_processes)
    return VersionStore.open(
        folder / f"process-{process}", LAYOUT, NUM_RECORDS, fingerprint="a", owned=owned
    )


def train(store: VersionStore, step: int) -> None:
    record_R = store.layout.zeros()
    for index in store.owned:
        store.layout.views(record_R)["w"][:] = 100 * index + step
        store.write(index, record_R)


def values(store: VersionStore) -> list[float]:
    record_R = store.layout.zeros()
    found = []
    for index in store.owned:
        store.read_into(index, record_R)
        found.append(float(store.layout.views(record_R)["w"][0]))
    return found


def state_of(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.full((8,), step, jnp.float32)}


def save(checkpoints: Checkpoints, store: VersionStore, step: int) -> None:
    train(store, step)
    checkpoints.save(step, state_of(step), step, "{}")


def restore(checkpoints: Checkpoints, store: VersionStore, step: int) -> None:
    state, data_state, _ = checkpoints.restore(step, jax.eval_shape(lambda: state_of(0)))
    assert (float(state["w"][0]), data_state) == (step, step)
    assert values(store) == [100 * index + step for index in range(NUM_RECORDS)]


@contextlib.contextmanager
def open_all(tmp_path: Path, local: Path) -> Iterator[tuple[VersionStore, Checkpoints]]:
    with open_store(local) as store:
        records = RecordCheckpoints({"experts": store})
        with Checkpoints(
            tmp_path / "checkpoints", CheckpointConfig(keep=2), records=records, timeout_s=60
        ) as opened:
            yield store, opened


@pytest.fixture
def local() -> Iterator[Path]:
    """A folder on another file system, where links to `tmp_path` are not possible."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made) / "local"


def test_records_come_back_with_the_state(
    tmp_path: Path, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    with open_all(tmp_path, local) as (store, checkpoints):
        for step in (1, 2, 3):
            save(checkpoints, store, step)
        train(store, 4)  # while step 3 is written
        checkpoints.close()
        assert checkpoints.steps() == [2, 3]
        assert is_durable(folder / "3" / ITEM)
        manifest = json.loads((folder / "3" / MANIFEST).read_text())
        assert f"{ITEM}/process-0.json" in manifest["files"]
        # those have sums of their own
        assert not any("experts" in name for name in manifest["files"])

    with open_all(tmp_path, local) as (store, checkpoints):
        assert values(store) == [100 * index + 4 for index in range(NUM_RECORDS)]
        assert checkpoints.latest_step() == 3
        restore(checkpoints, store, 3)

    shutil.rmtree(local)  # and of step 3, a record is lost
    next((folder / "3" / ITEM / "experts").iterdir()).unlink()
    with open_all(tmp_path, local) as (store, checkpoints):
        capsys.readouterr()
        assert checkpoints.latest_step() == 2
        assert "3 lacks 1 records, the first experts" in capsys.readouterr().err
        restore(checkpoints, store, 2)
        save(checkpoints, store, 3)  # what was there is set aside
        checkpoints.close()
        assert checkpoints.steps() == [2, 3]
        assert (folder / "incomplete-3-1").is_dir()


def test_one_step_is_too_few(tmp_path: Path) -> None:
    with (
        open_store(tmp_path) as store,
        pytest.raises(
            ValueError, match=r"checkpoint.keep = 1: must be greater than 1 with records"
        ),
    ):
        Checkpoints(
            tmp_path, CheckpointConfig(keep=1), records=RecordCheckpoints({"experts": store})
        )


RANK = """
import sys
from pathlib import Path
from tests.run.test_checkpoint_records import *
from jmoe.config import DistributedConfig
from jmoe.cluster.distributed import join_processes
rank, processes, port, local, folder, last = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], int(sys.argv[6])
if processes > 1:
    join_processes(DistributedConfig(coordinator_address=f"127.0.0.1:{port}", num_processes=processes, process_id=rank,
                            start_timeout_s=240, heartbeat_timeout_s=240))
from jax.sharding import AxisType, NamedSharding, PartitionSpec
mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("d"))
make = jax.jit(lambda n: {"w": jnp.full((12,), n, jnp.float32)}, out_shardings={"w": rows})
target = {"w": jax.ShapeDtypeStruct((12,), jnp.float32, sharding=rows)}
store = open_store(Path(local), rank, processes)
records = RecordCheckpoints({"experts": store}, process=rank, num_processes=processes)
checkpoints = Checkpoints(Path(folder), CheckpointConfig(keep=2), records=records, timeout_s=30)
begin = checkpoints.latest_step() or 0
if begin:
    checkpoints.restore(begin, target)
    assert values(store) == [100 * index + begin for index in store.owned]
print("begin", begin, flush=True)
for step in range(begin + 1, last + 1):
    train(store, step)
    checkpoints.save(step, make(np.float32(step)), step, "{}")
checkpoints.close()
print("done", checkpoints.steps(), flush=True)
"""


def run_ranks(
    start_python: Start, tmp_path: Path, local: Path, processes: int, last: int
) -> list[str]:
    arguments = [processes, free_port(), local, tmp_path / "checkpoints", last]
    environment = {"JAX_NUM_CPU_DEVICES": "1", "PYTHONWARNINGS": "error"}
    logs = [tmp_path / f"{last}-{rank}.log" for rank in range(processes)]
    ranks = [
        start_python(["-c", RANK, rank, *arguments], log, environment)
        for rank, log in enumerate(logs)
    ]
    return [rank.end(300) for rank in ranks]


def test_fewer_processes_go_on_from_the_last_durable_step(
    start_python: Start, tmp_path: Path, local: Path
) -> None:
    """3 processes; one local folder is lost, and a later step is not durable; 1 process goes on,
    then 2.
    """
    run_ranks(start_python, tmp_path, local, 3, 4)
    shutil.rmtree(local / "process-1")
    folder = tmp_path / "checkpoints" / "4" / ITEM
    (folder / "durable-1.json").unlink()
    for path in (folder / "experts").glob("1.*"):
        path.unlink()  # as if the process had been lost in its drain
    (log,) = run_ranks(start_python, tmp_path, local, 1, 6)
    assert "begin 3\n" in log
    assert "checkpoints/4 lacks 1 records, the first experts 1; skipped" in log
    assert "done [5, 6]" in log
    shutil.rmtree(local)
    for log in run_ranks(start_python, tmp_path, local, 2, 7):
        assert "begin 6\n" in log
        assert "done [6, 7]" in log


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_records_come_from_their_copies_and_then_from_an_older_step(
    tmp_path: Path, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_all(tmp_path, local) as (store, checkpoints):
        for step in (1, 2):
            save(checkpoints, store, step)
    folder = tmp_path / "checkpoints"
    pinned = {path.name.split(".")[0]: path for path in local.glob("process-0/pins/**/2/*")}
    copies = {path.name.split(".")[0]: path for path in (folder / "2" / ITEM / "experts").iterdir()}
    assert len(pinned) == len(copies) == NUM_RECORDS

    flip(pinned["1"])  # the store's own file has the same content: it is the same file
    with pinned["4"].open("r+b") as file:
        file.truncate(100)
    with pinned["5"].open("ab") as file:
        file.write(bytes(8))
    with open_all(tmp_path, local) as (store, checkpoints):
        assert checkpoints.latest_step() == 2
        warnings = capsys.readouterr().err
        for index in "145":
            assert f"{pinned[index]}: record {index}" in warnings
            assert f"delete {pinned[index]}" in warnings
            assert f"{copies[index]} is used" in warnings
        assert len(warnings.splitlines()) == 3
        restore(checkpoints, store, 2)

    flip(copies["4"])
    with open_all(tmp_path, local) as (store, checkpoints):
        assert checkpoints.latest_step() == 1
        warnings = capsys.readouterr().err
        assert f"{copies['4']}: record 4" in warnings
        assert (
            f"checkpoint {folder / '2'} lacks 1 records, the first experts 4; skipped" in warnings
        )
        restore(checkpoints, store, 1)

    for path in [
        *local.glob("process-0/pins/**/1/3.*"),
        *(folder / "1" / ITEM / "experts").glob("3.*"),
    ]:
        flip(path)
    with (
        open_all(tmp_path, local) as (store, checkpoints),
        pytest.raises(
            ValueError,
            match=f"no checkpoint in {folder} can be restored.*; delete .* to start anew",
        ),
    ):
        checkpoints.latest_step()


@pytest.mark.parametrize("how", ["flipped", "cut", "other"])
def test_a_damaged_list_of_records_is_named_and_the_older_step_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    with open_all(tmp_path, tmp_path / "local") as (store, checkpoints):
        for step in (1, 2):
            save(checkpoints, store, step)
        checkpoints.close()
        path = tmp_path / "checkpoints" / "2" / ITEM / "process-0.json"
        content = path.read_bytes()
        bad = {
            "flipped": content.replace(b'"pins"', b'"pinz"'),
            "cut": content[:-20],
            "other": b"[1, 2]",
        }[how]
        path.write_bytes(bad)
        assert checkpoints.latest_step() == 1
        warning = capsys.readouterr().err
        assert (
            f"{tmp_path}/checkpoints/2 is damaged: " in warning
            and f"{ITEM}/process-0.json" in warning
        )
        with pytest.raises(ValueError, match=f"{path}: is damaged"):
            RecordCheckpoints({"experts": store}).verify_records(path.parent)


SLOW_DRAIN = """
import sys, time
from types import SimpleNamespace
from tests.run.test_checkpoint_records import *
from jmoe.config import DistributedConfig, TrainConfig
from jmoe.memory import record_checkpoint
from jmoe.cluster.distributed import join_processes
from jmoe.cluster.watchdog import Watchdog
from jmoe.run.run_folder import RunFolder
from jmoe.training.expert_packing import PackingController
from jmoe.training.session import Session
rank, port, local, folder = int(sys.argv[1]), *sys.argv[2:5]
join_processes(DistributedConfig(coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=rank,
                                 start_timeout_s=240, heartbeat_timeout_s=240))
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.NamedSharding(mesh, jax.P("d"))
make = jax.jit(lambda n: {"w": jnp.full((12,), n, jnp.float32)}, out_shardings={"w": rows})
store = open_store(Path(local), rank, 2)
records = RecordCheckpoints({"experts": store}, process=rank, num_processes=2)
copy = record_checkpoint._copy_record
def slow(*args):
    time.sleep(4 * rank * (args[1].parent.name == "1"))
    copy(*args)
record_checkpoint._copy_record = slow
checkpoints = Checkpoints(Path(folder), CheckpointConfig(keep=2), records=records, timeout_s=8)
moves = SimpleNamespace(prepare_state_for_save=lambda state: state, progress_counters=records.progress_counters)
batches = SimpleNamespace(get_state=lambda: 0)
out = RunFolder(Path(folder).parent / "out", wait_s=240)
with Watchdog(8) as watchdog, out, checkpoints:
    config = TrainConfig(checkpoint=CheckpointConfig(drain_timeout_s=8))
    packing = PackingController(config, (2, 1, 1), 1)
    run = Session(
        config=config, resolved={}, mesh=mesh, corpus=None, batches=batches, trainer=moves, checkpoints=checkpoints,
        watchdog=watchdog, folder=out, files={}, expert_packing=packing,
    )
    for step in (1, 2):
        train(store, step)
        run.save(step, make(np.float32(step)))
print("done", checkpoints.steps(), flush=True)
"""


@pytest.mark.slow
def test_a_drain_may_take_longer_than_a_step(
    start_python: Start, tmp_path: Path, local: Path
) -> None:
    """Rank 1 copies its records for 12 s where a step may take 8 s: both wait for it at the next
    save.
    """
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    environment = {"JAX_NUM_CPU_DEVICES": "1"}
    arguments = [free_port(), local, tmp_path / "checkpoints"]
    ranks = [
        start_python(["-c", SLOW_DRAIN, rank, *arguments], log, environment)
        for rank, log in enumerate(logs)
    ]
    assert all("done [1, 2]" in rank.end(300) for rank in ranks)
    assert all(is_durable(tmp_path / "checkpoints" / step / ITEM) for step in "12")
