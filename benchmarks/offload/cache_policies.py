"""Rows `policies` of `offload/tiers`: hit rates of cache policies on routing traces; nothing is
timed.

Axes: E experts of a layer, L layers, T tokens.
"""

import heapq
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jmoe.memory.lfu_cache import LFUCache
from jmoe.memory.slot_table import HitCounts

NUM_RECORDS = 512  # of the traces
PHASE_STEPS = 200  # a trace's popularity changes this often
# One step of a trace: the records each layer uses, layer by layer. A record is used once in a step.
Step = list[NDArray[np.int64]]


# --- traces ---


def balanced(num_steps: int, num_layers: int) -> Iterator[Step]:
    """Return choices of every expert in every step, as a balance loss aims at."""
    for _ in range(num_steps):
        yield list(np.arange(NUM_RECORDS).reshape(num_layers, -1))


def zipf(
    num_steps: int, num_layers: int, num_tokens: int, seed: int, top_k: int = 2
) -> Iterator[Step]:
    """Return choices with probability 1 / rank^1.1; ranks change every PHASE_STEPS steps."""
    rng = np.random.default_rng(seed)
    num_experts = NUM_RECORDS // num_layers
    weights_E = np.arange(1.0, num_experts + 1) ** -1.1
    for step in range(num_steps):
        if step % PHASE_STEPS == 0:
            ranks_LE = [rng.permutation(num_experts) for _ in range(num_layers)]
        yield [
            layer * num_experts
            + np.unique(ranks_E[gumbel_top_k(rng, weights_E, num_tokens, top_k)])
            for layer, ranks_E in enumerate(ranks_LE)
        ]


def multi_task(num_steps: int, num_layers: int, seed: int) -> Iterator[Step]:
    """Return choices of four tasks in turn, of 512, 256, 128 and 128 tokens, each a `zipf`."""
    tasks = [
        zipf(num_steps, num_layers, tokens, seed + n)
        for n, tokens in enumerate((512, 256, 128, 128))
    ]
    for step in range(num_steps):
        yield [next(task) for task in tasks][step % len(tasks)]


def gumbel_top_k(
    rng: np.random.Generator, weights_E: NDArray[Any], num_tokens: int, top_k: int
) -> NDArray[Any]:
    """Return `top_k` different experts for each token, drawn with these weights."""
    noise_TE = rng.gumbel(size=(num_tokens, weights_E.size)) + np.log(weights_E)
    return np.argpartition(-noise_TE, top_k, axis=1)[:, :top_k]


def traces(num_steps: int, seed: int) -> dict[str, list[Step]]:
    first = 1000 * seed
    found = {f"balanced, {layers} layers": list(balanced(num_steps, layers)) for layers in (1, 4)}
    for layers in (1, 4):
        for tokens in (16, 128, 1024):
            found[f"zipf, {layers} layers, {tokens} tokens"] = list(
                zipf(num_steps, layers, tokens, first + tokens + layers)
            )
        found[f"four tasks, {layers} layers"] = list(
            multi_task(num_steps, layers, first + 7 + layers)
        )
    return found


# --- policies: use(record) says whether it was there; end_step(records) tells what the step used
# ---


class Policy(ABC):
    @abstractmethod
    def use(self, record: int) -> bool: ...

    def end_step(self, records: NDArray[np.int64]) -> None:  # noqa: B027 (most learn nothing from a step)
        pass


class Decayed(HitCounts):
    """Algorithm 2's decayed counts alone: `HitCounts` before it noticed changes."""

    def __init__(self) -> None:
        super().__init__(NUM_RECORDS, beta=0.9)

    def _add_step(self, ids: NDArray[np.int64]) -> None:
        self.scores[:] = self.decayed_counts
        self.scores[ids] += 1
        self._decayed[ids] += self._hit
        self.generation += 1


class KnowsChanges(HitCounts):
    """Restarts its counts at each change of popularity: no learned order of records is better."""

    def __init__(self) -> None:
        super().__init__(NUM_RECORDS)

    def _add_step(self, ids: NDArray[np.int64]) -> None:
        self.scores[ids] += 1
        if self._steps % PHASE_STEPS == 0:
            self.scores *= 1e-9  # what was popular before is still better than what never was
            self.generation += 1


