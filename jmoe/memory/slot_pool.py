"""Bookkeeping of device slots for single records: which slot each is in, and what has to be
loaded.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.memory.hot_set import HotSet, record_ids


class SlotPool(HotSet):
    """Says which device slot holds which record; the caller moves the bytes.

    Every needed record gets a slot. What has to go for it is the record with the lowest hit count;
    among equal ones the last to come, so what is fetched passes through a few slots and the hot set
    stays. Never evicted: what the same `plan` needs, and pinned records. A device computes later
    than the host plans, so pin what a step uses and unpin it when the step is done with it. A plan
    costs O(needed), and a heap operation per fetched record. Not thread-safe.
    """

    def plan(self, needed: ArrayLike) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
        """Return the slot of each needed record, in order, and the (record, slot) pairs to load
        before they are used.

        Records may be named twice. Raises `ValueError`, with nothing changed, if the distinct ones
        do not fit beside what is pinned.
        """
        ids = record_ids(needed, self.counts.num_records)
        slots = self.slot_of[ids]
        held = np.unique(slots[slots >= 0])
        missing = np.unique(ids[slots < 0])
        if not missing.size:
            return slots, []
        self.pin(held)
        if missing.size > self.num_slots - self.num_pinned:
            pinned = self.num_pinned
            self.unpin(held)
            raise ValueError(
                f"num_slots = {self.num_slots}: too few for the {held.size + missing.size} records"
                f" needed at once; {missing.size} of them have to be loaded and {pinned} slots are"
                " pinned or needed"
            )
        loads = [(record, self._take(record)) for record in missing.tolist()]
        self.unpin(np.concatenate([held, np.array([slot for _, slot in loads], np.int32)]))
        return self.slot_of[ids], loads

    def slots_of(self, records: ArrayLike) -> NDArray[np.int32]:
        """Return the slots of different records, which all have one: what `pin` and `unpin`
        take.
        """
        ids = record_ids(records, self.counts.num_records)
        slots = self.slot_of[ids]
        if (slots < 0).any():
            raise ValueError(f"record = {int(ids[slots < 0][0])}: has no slot")
        if np.unique(ids).size != ids.size:
            raise ValueError(f"records = {ids.tolist()}: must be different")
        return slots

    def drop(self, records: ArrayLike) -> None:
        """Forget records whose load failed; they must not be pinned."""
        for slot in self.slots_of(records).tolist():
            self.evict(slot)

    def _take(self, record: int) -> int:
        if not self.num_free:
            slot = self.victim()
            assert slot is not None
            self.evict(slot)
        slot = self.place(record)
        self.pin([slot])
        return slot
