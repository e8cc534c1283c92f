"""The device slot pool, against a brute-force model."""

import numpy as np
import pytest

from jmoe.memory.slot_pool import SlotPool
from jmoe.memory.slot_table import HitCounts


def test_pool_against_a_model() -> None:
    """Whatever is planned: slots are right, nothing needed or pinned moves, what goes has the
    lowest count.
    """
    rng = np.random.default_rng(3)
    counts = HitCounts(40, beta=0.8, decay_every_steps=2)
    pool = SlotPool(counts, 12)
    inside: dict[int, int] = {}  # record -> slot
    pins: dict[int, int] = {}
    refused = evicted = hits = 0
    for _ in range(2500):
        needed = rng.zipf(1.3, rng.integers(1, 14)) % 40
        counts_before = counts.scores.copy()
        distinct = set(needed.tolist())
        fits = len(distinct | pins.keys()) <= 12
        if not fits:
            refused += 1
            before = pool.slot_of.copy()
            with pytest.raises(ValueError, match="num_slots = 12: too few"):
                pool.plan_loads(needed)
            np.testing.assert_array_equal(pool.slot_of, before)
        else:
            slots, loads = pool.plan_loads(needed)
            assert [record for record, _ in loads] == sorted(distinct - inside.keys())
            gone = inside.keys() - set(pool.record_in.tolist())
            evicted += len(gone)
            hits += len(distinct & inside.keys())
            assert not gone & (distinct | pins.keys())
            stayed = inside.keys() - gone - distinct - pins.keys()
            if gone and stayed:
                assert max(counts_before[list(gone)]) <= min(counts_before[list(stayed)])
            inside = {record: slot for record, slot in inside.items() if record not in gone} | dict(
                loads
            )
            assert slots.tolist() == [inside[record] for record in needed.tolist()]
            assert sorted(set(inside.values())) == sorted(inside.values())
            assert {r: int(s) for r, s in enumerate(pool.slot_of) if s >= 0} == inside
            pool.counts.count_step(needed)
            if rng.integers(2):
                pool.pin(pool.slots_of(sorted(distinct)))
                for record in distinct:
                    pins[record] = pins.get(record, 0) + 1
        while sum(pins.values()) > 8 or (pins and rng.integers(3) == 0):
            record = int(rng.choice(list(pins)))
            pool.unpin(pool.slots_of(record))
            pins[record] -= 1
            if not pins[record]:
                del pins[record]
    assert min(evicted, hits) > 250
    assert refused > 50


def test_pool_keeps_a_hot_set_on_balanced_traffic() -> None:
    """4 layers of 8 records in turn through 16 slots: the last 8 slots are used again and again,
    the others stay.
    """
    pool, hits = SlotPool(HitCounts(32), 16), 0
    for _ in range(20):
        for layer in range(4):
            _, loads = pool.plan_loads(np.arange(layer * 8, layer * 8 + 8))
            hits += 8 - len(loads)
        pool.counts.count_step(np.arange(32))
    assert hits == 19 * 8
    assert set(range(8)) <= set(pool.record_in.tolist())


def test_pool_mistakes() -> None:
    pool = SlotPool(HitCounts(10), 4)
    slots, loads = pool.plan_loads([3, 5, 3])
    assert slots.tolist() == [loads[0][1], loads[1][1], loads[0][1]]
    with pytest.raises(ValueError, match="index = 10"):
        pool.plan_loads([10])
    with pytest.raises(ValueError, match="record = 7: has no slot"):
        pool.pin(pool.slots_of([7]))
    with pytest.raises(ValueError, match="must be different"):
        pool.pin(pool.slots_of([3, 3]))
    with pytest.raises(ValueError, match="too few for the 5 records"):
        pool.plan_loads(range(5))
    pool.pin(pool.slots_of([3]))
    with pytest.raises(ValueError, match=r"4 of them have to be loaded and 1 slots are pinned"):
        pool.plan_loads([0, 1, 2, 4])
    pool.drop_records([5])
    assert set(pool.record_in.tolist()) == {3, -1}
    assert not pool.plan_loads([])[1]
