"""Hit counts, which say which records deserve a place, and the set of slots that they rule.

A record is a number from 0 to num_records - 1. `LFUCache` (host memory) and `SlotPool` (device
memory) both stand on this. Not thread-safe: whoever shares one holds a lock.
"""

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.config import check

# Decayed counts grow by beta ** -decays. Before that leaves float64 they are all brought down
# again.
RESCALE_ABOVE = 2.0**512
# How much better other counts must explain the uses before the old ones are forgotten: log
# likelihood, natural units.
CUSUM_THRESHOLD = 20.0
# The most that one step may add to that: an odd one alone makes nothing be forgotten.
MAX_STEP_EVIDENCE = 10.0
# Uses of every record that counts are taken to begin with, so that what has not been seen is not
# impossible.
PRIOR = 2.0
# What is left of counts that are forgotten: it orders what nothing newer does.
FORGOTTEN = 1e-6

# Above every count that is reached.
EXPECTED = 2.0**40


def record_ids(indices: ArrayLike, num_records: int) -> NDArray[np.int64]:
    """Return `indices` as a flat integer array; `ValueError` if one of them is no record."""
    ids = np.asarray(indices, dtype=np.int64).reshape(-1)
    unknown = ids[(ids < 0) | (ids >= num_records)]
    if unknown.size:
        raise ValueError(f"index = {int(unknown[0])}: must be in [0, {num_records})")
    return ids


