"""The memory tiers on their own, without a model: the last line of output is one JSON object.

    python benchmarks/tiers.py                      everything
    python benchmarks/tiers.py --only policies      hit rates of cache policies on routing traces (no disk, no timing)
    python benchmarks/tiers.py --only reads --folder /mnt/nvme
    python benchmarks/tiers.py --only ring

reads: `TieredStore` against a plain loop of O_DIRECT reads of the same bytes with the same number of threads, in
turn; medians. policies: share of uses that need no read, of those that are not a record's first. ring: time of a
step against sum max(compute, transfer), with numpy matrix products as compute and a limited link.
Axes: E experts of a layer, L layers, T tokens, R bytes of a record.
"""

import argparse
import heapq
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jmoe.memory.buffers import RecordBuffers
from jmoe.memory.hot_set import HitCounts
from jmoe.memory.lfu_cache import LFUCache
from jmoe.memory.record_store import RecordLayout, RecordStore
from jmoe.memory.ring import Ring
from jmoe.memory.tiered_store import TieredStore
from jmoe.planning.roofline import ring_step_time_s, serial_step_time_s, spread

NUM_RECORDS = 512  # of the traces
PHASE_STEPS = 200  # a trace's popularity changes this often
# One step of a trace: the records each layer uses, layer by layer. A record is used once in a step.
Step = list[NDArray[np.int64]]


# --- traces ---


def balanced(num_steps: int, num_layers: int) -> Iterator[Step]:
    """Every expert of every layer in every step: what a balance loss aims at, with enough tokens."""
    for _ in range(num_steps):
        yield list(np.arange(NUM_RECORDS).reshape(num_layers, -1))


def zipf(num_steps: int, num_layers: int, num_tokens: int, seed: int, top_k: int = 2) -> Iterator[Step]:
    """Tokens that choose experts with probability 1 / rank^1.1, who is popular changing every PHASE_STEPS steps."""
    rng = np.random.default_rng(seed)
    num_experts = NUM_RECORDS // num_layers
    weights_E = np.arange(1.0, num_experts + 1) ** -1.1
    for step in range(num_steps):
        if step % PHASE_STEPS == 0:
            ranks_LE = [rng.permutation(num_experts) for _ in range(num_layers)]
        yield [
            layer * num_experts + np.unique(ranks_E[gumbel_top_k(rng, weights_E, num_tokens, top_k)])
            for layer, ranks_E in enumerate(ranks_LE)
        ]


def gumbel_top_k(rng: np.random.Generator, weights_E: NDArray[Any], num_tokens: int, top_k: int) -> NDArray[Any]:
    """`top_k` different experts for each token, drawn with these weights."""
    noise_TE = rng.gumbel(size=(num_tokens, weights_E.size)) + np.log(weights_E)
    return np.argpartition(-noise_TE, top_k, axis=1)[:, :top_k]


def traces(num_steps: int) -> dict[str, list[Step]]:
    found = {f"balanced, {layers} layers": list(balanced(num_steps, layers)) for layers in (1, 4)}
    for layers in (1, 4):
        for tokens in (16, 128, 1024):
            found[f"zipf, {layers} layers, {tokens} tokens"] = list(zipf(num_steps, layers, tokens, tokens + layers))
    return found


# --- policies: use(record) says whether it was there; end_step(records) tells what the step used ---


class Policy(Protocol):
    def use(self, record: int) -> bool: ...
    def end_step(self, records: NDArray[np.int64]) -> None: ...


class Ours:
    """`LFUCache`, with one staging slot as `TieredStore` would have some."""

    def __init__(self, num_slots: int) -> None:
        self.cache = LFUCache(HitCounts(NUM_RECORDS), num_slots - 1, 1)

    def use(self, record: int) -> bool:
        slot = self.cache.use(record)
        hit = slot is not None
        if slot is None:
            slot = self.cache.admit(record, demanded=True)
            assert slot is not None
        self.cache.unpin(slot)
        if not hit:
            read = self.cache.use(record)
            assert read is not None
            self.cache.unpin(read)
        return hit

    def end_step(self, records: NDArray[np.int64]) -> None:
        self.cache.touch(records)


class LRU:
    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.held = num_slots, dict[int, None]()

    def use(self, record: int) -> bool:
        hit = record in self.held
        if hit:
            del self.held[record]
        elif len(self.held) == self.num_slots:
            del self.held[next(iter(self.held))]
        self.held[record] = None
        return hit

    def end_step(self, records: NDArray[np.int64]) -> None: ...


class Static:
    """The records used most over the whole trace, known beforehand, never changed."""

    def __init__(self, num_slots: int, steps: list[Step]) -> None:
        counts = np.bincount(np.concatenate([r for step in steps for r in step]), minlength=NUM_RECORDS)
        self.held = set(np.argsort(-counts, kind="stable")[:num_slots].tolist())

    def use(self, record: int) -> bool:
        return record in self.held

    def end_step(self, records: NDArray[np.int64]) -> None: ...