class KnowsPhases(HitCounts):
    """A bound: knows at the start of each phase how often it will use each record."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__(NUM_RECORDS)
        self.phases = iter(
            steps[first : first + PHASE_STEPS] for first in range(0, len(steps), PHASE_STEPS)
        )
        self._add_step(np.arange(0))

    def _add_step(self, ids: NDArray[np.int64]) -> None:
        if self._steps % PHASE_STEPS == 0 and (phase := next(self.phases, None)) is not None:
            self.scores[:] = uses(phase)
            self.generation += 1


def uses(steps: list[Step]) -> NDArray[np.int64]:
    """Return how often each record is used."""
    return np.bincount(
        np.concatenate([layer for step in steps for layer in step]), minlength=NUM_RECORDS
    )


class Ours(Policy):
    """`LFUCache` with one staging slot, as `TieredStore` has several."""

    def __init__(self, num_slots: int, counts: HitCounts) -> None:
        self.cache = LFUCache(counts, num_slots - 1, 1)

    def use(self, record: int) -> bool:
        slot = self.cache.pin_record(record)
        hit = slot is not None
        if slot is None:
            slot = self.cache.reserve_slot(record, awaited=True)
            assert slot is not None
        self.cache.unpin(slot)
        if not hit:
            read = self.cache.pin_record(record)
            assert read is not None
            self.cache.unpin(read)
        return hit

    def end_step(self, records: NDArray[np.int64]) -> None:
        self.cache.counts.count_step(records)


class Ahead(Policy):
    """A bound: the policy is told what the next step will use, and in which order.

    It keeps the record that is used soonest, then the one with the highest count. Like `Ours` it
    has one slot to pass through.
    """

    SOON = 2.0**900  # above every count

    def __init__(self, num_slots: int, counts: HitCounts, steps: list[Step]) -> None:
        self.counts, self.steps = counts, iter(steps)
        self.held = np.full(
            num_slots - 1, NUM_RECORDS
        )  # NUM_RECORDS: nothing, with the lowest rank
        self.ranks = np.append(np.zeros(NUM_RECORDS), -np.inf)
        self.coming = [
            deque[int]() for _ in range(NUM_RECORDS)
        ]  # places of uses in the order of all
        self.told = 0
        self.tell()
        self.tell()

    def tell(self) -> None:
        for record in np.concatenate(next(self.steps, [np.zeros(0, np.int64)])).tolist():
            self.coming[record].append(self.told)
            self.told += 1
            self.ranks[record] = self.rank(record)

    def rank(self, record: int) -> float:
        coming = self.coming[record]
        return self.SOON / (1 + coming[0]) if coming else float(self.counts.scores[record])

    def use(self, record: int) -> bool:
        self.coming[record].popleft()
        self.ranks[record] = self.rank(record)
        if record in self.held:
            return True
        slot = np.argmin(self.ranks[self.held])
        if self.ranks[record] > self.ranks[self.held[slot]]:
            self.held[slot] = record
        return False

    def end_step(self, records: NDArray[np.int64]) -> None:
        self.counts.count_step(records)
        self.ranks[:-1] = [self.rank(record) for record in range(NUM_RECORDS)]
        self.tell()


class LRU(Policy):
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


class Static(Policy):
    """A bound: the most used records of each phase, known beforehand, exchanged at no cost."""

    def __init__(self, num_slots: int, steps: list[Step], phase_steps: int) -> None:
        phases = [steps[first : first + phase_steps] for first in range(0, len(steps), phase_steps)]
        self.best = [
            set(np.argsort(-uses(phase), kind="stable")[:num_slots].tolist()) for phase in phases
        ]
        self.phase_steps, self.step = phase_steps, 0

    def use(self, record: int) -> bool:
        return record in self.best[self.step // self.phase_steps]

    def end_step(self, records: NDArray[np.int64]) -> None:
        self.step += 1


class Belady(Policy):
    """A bound: evicts the record whose next use is furthest away."""

    def __init__(self, num_slots: int, steps: list[Step]) -> None:
        self.num_slots, self.held = (
            num_slots,
            dict[int, int](),
        )  # record -> position of its next use
        order = np.concatenate([r for step in steps for r in step]).tolist()
        self.next_use = [len(order)] * len(order)
        later: dict[int, int] = {}
        for position in range(len(order) - 1, -1, -1):
            self.next_use[position] = later.get(order[position], len(order))
            later[order[position]] = position
        self.position = 0
        self.last: list[
            tuple[int, int]
        ] = []  # heap of (-next use, record), with entries that are out of date

    def use(self, record: int) -> bool:
        hit, next_use = record in self.held, self.next_use[self.position]
        self.position += 1
        if not hit and len(self.held) == self.num_slots:
            while self.held.get(self.last[0][1]) != -self.last[0][0]:
                heapq.heappop(self.last)
            del self.held[heapq.heappop(self.last)[1]]
        self.held[record] = next_use
        heapq.heappush(self.last, (-next_use, record))
        return hit


class Algorithm2(Policy):
    """MoESys, Algorithm 2, as printed, in our reading.

    A newcomer replaces the record with the fewest hits if that record has reached the threshold,
    and otherwise waits: here it is read past the cache. Hits begin at 1 and are lost with the
    place; the decayed counts are computed every K steps and never assigned. forced: where it would
    wait, the record with the fewest hits goes all the same, the oldest among equals. decayed: the
    decayed counts are assigned.
    """

    BETA, EVERY_STEPS = 0.8, 4

    def __init__(
        self, num_slots: int, *, threshold: float, forced: bool, decayed: bool = False
    ) -> None:
        self.num_slots = num_slots
        self.threshold = threshold
        self.forced = forced
        self.decayed_counts = decayed
        self.hits: dict[int, float] = {}
        self.steps = 0

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

    def end_step(self, records: NDArray[np.int64]) -> None:
        self.steps += 1
        if self.decayed_counts and self.steps % self.EVERY_STEPS == 0:
            self.hits = {record: self.BETA * hits for record, hits in self.hits.items()}


def hit_rate(policy: Policy, steps: list[Step]) -> float:
    """Return hits over uses, without each record's first use, which has to be read."""
    hits, counted, seen = 0, 0, set[int]()
    for step in steps:
        for layer in step:
            for record in layer.tolist():
                hit, again = policy.use(record), record in seen
                hits += hit and again
                counted += again
                seen.add(record)
        policy.end_step(np.concatenate(step))
    return hits / counted


