"""M device slots for single experts: a resident hot set and what a step fetches share them.

Host-only bookkeeping: it says which slot each record is in and what has to be loaded; the caller moves the bytes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.memory.hot_set import HitCounts, HotSet, record_ids


@dataclass(frozen=True)
class SlotPoolStats:
    """hits, misses: distinct records of every `plan` that had a slot, or had to be loaded."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        planned = self.hits + self.misses
        return self.hits / planned if planned else 0.0


class SlotPool:
    """Which of `num_slots` device slots holds which record (an expert of a layer).

    Every needed record gets a slot. What has to go for it is the record with the lowest hit count
    (`HitCounts`, the same score as the host cache's); among equal ones the last to come, so what is fetched passes
    through a few slots and the hot set stays. Never evicted: what the same `plan` needs, and pinned records. A
    device computes later than the host plans, so pin what a step uses and unpin it when the step is done with it.
    Cost of a plan: O(needed), with a heap operation per fetched record. Not thread-safe.
    """

    def __init__(self, counts: HitCounts, num_slots: int) -> None:
        self.counts = counts
        self._hot = HotSet(counts, num_slots)
        self._hits = self._misses = self._evictions = 0

    @property
    def num_slots(self) -> int:
        return self._hot.num_slots

    @property
    def slot_of(self) -> NDArray[np.int32]:
        """The slot of every record, [num_records]; -1 where it has none. Read-only."""
        view = self._hot.slot_of.view()
        view.flags.writeable = False
        return view

    @property
    def record_in(self) -> NDArray[np.int64]:
        """The record in every slot, [num_slots]; -1 where there is none. Read-only."""
        view = self._hot.record_in.view()
        view.flags.writeable = False
        return view

    def touch(self, indices: ArrayLike) -> None:
        """Count one step that used these records."""
        self.counts.touch(indices)

    def plan(self, needed: ArrayLike) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
        """The slot of each needed record, in order, and the (record, slot) pairs to load before they are used.

        Records may be named twice. Raises `ValueError`, with nothing changed, if the distinct ones do not fit beside
        what is pinned.
        """
        ids = record_ids(needed, self.counts.num_records)
        slots = self._hot.slot_of[ids]
        held = np.unique(slots[slots >= 0])
        missing = np.unique(ids[slots < 0])
        if not missing.size:
            self._hits += held.size
            return slots, []
        self._hot.pin(held)
        room = self.num_slots - self._hot.num_pinned
        if missing.size > room:
            pinned = self._hot.num_pinned
            self._hot.unpin(held)
            raise ValueError(
                f"num_slots = {self.num_slots}: too few for the {held.size + missing.size} records needed at once; "
                f"{missing.size} of them have to be loaded and {pinned} slots are pinned or needed"
            )
        loads = [(record, self._take(record)) for record in missing.tolist()]
        self._hot.unpin(np.concatenate([held, np.array([slot for _, slot in loads], np.int32)]))
        self._hits += held.size
        self._misses += missing.size
        return self._hot.slot_of[ids], loads

    def pin(self, records: ArrayLike) -> None:
        """One more pin on each of these different records, which all have slots."""
        self._hot.pin(self._slots(records))

    def unpin(self, records: ArrayLike) -> None:
        """Take back one pin from each of these different records."""
        self._hot.unpin(self._slots(records))

    def drop(self, records: ArrayLike) -> None:
        """Forget records whose load failed; they must not be pinned."""
        for slot in self._slots(records).tolist():
            self._hot.evict(slot)

    def records(self) -> list[int]:
        """The records that have slots."""
        return self._hot.records()

    def stats(self) -> SlotPoolStats:
        return SlotPoolStats(self._hits, self._misses, self._evictions)

    def _slots(self, records: ArrayLike) -> NDArray[np.int32]:
        ids = record_ids(records, self.counts.num_records)
        slots = self._hot.slot_of[ids]
        if (slots < 0).any():
            raise ValueError(f"record = {int(ids[slots < 0][0])}: has no slot")
        if np.unique(ids).size != ids.size:
            raise ValueError(f"records = {ids.tolist()}: must be different")
        return slots

    def _take(self, record: int) -> int:
        if not self._hot.num_free:
            slot = self._hot.victim()
            assert slot is not None
            self._hot.evict(slot)
            self._evictions += 1
        slot = self._hot.place(record)
        self._hot.pin([slot])
        return slot
