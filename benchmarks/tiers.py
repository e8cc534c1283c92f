"""The memory tiers on their own, without a model: the last line of output is one JSON object.

    python benchmarks/tiers.py                      everything
    python benchmarks/tiers.py --only policies      hit rates of cache policies on routing traces (no disk, no timing)
    python benchmarks/tiers.py --only reads --folder /mnt/nvme
    python benchmarks/tiers.py --only store         read, write and replace against fio
    python benchmarks/tiers.py --only checkpoint    what a checkpoint of records costs
    python benchmarks/tiers.py --only ring

reads: `TieredStore` against a plain loop of O_DIRECT reads of the same bytes with the same number of threads, in
turn; medians. policies: share of uses that need no read, of those that are not a record's first. ring: time of a
step against sum max(compute, transfer), with numpy matrix products as compute and a limited link. store, checkpoint:
see `storage.py`; give --total-bytes 8000000000 for the latter.
Axes: E experts of a layer, L layers, T tokens, R bytes of a record.
"""

if __name__ == "__main__":
    import script  # noqa: F401  makes benchmarks and jmoe importable

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.offload.cache_policies import PHASE_STEPS, policies
from benchmarks.offload.storage import checkpoint, store
from jmoe.memory.buffers import RecordBuffers
from jmoe.memory.record_store import RecordLayout, RecordStore
from jmoe.memory.ring import Ring
from jmoe.memory.tiered_store import TieredStore
from jmoe.planning.roofline import ring_step_time_s

# --- reads ---


def plain_reads(path: Path, record_bytes: int, num_records: int, threads: int) -> float:
    """Seconds of a bare loop: each thread reads every `threads`-th record into one buffer of its own."""
    buffers = RecordBuffers(threads, record_bytes)

    def work(first: int) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for index in range(first, num_records, threads):
            assert os.preadv(fd, [buffers.slot(first)], index * record_bytes) == record_bytes
        os.close(fd)

    start_s = time.perf_counter()
    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start_s


def tiered_reads(store: RecordStore, threads: int) -> tuple[float, int]:
    """Seconds to go through all records in order with a cache of a few, the second time, and the bytes then read."""
    with TieredStore(store, cache_bytes=4 * threads * store.layout.record_bytes, threads=threads) as tiers:
        for _ in range(2):  # the first touches the memory
            before_bytes = tiers.stats().nvme.num_bytes
            start_s = time.perf_counter()
            tiers.prefetch(range(store.num_records))
            for index in range(store.num_records):
                tiers.get(index).close()
            seconds = time.perf_counter() - start_s
        stats = tiers.stats()
        assert stats.io == "O_DIRECT", stats.io
    return seconds, stats.nvme.num_bytes - before_bytes


