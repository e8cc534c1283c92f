"""Hit counts, the host cache's rule and the device slot pool, against brute-force models."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jmoe.memory.hot_set import HitCounts, HotSet
from jmoe.memory.lfu_cache import LFUCache
from jmoe.memory.slot_pool import SlotPool


def test_counts_decay() -> None:
    counts = HitCounts(4, beta=0.5, decay_every_steps=2)
    counts.touch([0, 1, 1])
    np.testing.assert_allclose(counts.decayed, [1, 1, 0, 0])
    counts.touch([1])  # then a decay
    np.testing.assert_allclose(counts.decayed, [0.5, 1, 0, 0])
    counts.touch(np.array([[2, 1]]))
    np.testing.assert_allclose(counts.decayed, [0.5, 2, 1, 0])
    counts.touch([])  # then a decay
    np.testing.assert_allclose(counts.decayed, [0.25, 1, 0.5, 0])


def test_counts_survive_any_number_of_decays() -> None:
    rng = np.random.default_rng(0)
    counts = HitCounts(8, beta=0.5, decay_every_steps=1)
    expected = np.zeros(8)
    for _ in range(3000):
        touched = rng.choice(8, 3, replace=False)
        expected[touched] += 1
        expected *= 0.5
        counts.touch(touched)
        np.testing.assert_allclose(counts.decayed, expected, rtol=1e-12, atol=1e-300)
    assert counts.generation == 0  # traffic never changed


class CountsModel:
    """The rule of `HitCounts` in plain words: what predicts the uses best becomes the scores."""

    def __init__(self, num_records: int, beta: float) -> None:
        self.scores, self.decayed, self.fresh = [[0.0] * num_records for _ in range(3)]
        self.beta, self.forgotten = beta, 0
        self.decayed_is_better = self.fresh_is_better = 0.0

    def touch(self, records: set[int]) -> None:
        def log_likelihood(counts: list[float]) -> float:
            return sum(math.log((counts[i] + 2) / sum(n + 2 for n in counts)) for i in records)

        scores = log_likelihood(self.scores)
        self.decayed_is_better = max(0, self.decayed_is_better + min(10, log_likelihood(self.decayed) - scores))
        self.fresh_is_better += min(10, log_likelihood(self.fresh) - scores)
        for i in records:
            for counts in (self.scores, self.decayed, self.fresh):
                counts[i] += 1
        better = None
        if self.fresh_is_better <= 0:
            self.reexec_with_env()
        elif self.fresh_is_better >= 20:
            better = self.fresh
        if better is None and self.decayed_is_better >= 20:
            better = self.decayed
        if better is not None:
            self.scores = [new + 1e-6 * old for new, old in zip(better, self.scores, strict=True)]
            self.decayed = list(self.scores)
            self.forgotten, self.decayed_is_better = self.forgotten + 1, 0.0
            self.reexec_with_env()
        self.decayed = [n * self.beta for n in self.decayed]

    def reexec_with_env(self) -> None:
        self.fresh, self.fresh_is_better = [0.0] * len(self.fresh), 0.0


@pytest.mark.parametrize("beta", [0.97, 0.5])
@pytest.mark.parametrize("changed", [30, 12])
def test_counts_against_a_model(beta: float, changed: int) -> None:
    """changed: so many of the records change places every 250 steps, the most popular ones."""
    rng = np.random.default_rng(4)
    counts, model = HitCounts(30, beta=beta, decay_every_steps=1), CountsModel(30, beta)
    popularity = 1 / np.arange(1.0, 31)
    for step in range(1500):
        if step % 250 == 0:
            places = np.argsort(-popularity)[:changed]
            popularity[places] = popularity[np.roll(places, changed // 2)]
        used = rng.choice(30, rng.integers(1, 12), p=popularity / popularity.sum())
        counts.touch(used)
        model.touch(set(used.tolist()))
        np.testing.assert_allclose(counts.scores, model.scores, rtol=1e-9)
        np.testing.assert_allclose(counts.decayed, model.decayed, rtol=1e-9)
        assert counts.generation == model.forgotten
    assert model.forgotten > 3


def zipf_steps(rng: np.random.Generator, popularity: NDArray[Any], num_steps: int) -> Iterator[NDArray[Any]]:
    """Steps of 40 tokens with one choice each."""
    for _ in range(num_steps):
        yield rng.choice(popularity.size, 40, p=popularity / popularity.sum())


@pytest.mark.parametrize(("changed", "within_steps"), [(128, 5), (32, 60)])
def test_what_is_popular_is_learned_anew_after_a_change(changed: int, within_steps: int) -> None:
    """All the records change places, or a quarter of them does: counts of many steps are forgotten soon after."""
    rng = np.random.default_rng(5)
    counts, popularity = HitCounts(128), rng.permutation(np.arange(1.0, 129) ** -1.1)
    for used in zipf_steps(rng, popularity, 400):
        counts.touch(used)
    assert counts.generation == 0
    places = np.argsort(-popularity)[:changed]
    popularity[places] = popularity[np.roll(places, changed // 2)]
    for used in zipf_steps(rng, popularity, within_steps):
        counts.touch(used)
    assert counts.generation > 0
    for used in zipf_steps(rng, popularity, 100):
        counts.touch(used)
    best = np.argsort(-popularity)[:16]
    assert np.isin(np.argsort(-counts.scores)[:16], best).mean() > 0.75


def test_one_odd_step_makes_nothing_forgotten() -> None:
    rng = np.random.default_rng(6)
    counts, popularity = HitCounts(128), np.arange(1.0, 129) ** -1.1
    for _ in range(10):
        for used in zipf_steps(rng, popularity, 30):
            counts.touch(used)
        counts.touch(np.arange(64, 128))  # the least popular
    assert counts.generation == 0


def test_balanced_traffic_makes_nothing_forgotten() -> None:
    counts = HitCounts(64, beta=0.5, decay_every_steps=1)
    for _ in range(1000):
        counts.touch(np.arange(64))
    assert counts.generation == 0
    assert (counts.scores == 1000).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"beta": 0.0}, "beta = 0.0"), ({"beta": 1.5}, "beta = 1.5"), ({"decay_every_steps": 0}, "decay_every_steps = 0")],
)
def test_counts_that_make_no_sense(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HitCounts(4, **options)  # type: ignore[arg-type]


def test_an_unknown_record_is_named() -> None:
    counts = HitCounts(4)
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=rf"index = {bad}: must be in \[0, 4\)"):
            counts.touch([0, bad])
    assert not counts.decayed.any()
    assert not counts.scores.any()


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_hot_set_against_a_model(beta: float) -> None:
    """The victim is always the unpinned record with the lowest score, the last to come among equals."""
    rng = np.random.default_rng(1)
    counts = HitCounts(20, beta=beta, decay_every_steps=1)
    hot = HotSet(counts, 6)
    came: dict[int, int] = {}  # record -> arrival
    pins: dict[int, int] = {}
    for step in range(6000):
        action = rng.integers(5)
        if action == 0:
            popular = (np.arange(10) + 10 * (step // 1500)) % 20  # changes, so that counts are forgotten
            counts.touch(rng.choice(popular, rng.integers(4), replace=False))
        elif action == 1 and came:
            record = int(rng.choice(list(came)))
            hot.pin([hot.slot_of[record]])
            pins[record] = pins.get(record, 0) + 1
        elif action == 2 and pins:
            record = int(rng.choice(list(pins)))
            hot.unpin([hot.slot_of[record]])
            pins[record] -= 1
            if not pins[record]:
                del pins[record]
        else:
            unpinned = [record for record in came if record not in pins]
            expected = min(unpinned, key=lambda r: (counts.scores[r], -came[r])) if unpinned else None
            slot = hot.victim()
            assert (None if slot is None else hot.record_in[slot]) == expected
            if not hot.num_free and slot is not None:
                assert hot.evict(slot) == expected
                del came[expected]
            absent = [record for record in range(20) if record not in came]
            if hot.num_free:
                record = int(rng.choice(absent))
                hot.place(record)
                came[record] = step + 1
        assert set(hot.record_in.tolist()) - {-1} == came.keys()
        assert hot.num_pinned == len(pins)
        assert all(hot.record_in[hot.slot_of[record]] == record for record in came)
        assert np.count_nonzero(hot.slot_of >= 0) == len(came) == 6 - hot.num_free
    assert counts.generation > 2


class CacheModel:
    """The rule of `LFUCache` in plain words, without its data structures."""

    def __init__(self, num_records: int, num_slots: int, staging_slots: int) -> None:
        self.num_slots, self.staging_slots = num_slots, staging_slots
        self.cached: list[int] = []  # in order of arrival
        self.staged: list[int] = []  # in order of last use
        self.pins = [0] * num_records
        self.fresh = [False] * num_records
        self.hits = self.misses = self.evictions = self.passed = self.unused = 0

    def give_up(self, index: int) -> None:
        self.unused += self.fresh[index]
        self.fresh[index] = False

    def use(self, index: int) -> bool:
        if index not in self.cached + self.staged:
            return False
        self.hits, self.misses = self.hits + (not self.fresh[index]), self.misses + self.fresh[index]
        self.fresh[index] = False
        if index in self.staged:
            self.staged.remove(index)
            self.staged.append(index)
        self.pins[index] += 1
        return True

    def admit(self, index: int, scores: list[float], demanded: bool) -> bool:
        unpinned = [i for i in self.cached if not self.pins[i]]
        if len(self.cached) < self.num_slots:
            self.cached.append(index)
        elif unpinned and scores[index] > min(scores[i] for i in unpinned):
            lowest = min(scores[i] for i in unpinned)
            victim = [i for i in unpinned if scores[i] == lowest][-1]
            self.give_up(victim)
            self.cached.remove(victim)
            self.cached.append(index)
            self.evictions += 1
        else:
            if len(self.staged) == self.staging_slots:
                free = [i for i in self.staged if not self.pins[i]]
                free = [i for i in free if not self.fresh[i]] or (free if demanded else [])
                if not free:
                    return False
                self.give_up(free[0])
                self.staged.remove(free[0])
            self.staged.append(index)
            self.passed += 1
        self.fresh[index] = True
        self.pins[index] += 1
        return True


def test_cache_against_a_model() -> None:
    rng = np.random.default_rng(2)
    counts = HitCounts(24, beta=0.7, decay_every_steps=3)
    cache = LFUCache(counts, 6, 3)
    model = CacheModel(24, 6, 3)
    held: list[tuple[int, int]] = []  # (record, slot), one per pin
    popularity = rng.permutation(1 / np.arange(1.0, 25))
    for n in range(20000):
        if n % 400 == 0:
            rng.shuffle(popularity)
        action = rng.integers(6)
        index = int(rng.choice(24, p=popularity / popularity.sum()))
        here = index in model.cached + model.staged
        if action == 0:
            cache.counts.touch(rng.choice(24, 4, replace=False, p=popularity / popularity.sum()))
        elif action in (1, 2) and held:
            record, slot = held.pop(rng.integers(len(held)))
            assert cache.slot_of(record) == slot  # never moved while held
            cache.unpin(slot)
            model.pins[record] -= 1
        elif action == 3 and here and not model.pins[index]:
            cache.discard(index)
            model.give_up(index)
        elif action == 4 and here:
            if len(held) < 7:
                slot = cache.use(index)
                assert model.use(index)
                assert slot is not None
                held.append((index, slot))
        elif not here and len(held) < 7:
            demanded = bool(rng.integers(2))
            slot = cache.admit(index, demanded=demanded)
            assert (slot is not None) == model.admit(index, counts.scores.tolist(), demanded)
            if slot is not None and rng.integers(10) == 0:  # its read fails
                cache.drop(index)
                model.fresh[index], model.pins[index] = False, 0
                (model.cached if index in model.cached else model.staged).remove(index)
            elif slot is not None:
                held.append((index, slot))
        slots = {i: cache.slot_of(i) for i in range(24)}
        assert {i for i, slot in slots.items() if slot is not None} == {*model.cached, *model.staged}
        assert all((slots[i] or 0) < 6 for i in model.cached)
        assert all((slots[i] or 0) >= 6 for i in model.staged)
        taken = [slot for slot in slots.values() if slot is not None]
        assert len(set(taken)) == len(taken)
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.evictions, stats.passed_through, stats.unused) == (
            model.hits,
            model.misses,
            model.evictions,
            model.passed,
            model.unused,
        )
    assert min(model.hits, model.misses, model.evictions, model.passed, model.unused) > 100


def pass_through(cache: LFUCache, index: int) -> None:
    slot = cache.use(index)
    if slot is None:
        slot = cache.admit(index, demanded=True)
        assert slot is not None
        cache.unpin(slot)
        slot = cache.use(index)
        assert slot is not None
    cache.unpin(slot)


def test_balanced_traffic_keeps_what_is_there() -> None:
    """32 records in turn through a cache of 8: a quarter hits, as with a fixed set. LRU would get none."""
    cache = LFUCache(HitCounts(32, beta=0.5, decay_every_steps=2), 8, 1)
    for _ in range(50):
        for index in range(32):
            pass_through(cache, index)
        cache.counts.touch(range(32))
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.evictions) == (49 * 8, 50 * 32 - 49 * 8, 0)
    assert stats.hit_rate == 49 * 8 / (50 * 32)


def belady_hits(order: list[int], num_slots: int) -> int:
    """The most hits that a cache of so many slots can have: what is needed last goes, or does not come in."""
    held, hits = set[int](), 0
    for position, index in enumerate(order):
        later = order[position + 1 :]
        hits += index in held
        held.add(index)
        if len(held) > num_slots:
            held.remove(max(held, key=lambda i: later.index(i) if i in later else len(order)))
    return hits


@pytest.mark.parametrize("seed", range(5))
def test_a_known_future_is_used_as_well_as_can_be(seed: int) -> None:
    """With all that is to come announced, there are no fewer hits than Belady's rule has."""
    rng = np.random.default_rng(seed)
    steps = [rng.choice(16, 6, replace=False).tolist() for _ in range(60)]
    cache = LFUCache(HitCounts(16, beta=0.5, decay_every_steps=2), 5, 1)
    for step in steps:
        cache.counts.expect(step)
    for step in steps:
        for index in step:
            pass_through(cache, index)
    assert cache.stats().hits >= belady_hits([index for step in steps for index in step], 5)
    assert not cache.counts._coming


