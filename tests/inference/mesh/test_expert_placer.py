"""When placements change, on counts made by hand and experts that only note where they are."""

from typing import Any

import numpy as np
import pytest

from jmoe.config.engine import EngineMesh
from jmoe.inference.mesh.expert_placer import ExpertPlacer, SwapCosts
from jmoe.inference.path_table import PopularityEstimate
from jmoe.offload.expert_index import ExpertIndex
from jmoe.planning.placement import Placement, PlacementChanges, place_experts, placement_changes

EXPERTS, LAYERS, DEVICES, SLOTS = 8, 2, 4, 3
DEAR, FREE = SwapCosts(1.0, 1e6), SwapCosts(1.0, 0.0)


class NotedExperts:
    """Places without weights. copied_bytes: one a copy."""

    def __init__(self) -> None:
        self.index, self.process_of_N = ExpertIndex(LAYERS, EXPERTS), np.array([0, 0, 1, 1])
        self.copied_bytes, self.copied_s, self.copies_N = 0, 0.0, np.zeros(DEVICES, int)
        options: dict[str, Any] = {"slots_per_device": SLOTS, "max_packed": SLOTS, "policy": "even"}
        self.placements = [place_experts(np.ones(EXPERTS), DEVICES, **options)] * LAYERS
        self.moved: list[int] = []

    def copies_for_placement(self, layer: int, placement: Placement) -> PlacementChanges:
        return placement_changes(self.placements[layer].physical_to_logical, placement)

    def apply_copies(self, layer: int, changed: PlacementChanges) -> None:
        self.placements[layer] = changed.placement
        self.copied_bytes += len(changed.fills)
        self.copies_N += np.bincount([fill.device for fill in changed.fills], minlength=DEVICES)
        self.moved.append(layer)


class Table:
    """A path table that knows what layer 1's tokens will choose."""

    def __init__(self, popularity_E: np.ndarray) -> None:
        self.popularity_E = popularity_E

    def estimate_popularity(self, path: list[np.ndarray]) -> PopularityEstimate:
        assert len(path) == 1
        return PopularityEstimate(self.popularity_E, 0.0)


def placer_of(
    costs: SwapCosts, table: Any = None, **mesh: Any
) -> tuple[ExpertPlacer, NotedExperts]:
    experts: Any = NotedExperts()
    placer = ExpertPlacer(
        EngineMesh(devices=DEVICES, slots_per_device=SLOTS, **mesh), experts, 1, True, table
    )
    placer.costs = costs
    return placer, experts


def chosen(*counts: int) -> np.ndarray:
    """Return [T, 1] choices, of the experts 0, 1, ... so many, and a token of padding."""
    return np.append(np.repeat(np.arange(len(counts)), counts), EXPERTS).astype(np.int32)[:, None]


SKEWED, OTHERS = chosen(40, 20, 1, 1, 1, 1, 0, 0), chosen(1, 1, 1, 1, 0, 0, 20, 40)


def counts(choices_TK: np.ndarray) -> np.ndarray:
    return np.bincount(choices_TK[:, 0], minlength=EXPERTS + 1)[:-1].astype(float)


def step(placer: ExpertPlacer, *layers: np.ndarray) -> None:
    path: list[np.ndarray] = []
    placer.rebalance_next_layer()
    for layer, choices_TK in enumerate(layers):
        placer.place_by_estimate(layer, path)
        placer.record_choices_and_correct_placement(layer, choices_TK)
        path.append(choices_TK)
    placer.end_step()


def test_a_right_estimate_is_not_planned_again() -> None:
    placer, experts = placer_of(FREE, Table(counts(SKEWED)), placement="lina")
    step(placer, OTHERS, SKEWED)
    assert placer.stats().replans == 1  # the first layer has no path yet
    assert experts.moved == [0, 1]
    balancedness = placer.stats().balancedness
    assert balancedness[1] > 0.9  # 40 + 20 + 4 tokens on 4 devices
    before = experts.placements[1]
    step(placer, OTHERS, SKEWED)  # now the first layer goes by its last choices
    assert placer.stats().replans == 1 and placer.stats().estimates == 4
    assert experts.placements[1] is before


def test_a_wrong_estimate_is_planned_again_after_the_gate() -> None:
    placer, experts = placer_of(FREE, Table(counts(OTHERS)), placement="lina")
    step(placer, OTHERS, SKEWED)
    assert placer.stats().replans == 2
    assert experts.moved == [0, 1, 1]  # by the gate; by the estimate, and by the gate
    assert placer.stats().balancedness[1] > 0.9
    assert placer.stats().swapped_bytes == sum(placer.stats().copies) == experts.copied_bytes > 0
    placer.reset()
    assert placer.stats().copies == (0,) * DEVICES
    assert placer.stats().swapped_bytes == placer.stats().replans == placer.stats().swaps == 0


