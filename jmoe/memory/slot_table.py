"""Hit counts of records, and a set of slots that evicts by them.

`LFUCache` (host memory) and `SlotPool` (device memory) are built on this. Records are numbers from
0 to num_records - 1. Not thread-safe: the caller holds a lock.
"""

import heapq
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.config import check

# Instead of decaying old counts, each decay divides the weight of a new use by beta; beyond
# this weight all decayed counts are scaled down.
RESCALE_ABOVE = 2.0**512
# Sum of log likelihood ratios (in nats) at which other counts replace the scores.
CUSUM_THRESHOLD = 20.0
# The most that one step adds to that sum: a single odd step replaces nothing.
MAX_STEP_EVIDENCE = 10.0
# Uses added to every record's count in a prediction, so that an unseen record is not
# impossible.
PRIOR = 2.0
# Weight of the old scores when other counts replace them: they break ties.
FORGOTTEN = 1e-6

# Added to the score of an expected record; higher than any count.
EXPECTED_BONUS = 2.0**40


def checked_record_ids(indices: ArrayLike, num_records: int) -> NDArray[np.int64]:
    """Return `indices` as a flat int64 array; raise `ValueError` if one is out of range."""
    ids = np.asarray(indices, dtype=np.int64).reshape(-1)
    unknown = ids[(ids < 0) | (ids >= num_records)]
    if unknown.size:
        raise ValueError(f"index = {int(unknown[0])}: must be in [0, {num_records})")
    return ids


class RecordRanks(ABC):
    """The order in which a cache keeps records: the record of the lowest rank is evicted first.

    A rank may rise at any time; `generation` changes whenever one falls. oldest_first: whether the
    record that came first is evicted among equal ranks, or the one that came last.
    """

    generation: int = 0
    oldest_first: bool = False

    @property
    @abstractmethod
    def num_records(self) -> int: ...

    @abstractmethod
    def rank(self, index: int) -> float:
        """Return the record's rank."""

    def admits(self, index: int, victim: int) -> bool:
        """Return True if the absent record `index` may replace `victim` in a full cache."""
        return self.rank(index) > self.rank(victim)

    @abstractmethod
    def count_step(self, indices: ArrayLike) -> None:
        """Count one step that used these records; a repeated record counts once."""

    def rank_first(self, indices: ArrayLike) -> None:  # noqa: B027 (a policy may ignore it)
        """Note that the next step will probably use these records."""

    def count_hit(self, index: int) -> None:  # noqa: B027 (`HitCounts` counts by steps)
        """Count a use of a record that the cache holds."""

    def count_load(self, index: int) -> None:  # noqa: B027
        """Count the load of a record that the cache has admitted."""

    def count_eviction(self, index: int) -> None:  # noqa: B027
        """Count the eviction of a record."""