def test_what_was_expected_and_did_not_come_is_forgotten() -> None:
    cache = LFUCache(HitCounts(8), 2, 1)
    for index in (0, 1):
        pass_through(cache, index)
    cache.counts.expect([0, 1])
    for _ in range(2):
        for index in (2, 3):
            pass_through(cache, index)
        cache.counts.touch([2, 3])
        assert {0, 1} == {index for index in range(8) if cache._hot.slot_of[index] >= 0}
    for index in (2, 3):
        pass_through(cache, index)
    assert cache._hot.slot_of[2] >= 0  # 3 is in staging
    assert cache.counts.rank(0) == 0


def test_staging_is_needed_unless_all_fit() -> None:
    LFUCache(HitCounts(8), 8, 0)
    with pytest.raises(ValueError, match="staging_slots = 0"):
        LFUCache(HitCounts(9), 8, 0)


def test_pool_against_a_model() -> None:
    """Whatever is planned: slots are right, nothing needed or pinned moves, what goes has the lowest count."""
    rng = np.random.default_rng(3)
    counts = HitCounts(40, beta=0.8, decay_every_steps=2)
    pool = SlotPool(counts, 12)
    inside: dict[int, int] = {}  # record -> slot
    pins: dict[int, int] = {}
    refused = evicted = hits = 0
    for _ in range(5000):
        needed = rng.zipf(1.3, rng.integers(1, 14)) % 40
        counts_before = counts.scores.copy()
        distinct = set(needed.tolist())
        fits = len(distinct | pins.keys()) <= 12
        if not fits:
            refused += 1
            before = pool.slot_of.copy()
            with pytest.raises(ValueError, match="num_slots = 12: too few"):
                pool.plan(needed)
            np.testing.assert_array_equal(pool.slot_of, before)
        else:
            slots, loads = pool.plan(needed)
            assert [record for record, _ in loads] == sorted(distinct - inside.keys())
            gone = inside.keys() - set(pool.record_in.tolist())
            evicted += len(gone)
            hits += len(distinct & inside.keys())
            assert not gone & (distinct | pins.keys())
            stayed = inside.keys() - gone - distinct - pins.keys()
            if gone and stayed:
                assert max(counts_before[list(gone)]) <= min(counts_before[list(stayed)])
            inside = {record: slot for record, slot in inside.items() if record not in gone} | dict(loads)
            assert slots.tolist() == [inside[record] for record in needed.tolist()]
            assert sorted(set(inside.values())) == sorted(inside.values())
            assert {r: int(s) for r, s in enumerate(pool.slot_of) if s >= 0} == inside
            pool.counts.touch(needed)
            if rng.integers(2):
                pool.pin(sorted(distinct))
                for record in distinct:
                    pins[record] = pins.get(record, 0) + 1
        while sum(pins.values()) > 8 or (pins and rng.integers(3) == 0):
            record = int(rng.choice(list(pins)))
            pool.unpin(record)
            pins[record] -= 1
            if not pins[record]:
                del pins[record]
    assert min(evicted, hits) > 500
    assert refused > 100