class StaticOfPhase:
    """As `Static`, with the records used most in each phase, changed without cost at its beginning."""

    def __init__(self, num_slots: int, steps: list[Step]) -> None:
        phases = [steps[first : first + PHASE_STEPS] for first in range(0, len(steps), PHASE_STEPS)]
        self.phases = [Static(num_slots, phase) for phase in phases]
        self.step = 0

    def use(self, record: int) -> bool:
        return self.phases[self.step // PHASE_STEPS].use(record)

    def end_step(self, records: NDArray[np.int64]) -> None:
        self.step += 1


class Belady:
    """Knows the future: gives up what is needed last, or does not keep the newcomer if that is."""

    def __init__(self, num_slots: int, steps: list[Step]) -> None:
        self.num_slots, self.held = num_slots, dict[int, int]()  # record -> position of its next use
        order = np.concatenate([r for step in steps for r in step]).tolist()
        self.next_use = [len(order)] * len(order)
        later: dict[int, int] = {}
        for position in range(len(order) - 1, -1, -1):
            self.next_use[position] = later.get(order[position], len(order))
            later[order[position]] = position
        self.position = 0
        self.last: list[tuple[int, int]] = []  # heap of (-next use, record), with entries that are out of date

    def use(self, record: int) -> bool:
        hit, next_use = record in self.held, self.next_use[self.position]
        self.position += 1
        if not hit and len(self.held) == self.num_slots:
            while self.held.get(self.last[0][1]) != -self.last[0][0]:
                heapq.heappop(self.last)
            if -self.last[0][0] <= next_use:
                return False
            del self.held[heapq.heappop(self.last)[1]]
        self.held[record] = next_use
        heapq.heappush(self.last, (-next_use, record))
        return hit

    def end_step(self, records: NDArray[np.int64]) -> None: ...


class Algorithm2:
    """MoESys, Algorithm 2, as printed, in our reading: a newcomer replaces the record with the fewest hits if that
    one has reached the threshold, and otherwise waits, here: is read past the cache. Hits begin at 1 and are lost
    with the place; the decayed counts are computed every K steps and never assigned. forced: where it would wait,
    the record with the fewest hits, the oldest among equals, goes all the same.
    """

    def __init__(self, num_slots: int, *, threshold: float, forced: bool) -> None:
        self.num_slots, self.threshold, self.forced = num_slots, threshold, forced
        self.hits: dict[int, int] = {}

    def use(self, record: int) -> bool:
        if record in self.hits:
            self.hits[record] += 1
            return True
        if len(self.hits) == self.num_slots:
            fewest = min(self.hits, key=self.hits.__getitem__)
            if self.hits[fewest] < self.threshold and not self.forced:
                return False
            del self.hits[fewest]
        self.hits[record] = 1
        return False

    def end_step(self, records: NDArray[np.int64]) -> None: ...


def hit_rate(policy: Policy, steps: list[Step]) -> float:
    """Hits over uses, without the first use of each record, which nobody can hit."""
    hits, uses, seen = 0, 0, set[int]()
    for step in steps:
        for layer in step:
            for record in layer.tolist():
                hits += policy.use(record)
                uses += record in seen
                seen.add(record)
        policy.end_step(np.concatenate(step))
    return hits / uses


def policies(num_steps: int) -> list[dict[str, Any]]:
    """Every policy has the same slots; where some records are only passed through, one of them is for that."""
    rows = []
    for name, steps in traces(num_steps).items():
        for share in (0.25, 0.5):
            slots = int(NUM_RECORDS * share)
            contestants: dict[str, Policy] = {
                "ours": Ours(slots),
                "lru": LRU(slots),
                "algorithm_2": Algorithm2(slots - 1, threshold=2, forced=False),
                "algorithm_2_forced": Algorithm2(slots, threshold=2, forced=True),
                "static": Static(slots - 1, steps),
                "static_of_phase": StaticOfPhase(slots - 1, steps),
                "belady": Belady(slots, steps),
            }
            rates = {policy: round(hit_rate(it, steps), 3) for policy, it in contestants.items()}
            rows.append({"trace": name, "cache_share": share, **rates})
            print(f"{name:28} {share:4.2f} " + " ".join(f"{k} {v:.3f}" for k, v in rates.items()), file=sys.stderr)
    return rows


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
        resident = spread(num_layers, half - 2)
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
        serial = [serial_step_time_s(compute, transfers, limit) for compute in computes]
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
    parser.add_argument("--only", choices=("reads", "policies", "ring"))
    parser.add_argument("--folder", type=Path, help="where to read from; default: the system's temporary folder")
    parser.add_argument("--total-bytes", type=int, default=1 << 29, help="read per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace-steps", type=int, default=2 * PHASE_STEPS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--layer-bytes", type=int, default=1 << 24)
    a = parser.parse_args()
    result: dict[str, Any] = {}
    if a.only in (None, "policies"):
        result["policies"] = policies(a.trace_steps)
    if a.only in (None, "reads"):
        with tempfile.TemporaryDirectory(prefix="jmoe-tiers-", dir=a.folder) as folder:
            result["reads"] = reads(Path(folder), a.total_bytes, a.rounds)
    if a.only in (None, "ring"):
        result["ring"] = ring(a.layers, a.layer_bytes, a.rounds)
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
