"""Bookkeeping of device slots for single records: which slot each is in, and what has to be loaded."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.memory.hot_set import HitCounts, HotSet, record_ids


class SlotPool:
    """Says which of `num_slots` device slots holds which record; the caller moves the bytes.

    Every needed record gets a slot. What has to go for it is the record with the lowest hit count; among equal ones the
    last to come, so what is fetched passes through a few slots and the hot set stays. Never evicted: what the same
    `plan` needs, and pinned records. A device computes later than the host plans, so pin what a step uses and unpin it
    when the step is done with it. A plan costs O(needed), and a heap operation per fetched record. Not thread-safe.
    """

    def __init__(self, counts: HitCounts, num_slots: int) -> None:
        self.counts = counts
        self._hot = HotSet(counts, num_slots)

    @property
    def num_slots(self) -> int:
        return self._hot.num_slots

    @property
    def slot_of(self) -> NDArray[np.int32]:
        """Return the slot of every record, [num_records]; -1 where it has none. Read-only."""
        view = self._hot.slot_of.view()
        view.flags.writeable = False
        return view

    @property
    def record_in(self) -> NDArray[np.int64]:
        """Return the record in every slot, [num_slots]; -1 where there is none. Read-only."""
        view = self._hot.record_in.view()
        view.flags.writeable = False
        return view

    def plan(self, needed: ArrayLike) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
        """Return the slot of each needed record, in order, and the (record, slot) pairs to load before they are used.

        Records may be named twice. Raises `ValueError`, with nothing changed, if the distinct ones do not fit beside
        what is pinned.
        """
        ids = record_ids(needed, self.counts.num_records)
        slots = self._hot.slot_of[ids]
        held = np.unique(slots[slots >= 0])
        missing = np.unique(ids[slots < 0])
        if not missing.size:
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
        return self._hot.slot_of[ids], loads

    def pin(self, records: ArrayLike) -> None:
        """Put one more pin on each of these different records, which all have slots."""
        self._hot.pin(self._slots(records))

    def unpin(self, records: ArrayLike) -> None:
        self._hot.unpin(self._slots(records))

    def drop(self, records: ArrayLike) -> None:
        """Forget records whose load failed; they must not be pinned."""
        for slot in self._slots(records).tolist():
            self._hot.evict(slot)

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
        slot = self._hot.place(record)
        self._hot.pin([slot])
        return slot