class HitCounts(RecordRanks):
    """Hit counts that forget old traffic when the traffic changes.

    `scores` rank the records; each step adds 1 to the records it uses. Scores do not decay, since
    more steps give a better order as long as popularity is stable. Two other counts detect a
    change: decayed counts (times beta every `decay_every_steps` steps; MoESys, Algorithm 2, arXiv
    2205.10034), and fresh counts since the step at which a change is suspected.

    Each set of counts predicts that a step uses records in proportion to their counts. Page's CUSUM
    test (Biometrika 1954) sums the log likelihood ratio of each alternative to the scores; when a
    sum reaches `CUSUM_THRESHOLD`, that alternative replaces the scores. Fresh counts detect within
    a few steps that everything changed; decayed counts detect partial changes and drift.

    Scores fall only when they are replaced; `generation` counts replacements and calls of
    `rank_first`. Counts belong to records, not to slots, so they survive eviction.
    """

    def __init__(self, num_records: int, *, beta: float = 0.8, decay_every_steps: int = 4) -> None:
        check(num_records > 0, "num_records", num_records, "must be greater than 0")
        check(0 < beta <= 1, "beta", beta, "must be in (0, 1]")
        check(
            decay_every_steps > 0, "decay_every_steps", decay_every_steps, "must be greater than 0"
        )
        self.scores = np.zeros(num_records)
        self.generation = 0
        # decayed counts times beta ** -decays, and the weight of a new use in them
        self._decayed, self._hit = np.zeros(num_records), 1.0
        self._fresh = np.zeros(num_records)
        self._decayed_is_better = self._fresh_is_better = 0.0  # CUSUM sums of log likelihood ratios
        self._beta, self._decay_every_steps = beta, decay_every_steps
        self._steps = 0
        self._expected = np.zeros(num_records, np.bool_)

    @property
    def num_records(self) -> int:
        return self.scores.size

    def rank_first(self, indices: ArrayLike) -> None:
        """Give these records ranks above all others from now on, and all other records their usual
        ranks.
        """
        self._expected[:] = False
        self._expected[checked_record_ids(indices, self.num_records)] = True
        self.generation += 1

    def rank(self, index: int) -> float:
        """Return a record's rank: of two records the one with the higher rank keeps its slot."""
        return float(self.scores[index]) + (EXPECTED_BONUS if self._expected[index] else 0.0)

    @property
    def decayed_counts(self) -> NDArray[np.float64]:
        """Return float64 [num_records]: the decayed counts (MoESys, Algorithm 2).

        When the scores are replaced, these counts continue from the new scores.
        """
        return self._decayed / self._hit

    def count_step(self, indices: ArrayLike) -> None:
        """Count one step that used these records; a repeated record counts once."""
        used = np.zeros(self.num_records, np.bool_)
        used[checked_record_ids(indices, self.num_records)] = True
        ids = np.flatnonzero(used)
        self._steps += 1
        self._add_step(ids)
        if self._steps % self._decay_every_steps == 0:
            self._hit /= self._beta
            if self._hit > RESCALE_ABOVE:
                self._decayed /= self._hit
                self._hit = 1.0

    def _add_step(self, ids: NDArray[np.int64]) -> None:
        """Add a step that used the records `ids` to all counts; replace the scores by the fresh or
        the decayed counts if the CUSUM sum of these has reached `CUSUM_THRESHOLD`.
        """
        self._update_cusum(ids)
        self.scores[ids] += 1
        self._decayed[ids] += self._hit
        if self._fresh_is_better >= CUSUM_THRESHOLD:
            self._replace_scores(self._fresh)
        elif self._decayed_is_better >= CUSUM_THRESHOLD:
            self._replace_scores(self.decayed_counts)

    def _update_cusum(self, ids: NDArray[np.int64]) -> None:
        """Add this step's log likelihood ratios to the two CUSUM sums: of the decayed counts and of
        the fresh counts, each against the scores.

        While the sum of the fresh counts is 0, the fresh counts start again from zero.
        """
        scores = _log_likelihood(self.scores, ids, 1.0)
        decayed = _log_likelihood(self._decayed, ids, self._hit)
        fresh = _log_likelihood(self._fresh, ids, 1.0)
        self._decayed_is_better = max(
            0.0, self._decayed_is_better + min(decayed - scores, MAX_STEP_EVIDENCE)
        )
        self._fresh_is_better = max(
            0.0, self._fresh_is_better + min(fresh - scores, MAX_STEP_EVIDENCE)
        )
        if self._fresh_is_better > 0:
            self._fresh[ids] += 1
        else:
            self._fresh[:] = 0

    def _replace_scores(self, better: NDArray[np.float64]) -> None:
        """Replace the scores by `better`; the old scores only break ties."""
        self.scores[:] = better + FORGOTTEN * self.scores
        self._decayed[:] = self.scores * self._hit
        self._fresh[:] = 0
        self._decayed_is_better = self._fresh_is_better = 0.0
        self.generation += 1


def _log_likelihood(
    counts: NDArray[np.float64], ids: NDArray[np.int64], count_per_use: float
) -> float:
    """Return the log probability of uses of records `ids`, if a record is used in proportion to its
    count and a small prior.

    count_per_use: how much one use adds to a count.
    """
    prior = PRIOR * count_per_use
    return float(
        np.log(counts[ids] + prior).sum() - ids.size * np.log(counts.sum() + prior * counts.size)
    )


