"""`benchmarks.training_tiers two_nodes`: the step with both prefetches, over a slow link and from a disk.

Two processes, each a node of its own (`benchmarks.lib.two_nodes`) with half of the experts. The steps that are compared
take turns: experts on NVMe with the next layer's fetched ahead, without (`device_layers` = 1), and everything in host
memory, which without a link limit is what computing alone takes. `disk_s` is what the disk, which both share, needs for
a step's bytes at the rates measured: to read and then to write; with --disk-bytes-per-s, a limit for each, the longer
of the two.
"""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.communication import NODES, Clock, launch
from benchmarks.lib.slow_disk import SlowDisk
from benchmarks.lib.two_nodes import ADDRESSES

KINDS: dict[str, dict[str, Any]] = {
    "ahead": {"experts": "nvme", "optimizer": "nvme", "device_layers": 2},
    "not_ahead": {"experts": "nvme", "optimizer": "nvme", "device_layers": 1},
    "host": {"experts": "host", "optimizer": "host", "gradients": "host", "device_layers": 2},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 200], help="Mbit/s, both directions; 0: no link")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--disk-bytes-per-s", type=int, default=0, help="limit of the disk for reads, and for writes; 0: none"
    )
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those that count")
    parser.add_argument("--chunk-bytes", type=int, default=0, help="default: what the link carries in 20 ms")
    parser.add_argument("--schedule", default="chunks")
    parser.add_argument("--cache-dir", help="keep compiled programs in this folder")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)


class Steps:
    """One kind of step and what it took."""

    def __init__(self, config: Any, mesh: Any) -> None:
        from benchmarks.training_tiers import Session

        self.session = Session.open(config, mesh)
        self.seconds: list[float] = []
        self.sent: list[int] = []  # over the link, by both nodes
        self.moved: list[tuple[int, int]] = []  # bytes (read from NVMe, written to it), by both

    def run(self, number: int, clock: Clock, *, counts: bool) -> None:
        from jax.experimental.multihost_utils import process_allgather

        moved: list[int] = []

        def step() -> Any:
            moved[:] = self.session.step(number)[1:]
            return ()

        seconds, sent = clock(step, ())
        sent, read, written = process_allgather(np.array([sent, *moved], np.float32)).reshape(NODES, 3).sum(axis=0)
        if counts:
            self.seconds.append(seconds)
            self.sent.append(int(sent))
            self.moved.append((int(read), int(written)))


def worker(a: argparse.Namespace) -> list[dict[str, Any]]:
    """What one rank does; rank 0's row is the result."""
    import jax

    from benchmarks.training_tiers import config_of, disk_rates
    from jmoe.config import CommConfig, MeshConfig
    from jmoe.mesh import make_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_compilation_cache_dir", a.cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    rate = a.rates[0]
    jax.distributed.initialize(f"{ADDRESSES[0] if rate else '127.0.0.1'}:{a.port}", NODES, a.rank)
    mesh = make_mesh((1, NODES, 1))
    clock = Clock(mesh, has_link=rate > 0)
    place = MeshConfig(1, NODES, 1)
    comm = CommConfig(chunk_bytes=a.chunk_bytes or round((rate or 1000) / 8 * 1e6 * 0.02), schedule=a.schedule)
    configs = {kind: config_of(a, a.folder / kind, place, **KINDS[kind]) for kind in a.kinds}
    found = {kind: Steps(replace(config, comm=comm), mesh) for kind, config in configs.items()}
    rates = disk_rates(found["ahead"].session.program, a.folder / "rates", 3) if a.rank == 0 else (0.0, 0.0)
    clock.barrier()
    for number in range(a.warm_up + a.rounds):
        for steps in found.values():
            steps.run(number, clock, counts=number >= a.warm_up)
    for steps in found.values():
        steps.session.program.close()

    def disk_s(read: int, written: int) -> float:
        if a.rank != 0:
            return 0.0
        ways = read / rates[0], written / rates[1]
        return max(ways) if a.disk_bytes_per_s else sum(ways)

    return [
        {
            "mbit_per_s": rate,
            "kind": kind,
            "step_s": median(steps.seconds),
            "all_step_s": [round(s, 3) for s in steps.seconds],
            "link_bytes": median(steps.sent),
            "link_s": median(steps.sent) * 8e-6 / rate if rate else 0.0,
            "read_bytes": median(read for read, _ in steps.moved),
            "written_bytes": median(written for _, written in steps.moved),
            "disk_s": median(disk_s(read, written) for read, written in steps.moved),
            "disk_bytes_per_s": rates,
        }
        for kind, steps in found.items()
    ]


def measure(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every kind of step against max(computing, link, disk)."""
    if 0 not in a.rates or not {"ahead", "host"} <= set(a.kinds):
        sys.exit("two_nodes needs --rates 0 and --kinds ahead host: they say what disk and computing alone take")
    if a.disk_bytes_per_s < 0:
        sys.exit(f"--disk-bytes-per-s {a.disk_bytes_per_s}: must be at least 0, bytes a second; 0 is no limit")
    if a.warm_up < 0 or a.rounds < 1:
        sys.exit(f"--warm-up {a.warm_up}, --rounds {a.rounds}: must be at least 0 and 1")
    sys.argv += ["--folder", str(folder)]  # what the ranks are started with
    cache_dir = a.cache_dir or str(folder / "compiled")
    with SlowDisk(folder, a.disk_bytes_per_s) if a.disk_bytes_per_s else nullcontext():
        rows = [row for rate in a.rates for row in launch(rate, cache_dir, ranks_per_node=1)]
    compute_s = next(row["step_s"] for row in rows if not row["mbit_per_s"] and row["kind"] == "host")
    for row in rows:
        row["bound_s"] = max(compute_s, row["link_s"], row["disk_s"])
        row["against_bound"] = row["step_s"] / row["bound_s"]
    return {"compute_s": compute_s, "rows": rows}
