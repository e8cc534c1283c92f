"""The grouping of layers into repeated patterns and runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import STACKS, LayerKind
from jmoe.config.layers import layer_table
from jmoe.models.layer_patterns import LayerPattern, find_patterns

KINDS: dict[str, LayerKind] = {"M": "moe", "D": "dense"}


def patterns_of(kinds: str) -> list[LayerPattern]:
    return find_patterns(layer_table([KINDS[kind] for kind in kinds], [None] * len(kinds)))


def described(pattern: LayerPattern) -> tuple[str, int]:
    return "".join("DM"[kind == "moe"] for kind in pattern.kinds), pattern.repeats


@pytest.mark.parametrize(
    ("kinds", "patterns"),
    [
        ("MMMM", [("M", 4)]),
        ("DMMM", [("D", 1), ("M", 3)]),
        ("DMDMDM", [("DM", 3)]),
        ("DDMDDM", [("DDM", 2)]),
        ("MDMM", [("M", 1), ("D", 1), ("M", 2)]),
        ("MDMMMDMM", [("MDMM", 2)]),
        ("DMD", [("D", 1), ("M", 1), ("D", 1)]),
        ("", []),
    ],
)
def test_patterns(kinds: str, patterns: list[tuple[str, int]]) -> None:
    assert [described(pattern) for pattern in patterns_of(kinds)] == patterns


@pytest.mark.parametrize(
    ("kinds", "windows", "runs"),
    [
        ("MMMM", [8, 99, 8, 99], [("M", 8, 1), ("M", 99, 1)]),
        ("MMMMMM", [8, 8, 99, 8, 8, 99], [("M", 8, 2), ("M", 99, 1)]),
        ("DMDM", [8, 99, 8, 99], [("D", 8, 1), ("M", 99, 1)]),
    ],
)
def test_windows_repeat_too(
    kinds: str, windows: list[int], runs: list[tuple[str, int, int]]
) -> None:
    """A layer's window is part of its program; a scan whose layers differ runs a whole repeat."""
    (pattern,) = find_patterns(layer_table([KINDS[kind] for kind in kinds], windows))
    assert pattern.windows * pattern.repeats == tuple(windows)
    assert [("DM"[run.kind == "moe"], run.window, run.count) for run in pattern.runs()] == runs


@pytest.mark.parametrize("kinds", ["MMMM", "DDMDDM", "MDMMMDMMDD", "DMMDMMDMMD", "DM"])
@pytest.mark.parametrize("joined_layers", [1, 4])
def test_numbers_are_those_of_the_table(kinds: str, joined_layers: int) -> None:
    """Whatever the grouping, position and repeat name the layers of the table, in order."""
    table = layer_table([KINDS[kind] for kind in kinds], [None] * len(kinds))
    named: list[tuple[str, int]] = []
    for pattern in find_patterns(table):
        joined = pattern.join_repeats(joined_layers)
        assert joined.layers == pattern.layers
        for repeat in range(joined.repeats):
            for position, kind in enumerate(joined.kinds):
                number = joined.layer_index(position, repeat)
                assert joined.layer_index(position, jnp.int32(repeat)) == number
                named.append((kind, number))
    assert named == [(layer.kind, layer.number) for layer in table]


@pytest.mark.parametrize(
    ("kinds", "num_layers", "joined"),
    [
        ("MMMM", 2, ("MM", 2)),
        ("MMMM", 3, ("MM", 2)),
        ("MMM", 2, ("M", 3)),
        ("DMDM", 9, ("DMDM", 1)),
    ],
)
def test_joined_repeats(kinds: str, num_layers: int, joined: tuple[str, int]) -> None:
    (pattern,) = patterns_of(kinds)
    assert described(pattern.join_repeats(num_layers)) == joined


@pytest.mark.parametrize("kinds", ["MMMM", "DDMDDM", "MDMMMDMMDD", "DMMDMMDMMD", "DM", "D"])
def test_runs_select_their_layers(kinds: str) -> None:
    """The runs of all repeats together hold each layer of each stack once, in the model's order."""
    table = layer_table([KINDS[kind] for kind in kinds], [None] * len(kinds))
    sizes = {kind: sum(layer.kind == kind for layer in table) for kind in STACKS}
    found: list[tuple[LayerKind, int]] = []
    for pattern in find_patterns(table):
        selected = [
            (run, np.asarray(run.select(jnp.arange(sizes[run.kind])))) for run in pattern.runs()
        ]
        for repeat in range(pattern.repeats):
            for run, numbers in selected:
                assert numbers.ndim == 2 - run.is_single
                found += [(run.kind, int(n)) for n in np.ravel(numbers[repeat])]
    assert found == [(layer.kind, layer.number) for layer in table]
