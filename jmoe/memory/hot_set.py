"""Which records deserve a place: decayed hit counts, and the set of slots that is ruled by them.

A record is a number from 0 to num_records - 1. `LFUCache` (host memory) and `SlotPool` (device memory) both stand on
this. Not thread-safe: whoever shares one holds a lock.
"""

import heapq
from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.config import check

# Counts grow by beta ** -decays. Before that leaves float64 they are all brought down again.
RESCALE_ABOVE = 2.0**512
# What is announced ranks above every count, and what comes sooner above what comes later.
ANNOUNCED = 2.0**900


def record_ids(indices: ArrayLike, num_records: int) -> NDArray[np.int64]:
    """`indices` as a flat integer array; `ValueError` if one of them is no record."""
    ids = np.asarray(indices, dtype=np.int64).reshape(-1)
    unknown = ids[(ids < 0) | (ids >= num_records)]
    if unknown.size:
        raise ValueError(f"index = {int(unknown[0])}: must be in [0, {num_records})")
    return ids


class HitCounts:
    """Decayed hit counts: a step that uses a record adds 1; every `decay_every_steps` steps all counts are times beta.

    Counts belong to records, not to slots, so they survive eviction. Instead of shrinking all counts, what a hit adds
    is made larger by 1 / beta: the order is the same and a decay costs nothing. `scores` are these scaled counts;
    they only ever rise, but for a common rescaling now and then, which `generation` counts.

    Who knows what the next step will use says so with `expect`. Until it is used, such a record ranks above all that
    are not expected: the rule that is best when the future is known (Belady's), as far as it is known here.
    MoESys, Algorithm 2 (arXiv 2205.10034), with the decayed counts assigned.
    """

    def __init__(self, num_records: int, *, beta: float = 0.9, decay_every_steps: int = 4) -> None:
        check(num_records > 0, "num_records", num_records, "must be greater than 0")
        check(0 < beta <= 1, "beta", beta, "must be in (0, 1]")
        check(decay_every_steps > 0, "decay_every_steps", decay_every_steps, "must be greater than 0")
        self.scores = np.zeros(num_records)
        self.generation = 0
        self._hit = 1.0
        self._beta, self._decay_every_steps = beta, decay_every_steps
        self._steps = 0
        self._coming: dict[int, deque[int]] = {}  # record -> its places in the order of expected uses
        self._place = self._place_before = 0  # the next place, and what it was when the step before ended

    @property
    def num_records(self) -> int:
        return self.scores.size

    def expect(self, indices: ArrayLike) -> None:
        """All that the next step will use, in order, which is after what was expected before.

        What has not come by the end of the step after that is not expected any more.
        """
        for index in record_ids(indices, self.num_records).tolist():
            self._coming.setdefault(index, deque()).append(self._place)
            self._place += 1

    def used(self, index: int) -> bool:
        """An expected use of the record has come, so that its rank falls; False if none was expected."""
        coming = self._coming.get(index)
        if coming is None:
            return False
        coming.popleft()
        if not coming:
            del self._coming[index]
        return True

    def rank(self, index: int, *, uses: int = 0) -> float:
        """What says which of two records deserves its place more, after so many of the expected uses."""
        coming = self._coming.get(index, ())
        return ANNOUNCED / (1 + coming[uses]) if len(coming) > uses else float(self.scores[index])

    @property
    def counts(self) -> NDArray[np.float64]:
        """The decayed counts themselves, [num_records]."""
        return self.scores / self._hit

    def touch(self, indices: ArrayLike) -> None:
        """Count one step that used these records; one named twice counts once (it is fetched once)."""
        ids = record_ids(indices, self.num_records)
        self.scores[np.unique(ids)] += self._hit
        self._steps += 1
        overdue = [index for index, coming in self._coming.items() if coming[0] < self._place_before]
        for index in overdue:
            self.used(index)
        self.generation += bool(overdue)
        self._place_before = self._place
        if self._steps % self._decay_every_steps == 0:
            self._hit /= self._beta
            if self._hit > RESCALE_ABOVE:
                self.scores /= self._hit
                self._hit = 1.0
                self.generation += 1


class HotSet:
    """`num_slots` slots that hold records; knows which of them deserves its place least.

    The victim is the slot with the lowest score; among equal ones the record that came last, so that on balanced
    traffic what is there stays there (evicting the oldest would lose every hit of a repeating order). Slots with pins
    are never victims. Finding a victim costs O(log num_slots) on average: a heap whose keys may be out of date, put
    right when they come to the top; where a rank falls, a second key is added.
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
        """The slot to give up next; None if every occupied slot is pinned."""
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
        """Put a record that is not here into a free slot; there must be one. The slot has no pin yet."""
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
        """One more pin on each of these different, occupied slots."""
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

    def is_pinned(self, slot: int) -> bool:
        return bool(self._pins[slot])

    def records(self) -> list[int]:
        """The records that are here, by slot."""
        held: list[int] = self.record_in[self.record_in >= 0].tolist()
        return held

    def fallen(self, record: int) -> None:
        """The rank of this record, which is here, has fallen."""
        self._push(int(self.slot_of[record]))

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
