"""The host cache's rule, against a brute-force model."""

from collections.abc import Collection

import numpy as np
import pytest

from jmoe.memory.lfu_cache import LFUCache
from jmoe.memory.slot_table import HitCounts

NUM_RECORDS = 24
ACTIONS = (
    "touch",
    *4 * ["get"],
    *2 * ["close"],
    "discard",
    *3 * ["change"],
    *2 * ["write"],
    *2 * ["written"],
    "clean",
)


class CacheModel:
    """The rule of `LFUCache` in plain words: lists and sets, no slots."""

    def __init__(self, num_slots: int, staging_slots: int) -> None:
        self.num_slots, self.staging_slots = num_slots, staging_slots
        self.cached: list[int] = []  # in order of arrival
        self.staged: list[int] = []  # in order of last use
        self.dirty, self.writing, self.fresh = set[int](), set[int](), set[int]()
        self.wanted: list[int] = []  # dirty records whose slot is wanted
        self.to_clean: list[int] = []
        self.pins = [0] * NUM_RECORDS
        self.hits = self.misses = self.evictions = self.passed = self.unused = 0

    def give_up(self, index: int) -> None:
        self.unused += index in self.fresh
        self.fresh.discard(index)

    def use(self, index: int) -> bool:
        if index not in self.cached + self.staged:
            return False
        self.hits = self.hits + (index not in self.fresh)
        self.misses = self.misses + (index in self.fresh)
        self.fresh.discard(index)
        if index in self.staged:
            self.staged.remove(index)
            self.staged.append(index)
        self.pins[index] += 1
        return True

    def room_in_staging(self, awaited: bool) -> bool:
        if len(self.staged) < self.staging_slots:
            return True
        free = [i for i in self.staged if not self.pins[i] and i not in self.dirty]
        free = [i for i in free if i not in self.fresh] or (free if awaited else [])
        if free:
            self.give_up(free[0])
            self.staged.remove(free[0])
        return bool(free)

    def reserve_slot(self, index: int, scores: list[float], awaited: bool) -> bool:
        unpinned = [i for i in self.cached if not self.pins[i]]
        into_cache = len(self.cached) < self.num_slots
        if (
            not into_cache
            and unpinned
            and scores[index] > (lowest := min(scores[i] for i in unpinned))
        ):
            victim = [i for i in unpinned if scores[i] == lowest][-1]
            is_unused_prefetch = victim in self.fresh and not awaited
            if not is_unused_prefetch and (
                victim not in self.dirty or self.room_in_staging(awaited)
            ):
                into_cache = True
                self.give_up(victim)
                self.cached.remove(victim)
                self.evictions += 1
                if victim in self.dirty:
                    self.staged.append(victim)
                    self.want(victim)
        if into_cache:
            self.cached.append(index)
        elif self.room_in_staging(awaited):
            self.staged.append(index)
            self.passed += 1
        else:
            return False
        self.fresh.add(index)
        self.pins[index] += 1
        return True

    def want(self, index: int) -> None:
        if index not in self.wanted:
            self.wanted.append(index)

    def put(self, index: int) -> None:
        self.dirty.add(index)
        if index in self.staged:
            self.want(index)

    def begin_next_write(self, changing: Collection[int]) -> int | None:
        queue = self.wanted + [i for i in self.to_clean if i not in self.wanted]
        index = next((i for i in queue if i not in changing), None)
        if index is not None:
            self.wanted = [i for i in self.wanted if i != index]
            self.to_clean = [i for i in self.to_clean if i != index]
            self.dirty.remove(index)
            self.writing.add(index)
            self.pins[index] += 1
        return index


