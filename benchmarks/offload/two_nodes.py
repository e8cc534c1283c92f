"""`offload/training two_nodes`: steps that prefetch over a slow link and from a disk.

Two processes, each a node of its own (`benchmarks.lib.linked_nodes`) with half of the experts. The
steps that are compared take turns: experts on NVMe with the next layer's fetched ahead, without
(`device_layers` = 1), and everything in host memory, which without a link limit is what computing
alone takes. `disk_s` is what the disk, which both share, needs for a step's bytes at the rates
measured: to read and then to write; with --disk-bytes-per-s, a limit for each, the longer of the
two. `before_link_s` and `after_link_s`, of the first node and the last step that does not count:
its time until traffic over the link begins, and since it ends (`LinkWatch`, which takes time
itself); `processor_s`: of all threads of that node, spinning and I/O included.
"""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jax.sharding import Mesh

from benchmarks.lib.linked_nodes import LinkWatch
from benchmarks.lib.ranks import NUM_NODES, Clock, add_rank_options, join_as_rank, launch_ranks
from benchmarks.lib.report import JsonObject
from benchmarks.lib.slow_disk import SlowDisk
from benchmarks.offload.session import Session, StepCost, config_of, disk_rates
from jmoe.config import CommConfig, MeshConfig, TrainConfig

KINDS: dict[str, dict[str, Any]] = {
    "ahead": {"experts": "nvme", "optimizer": "nvme", "device_layers": 2},
    "not_ahead": {"experts": "nvme", "optimizer": "nvme", "device_layers": 1},
    "host": {"experts": "host", "optimizer": "host", "gradients": "host", "device_layers": 2},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0, 200],
        help="Mbit/s, both directions; 0: no link",
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--disk-bytes-per-s",
        type=int,
        default=0,
        help="limit of the disk for reads, and for writes; 0: none",
    )
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those that count")
    parser.add_argument(
        "--chunk-bytes", type=int, default=0, help="default: what the link carries in 20 ms"
    )
    parser.add_argument("--schedule", default="chunks")
    parser.add_argument("--cache-dir", help="keep compiled programs in this folder")
    add_rank_options(parser)


class Steps:
    """The rounds of one kind of step; bytes are those of both nodes."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.session = Session(config, mesh)
        self.costs: list[StepCost] = []
        self.sent: list[int] = []  # over the link
        self.idle = 0.0, 0.0  # seconds until traffic over the link begins, and since it ends

    def run(self, number: int, clock: Clock, *, counts: bool) -> None:
        from jax.experimental.multihost_utils import process_allgather

        costs: list[StepCost] = []
        clock.barrier()  # the watch begins when all ranks do
        with LinkWatch() if clock.has_link and not counts else nullcontext() as watch:
            seconds, sent = clock(lambda: costs.append(self.session.step(number)))
        mine = np.array([sent, costs[0].read_bytes, costs[0].written_bytes], np.float32)
        sent, read, written = process_allgather(mine).reshape(NUM_NODES, 3).sum(axis=0)
        if watch:
            self.idle = watch.before_s, watch.after_s
        if counts:
            self.sent.append(int(sent))
            self.costs.append(
                StepCost(seconds, int(read), int(written), processor_s=costs[0].processor_s)
            )


def worker(a: argparse.Namespace) -> list[JsonObject]:
    """Measure as one rank; rank 0 prints the rows."""
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    mesh, clock = join_as_rank(a, ranks_per_node=1)
    rate = a.rates[0]
    place = MeshConfig(1, NUM_NODES, 1)
    chunk_bytes = a.chunk_bytes or round((rate or 1000) / 8 * 1e6 * 0.02)
    chunked = a.schedule in ("chunks", "pipelined")
    comm = CommConfig(chunk_bytes=chunk_bytes if chunked else 0, schedule=a.schedule)
    configs = {kind: config_of(a, a.folder / kind, place, **KINDS[kind]) for kind in a.kinds}
    kinds = {kind: Steps(replace(config, comm=comm), mesh) for kind, config in configs.items()}
    layout = kinds["ahead"].session.program.stores.layouts["moments"]
    rates = disk_rates(layout, a.folder / "rates", 3) if a.rank == 0 else (0.0, 0.0)
    clock.barrier()
    for number in range(a.warm_up + a.rounds):
        for steps in kinds.values():
            steps.run(number, clock, counts=number >= a.warm_up)
    for steps in kinds.values():
        steps.session.program.close()

    def disk_s(cost: StepCost) -> float:
        if a.rank != 0:
            return 0.0
        ways = cost.read_bytes / rates[0], cost.written_bytes / rates[1]
        return max(ways) if a.disk_bytes_per_s else sum(ways)

    return [
        {
            "mbit_per_s": rate,
            "kind": kind,
            "step_s": median(cost.seconds for cost in steps.costs),
            "all_step_s": [round(cost.seconds, 3) for cost in steps.costs],
            "link_bytes": median(steps.sent),
            "link_s": median(steps.sent) * 8e-6 / rate if rate else 0.0,
            "before_link_s": steps.idle[0],
            "after_link_s": steps.idle[1],
            "processor_s": median(cost.processor_s for cost in steps.costs),
            "read_bytes": median(cost.read_bytes for cost in steps.costs),
            "written_bytes": median(cost.written_bytes for cost in steps.costs),
            "disk_s": median(disk_s(cost) for cost in steps.costs),
            "disk_bytes_per_s": rates,
        }
        for kind, steps in kinds.items()
    ]


def measure(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Return rows: kinds of step beside max(step with experts in host memory, link, disk)."""
    if 0 not in a.rates or not {"ahead", "host"} <= set(a.kinds):
        sys.exit(
            "two_nodes needs --rates 0 and --kinds ahead host: they say what disk and computing "
            "alone take"
        )
    if a.disk_bytes_per_s < 0:
        sys.exit(
            f"--disk-bytes-per-s {a.disk_bytes_per_s}: must be at least 0, bytes a second; 0 is "
            f"no limit"
        )
    if a.warm_up < 0 or a.rounds < 1:
        sys.exit(f"--warm-up {a.warm_up}, --rounds {a.rounds}: must be at least 0 and 1")
    sys.argv += ["--folder", str(folder)]  # what the ranks are started with
    cache_dir = a.cache_dir or str(folder / "compiled")
    with SlowDisk(folder, a.disk_bytes_per_s) if a.disk_bytes_per_s else nullcontext():
        rows = [row for rate in a.rates for row in launch_ranks(rate, cache_dir, ranks_per_node=1)]
    host_step_s = next(
        row["step_s"] for row in rows if not row["mbit_per_s"] and row["kind"] == "host"
    )
    for row in rows:
        row["bound_s"] = max(host_step_s, row["link_s"], row["disk_s"])
        row["against_bound"] = row["step_s"] / row["bound_s"]
    return {"host_step_s": host_step_s, "rows": rows}
