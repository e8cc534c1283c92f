"""Counts of paths against a dictionary, what shorter paths are for, and tables on disk."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from jmoe.inference import path_table
from jmoe.inference.path_table import PATHS_FILE, PathCounter, PathTable
from tests.damage import flip

E, K, LAYERS, LENGTH = 7, 2, 5, 3
SIZES = (LAYERS, E, K, LENGTH)


def _choices(seed: int, tokens: int) -> list[np.ndarray]:
    """Return skewed choices of each layer; every fifth token is padding."""
    random = np.random.default_rng(seed)
    scores = random.gumbel(size=(LAYERS, tokens, E)) - np.log(np.arange(1, E + 1))
    choices = np.argsort(-scores, axis=-1)[..., :K].astype(np.int32)
    choices[:, ::5] = E
    return list(choices)


def _counted(*steps: list[np.ndarray], kept: int | None = None) -> PathTable:
    counter = PathCounter(*SIZES)
    for step in steps:
        counter.count_step(step)
    return counter.make_table("the model", kept)


STEPS = [_choices(seed, 60) for seed in range(4)]


def _path(step: list[np.ndarray], token: int, layer: int, digits: int) -> tuple[int, ...]:
    """Return a token's choices up to a layer: the first and the second there, then the first
    ones before it.
    """
    chosen = [
        step[layer][token, 0],
        step[layer][token, 1],
        *(step[n][token, 0] for n in reversed(range(layer))),
    ]
    return layer, *map(int, chosen[:digits])


def _digits(layer: int) -> int:
    return min(LENGTH, layer + 1) + 1


def _dictionary() -> tuple[dict[tuple[int, ...], Counter[int]], Counter[tuple[int, ...]]]:
    """Return the next experts' counts and the number of tokens, by path: layer, then choices,
    the nearest first.
    """
    following: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    tokens: Counter[tuple[int, ...]] = Counter()
    for step in STEPS:
        for token in range(len(step[0])):
            for layer in range(LAYERS - 1):
                for digits in range(1, _digits(layer) + 1):
                    path = _path(step, token, layer, digits)
                    if E not in path:
                        tokens[path] += 1
                        following[path].update(map(int, step[layer + 1][token]))
    return following, tokens


@pytest.mark.parametrize("kept", [K, E])
def test_counts_are_those_of_a_dictionary(kept: int) -> None:
    table = _counted(*STEPS, kept=kept)
    following, tokens = _dictionary()
    found = 0
    for layer in range(LAYERS - 1):
        for digits in range(1, LENGTH + 2):
            for row in range(*table.starts[layer, digits - 1 : digits + 1]):
                found += 1
                path = (layer, *(int(table.keys[row]) // E**digit % E for digit in range(digits)))
                assert table.tokens[row] == tokens[path]
                ranked = sorted(following[path].items(), key=lambda item: (-item[1], item[0]))[
                    :kept
                ]
                stored = [
                    (e, n) for e, n in zip(table.experts[row], table.counts[row], strict=True) if n
                ]
                assert stored == ranked
    assert found == len(tokens)
    assert table.header.tokens == sum(np.count_nonzero(step[0][:, 0] < E) for step in STEPS)


def test_popularity_is_the_sum_over_tokens() -> None:
    whole, top, step = _counted(*STEPS, kept=E), _counted(*STEPS), STEPS[0]
    following, tokens = _dictionary()
    for layer in range(LAYERS - 1):
        expected = np.zeros((2, E))
        for token in np.flatnonzero(step[0][:, 0] < E):
            path = _path(step, token, layer, _digits(layer))
            ranked = sorted(following[path].items(), key=lambda item: (-item[1], item[0]))
            for kind, experts in enumerate((ranked, ranked[:K])):
                for expert, count in experts:
                    expected[kind, expert] += count / tokens[path]
        for table, popularity_E in zip((whole, top), expected, strict=True):
            estimate = table.estimate_popularity(step[: layer + 1])
            np.testing.assert_allclose(estimate.popularity_E, popularity_E, rtol=1e-12)
            assert estimate.without_share == 0
        real = np.count_nonzero(step[0][:, 0] < E)
        assert whole.estimate_popularity(step[: layer + 1]).popularity_E.sum() == pytest.approx(
            K * real
        )
    after_last = whole.estimate_popularity(step)
    assert (after_last.popularity_E.sum(), after_last.without_share) == (0, 1)
    assert whole.most_frequent_experts(step).size == 0


def test_an_unseen_path_is_shortened() -> None:
    seen = [np.array([[e, 6]], np.int32) for e in (0, 1, 2, 3, 4)]
    other = [np.array([[e, 6]], np.int32) for e in (5, 1, 0, 2, 5)]
    table = _counted(seen, other)

    def likely(*first: int, second: int = 6) -> list[int]:
        return table.most_frequent_experts(
            [np.array([[e, second]], np.int32) for e in first]
        ).tolist()

    assert likely(0, 1) == [2, 6]
    assert likely(5, 1) == [0, 6]
    # from 1 alone, which both came through: the most frequent, then the lowest number
    assert likely(3, 1) == [6, 0]
    assert likely(5, 5, 2) == [3, 6]  # as if it had been 2 alone
    assert likely(0, 1, second=3) == [6, 0]  # another second choice
    assert likely(4) == []  # never seen in layer 0
    mixed = [np.array([[0, 6], [4, 6], [E, E], [5, 6]], np.int32)]
    estimate = table.estimate_popularity(mixed)
    assert estimate.popularity_E.tolist() == [0, 2, 0, 0, 0, 0, 2]
    assert estimate.without_share == pytest.approx(1 / 3)
    nothing = table.estimate_popularity([np.full((3, K), E, np.int32)])
    assert (nothing.popularity_E.sum(), nothing.without_share) == (0, 0)


def test_a_table_on_disk(tmp_path: Path) -> None:
    table = _counted(*STEPS)
    file = table.save(tmp_path)
    assert file == tmp_path / PATHS_FILE == tmp_path / "expert_paths.table"
    loaded = PathTable.load(tmp_path, "the model")
    assert loaded.header == table.header
    for name in ("starts", "keys", "tokens", "experts", "counts"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(table, name))
    with pytest.raises(ValueError, match="was made for another model; make one with"):
        PathTable.load(tmp_path, "another model")
    with pytest.raises(ValueError, match="no such file; make one"):
        PathTable.load(tmp_path / "empty", "the model")


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    """A bit flipped anywhere, or an end that is missing."""
    file = _counted(*STEPS).save(tmp_path)
    content = file.read_bytes()
    for at in [*range(0, len(content), 97), len(content) - 1]:
        flip(file, at, at % 8)
        with pytest.raises(ValueError, match=f"{PATHS_FILE}: is damaged; make one"):
            PathTable.load(tmp_path, "the model")
        flip(file, at, at % 8)
    for size in (0, 10, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match="is damaged"):
            PathTable.load(tmp_path, "the model")


def test_a_table_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(path_table, "VERSION", 2)
        _counted(*STEPS).save(tmp_path)
    with pytest.raises(ValueError, match="has version 2, this is version 1; make one"):
        PathTable.load(tmp_path, "the model")


def test_a_path_too_long_for_its_key() -> None:
    with pytest.raises(ValueError, match=r"path_length = 7: must be in \[1, 6\] with 128 experts"):
        PathCounter(2, 128, 8, 7)
    with pytest.raises(ValueError, match="path_length = 0"):
        PathCounter(2, 128, 8, 0)
    with pytest.raises(ValueError, match=r"kept = 1: must be in \[2, 7\]"):
        _counted(kept=1)
    assert len(_counted().keys) == 0  # nothing was counted
