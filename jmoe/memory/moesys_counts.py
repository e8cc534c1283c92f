"""Hit counts as MoESys prints them (Algorithm 2, arXiv 2205.10034), for `LFUCache`."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from jmoe.config import check
from jmoe.config.tiers import CachePolicy
from jmoe.memory.slot_table import HitCounts, RecordRanks, checked_record_ids


class MoESysCounts(RecordRanks):
    """MoESys' hit table: hits of the cached records alone, which decay.

    A record begins with one hit when it is loaded, gets one with each use, and loses its hits with
    its slot. In a full cache a newcomer replaces the record with the fewest hits, the oldest among
    equals, if that record has at least `threshold` hits; otherwise the newcomer passes through a
    staging slot. Every `interval` steps all hits are multiplied by `beta`.

    Three places of the printed algorithm need a reading: a newcomer that replaces a record begins
    with one hit, too; the product with `beta` is assigned; and the slot that "acc_caches + 1 <
    CPU_size" leaves unused is the staging slot. Records whose slots are in use are not replaced.
    """

    oldest_first = True

    def __init__(
        self, num_records: int, *, threshold: float = 1.0, beta: float = 0.8, interval: int = 4
    ) -> None:
        check(num_records > 0, "num_records", num_records, "must be greater than 0")
        check(threshold >= 0, "threshold", threshold, "must not be negative")
        check(0 < beta <= 1, "beta", beta, "must be in (0, 1]")
        check(interval > 0, "interval", interval, "must be greater than 0")
        self.hits = np.zeros(num_records)
        self._threshold, self._beta, self._interval = threshold, beta, interval
        self._steps = 0

    @property
    def num_records(self) -> int:
        return self.hits.size

    def rank(self, index: int) -> float:
        return float(self.hits[index])

    def admits(self, index: int, victim: int) -> bool:
        return self.rank(victim) >= self._threshold

    def count_hit(self, index: int) -> None:
        if self.hits[index]:  # a record that passes through has no hits
            self.hits[index] += 1

    def count_load(self, index: int) -> None:
        self.hits[index] = 1

    def count_eviction(self, index: int) -> None:
        self.hits[index] = 0

    def count_step(self, indices: ArrayLike) -> None:
        checked_record_ids(indices, self.num_records)
        self._steps += 1
        if self._steps == self._interval:
            self.hits *= self._beta
            self.generation += 1
            self._steps = 0


class CacheOptions(Protocol):
    """The cache's options of `TiersConfig` and `EngineConfig`."""

    @property
    def cache_policy(self) -> CachePolicy: ...
    @property
    def cache_threshold(self) -> float: ...
    @property
    def cache_beta(self) -> float: ...
    @property
    def cache_interval(self) -> int: ...


def record_ranks_factory(options: CacheOptions) -> Callable[[int], RecordRanks]:
    """Return the function that makes the ranks of `options.cache_policy`, for `TieredStore`."""
    if options.cache_policy == "lfu":
        return HitCounts
    return partial(
        MoESysCounts,
        threshold=options.cache_threshold,
        beta=options.cache_beta,
        interval=options.cache_interval,
    )