@pytest.mark.parametrize(("num_slots", "staging_slots"), [(1, 1), (2, 4), (4, 1), (6, 3)])
def test_cache_against_a_model(num_slots: int, staging_slots: int) -> None:
    """Whatever happens, the cache holds what the rule says, loses no dirty record and hands none
    out twice.
    """
    rng = np.random.default_rng(num_slots)
    counts = HitCounts(NUM_RECORDS, beta=0.7, decay_every_steps=3)
    cache, model = LFUCache(counts, num_slots, staging_slots), CacheModel(num_slots, staging_slots)
    held: list[tuple[int, int]] = []  # (record, slot), one per pin
    changing, writes = set[int](), 0  # held by one who changes it
    popularity = rng.permutation(1 / np.arange(1.0, NUM_RECORDS + 1))
    for n in range(8000):
        if n % 400 == 0:
            rng.shuffle(popularity)
        action = rng.choice(ACTIONS)
        index = int(rng.choice(NUM_RECORDS, p=popularity / popularity.sum()))
        is_there = index in model.cached + model.staged
        if action == "touch":
            counts.count_step(
                rng.choice(NUM_RECORDS, 4, replace=False, p=popularity / popularity.sum())
            )
        elif (
            action == "get" and index not in changing and len(held) < num_slots + staging_slots - 2
        ):
            awaited = bool(rng.integers(2))
            slot = (
                cache.pin_record(index) if is_there else cache.reserve_slot(index, awaited=awaited)
            )
            expected = (
                model.use(index)
                if is_there
                else model.reserve_slot(index, counts.scores.tolist(), awaited)
            )
            assert (slot is not None) == expected
            if slot is not None and not is_there and rng.integers(10) == 0:  # its read fails
                cache.drop_failed_read(index)
                model.fresh.remove(index)
                model.pins[index] = 0
                (model.cached if index in model.cached else model.staged).remove(index)
            elif slot is not None:
                held.append((index, slot))
        elif (
            action == "change"
            and model.pins[index] == 1
            and index in dict(held)
            and index not in model.fresh
        ):
            changing.add(index)
        elif action == "close" and held:
            record, slot = held.pop(rng.integers(len(held)))
            assert cache.slot_of(record) == slot  # never moved while held
            if record in changing:
                changing.remove(record)
                cache.mark_dirty(record)
                model.put(record)
            cache.unpin(slot)
            model.pins[record] -= 1
        elif action == "discard" and is_there and not model.pins[index]:
            cache.mark_unneeded(index)
            model.give_up(index)
        elif action == "write":
            work, expected_write = (
                cache.begin_next_write(changing),
                model.begin_next_write(changing),
            )
            writes += work is not None
            assert (None if work is None else work[0]) == expected_write
            assert work is None or work[1] == cache.slot_of(work[0])
        elif action == "written" and model.writing:
            index, ok = int(rng.choice(sorted(model.writing))), bool(rng.integers(4))
            cache.end_write(index, ok=ok)
            model.writing.remove(index)
            model.pins[index] -= 1
            if not ok:
                model.dirty.add(index)
                model.want(index)
        elif action == "clean" and rng.integers(10) == 0:
            cache.queue_write_back()
            model.to_clean += [i for i in cache._dirty if i not in model.to_clean]
        slots = {i: slot for i in range(NUM_RECORDS) if (slot := cache.slot_of(i)) is not None}
        assert slots.keys() == {*model.cached, *model.staged}
        assert {i for i in slots if cache._table.slot_of[i] >= 0} == set(model.cached)
        assert len(set(slots.values())) == len(slots)  # no slot has two records
        assert set(cache._dirty) == model.dirty <= slots.keys()
        assert cache.num_dirty == len(model.dirty) + len(model.writing)
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.evictions) == (
            model.hits,
            model.misses,
            model.evictions,
        )
        assert (stats.passed_through, stats.unused) == (model.passed, model.unused)
    least = 20 if num_slots + staging_slots > 4 else 0
    assert min(model.hits, model.evictions, model.passed, writes) >= least


def pass_through(cache: LFUCache, index: int) -> None:
    slot = cache.pin_record(index)
    if slot is None:
        slot = cache.reserve_slot(index, awaited=True)
        assert slot is not None
        cache.unpin(slot)
        slot = cache.pin_record(index)
        assert slot is not None
    cache.unpin(slot)


def test_a_prefetch_does_not_evict_what_was_prefetched_before_it() -> None:
    """However popular it is; a caller who waits may."""
    counts = HitCounts(NUM_RECORDS)
    counts.count_step([5])
    counts.count_step([5, 6])
    cache = LFUCache(counts, num_slots=1, staging_slots=2)
    for index in (0, 5):
        slot = cache.reserve_slot(index, awaited=False)
        assert slot is not None
        cache.unpin(slot)
    assert cache.slot_of(0) is not None and cache.stats().unused == cache.stats().evictions == 0
    assert cache.reserve_slot(6, awaited=True) is not None
    assert cache.slot_of(0) is None and cache.stats().unused == cache.stats().evictions == 1


def test_balanced_traffic_keeps_what_is_there() -> None:
    """32 records in turn through a cache of 8: a quarter hits, as with a fixed set. LRU would
    get none.
    """
    cache = LFUCache(HitCounts(32, beta=0.5, decay_every_steps=2), 8, 1)
    for _ in range(50):
        for index in range(32):
            pass_through(cache, index)
        cache.counts.count_step(range(32))
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.evictions) == (49 * 8, 50 * 32 - 49 * 8, 0)
    assert stats.hit_rate == 49 * 8 / (50 * 32)


def test_staging_is_needed_unless_all_fit() -> None:
    LFUCache(HitCounts(8), 8, 0)
    with pytest.raises(ValueError, match="staging_slots = 0"):
        LFUCache(HitCounts(9), 8, 0)


def test_what_is_expected_keeps_its_place() -> None:
    """Whatever the counts are, until something else is expected."""
    cache = LFUCache(HitCounts(8), 2, 1)
    for index in (0, 1):
        pass_through(cache, index)
    cache.counts.rank_first([0, 1])
    for _ in range(3):
        for index in (2, 3):
            pass_through(cache, index)
        cache.counts.count_step([2, 3])
        assert {0, 1} == {index for index in range(8) if cache._table.slot_of[index] >= 0}
    cache.counts.rank_first([4])
    pass_through(cache, 4)
    pass_through(cache, 2)
    assert {2, 4} == {index for index in range(8) if cache._table.slot_of[index] >= 0}
