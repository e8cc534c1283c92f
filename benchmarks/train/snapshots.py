"""Time saving a state to disk and to memory, and restoring it.

    python benchmarks/train/snapshots.py

--processes processes, each with a memory folder of its own as on a host of its own, hold --mib MiB
of random float32 in arrays that are split over all of them, and 1 % more that each of them has
whole. Medians of --rounds rounds, of the slowest process: checkpoint_blocking (until
`Checkpoints.save` returns), checkpoint (until the step is whole on disk), snapshot (own shards and
the copy of the partner, whole in both memories), restore_disk (the page cache is warm),
restore_disk_cold (it has nothing of the checkpoint), restore_memory (from the memory of the process
itself), restore_partner (process 1 has lost its memory, its partner sends). By /proc/self/io, of
each process: read_mib, what it asks for to restore from disk (rchar), and disk_mib, what the disk
gives it when the page cache is cold (read_bytes).

Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.cluster.remote_process import reserve_port

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jmoe.run.snapshots import Snapshots

ARRAYS = 8
T = TypeVar("T")
State = dict[str, "jax.Array"]


def read_mib(counter: str) -> float:
    """Return the MiB that this process has read: rchar, by calls; read_bytes, from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[counter]) / 2**20


def drop_from_page_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache; they must be flushed to disk before."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def process(a: argparse.Namespace) -> None:
    """Run one rank; rank 0 prints all ranks' figures."""
    import jax

    from jmoe.cluster import distributed
    from jmoe.config import DistributedConfig
    from jmoe.mesh import make_mesh

    address = f"127.0.0.1:{a.port}"
    distributed.join_processes(
        DistributedConfig(coordinator_address=address, num_processes=a.processes, process_id=a.rank)
    )
    stores = Stores(a, *state_program(a, make_mesh((jax.device_count(), 1, 1))))
    # the first round makes folders and compiles
    rows = [stores.measure(step) for step in range(1, a.rounds + 2)]
    stores.checkpoints.close()
    if a.rank == 0:
        leaves = jax.tree.leaves(stores.make(0.0))
        own = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
        report.finish(figures(rows[1:], a.processes, own / 2**20))


def state_program(a: argparse.Namespace, mesh: "Mesh") -> tuple[Callable[[float], State], State]:
    """Return (a program that draws the state of a step, the state's shapes and shardings)."""
    import jax

    from jmoe.mesh import BATCH, REPLICATED, shardings

    rows = a.mib * 2**20 // 4 // 1024 // ARRAYS // a.processes * a.processes
    specs = {f"split_{i}": BATCH for i in range(ARRAYS)} | {"whole": REPLICATED, "step": REPLICATED}
    places = shardings(specs, mesh)

    def state_of(step: "jax.Array") -> State:
        sizes = {
            name: (rows if name.startswith("split") else rows * ARRAYS // 100, 1024)
            for name in specs
        }
        keys = jax.random.split(jax.random.key(0), len(sizes))
        drawn = {
            name: jax.random.normal(key, sizes[name]) + step
            for name, key in zip(sizes, keys, strict=True)
        }
        return drawn | {"step": step}

    make = jax.jit(state_of, out_shardings=places)
    shapes = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(make, 0.0),
        places,
    )
    return make, shapes


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of `work`, begun by all ranks together, and its result."""
    from jmoe.cluster.processes import gather_json

    gather_json(None)
    begun = time.perf_counter()
    done = work()
    return time.perf_counter() - begun, done


def check(state: State, wanted: State) -> None:
    """Raise AssertionError unless this rank's part of both states is the same."""
    import jax
    import numpy as np

    for array, expected in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        for shard, other in zip(array.addressable_shards, expected.addressable_shards, strict=True):
            assert np.array_equal(shard.data, other.data)