class HitCounts:
    """Hit counts that forget when the traffic changes: a step that uses a record adds 1; `scores`
    rank the records.

    The more steps are counted the better is the order of the records known, unless their popularity
    has changed. So `scores` do not decay, but other counts are kept beside them: decayed ones
    (MoESys, Algorithm 2, arXiv 2205.10034: times beta every `decay_every_steps` steps), and fresh
    ones since the step at which a change is suspected. Each predicts that a step uses records in
    proportion to their counts. Where one has explained what came better than the scores by
    `CUSUM_THRESHOLD` (the sum of log likelihood ratios over uses, from where it was last below 0:
    Page's CUSUM test, Biometrika 1954), it becomes the scores. Fresh counts notice within a few
    steps that everything is different, decayed ones that something is, or drifts. Scores only fall
    when something is forgotten, which `generation` counts. Counts belong to records, not to slots,
    so they survive eviction.
    """

    def __init__(self, num_records: int, *, beta: float = 0.8, decay_every_steps: int = 4) -> None:
        check(num_records > 0, "num_records", num_records, "must be greater than 0")
        check(0 < beta <= 1, "beta", beta, "must be in (0, 1]")
        check(
            decay_every_steps > 0, "decay_every_steps", decay_every_steps, "must be greater than 0"
        )
        self.scores = np.zeros(num_records)
        self.generation = 0
        # decayed counts, and one use, times beta ** -decays
        self._decayed, self._hit = np.zeros(num_records), 1.0
        self._fresh = np.zeros(num_records)
        self._decayed_is_better = self._fresh_is_better = 0.0  # log likelihood ratios to the scores
        self._beta, self._decay_every_steps = beta, decay_every_steps
        self._steps = 0
        self._expected = np.zeros(num_records, np.bool_)

    @property
    def num_records(self) -> int:
        return self.scores.size

    def expect(self, indices: ArrayLike) -> None:
        """Let these records rank above all others from now on, and no others."""
        self._expected[:] = False
        self._expected[record_ids(indices, self.num_records)] = True
        self.generation += 1

    def rank(self, index: int) -> float:
        """Return which of two records deserves its place more: the one with the higher rank."""
        return float(self.scores[index]) + (EXPECTED if self._expected[index] else 0.0)

    @property
    def decayed(self) -> NDArray[np.float64]:
        """Return the counts of Algorithm 2, [num_records]: every use since the last change, with
        its decay.
        """
        return self._decayed / self._hit

    def touch(self, indices: ArrayLike) -> None:
        """Count one step that used these records; one named twice counts once (it is fetched
        once).
        """
        used = np.zeros(self.num_records, np.bool_)
        used[record_ids(indices, self.num_records)] = True
        ids = np.flatnonzero(used)
        self._steps += 1
        self._learn(ids)
        if self._steps % self._decay_every_steps == 0:
            self._hit /= self._beta
            if self._hit > RESCALE_ABOVE:
                self._decayed /= self._hit
                self._hit = 1.0

    def _learn(self, ids: NDArray[np.int64]) -> None:
        """Count a step in all the counts, and replace the scores if others are better."""
        self._compare(ids)
        self.scores[ids] += 1
        self._decayed[ids] += self._hit
        if self._fresh_is_better >= CUSUM_THRESHOLD:
            self._forget(self._fresh)
        elif self._decayed_is_better >= CUSUM_THRESHOLD:
            self._forget(self.decayed)

    def _compare(self, ids: NDArray[np.int64]) -> None:
        """Add up how much better other counts foretold this step; the fresh ones begin again if
        they did not.
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

    def _forget(self, better: NDArray[np.float64]) -> None:
        """Take these counts for the scores. What was known before decides between records that
        they say nothing of.
        """
        self.scores[:] = better + FORGOTTEN * self.scores
        self._decayed[:] = self.scores * self._hit
        self._fresh[:] = 0
        self._decayed_is_better = self._fresh_is_better = 0.0
        self.generation += 1


def _log_likelihood(counts: NDArray[np.float64], ids: NDArray[np.int64], one: float) -> float:
    """Return log P of uses of these records, where each has its share of the counts; `one` is
    what a use has added.
    """
    prior = PRIOR * one
    return float(
        np.log(counts[ids] + prior).sum() - ids.size * np.log(counts.sum() + prior * counts.size)
    )


class HotSet:
    """Says which of the records in `num_slots` slots deserves its place least.

    The victim is the slot with the lowest score; among equal ones the record that came last, so
    that on balanced traffic what is there stays there (evicting the oldest would lose every hit of
    a repeating order). Slots with pins are never victims. Finding a victim costs O(log num_slots)
    on average: a heap whose keys may be out of date, put right when they come to the top.
    """

    def __init__(self, counts: HitCounts, num_slots: int) -> None:
        check(num_slots > 0, "num_slots", num_slots, "must be greater than 0")
        self.counts = counts
        self.slot_of = np.full(counts.num_records, -1, np.int32)  # record -> slot, -1: not here
        self.record_in = np.full(num_slots, -1, np.int64)  # slot -> record, -1: free
        self.num_pinned = 0  # slots with pins
        self._pins = np.zeros(num_slots, np.int32)
        self._came = [0] * num_slots  # slot -> serial number of the arrival, 0: free
        self._serial = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._heap: list[tuple[float, int, int]] = []  # (score, -arrival, slot)
        self._in_heap = [False] * num_slots
        self._generation = counts.generation

    @property
    def num_slots(self) -> int:
        return self.record_in.size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def victim(self) -> int | None:
        """Return the slot to give up next; None if every occupied slot is pinned."""
        if self._generation != self.counts.generation or len(self._heap) > 8 * self.num_slots:
            self._rebuild()
        heap = self._heap
        while heap:
            score, minus_came, slot = heap[0]
            if self._came[slot] != -minus_came:  # the record of this key has left
                heapq.heappop(heap)
            elif self._pins[slot]:  # comes back with its last unpin
                heapq.heappop(heap)
                self._in_heap[slot] = False
            elif score != (now := self._score(slot)):
                heapq.heapreplace(heap, (now, minus_came, slot))
            else:
                return slot
        return None

    def place(self, record: int) -> int:
        """Put a record that is not here into a free slot; there must be one. The slot has no pin
        yet.
        """
        slot = self._free.pop()
        self._serial += 1
        self._came[slot] = self._serial
        self.slot_of[record] = slot
        self.record_in[slot] = record
        self._push(slot)
        return slot

    def evict(self, slot: int) -> int:
        """Free an occupied slot without pins; returns the record that was in it."""
        record = int(self.record_in[slot])
        assert record >= 0 and not self._pins[slot], (record, slot)
        self.slot_of[record] = -1
        self.record_in[slot] = -1
        self._came[slot] = 0
        self._in_heap[slot] = False
        self._free.append(slot)
        return record

    def pin(self, slots: ArrayLike) -> None:
        """Put one more pin on each of these different, occupied slots."""
        slots = np.asarray(slots)
        self.num_pinned += int(np.count_nonzero(self._pins[slots] == 0))
        self._pins[slots] += 1

    def unpin(self, slots: ArrayLike) -> None:
        """Take back one pin from each of these different slots."""
        slots = np.atleast_1d(slots)
        assert (self._pins[slots] > 0).all(), f"slots {slots[self._pins[slots] <= 0]} have no pin"
        self._pins[slots] -= 1
        unpinned = slots[self._pins[slots] == 0]
        self.num_pinned -= unpinned.size
        for slot in unpinned.tolist():
            if not self._in_heap[slot]:
                self._push(slot)

    def _score(self, slot: int) -> float:
        return self.counts.rank(int(self.record_in[slot]))

    def _push(self, slot: int) -> None:
        heapq.heappush(self._heap, (self._score(slot), -self._came[slot], slot))
        self._in_heap[slot] = True

    def _rebuild(self) -> None:
        occupied = [slot for slot, came in enumerate(self._came) if came]
        self._heap = [(self._score(slot), -self._came[slot], slot) for slot in occupied]
        heapq.heapify(self._heap)
        for slot in occupied:
            self._in_heap[slot] = True
        self._generation = self.counts.generation
