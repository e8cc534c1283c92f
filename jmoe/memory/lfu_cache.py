"""Bookkeeping of the host-memory cache: which records have slots, and which record to evict.

Slots are numbers of places in host memory. `num_slots` slots form the cache. `staging_slots` more
hold records that the cache does not admit, and evicted dirty records until they are written back.
`TieredStore` calls this under its lock; it is not thread-safe.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain

from jmoe.config import check
from jmoe.memory.slot_table import LFUSlotTable, RecordRanks


@dataclass
class CacheStats:
    """Counters since the start.

    hits: uses of a record that needed no read. misses: first uses after a read. evictions: records
    that lost their cache slot. passed_through: records read into a staging slot. unused: records
    that were read, but evicted or discarded before their first use. written_back: completed writes
    of dirty records.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    passed_through: int = 0
    unused: int = 0
    written_back: int = 0

    @property
    def hit_rate(self) -> float:
        """Return hits / (hits + misses); 0 before the first use."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else 0.0


class LFUCache:
    """A cache of records by hit count (`HitCounts`), also for balanced traffic, or by other ranks.

    A new record enters if a slot is free, or if its rank is higher than the lowest rank in the
    cache; otherwise it passes through a staging slot. Plain LFU and LRU insert every record, so
    records that come in a cycle and do not all fit never hit. This rule keeps a fixed set instead,
    which is optimal there. It is MoESys's Algorithm 2 with two changes: counts survive eviction and
    are forgotten when traffic changes, and ties go to the cached record. With `MoESysCounts` in
    place of `HitCounts` it is the algorithm as printed.

    A slot belongs to its record between `reserve_slot` and the last `unpin`. A dirty record keeps
    its slot until it is written: `begin_next_write` returns one to write, `end_write` ends the
    write. When the cache evicts a dirty record, the record keeps its slot as a staging slot, and
    the cache takes a free staging slot in exchange; so no caller waits for the write. Dirty records
    in staging slots are written first. Dirty records in the cache are written on eviction or after
    `queue_write_back`.
    """

    def __init__(self, counts: RecordRanks, num_slots: int, staging_slots: int) -> None:
        check(staging_slots >= 0, "staging_slots", staging_slots, "must not be negative")
        check(
            staging_slots > 0 or num_slots >= counts.num_records,
            "staging_slots",
            staging_slots,
            "must be greater than 0 unless every record has a slot",
        )
        self.counts = counts
        self._table = LFUSlotTable(counts, num_slots)
        self._slot_at = list(range(num_slots))  # place in the table -> slot
        self._place_of = {slot: slot for slot in range(num_slots)}  # slot -> place in the table
        self._free_staging = list(range(num_slots + staging_slots - 1, num_slots - 1, -1))
        self._staged: OrderedDict[int, int] = OrderedDict()  # record -> slot, longest unused first
        self._staging_pins: dict[int, int] = {}  # slot -> pins
        self._fresh: set[int] = set()  # records read and not used yet
        self._dirty: dict[int, None] = {}  # oldest first
        self._to_write: dict[int, None] = {}  # dirty records whose slot is wanted, in this order
        self._to_clean: dict[int, None] = {}  # dirty records to write after those
        self._writing: set[int] = set()  # records being written, each with a pin
        self._stats = CacheStats()

    @property
    def num_slots(self) -> int:
        return self._table.num_slots

    def slot_of(self, index: int) -> int | None:
        """Return the record's slot; None if it has none."""
        place = int(self._table.slot_of[index])
        return self._slot_at[place] if place >= 0 else self._staged.get(index)

    def pin_record(self, index: int) -> int | None:
        """Return the record's slot with one more pin, and count a hit or miss; None if it has no
        slot.
        """
        slot = self.slot_of(index)
        if slot is None:
            return None
        if index in self._fresh:
            self._fresh.remove(index)
            self._stats.misses += 1
        else:
            self._stats.hits += 1
            self.counts.count_hit(index)
        if index in self._staged:
            self._staged.move_to_end(index)
        self._pin_slot(slot)
        return slot

    def reserve_slot(self, index: int, *, awaited: bool) -> int | None:
        """Return a slot, pinned once, to read an absent record into; None if no slot can be freed
        now.

        awaited: a caller waits for the record, so it may take the slot of a prefetched record that
        is still unused; a prefetch may not.
        """
        assert self.slot_of(index) is None, index
        slot = self._take_cache_slot(index, awaited)
        if slot is None:
            slot = self._take_staging_slot(awaited)
            if slot is None:
                return None
            self._staged[index] = slot
            self._stats.passed_through += 1
        self._fresh.add(index)
        self._pin_slot(slot)
        return slot

    def drop_failed_read(self, index: int) -> None:
        """Remove a record whose read failed; its only pin must be that of `reserve_slot`."""
        slot = self.slot_of(index)
        assert slot is not None, index
        self.unpin(slot)
        self._fresh.discard(index)
        if slot in self._place_of:
            self._table.evict(self._place_of[slot])
            self.counts.count_eviction(index)
        else:
            del self._staged[index]
            self._free_staging.append(slot)

    def mark_unneeded(self, index: int) -> None:
        """Note that a prefetched record will not be used, so that its staging slot may be taken."""
        if index in self._fresh:
            self._fresh.remove(index)
            self._stats.unused += 1

    def unpin(self, slot: int) -> None:
        if slot in self._place_of:
            self._table.unpin(self._place_of[slot])
            return
        self._staging_pins[slot] -= 1
        if self._staging_pins[slot] == 0:
            del self._staging_pins[slot]

    @property
    def num_dirty(self) -> int:
        """Return the number of records that are newer in memory than in the store, including writes
        under way.
        """
        return len(self._dirty) + len(self._writing)

    def is_writing(self, index: int) -> bool:
        """Return True while the record is being written, so that its bytes must not change."""
        return index in self._writing

    def mark_dirty(self, index: int) -> None:
        """Note that a record, pinned by the caller, has changed."""
        self._dirty.setdefault(index)
        if index in self._staged:
            self._to_write.setdefault(index)

    def cancel_write_back(self, index: int) -> None:
        """Mark a dirty record as clean without writing it; a write under way continues."""
        for queue in (self._dirty, self._to_write, self._to_clean):
            queue.pop(index, None)

    def queue_write_back(self) -> None:
        """Queue all dirty records for writing."""
        self._to_clean |= self._dirty

    def begin_next_write(self, changing: Collection[int] = ()) -> tuple[int, int] | None:
        """Return (record, slot) of the next dirty record that is queued to be written (evicted, or
        by `queue_write_back`), with a pin for the writer; None if none is queued.

        changing: records to skip, because a caller is changing their memory.
        """
        for index in chain(self._to_write, self._to_clean):
            if index not in changing:
                slot = self.slot_of(index)
                assert slot is not None, index
                self._to_write.pop(index, None)
                self._to_clean.pop(index, None)
                del self._dirty[index]
                self._writing.add(index)
                self._pin_slot(slot)
                return index, slot
        return None

    def end_write(self, index: int, *, ok: bool) -> None:
        """End the write of a record and remove the writer's pin; after a failed write it is dirty
        again.
        """
        slot = self.slot_of(index)
        assert slot is not None, index
        self._writing.remove(index)
        self._stats.written_back += ok
        if not ok:
            self._dirty[index] = None
            self._to_write[index] = None
        self.unpin(slot)

    def stats(self) -> CacheStats:
        return replace(self._stats)

    def _pin_slot(self, slot: int) -> None:
        if slot in self._place_of:
            self._table.pin([self._place_of[slot]])
        else:
            self._staging_pins[slot] = self._staging_pins.get(slot, 0) + 1

    def _take_cache_slot(self, index: int, awaited: bool) -> int | None:
        """Return a cache slot for the record, after evicting the record of lowest rank if none is
        free; None if the new record may not evict it.
        """
        if not self._table.num_free_slots:
            place = self._table.next_victim()
            if place is None:
                return None
            victim = int(self._table.record_in[place])
            if not self.counts.admits(index, victim):
                return None
            if victim in self._fresh and not awaited:
                return None
            if victim in self._dirty and not self._move_to_staging(victim, place, awaited):
                return None
            self._count_if_unused(victim)
            self._table.evict(place)
            self.counts.count_eviction(victim)
            self._stats.evictions += 1
        self.counts.count_load(index)
        return self._slot_at[self._table.place(index)]

    def _move_to_staging(self, victim: int, table_slot: int, awaited: bool) -> bool:
        """Move a dirty record out of the cache: its slot becomes a staging slot, and the cache gets
        a free staging slot in exchange. Return False if no staging slot is free.

        table_slot: the slot number of the record in the `LFUSlotTable`.
        """
        slot = self._take_staging_slot(awaited)
        if slot is None:
            return False
        self._staged[victim] = self._slot_at[table_slot]
        self._to_write.setdefault(victim)
        del self._place_of[self._slot_at[table_slot]]
        self._slot_at[table_slot] = slot
        self._place_of[slot] = table_slot
        return True

    def _take_staging_slot(self, awaited: bool) -> int | None:
        """Return a staging slot that is free or whose record may be dropped: unpinned, clean, and
        used since it was read (or unused, if `awaited`). None without such a slot.
        """
        if self._free_staging:
            return self._free_staging.pop()
        unpinned = [
            i
            for i, slot in self._staged.items()
            if slot not in self._staging_pins and i not in self._dirty
        ]
        used = [index for index in unpinned if index not in self._fresh]
        candidates = used or (unpinned if awaited else [])
        if not candidates:
            return None
        self._count_if_unused(candidates[0])
        return self._staged.pop(candidates[0])

    def _count_if_unused(self, index: int) -> None:
        """Add 1 to the statistics' `unused` if the record has not been used since it was read."""
        if index in self._fresh:
            self._fresh.remove(index)
            self._stats.unused += 1
