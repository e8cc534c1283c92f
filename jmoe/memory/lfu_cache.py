"""The bookkeeping of the host tier: which records are in memory, and which one goes when another comes.

Slots are numbers of places in `RecordBuffers`: the first `num_slots` form the cache, `staging_slots` more take what
the cache does not let in. Not thread-safe: `TieredStore` holds the lock.
"""

from collections import OrderedDict
from dataclasses import dataclass

from numpy.typing import ArrayLike

from jmoe.config import check
from jmoe.memory.hot_set import HitCounts, HotSet


@dataclass(frozen=True)
class CacheStats:
    """hits: uses of a record that needed no read; misses: first uses after a read; both count uses.

    evictions: records that lost their slot in the cache. passed_through: reads that went to a staging slot.
    unused: records read and then given up, or discarded, before anyone used them.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    passed_through: int = 0
    unused: int = 0

    @property
    def hit_rate(self) -> float:
        uses = self.hits + self.misses
        return self.hits / uses if uses else 0.0


class LFUCache:
    """A cache of records by decayed hit count (`HitCounts`), for traffic that may be perfectly balanced.

    A newcomer enters if a slot is free or if its count is higher than the lowest one here, otherwise it passes
    through a staging slot. Forced insertion, which plain LFU and LRU do, gets no hit at all where records come round
    in turn and do not all fit; this rule then keeps a fixed set, the best there is (MoESys, Algorithm 2, as changed
    in this project: counts survive eviction, ties go to the record that is there). Entries with pins are never given
    up. Between `admit` and the last `unpin` a slot belongs to its record.
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
        self._free_staging = list(range(num_slots + staging_slots - 1, num_slots - 1, -1))
        self._staged: OrderedDict[int, int] = OrderedDict()  # record -> slot, longest unused first
        self._staging_pins: dict[int, int] = {}  # slot -> pins
        self._fresh: set[int] = set()  # records read and not used yet
        self._hits = self._misses = self._evictions = self._passed_through = self._unused = 0

    @property
    def num_slots(self) -> int:
        return self._hot.num_slots

    def touch(self, indices: ArrayLike) -> None:
        """Count one step that used these records."""
        self.counts.touch(indices)

    def slot_of(self, index: int) -> int | None:
        """The slot that the record has, or None."""
        slot = int(self._hot.slot_of[index])
        return slot if slot >= 0 else self._staged.get(index)

    def use(self, index: int) -> int | None:
        """The slot of a record that is here, with one more pin, counted as a hit or miss; None if it is not here."""
        slot = self.slot_of(index)
        if slot is None:
            return None
        if index in self._fresh:
            self._fresh.remove(index)
            self._misses += 1
        else:
            self._hits += 1
        if index in self._staged:
            self._staged.move_to_end(index)
        self._pin(slot)
        return slot

    def admit(self, index: int, *, demanded: bool) -> int | None:
        """A slot, pinned once, to read a record into that is not here; None if there is none for it now.

        demanded: someone waits for the record, so what was read ahead may be given up for it; a read ahead itself
        may not push out another one that is not used yet.
        """
        assert self.slot_of(index) is None, index
        slot = self._cache_slot(index)
        if slot is None:
            slot = self._staging_slot(demanded)
            if slot is None:
                return None
            self._staged[index] = slot
            self._passed_through += 1
        self._fresh.add(index)
        self._pin(slot)
        return slot

    def drop(self, index: int) -> None:
        """Forget a record whose read failed; its only pin is the one that `admit` gave."""
        slot = self.slot_of(index)
        assert slot is not None, index
        self.unpin(slot)
        self._fresh.discard(index)
        if slot < self.num_slots:
            self._hot.evict(slot)
        else:
            del self._staged[index]
            self._free_staging.append(slot)

    def discard(self, index: int) -> None:
        """A record read ahead will not be used after all: its staging slot may be taken."""
        if index in self._fresh:
            self._fresh.remove(index)
            self._unused += 1

    def unpin(self, slot: int) -> None:
        """Take back one pin."""
        if slot < self.num_slots:
            self._hot.unpin(slot)
            return
        self._staging_pins[slot] -= 1
        if self._staging_pins[slot] == 0:
            del self._staging_pins[slot]

    def stats(self) -> CacheStats:
        return CacheStats(self._hits, self._misses, self._evictions, self._passed_through, self._unused)

    def _pin(self, slot: int) -> None:
        if slot < self.num_slots:
            self._hot.pin([slot])
        else:
            self._staging_pins[slot] = self._staging_pins.get(slot, 0) + 1

    def _cache_slot(self, index: int) -> int | None:
        if not self._hot.num_free:
            slot = self._hot.victim()
            if slot is None:
                return None
            victim = int(self._hot.record_in[slot])
            if self.counts.scores[index] <= self.counts.scores[victim]:
                return None
            self._give_up(victim)
            self._hot.evict(slot)
            self._evictions += 1
        return self._hot.place(index)

    def _staging_slot(self, demanded: bool) -> int | None:
        if self._free_staging:
            return self._free_staging.pop()
        unpinned = [index for index, slot in self._staged.items() if slot not in self._staging_pins]
        used = [index for index in unpinned if index not in self._fresh]
        candidates = used or (unpinned if demanded else [])
        if not candidates:
            return None
        self._give_up(candidates[0])
        return self._staged.pop(candidates[0])

    def _give_up(self, index: int) -> None:
        if index in self._fresh:
            self._fresh.remove(index)
            self._unused += 1
