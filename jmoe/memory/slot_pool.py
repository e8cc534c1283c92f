"""Bookkeeping of device slots for single records: which record is in which slot, and what to load.

`offload/policies.py` (`ChosenExperts`) calls this.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.memory.slot_table import HitCounts, LFUSlotTable, checked_record_ids


class SlotPool(LFUSlotTable):
    """Says which device slot holds which record; the caller moves the bytes.

    Every needed record gets a slot. To free one, the record with the lowest hit count is evicted;
    among equal counts the last to come, so that fetched records pass through few slots and the hot
    set stays. Pinned records, and records of the same `plan_loads` call, are never evicted. The
    host plans ahead of the device, so pin the records of a step, and unpin them when the device has
    finished it.

    A plan costs O(needed), plus a heap operation per record to load. Not thread-safe.
    """

    counts: HitCounts

    def plan_loads(self, needed: ArrayLike) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
        """Return (int32 slots of the needed records, in order; the (record, slot) pairs to load
        first).

        Records may repeat. Raises `ValueError`, with nothing changed, if the records do not fit
        beside the pinned ones.
        """
        ids = checked_record_ids(needed, self.counts.num_records)
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
        loads = [(record, self._assign_slot(record)) for record in missing.tolist()]
        self.unpin(np.concatenate([held, np.array([slot for _, slot in loads], np.int32)]))
        return self.slot_of[ids], loads

    def slots_of(self, records: ArrayLike) -> NDArray[np.int32]:
        """Return int32 slots of these records, for `pin` and `unpin`.

        Raises `ValueError` if a record repeats or has no slot.
        """
        ids = checked_record_ids(records, self.counts.num_records)
        slots = self.slot_of[ids]
        if (slots < 0).any():
            raise ValueError(f"record = {int(ids[slots < 0][0])}: has no slot")
        if np.unique(ids).size != ids.size:
            raise ValueError(f"records = {ids.tolist()}: must be different")
        return slots

    def drop_records(self, records: ArrayLike) -> None:
        """Remove unpinned records whose load failed or was cancelled."""
        for slot in self.slots_of(records).tolist():
            self.evict(slot)

    def _assign_slot(self, record: int) -> int:
        """Return a slot for an absent record, pinned once, after evicting another record if none is
        free.
        """
        if not self.num_free_slots:
            slot = self.next_victim()
            assert slot is not None
            self.evict(slot)
        slot = self.place(record)
        self.pin([slot])
        return slot