class Stores:
    """The checkpoints and snapshots of one rank. make, shapes: see `state_program`."""

    def __init__(
        self, a: argparse.Namespace, make: Callable[[float], State], shapes: State
    ) -> None:
        from jmoe.config import CheckpointConfig
        from jmoe.run.checkpoint import Checkpoints

        self.rank, self.make, self.shapes = a.rank, make, shapes
        self.folder = a.folder / "checkpoints"
        self.config = CheckpointConfig(memory_dir=str(a.folder / f"memory-{a.rank}"))
        self.checkpoints = Checkpoints(self.folder, self.config)
        self.snapshots = self.reader()

    def reader(self) -> "Snapshots":
        """Return the snapshots as a rank that starts anew opens them."""
        from jmoe.run.snapshots import Snapshots

        return Snapshots(self.config, "run", ["start"])

    def measure(self, step: int) -> list[dict[str, float]]:
        """Save the state of a step and restore it; return the figures of each rank."""
        import jax

        from jmoe.cluster.processes import gather_json

        state = jax.block_until_ready(self.make(float(step)))
        rows: list[dict[str, float]] = gather_json(
            self.save(step, state)
            | self.restore_from_disk(step, state)
            | self.restore_from_memory(state)
        )
        return rows

    def save(self, step: int, state: State) -> dict[str, float]:
        """Return the seconds of a checkpoint, of the part that blocks, and of a snapshot."""
        seconds: dict[str, float] = {}
        begun = time.perf_counter()
        seconds["checkpoint_blocking"], _ = timed(
            lambda: self.checkpoints.save(step, state, {}, "{}")
        )
        self.checkpoints.wait_for_save()
        seconds["checkpoint"] = time.perf_counter() - begun
        seconds["snapshot"], problem = timed(
            lambda: self.snapshots.save(step, state, {"at": step}, {}, -1)
        )
        assert not problem, problem
        return seconds

    def restore_from_disk(self, step: int, state: State) -> dict[str, float]:
        """Return the seconds and MiB of a restart from the checkpoint: from the page cache, and
        without it.
        """
        from jmoe.run.checkpoint import Checkpoints

        found: dict[str, float] = {}
        for name, read, counter in (("", "read", "rchar"), ("_cold", "disk", "read_bytes")):
            if name:
                drop_from_page_cache(self.checkpoints.step_folder(step))
            before = read_mib(counter)
            found[f"restore_disk{name}"], restored = timed(
                lambda: Checkpoints(self.folder, self.config).restore(step, self.shapes)
            )
            found[f"{read}_mib"] = read_mib(counter) - before
            check(restored[0], state)
        return found

    def restore_from_memory(self, state: State) -> dict[str, float]:
        """Return the seconds of a restart from the snapshot, and of one for which rank 1 reads its
        part from the partner.
        """
        seconds: dict[str, float] = {}
        for name in ("restore_memory", "restore_partner"):
            if name == "restore_partner" and self.rank == 1:
                shutil.rmtree(self.snapshots.folder)
            seconds[name], (snapshot, _) = timed(
                lambda: self.reader().read_newest(self.shapes, None, -1)
            )
            assert snapshot is not None
            check(snapshot.state, state)
        return seconds


def figures(
    rounds: Sequence[Sequence[dict[str, float]]], num_processes: int, own_mib: float
) -> JsonObject:
    """Return the medians over rounds: seconds of the slowest rank, MiB of each rank."""
    worst = [
        {name: max(row[name] for row in of_ranks) for name in of_ranks[0]} for of_ranks in rounds
    ]
    values: JsonObject = {
        f"{name}_s": report.median((row[name] for row in worst), 3)
        for name in worst[0]
        if not name.endswith("_mib")
    }
    values["own_mib"] = round(own_mib, 1)
    for name in ("read_mib", "disk_mib"):
        of_rank = ([row[rank][name] for row in rounds] for rank in range(num_processes))
        values[name] = [round(statistics.median(found), 1) for found in of_rank]
    return values


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--disk",
        type=Path,
        default=None,
        help="folder on the disk; the system's for scratch if not given",
    )
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    for name, kind in (("rank", int), ("port", int), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, default=None, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank is not None:
        return process(a)
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(dir=a.disk) as disk,
        tempfile.TemporaryDirectory(dir=a.memory) as memory,
    ):
        for rank in range(a.processes):
            (Path(memory) / str(rank)).mkdir()
            (Path(disk) / f"memory-{rank}").symlink_to(Path(memory) / str(rank))
        with reserve_port() as reserved:
            same = ["--processes", a.processes, "--mib", a.mib, "--rounds", a.rounds]
            same += ["--port", reserved.getsockname()[1], "--folder", disk]
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, *map(str, same), "--rank", str(rank)],
                    env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(a.processes)
            ]
            screens = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(screens))
    result = {
        "benchmark": "snapshots",
        "options": report.options(a, "rank", "port", "folder", "disk", "memory"),
    }
    report.finish(result | {"load_before": load} | json.loads(screens[0].splitlines()[-1]))
    return None


if __name__ == "__main__":
    main()