def policies(num_steps: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each policy, all with the same slots; one slot may pass records through."""
    rows = []
    for name, steps in traces(num_steps, seed).items():
        for share in (0.25, 0.5):
            slots = int(NUM_RECORDS * share)
            contestants: dict[str, Policy] = {
                "ours": Ours(slots, HitCounts(NUM_RECORDS)),
                "decayed": Ours(slots, Decayed()),
                "knows_changes": Ours(slots, KnowsChanges()),
                "lru": LRU(slots),
                "algorithm_2": Algorithm2(slots - 1, threshold=2, forced=False),
                "algorithm_2_forced": Algorithm2(slots, threshold=2, forced=True),
                "algorithm_2_decayed": Algorithm2(
                    slots - 1, threshold=2, forced=False, decayed=True
                ),
                "algorithm_2_decayed_forced": Algorithm2(
                    slots, threshold=2, forced=True, decayed=True
                ),
                "static": Static(slots - 1, steps, len(steps)),
                "static_of_phase": Static(slots - 1, steps, PHASE_STEPS),
                "ours_ahead": Ahead(slots, HitCounts(NUM_RECORDS), steps),
                "decayed_ahead": Ahead(slots, Decayed(), steps),
                "knows_changes_ahead": Ahead(slots, KnowsChanges(), steps),
                "knows_phases_ahead": Ahead(slots, KnowsPhases(steps), steps),
                "belady": Belady(slots, steps),
            }
            rates = {policy: round(hit_rate(it, steps), 4) for policy, it in contestants.items()}
            rows.append({"trace": name, "seed": seed, "cache_share": share, **rates})
            print(
                f"{name:28} {share:4.2f} " + " ".join(f"{k} {v:.3f}" for k, v in rates.items()),
                file=sys.stderr,
            )
    return rows