def reads(folder: Path, total_bytes: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for record_bytes in (1 << 18, 1 << 20, 1 << 22, 12 << 20):
        layout = RecordLayout.of({"w": ((record_bytes,), np.uint8)})
        num_records = total_bytes // record_bytes

        def fill(index: int, views: dict[str, NDArray[Any]]) -> None:
            views["w"][:] = index % 251

        target = folder / str(record_bytes)
        with RecordStore.pack(target, layout, num_records, fill, fingerprint="benchmark") as store:
            for threads in (1, 2, 4):
                rates: dict[str, list[float]] = {"tiered": [], "plain": []}
                for _ in range(rounds):
                    seconds, moved_bytes = tiered_reads(store, threads)
                    rates["tiered"].append(moved_bytes / seconds)
                    seconds = plain_reads(store.path, record_bytes, num_records, threads)
                    rates["plain"].append(num_records * record_bytes / seconds)
                row = {"record_bytes": record_bytes, "threads": threads}
                row |= {f"{name}_gb_per_s": round(statistics.median(v) / 1e9, 3) for name, v in rates.items()}
                ratios = [t / p for t, p in zip(rates["tiered"], rates["plain"])]
                rows.append(row | {"ratio": round(statistics.median(ratios), 3)})
                print(rows[-1], file=sys.stderr, flush=True)
            store.path.unlink()
    return rows


# --- ring ---


def ring(num_layers: int, layer_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """A step of `num_layers` matrix products, layers through half as many slots, at three speeds of the link.

    over_bound: step time over sum max(compute, transfer), with the compute of the resident step of the same round.
    """
    host_LR = np.ones((num_layers, layer_bytes), np.uint8)
    device_R = [np.ones(layer_bytes, np.uint8) for _ in range(num_layers)]
    a, b = np.ones((1024, 1024), np.float32), np.ones((1024, 1024), np.float32)
    out = np.empty_like(a)

    def compute() -> None:
        np.matmul(a, b, out=out)

    def load(layer: int, slot: int) -> int:
        np.copyto(device_R[slot], host_LR[layer])
        return layer_bytes

    compute_s = statistics.median(timed(compute) for _ in range(20))
    rows = []
    for ratio in (0.5, 1.0, 2.0):  # transfer time / compute time of a layer
        limit = layer_bytes / (ratio * compute_s)
        half = num_layers // 2
        resident = tuple((n + 1) * num_layers // (half - 2) - 1 for n in range(half - 2))  # evenly
        rings = {
            "resident": Ring(range(num_layers), num_layers, load, bandwidth_limit_bytes_per_s=limit),
            "ring": Ring(range(num_layers), half, load, bandwidth_limit_bytes_per_s=limit),
            "ring_with_resident": Ring(
                range(num_layers), half, load, resident=resident, bandwidth_limit_bytes_per_s=limit
            ),
            "serial": Ring(range(num_layers), 1, load, bandwidth_limit_bytes_per_s=limit),
        }
        times: dict[str, list[float]] = {name: [] for name in rings}
        moved = dict.fromkeys(rings, 0)
        for _ in range(rounds):
            for name, it in rings.items():
                step = partial(ring_step, it, num_layers, compute)
                step()  # uses up what was loaded while the ring was not in use
                before_bytes = it.stats().loads.num_bytes
                times[name].append(timed(step))
                moved[name] = it.stats().loads.num_bytes - before_bytes
        for it in rings.values():
            it.close()
        transfers = [float(layer_bytes)] * num_layers
        computes = [[step_s / num_layers] * num_layers for step_s in times["resident"]]  # of the same round
        bounds = [ring_step_time_s(compute, transfers, limit) for compute in computes]
        serial = [sum(compute) + sum(transfers) / limit for compute in computes]
        row: dict[str, Any] = {"transfer_over_compute": ratio, "bound_s": round(statistics.median(bounds), 4)}
        row |= {"predicted_serial_s": round(statistics.median(serial), 4)}
        for name, seconds in times.items():
            over_bound = statistics.median(step_s / bound_s for step_s, bound_s in zip(seconds, bounds))
            row[name] = {
                "step_s": round(statistics.median(seconds), 4),
                "over_bound": round(over_bound, 3),
                "moved_bytes": moved[name],
            }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def ring_step(ring: Ring, num_layers: int, compute: Callable[[], None]) -> None:
    for _ in range(num_layers):
        ring.acquire()
        compute()
        ring.release()


def timed(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("reads", "policies", "store", "checkpoint", "ring"))
    parser.add_argument("--folder", type=Path, help="where to read from; default: the system's temporary folder")
    parser.add_argument("--total-bytes", type=int, default=1 << 29, help="read per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace-steps", type=int, default=2 * PHASE_STEPS)
    parser.add_argument("--trace-seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--layer-bytes", type=int, default=1 << 24)
    a = parser.parse_args()
    result: dict[str, Any] = {}
    if a.only in (None, "policies"):
        result["policies"] = policies(a.trace_steps, a.trace_seed)
    if a.only in (None, "reads"):
        with tempfile.TemporaryDirectory(prefix="jmoe-tiers-", dir=a.folder) as folder:
            result["reads"] = reads(Path(folder), a.total_bytes, a.rounds)
    for name, measure in (("store", store), ("checkpoint", checkpoint)):
        if a.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="jmoe-tiers-", dir=a.folder) as folder:
                result[name] = measure(Path(folder), a.total_bytes, a.rounds)
    if a.only in (None, "ring"):
        result["ring"] = ring(a.layers, a.layer_bytes, a.rounds)
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