class LFUSlotTable:
    """Tracks which records are in `num_slots` slots, and which slot to evict next.

    The victim is the unpinned slot whose record has the lowest rank (`RecordRanks.rank`, a hit
    count); among equal ranks it is the record that came last, unless `RecordRanks.oldest_first`. So
    on balanced traffic the set stays; evicting the oldest record would lose every hit of a cyclic
    order. A victim costs O(log num_slots) on average: a heap with lazily updated keys.
    """

    def __init__(self, counts: RecordRanks, num_slots: int) -> None:
        check(num_slots > 0, "num_slots", num_slots, "must be greater than 0")
        self.counts = counts
        self.slot_of = np.full(counts.num_records, -1, np.int32)  # record -> slot, -1: not here
        self.record_in = np.full(num_slots, -1, np.int64)  # slot -> record, -1: free
        self.num_pinned = 0  # slots with pins
        self._pins = np.zeros(num_slots, np.int32)
        self._came = [0] * num_slots  # slot -> serial number of the arrival, 0: free
        self._serial = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._arrival_sign = 1 if counts.oldest_first else -1
        self._heap: list[tuple[float, int, int]] = []  # (score, signed arrival, slot)
        self._in_heap = [False] * num_slots
        self._generation = counts.generation

    @property
    def num_slots(self) -> int:
        return self.record_in.size

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def next_victim(self) -> int | None:
        """Return the slot to evict next; None if every occupied slot is pinned."""
        if self._generation != self.counts.generation or len(self._heap) > 8 * self.num_slots:
            self._rebuild_heap()
        heap = self._heap
        while heap:
            score, arrival, slot = heap[0]
            if self._came[slot] != abs(arrival):  # this key's record was evicted
                heapq.heappop(heap)
            elif self._pins[slot]:  # the last unpin pushes it again
                heapq.heappop(heap)
                self._in_heap[slot] = False
            elif score != (now := self._eviction_rank(slot)):
                heapq.heapreplace(heap, (now, arrival, slot))
            else:
                return slot
        return None

    def place(self, record: int) -> int:
        """Put an absent record into a free slot, unpinned, and return the slot; a free slot must
        exist.
        """
        slot = self._free.pop()
        self._serial += 1
        self._came[slot] = self._serial
        self.slot_of[record] = slot
        self.record_in[slot] = record
        self._push_slot(slot)
        return slot

    def evict(self, slot: int) -> int:
        """Free an occupied, unpinned slot; return the record that was in it."""
        record = int(self.record_in[slot])
        assert record >= 0 and not self._pins[slot], (record, slot)
        self.slot_of[record] = -1
        self.record_in[slot] = -1
        self._came[slot] = 0
        self._in_heap[slot] = False
        self._free.append(slot)
        return record

    def pin(self, slots: ArrayLike) -> None:
        """Add one pin to each of these slots, which must be different and occupied."""
        slots = np.asarray(slots)
        self.num_pinned += int(np.count_nonzero(self._pins[slots] == 0))
        self._pins[slots] += 1

    def unpin(self, slots: ArrayLike) -> None:
        """Remove one pin from each of these slots, which must be different and pinned."""
        slots = np.atleast_1d(slots)
        assert (self._pins[slots] > 0).all(), f"slots {slots[self._pins[slots] <= 0]} have no pin"
        self._pins[slots] -= 1
        unpinned = slots[self._pins[slots] == 0]
        self.num_pinned -= unpinned.size
        for slot in unpinned.tolist():
            if not self._in_heap[slot]:
                self._push_slot(slot)

    def _eviction_rank(self, slot: int) -> float:
        return self.counts.rank(int(self.record_in[slot]))

    def _heap_entry(self, slot: int) -> tuple[float, int, int]:
        """Return a key by which the next victim sorts first: rank, arrival, slot."""
        return self._eviction_rank(slot), self._arrival_sign * self._came[slot], slot

    def _push_slot(self, slot: int) -> None:
        heapq.heappush(self._heap, self._heap_entry(slot))
        self._in_heap[slot] = True

    def _rebuild_heap(self) -> None:
        occupied = [slot for slot, came in enumerate(self._came) if came]
        self._heap = [self._heap_entry(slot) for slot in occupied]
        heapq.heapify(self._heap)
        for slot in occupied:
            self._in_heap[slot] = True
        self._generation = self.counts.generation
