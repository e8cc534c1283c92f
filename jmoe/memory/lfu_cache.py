"""Bookkeeping of the host tier: which records are in memory, and which one goes when another comes.

Slots are numbers of places in host memory: `num_slots` of them form the cache, `staging_slots` more
take what the cache does not let in, and what it has given up until that is written back. Not
thread-safe: `TieredStore` holds a lock.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain

from jmoe.config import check
from jmoe.memory.hot_set import HitCounts, HotSet


@dataclass
class CacheStats:
    """hits: uses of a record that needed no read; misses: first uses after a read; both count uses.

    evictions: records that lost their slot in the cache. passed_through: reads that went to a
    staging slot.
    unused: records read and then given up, or discarded, before anyone used them.
    written_back: dirty records that were handed out to be written and were written.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    passed_through: int = 0
    unused: int = 0
    written_back: int = 0

    @property
    def hit_rate(self) -> float:
        uses = self.hits + self.misses
        return self.hits / uses if uses else 0.0


class LFUCache:
    """A cache of records by hit count (`HitCounts`), for traffic that may be perfectly balanced.

    A newcomer enters if a slot is free or if its count is higher than the lowest one in the cache,
    otherwise it passes through a staging slot. Forced insertion, which plain LFU and LRU do, gets
    no hit at all where records come round in turn and do not all fit; this rule then keeps a fixed
    set, the best there is (MoESys, Algorithm 2, changed: counts survive eviction and are forgotten
    when they no longer fit the traffic, ties go to the record that is there). Between `admit` and
    the last `unpin` a slot belongs to its record.

    Dirty entries keep their slot until they are written: `next_write` hands one out, `written`
    takes it back. A dirty victim leaves the cache at once all the same: it becomes a staged entry
    where it is, and the newcomer's staging slot becomes one of the cache's, so nobody waits for the
    write. What is staged and dirty is written first; what is in the cache when it is given up, or
    when `write_back` asks for it.
    """

    def __init__(self, counts: HitCounts, num_slots: int, staging_slots: int) -> None:
        check(staging_slots >= 0, "staging_slots", staging_slots, "must not be negative")
        check(
            staging_slots > 0 or num_slots >= counts.num_records,
            "staging_slots",
            staging_slots,
            "must be greater than 0 unless every record has a slot",
        )
        self.counts = counts
        self._hot = HotSet(counts, num_slots)
        self._slot_at = list(range(num_slots))  # place in the hot set -> slot
        self._place_of = {slot: slot for slot in range(num_slots)}  # and back
        self._free_staging = list(range(num_slots + staging_slots - 1, num_slots - 1, -1))
        self._staged: OrderedDict[int, int] = OrderedDict()  # record -> slot, longest unused first
        self._staging_pins: dict[int, int] = {}  # slot -> pins
        self._fresh: set[int] = set()  # records read and not used yet
        self._dirty: dict[int, None] = {}  # oldest first
        self._to_write: dict[int, None] = {}  # dirty records whose slot is wanted, in this order
        self._to_clean: dict[int, None] = {}  # dirty records to write after those
        self._writing: set[int] = set()  # handed out, each with a pin
        self._stats = CacheStats()

    @property
    def num_slots(self) -> int:
        return self._hot.num_slots

    def slot_of(self, index: int) -> int | None:
        """Return the slot that the record has, or None."""
        place = int(self._hot.slot_of[index])
        return self._slot_at[place] if place >= 0 else self._staged.get(index)

    def use(self, index: int) -> int | None:
        """Return the slot of a record, with one more pin, counted as a hit or miss; None if it
        has none.
        """
        slot = self.slot_of(index)
        if slot is None:
            return None
        if index in self._fresh:
            self._fresh.remove(index)
            self._stats.misses += 1
        else:
            self._stats.hits += 1
        if index in self._staged:
            self._staged.move_to_end(index)
        self._pin(slot)
        return slot

    def admit(self, index: int, *, demanded: bool) -> int | None:
        """Return a slot, pinned once, to read a record into that has none; None if there is none
        for it now.

        demanded: someone waits for the record, so what was read ahead may be given up for it; a
        read ahead itself may not push out another one that is not used yet.
        """
        assert self.slot_of(index) is None, index
        slot = self._cache_slot(index, demanded)
        if slot is None:
            slot = self._staging_slot(demanded)
            if slot is None:
                return None
            self._staged[index] = slot
            self._stats.passed_through += 1
        self._fresh.add(index)
        self._pin(slot)
        return slot

    def drop(self, index: int) -> None:
        """Forget a record whose read failed; its only pin is the one that `admit` gave."""
        slot = self.slot_of(index)
        assert slot is not None, index
        self.unpin(slot)
        self._fresh.discard(index)
        if slot in self._place_of:
            self._hot.evict(self._place_of[slot])
        else:
            del self._staged[index]
            self._free_staging.append(slot)

    def discard(self, index: int) -> None:
        """Let the staging slot of a record be taken that was read ahead and will not be used."""
        if index in self._fresh:
            self._fresh.remove(index)
            self._stats.unused += 1

    def unpin(self, slot: int) -> None:
        if slot in self._place_of:
            self._hot.unpin(self._place_of[slot])
            return
        self._staging_pins[slot] -= 1
        if self._staging_pins[slot] == 0:
            del self._staging_pins[slot]

    @property
    def num_dirty(self) -> int:
        """Return how many records are newer here than in the store, those being written
        included.
        """
        return len(self._dirty) + len(self._writing)

    def is_writing(self, index: int) -> bool:
        """Return whether the record is handed out to be written, so that its bytes must not
        change.
        """
        return index in self._writing

    def mark_dirty(self, index: int) -> None:
        """Note that a record, pinned by the caller, has changed."""
        self._dirty.setdefault(index)
        if index in self._staged:
            self._to_write.setdefault(index)

    def forget_changes(self, index: int) -> None:
        """Do not write a record, whatever was changed in it; one that is being written is
        written to its end.
        """
        for queue in (self._dirty, self._to_write, self._to_clean):
            queue.pop(index, None)

    def write_back(self) -> None:
        """Have every record written that is dirty now."""
        self._to_clean |= self._dirty

    def next_write(self, changing: Collection[int] = ()) -> tuple[int, int] | None:
        """Return (record, slot) of a dirty record to write now, with a pin for the writer; None if
        there is none.

        changing: records not to hand out, since somebody is writing to their memory.
        """
        for index in chain(self._to_write, self._to_clean):
            if index not in changing:
                slot = self.slot_of(index)
                assert slot is not None, index
                self._to_write.pop(index, None)
                self._to_clean.pop(index, None)
                del self._dirty[index]
                self._writing.add(index)
                self._pin(slot)
                return index, slot
        return None

    def written(self, index: int, *, ok: bool) -> None:
        """Take back a record from its writer; where the write failed it is dirty as before."""
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

    def _pin(self, slot: int) -> None:
        if slot in self._place_of:
            self._hot.pin([self._place_of[slot]])
        else:
            self._staging_pins[slot] = self._staging_pins.get(slot, 0) + 1

    def _cache_slot(self, index: int, demanded: bool) -> int | None:
        if not self._hot.num_free:
            place = self._hot.victim()
            if place is None:
                return None
            victim = int(self._hot.record_in[place])
            if self.counts.rank(index) <= self.counts.rank(victim):
                return None
            if victim in self._dirty and not self._demote(victim, place, demanded):
                return None
            self._give_up(victim)
            self._hot.evict(place)
            self._stats.evictions += 1
        return self._slot_at[self._hot.place(index)]

    def _demote(self, victim: int, place: int, demanded: bool) -> bool:
        """Let a dirty victim keep its slot as a staging slot, and give the cache another; False
        if there is none.
        """
        slot = self._staging_slot(demanded)
        if slot is None:
            return False
        self._staged[victim] = self._slot_at[place]
        self._to_write.setdefault(victim)
        del self._place_of[self._slot_at[place]]
        self._slot_at[place] = slot
        self._place_of[slot] = place
        return True

    def _staging_slot(self, demanded: bool) -> int | None:
        if self._free_staging:
            return self._free_staging.pop()
        unpinned = [
            i
            for i, slot in self._staged.items()
            if slot not in self._staging_pins and i not in self._dirty
        ]
        used = [index for index in unpinned if index not in self._fresh]
        candidates = used or (unpinned if demanded else [])
        if not candidates:
            return None
        self._give_up(candidates[0])
        return self._staged.pop(candidates[0])

    def _give_up(self, index: int) -> None:
        if index in self._fresh:
            self._fresh.remove(index)
            self._stats.unused += 1
