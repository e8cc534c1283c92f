"""MoESys' cache policy, against a transcription of the algorithm from the paper."""

from pathlib import Path

import numpy as np
import pytest

from jmoe.config.tiers import TiersConfig
from jmoe.memory.lfu_cache import LFUCache
from jmoe.memory.moesys_counts import MoESysCounts, record_ranks_factory
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.slot_table import HitCounts
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore

NUM_RECORDS = 24
LAYOUT = RecordLayout.from_arrays({"w": ((8,), np.float32)})


class SparseSchedule:
    """Algorithm 2 line by line, with the paper's names; `fetched` and `evicted` are its transfers.

    The readings where the print is incomplete are those of `MoESysCounts`.
    """

    def __init__(self, CPU_size: int, threshold: float, beta: float, K: int) -> None:
        self.CPU_size, self.threshold, self.beta, self.K = CPU_size, threshold, beta, K
        self.hits: dict[int, float] = {}  # in the order of loading
        self.steps = self.acc_caches = 0
        self.fetched: list[int] = []
        self.evicted: list[int] = []

    def want(self, p_s: int) -> None:
        if p_s in self.hits:
            self.hits[p_s] += 1
            return
        self.fetched.append(p_s)
        if self.acc_caches + 1 < self.CPU_size:
            self.hits[p_s] = 1
            self.acc_caches += 1
            return
        for p_a, hits in self.hits.items():
            if hits >= self.threshold and hits == min(self.hits.values()):
                del self.hits[p_a]
                self.evicted.append(p_a)
                self.hits[p_s] = 1
                return

    def end_step(self) -> None:
        self.steps += 1
        if self.steps == self.K:
            for p_a in self.hits:
                self.hits[p_a] *= self.beta
            self.steps = 0


def want(cache: LFUCache, index: int) -> bool:
    """Use a record as `TieredStore.get` does; return True if it was read."""
    slot = cache.pin_record(index)
    if slot is not None:
        cache.unpin(slot)
        return False
    slot = cache.reserve_slot(index, awaited=True)
    assert slot is not None and cache.pin_record(index) == slot
    cache.unpin(slot)
    cache.unpin(slot)
    return True


def cached(cache: LFUCache) -> set[int]:
    return {int(record) for record in cache._table.record_in if record >= 0}


@pytest.mark.parametrize(
    ("num_slots", "threshold", "beta", "interval"),
    [
        (6, 1.0, 0.8, 4),
        (6, 0.0, 0.8, 1),
        (1, 2.0, 1.0, 4),
        (9, 2.0, 0.5, 3),
        (5, 3.0, 1.0, 7),
        (12, 0.4, 0.8, 2),
    ],
)
def test_equals_the_papers_algorithm(
    num_slots: int, threshold: float, beta: float, interval: int
) -> None:
    """Reads, evictions and residents are those of the transcription after every use."""
    rng = np.random.default_rng(0)
    counts = MoESysCounts(NUM_RECORDS, threshold=threshold, beta=beta, interval=interval)
    cache = LFUCache(counts, num_slots, 1)
    model = SparseSchedule(num_slots + 1, threshold, beta, interval)
    fetched, evicted, staged = list[int](), list[int](), -1
    weights = 1 / np.arange(1, NUM_RECORDS + 1) ** 1.1
    for step in range(300):
        if step % 100 == 0:
            weights = rng.permutation(weights)
        for record in rng.choice(NUM_RECORDS, 5, replace=False, p=weights / weights.sum()).tolist():
            # the paper sends a record that found no place to its device at once and forgets it
            if record == staged and cached(cache).isdisjoint([record]):
                continue
            before = cached(cache)
            if want(cache, record):
                fetched.append(record)
                staged = record if record not in cached(cache) else staged
            evicted += sorted(before - cached(cache))
            model.want(record)
            assert (fetched, evicted) == (model.fetched, model.evicted)
            assert cached(cache) == set(model.hits)
            for resident, hits in model.hits.items():
                assert counts.rank(resident) == pytest.approx(hits, rel=1e-12)
        counts.count_step([])
        model.end_step()
    assert len(fetched) > num_slots and (threshold > 1 or evicted)


def test_a_prefetched_record_has_one_hit_until_it_is_used_again() -> None:
    counts = MoESysCounts(4)
    cache = LFUCache(counts, 2, 1)
    slot = cache.reserve_slot(3, awaited=False)
    assert slot is not None
    cache.unpin(slot)
    for hits in (1, 2, 3):
        assert cache.pin_record(3) == slot
        cache.unpin(slot)
        assert counts.rank(3) == hits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -1.0}, "threshold = -1.0: must not be negative"),
        ({"beta": 0.0}, r"beta = 0.0: must be in \(0, 1\]"),
        ({"interval": 0}, "interval = 0: must be greater than 0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoESysCounts(4, **options)  # type: ignore[arg-type]


def test_a_store_keeps_what_the_policy_keeps(tmp_path: Path) -> None:
    """Two cached records with too few hits stay, one with enough is replaced by the newcomer."""
    tiers = TiersConfig(
        "nvme", "nvme", cache_policy="moesys", cache_threshold=2.0, cache_interval=100
    )
    assert record_ranks_factory(TiersConfig("nvme", "nvme")) is HitCounts
    with VersionStore.open(tmp_path, LAYOUT, 8, fingerprint="test") as store:
        store.write_all_records(lambda index, views: None)
        size = 3 * store.layout.record_bytes
        with TieredStore(
            store,
            cache_bytes=size,
            threads=1,
            write_threads=1,
            make_ranks=record_ranks_factory(tiers),
        ) as tiered:
            assert tiered._cache is not None and tiered._cache.num_slots == 2
            for index in (0, 1, 2, 1, 0, 3):
                tiered.get(index).close()
            assert cached(tiered._cache) == {1, 3}