def test_right_experts_with_other_numbers_of_tokens_are_planned_again() -> None:
    """A table of the likeliest experts says nothing of the third and fourth, which have nearly
    as many tokens.
    """
    actual = chosen(20, 20, 19, 19, 1, 1, 1, 1)
    placer, experts = placer_of(
        FREE, Table(np.array([20.0, 20, 0, 0, 0, 0, 0, 0])), placement="lina"
    )
    step(placer, OTHERS, actual)
    assert placer.stats().replans == 2 and experts.moved == [0, 1, 1]
    assert placer.stats().balancedness[1] > 0.9
    placer, experts = placer_of(
        SwapCosts(1.0, 10.0), Table(np.array([20.0, 20, 0, 0, 0, 0, 0, 0])), placement="lina"
    )
    step(placer, OTHERS, actual)
    assert placer.stats().replans == 1  # 30 tokens where 20.5 were foreseen are not worth a copy


def test_an_estimate_that_did_not_pay_is_trusted_again_once_it_would_have() -> None:
    placer, experts = placer_of(FREE, Table(counts(OTHERS)), placement="lina")
    for _ in range(3):
        step(placer, OTHERS, SKEWED)
    moves = len(experts.moved)
    for _ in range(3):
        step(placer, OTHERS, SKEWED)
    assert len(experts.moved) == moves  # what was placed after the gate is left alone
    assert placer.stats().replans == 7  # yet every estimate of layer 1 was wrong

    last_moves = []
    for number in range(20):
        right = (OTHERS, SKEWED)[number % 2]
        placer._table = Table(counts(right))  # type: ignore[assignment]
        placer.place_by_estimate(0, [])
        placer.record_choices_and_correct_placement(0, OTHERS)
        moves = len(experts.moved)
        placer.place_by_estimate(1, [OTHERS])
        last_moves.append(len(experts.moved) - moves)
        placer.record_choices_and_correct_placement(1, right)
        placer.end_step()
    assert last_moves[0] == 0 and last_moves[-1] == 1


def test_dear_copies_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor any while costs are not known; and where one copy is dearer than all that could be
    saved none is planned.
    """
    placer, experts = placer_of(SwapCosts(1.0, 40.0), Table(counts(OTHERS)), placement="lina")
    step(placer, OTHERS, SKEWED)
    # at most 44 are saved, by two copies or more
    assert placer.stats().replans == 2 and experts.moved == []
    monkeypatch.setattr(
        "jmoe.inference.mesh.expert_placer.place_experts",
        lambda *_, **__: pytest.fail("was planned"),
    )
    placer, experts = placer_of(DEAR, Table(counts(OTHERS)), placement="lina")
    step(placer, OTHERS, SKEWED)
    assert placer.stats().replans == 2 and experts.moved == []
    placer, experts = placer_of(SwapCosts(0.0, float("inf")), placement="lina")
    step(placer, OTHERS, SKEWED)
    assert experts.moved == []


def test_without_tokens_nothing_is_decided() -> None:
    placer, experts = placer_of(FREE, placement="lina")
    step(placer, chosen(), chosen())
    assert experts.moved == [] and placer.stats().replans == 0
    assert placer.stats().balancedness == (1.0, 1.0)


def test_eplb_places_a_layer_between_two_steps() -> None:
    """After four steps, by the last two; one layer at a time, although both wait."""
    placer, experts = placer_of(FREE, placement="eplb", rebalance_every=4, rebalance_window=2)
    for choices_TK in (OTHERS, OTHERS, SKEWED, SKEWED):
        step(placer, choices_TK, choices_TK)
        assert experts.moved == []
    step(placer, OTHERS, OTHERS)
    assert experts.moved == [0]
    np.testing.assert_array_equal(experts.placements[0].popularity_E, counts(SKEWED))
    step(placer, SKEWED, SKEWED)
    assert experts.moved == [0, 1]
    step(placer, SKEWED, SKEWED)
    assert experts.moved == [0, 1]


@pytest.mark.parametrize("copy_s", [1.0, 10_000.0])
def test_eplb_weighs_copies_against_the_steps_until_the_next(copy_s: float) -> None:
    placer, experts = placer_of(
        SwapCosts(1.0, copy_s), placement="eplb", rebalance_every=2, rebalance_window=2
    )
    for _ in range(4):
        step(placer, SKEWED, SKEWED)
    assert experts.moved == ([0, 1] if copy_s == 1 else [])


def test_even_stays() -> None:
    placer, experts = placer_of(FREE, placement="even")
    for _ in range(3):
        step(placer, SKEWED, OTHERS)
    assert experts.moved == [] and placer.stats().estimates == 0
    assert placer.stats().balancedness[0] == pytest.approx(16 / 60)
