"""Hit counts and the set of slots that they rule, against brute-force models."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jmoe.memory.slot_table import HitCounts, LFUSlotTable


def test_counts_decay() -> None:
    counts = HitCounts(4, beta=0.5, decay_every_steps=2)
    counts.count_step([0, 1, 1])
    np.testing.assert_allclose(counts.decayed_counts, [1, 1, 0, 0])
    counts.count_step([1])  # then a decay
    np.testing.assert_allclose(counts.decayed_counts, [0.5, 1, 0, 0])
    counts.count_step(np.array([[2, 1]]))
    np.testing.assert_allclose(counts.decayed_counts, [0.5, 2, 1, 0])
    counts.count_step([])  # then a decay
    np.testing.assert_allclose(counts.decayed_counts, [0.25, 1, 0.5, 0])


def test_counts_survive_any_number_of_decays() -> None:
    rng = np.random.default_rng(0)
    counts = HitCounts(8, beta=0.5, decay_every_steps=1)
    expected = np.zeros(8)
    for _ in range(3000):
        touched = rng.choice(8, 3, replace=False)
        expected[touched] += 1
        expected *= 0.5
        counts.count_step(touched)
        np.testing.assert_allclose(counts.decayed_counts, expected, rtol=1e-12, atol=1e-300)
    assert counts.generation == 0  # traffic never changed


class CountsModel:
    """The rule of `HitCounts` in plain words: what predicts the uses best becomes the scores."""

    def __init__(self, num_records: int, beta: float) -> None:
        self.scores, self.decayed_counts, self.fresh = [[0.0] * num_records for _ in range(3)]
        self.beta, self.forgotten = beta, 0
        self.decayed_is_better = self.fresh_is_better = 0.0

    def touch(self, records: set[int]) -> None:
        def log_likelihood(counts: list[float]) -> float:
            return sum(math.log((counts[i] + 2) / sum(n + 2 for n in counts)) for i in records)

        scores = log_likelihood(self.scores)
        self.decayed_is_better = max(
            0, self.decayed_is_better + min(10, log_likelihood(self.decayed_counts) - scores)
        )
        self.fresh_is_better += min(10, log_likelihood(self.fresh) - scores)
        for i in records:
            for counts in (self.scores, self.decayed_counts, self.fresh):
                counts[i] += 1
        better = None
        if self.fresh_is_better <= 0:
            self.start_anew()
        elif self.fresh_is_better >= 20:
            better = self.fresh
        if better is None and self.decayed_is_better >= 20:
            better = self.decayed_counts
        if better is not None:
            self.scores = [new + 1e-6 * old for new, old in zip(better, self.scores, strict=True)]
            self.decayed_counts = list(self.scores)
            self.forgotten, self.decayed_is_better = self.forgotten + 1, 0.0
            self.start_anew()
        self.decayed_counts = [n * self.beta for n in self.decayed_counts]

    def start_anew(self) -> None:
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
        counts.count_step(used)
        model.touch(set(used.tolist()))
        np.testing.assert_allclose(counts.scores, model.scores, rtol=1e-9)
        np.testing.assert_allclose(counts.decayed_counts, model.decayed_counts, rtol=1e-9)
        assert counts.generation == model.forgotten
    assert model.forgotten > 3


def zipf_steps(
    rng: np.random.Generator, popularity: NDArray[Any], num_steps: int
) -> Iterator[NDArray[Any]]:
    """Steps of 40 tokens with one choice each."""
    for _ in range(num_steps):
        yield rng.choice(popularity.size, 40, p=popularity / popularity.sum())


@pytest.mark.parametrize(("changed", "within_steps"), [(128, 5), (32, 60)])
def test_what_is_popular_is_learned_anew_after_a_change(changed: int, within_steps: int) -> None:
    """All the records change places, or a quarter of them does: counts of many steps are
    forgotten soon after.
    """
    rng = np.random.default_rng(5)
    counts, popularity = HitCounts(128), rng.permutation(np.arange(1.0, 129) ** -1.1)
    for used in zipf_steps(rng, popularity, 400):
        counts.count_step(used)
    assert counts.generation == 0
    places = np.argsort(-popularity)[:changed]
    popularity[places] = popularity[np.roll(places, changed // 2)]
    for used in zipf_steps(rng, popularity, within_steps):
        counts.count_step(used)
    assert counts.generation > 0
    for used in zipf_steps(rng, popularity, 100):
        counts.count_step(used)
    best = np.argsort(-popularity)[:16]
    assert np.isin(np.argsort(-counts.scores)[:16], best).mean() > 0.75


def test_one_odd_step_makes_nothing_forgotten() -> None:
    rng = np.random.default_rng(6)
    counts, popularity = HitCounts(128), np.arange(1.0, 129) ** -1.1
    for _ in range(10):
        for used in zipf_steps(rng, popularity, 30):
            counts.count_step(used)
        counts.count_step(np.arange(64, 128))  # the least popular
    assert counts.generation == 0


def test_balanced_traffic_makes_nothing_forgotten() -> None:
    counts = HitCounts(64, beta=0.5, decay_every_steps=1)
    for _ in range(1000):
        counts.count_step(np.arange(64))
    assert counts.generation == 0
    assert (counts.scores == 1000).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0"),
        ({"beta": 1.5}, "beta = 1.5"),
        ({"decay_every_steps": 0}, "decay_every_steps = 0"),
    ],
)
def test_counts_that_make_no_sense(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HitCounts(4, **options)  # type: ignore[arg-type]


def test_an_unknown_record_is_named() -> None:
    counts = HitCounts(4)
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=rf"index = {bad}: must be in \[0, 4\)"):
            counts.count_step([0, bad])
    assert not counts.decayed_counts.any()
    assert not counts.scores.any()


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_slot_table_against_a_model(beta: float) -> None:
    """The victim is always the unpinned record with the lowest score, the last to come among
    equals.
    """
    rng = np.random.default_rng(1)
    counts = HitCounts(20, beta=beta, decay_every_steps=1)
    hot = LFUSlotTable(counts, 6)
    came: dict[int, int] = {}  # record -> arrival
    pins: dict[int, int] = {}
    for step in range(6000):
        action = rng.integers(5)
        if action == 0:
            # changes, so that counts are forgotten
            popular = (np.arange(10) + 10 * (step // 1500)) % 20
            counts.count_step(rng.choice(popular, rng.integers(4), replace=False))
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
            expected = (
                min(unpinned, key=lambda r: (counts.scores[r], -came[r])) if unpinned else None
            )
            slot = hot.next_victim()
            assert (None if slot is None else hot.record_in[slot]) == expected
            if not hot.num_free_slots and slot is not None:
                assert hot.evict(slot) == expected
                del came[expected]
            absent = [record for record in range(20) if record not in came]
            if hot.num_free_slots:
                record = int(rng.choice(absent))
                hot.place(record)
                came[record] = step + 1
        assert set(hot.record_in.tolist()) - {-1} == came.keys()
        assert hot.num_pinned == len(pins)
        assert all(hot.record_in[hot.slot_of[record]] == record for record in came)
        assert np.count_nonzero(hot.slot_of >= 0) == len(came) == 6 - hot.num_free_slots
    assert counts.generation > 2