def test_pool_keeps_a_hot_set_on_balanced_traffic() -> None:
    """4 layers of 8 records in turn through 16 slots: the last 8 slots are used again and again, the others stay."""
    pool, hits = SlotPool(HitCounts(32), 16), 0
    for _ in range(20):
        for layer in range(4):
            _, loads = pool.plan(np.arange(layer * 8, layer * 8 + 8))
            hits += 8 - len(loads)
        pool.counts.touch(np.arange(32))
    assert hits == 19 * 8
    assert set(range(8)) <= set(pool.record_in.tolist())


def test_pool_mistakes() -> None:
    pool = SlotPool(HitCounts(10), 4)
    slots, loads = pool.plan([3, 5, 3])
    assert slots.tolist() == [loads[0][1], loads[1][1], loads[0][1]]
    with pytest.raises(ValueError, match="index = 10"):
        pool.plan([10])
    with pytest.raises(ValueError, match="record = 7: has no slot"):
        pool.pin([7])
    with pytest.raises(ValueError, match="must be different"):
        pool.pin([3, 3])
    with pytest.raises(ValueError, match="too few for the 5 records"):
        pool.plan(range(5))
    pool.pin([3])
    with pytest.raises(ValueError, match=r"4 of them have to be loaded and 1 slots are pinned"):
        pool.plan([0, 1, 2, 4])
    pool.drop([5])
    assert set(pool.record_in.tolist()) == {3, -1}
    assert not pool.plan([])[1]
