"""Placements of experts over devices: what holds for all of them, and small ones worked out by
hand.
"""

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.config.engine import PlacementPolicy
from jmoe.planning.placement import (
    EMPTY,
    Placement,
    SlotFill,
    balancedness,
    place_experts,
    placement_changes,
    placement_from_slots,
)
from jmoe.planning.placement_policies import CYCLE

POLICIES = get_args(PlacementPolicy)
ROWS = np.arange(CYCLE)


@st.composite
def _problems(draw: st.DrawFn) -> tuple[np.ndarray, int, dict[str, Any]]:
    """Return popularity, devices and the other arguments of `place`; the experts always fit
    once.
    """
    num_devices = draw(st.integers(1, 12))
    nodes = draw(st.sampled_from([n for n in range(1, num_devices + 1) if num_devices % n == 0]))
    slots = draw(st.integers(1, 6))
    max_packed = draw(st.integers(1, 6))
    num_groups = draw(st.sampled_from([1, nodes]))
    most = num_devices * min(slots, max_packed) // num_groups
    size = num_groups * draw(st.integers(1, most))
    kind = draw(st.sampled_from(["skewed", "few", "ones", "none"]))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    popularity_E = {
        "skewed": random.permutation(1000.0 // np.arange(1, size + 1) ** 1.5),
        "few": random.integers(0, 500, size) * (random.random(size) < 0.3),
        "ones": np.ones(size),
        "none": np.zeros(size),
    }[kind]
    more = {
        "slots_per_device": slots,
        "max_packed": max_packed,
        "nodes": nodes,
        "num_groups": num_groups,
    }
    return popularity_E, num_devices, more


def _check(placement: Placement, popularity_E: np.ndarray, max_packed: int) -> None:
    size = len(popularity_E)
    for held in placement.physical_to_logical:
        experts = held[held != EMPTY]
        assert len(set(experts)) == len(experts) <= max_packed
    assert all(len(placement.replicas_of(expert)) for expert in range(size))
    # whoever takes a token of an expert holds it, and every row is taken
    taken = placement.replica_of_tokens(ROWS[:, None], np.arange(size)[None])
    assert taken.dtype == np.int32
    np.testing.assert_array_equal(
        placement.physical_to_logical.ravel()[taken], np.tile(np.arange(size), (CYCLE, 1))
    )
    np.testing.assert_array_equal(
        placement.replica_of_tokens(ROWS + 7 * CYCLE, np.zeros(CYCLE, int)), taken[:, 0]
    )
    # quotas add up to the counts and are what the rows get; every replica gets some
    quotas_E = np.zeros(size)
    filled = placement.physical_to_logical != EMPTY
    np.add.at(quotas_E, placement.physical_to_logical[filled], placement.replica_loads[filled])
    np.testing.assert_allclose(quotas_E, popularity_E, rtol=1e-12)
    for expert in range(size):
        replicas, times = np.unique(taken[:, expert], return_counts=True)
        np.testing.assert_array_equal(replicas, placement.replicas_of(expert))
        share = placement.replica_loads.ravel()[replicas]
        np.testing.assert_allclose(share, popularity_E[expert] * times / CYCLE, rtol=1e-12)
    np.testing.assert_allclose(placement.device_loads.sum(), popularity_E.sum(), rtol=1e-12)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(_problems())
def test_what_holds_for_every_placement(problem: tuple[np.ndarray, int, dict[str, Any]]) -> None:
    popularity_E, num_devices, more = problem
    even = place_experts(popularity_E, num_devices, policy="even", **more)
    assert np.count_nonzero(even.physical_to_logical != EMPTY) == len(popularity_E)
    for policy in POLICIES:
        placement = place_experts(popularity_E, num_devices, policy=policy, **more)
        _check(placement, popularity_E, more["max_packed"])
        assert placement.device_loads.max() <= even.device_loads.max() * (1 + 1e-9)
        again = place_experts(popularity_E.copy(), num_devices, policy=policy, **more)
        np.testing.assert_array_equal(placement.replica_of_row, again.replica_of_row)
        np.testing.assert_array_equal(placement.physical_to_logical, again.physical_to_logical)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(_problems(), st.integers(0, 2**16))
def test_changes_keep_what_is_there(
    problem: tuple[np.ndarray, int, dict[str, Any]], seed: int
) -> None:
    popularity_E, num_devices, more = problem
    old = place_experts(popularity_E, num_devices, policy="even", **more)
    new = place_experts(
        np.random.default_rng(seed).permutation(popularity_E), num_devices, policy="eplb", **more
    )
    ordered, fills = placement_changes(old.physical_to_logical, new)
    _check(ordered, new.popularity_E, more["max_packed"])
    held = old.physical_to_logical.copy()
    for device, slot, expert in fills:
        held[device, slot] = expert
    wanted = ordered.physical_to_logical
    np.testing.assert_array_equal(held[wanted != EMPTY], wanted[wanted != EMPTY])
    fetched = 0
    for before, after, given_ in zip(
        old.physical_to_logical, wanted, new.physical_to_logical, strict=True
    ):
        assert set(after) == set(given_)
        fetched += len(set(after) - set(before) - {EMPTY})
    assert len(fills) == fetched  # nothing that a device has already
    # the same device takes a token of a row as before its slots were reordered
    rows, experts = ROWS[:, None], np.arange(len(popularity_E))
    slots = more["slots_per_device"]
    np.testing.assert_array_equal(
        ordered.replica_of_tokens(rows, experts) // slots,
        new.replica_of_tokens(rows, experts) // slots,
    )
    assert placement_changes(held, ordered).fills == ()


def test_lina_gives_popular_experts_whole_devices_and_packs_the_others() -> None:
    # of 8 devices: 3.5, 2, 1 and 0.5, 0.5, 0.5
    popularity_E = np.array([350, 200, 100, 50, 50, 50, 0, 0])
    placement = place_experts(popularity_E, 8, slots_per_device=4, policy="lina")
    assert [len(placement.replicas_of(expert)) for expert in range(8)] == [4, 2, 1, 1, 1, 1, 1, 1]
    assert placement.balancedness > 0.97  # 120 rows give no exact sevenths
    assert placement.physical_to_logical[:6, 0].tolist() == [0, 0, 0, 1, 1, 2]
    assert {tuple(held[held != EMPTY]) for held in placement.physical_to_logical[6:, :2]} == {
        (0, 3),
        (4, 5),
    }
    # no estimate: where the fewest experts are
    assert sorted(placement.physical_to_logical[:2, 1]) == [6, 7]
    even = place_experts(popularity_E, 8, slots_per_device=1, policy="even")
    assert even.balancedness == pytest.approx(100 / 350)
    # without a spare slot experts are only rearranged
    alone = place_experts(popularity_E, 4, slots_per_device=2, policy="lina")
    assert sorted(alone.physical_to_logical.ravel()) == list(range(8))
    assert sorted(alone.device_loads) == [100, 150, 200, 350]
    # too few slots for all parts: the most loaded experts are replicated, and those without all
    # theirs equally
    some = place_experts(popularity_E, 5, slots_per_device=2, policy="lina")
    assert [len(some.replicas_of(expert)) for expert in range(8)] == [2, 2, 1, 1, 1, 1, 1, 1]
    assert some.replica_loads[some.physical_to_logical == 0].tolist() == [175, 175]
    assert sorted(some.replica_loads[some.physical_to_logical == 1].tolist()) == [40, 160]


def test_eplb_replicates_and_packs_equal_numbers() -> None:
    popularity_E = np.array([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86])
    placement = place_experts(popularity_E, 8, slots_per_device=2, policy="eplb")
    assert np.all(placement.physical_to_logical != EMPTY)
    assert [len(placement.replicas_of(expert)) for expert in (10, 5, 1, 4)] == [2, 2, 2, 2]
    # half of expert 1 beside expert 8
    assert placement.balancedness == pytest.approx(1033 / 8 / 139)
    alone = place_experts(popularity_E, 4, slots_per_device=3, policy="eplb")
    assert sorted(alone.physical_to_logical.ravel()) == list(range(12))
    # two nodes: a group of three experts stays on one
    nodes = place_experts(popularity_E, 8, slots_per_device=2, policy="eplb", nodes=2, num_groups=4)
    of_node = [
        {int(e) // 3 for e in half.ravel()} for half in np.split(nodes.physical_to_logical, 2)
    ]
    assert sorted(map(len, of_node)) == [2, 2] and not of_node[0] & of_node[1]


def test_an_expert_makes_room_where_a_copy_may_not_go() -> None:
    """The small part of expert 0 comes last, and only its other copy's device has room: expert 1
    moves there.
    """
    popularity_E = np.array([29, 5, 17])
    placement = place_experts(popularity_E, 2, slots_per_device=2, policy="lina")
    assert placement.physical_to_logical.tolist() == [[0, 1], [0, 2]]
    # 106 of 120 rows: 25.5 of 29
    assert placement.device_loads[0] == pytest.approx(29 * 106 / 120 + 5)


def test_replicas_take_turns_at_equal_distances() -> None:
    placement = place_experts(np.array([3, 1]), 4, slots_per_device=1, policy="lina")
    taken = placement.replica_of_tokens(np.arange(9), np.zeros(9, int))
    assert taken.tolist() == [0, 1, 2] * 3
    assert placement.device_loads.tolist() == [1, 1, 1, 1]


def test_place_as() -> None:
    placement = placement_from_slots(
        np.array([[2, EMPTY], [0, 2], [1, 2]]), np.array([1.0, 0.0, 6.0])
    )
    assert placement.device_loads.tolist() == [2, 3, 2]
    assert placement.replicas_of(2).tolist() == [0, 3, 5]
    assert placement_changes(np.array([[EMPTY, 2], [2, 1], [0, 1]]), placement).fills == (
        SlotFill(1, 1, 0),
        SlotFill(2, 0, 2),
    )
    assert balancedness(np.zeros(3)) == 1
    for wrong, message in (
        ([[0, 1], [2, 3]], "below 3"),
        ([[0, 1], [0, EMPTY]], "each of 3 experts"),
        ([[0, 0], [1, 2]], "no expert twice"),
    ):
        with pytest.raises(ValueError, match=message):
            placement_from_slots(np.array(wrong), np.ones(3))
    with pytest.raises(ValueError, match="held = "):
        placement_changes(np.zeros((2, 2), int), placement)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("slots_per_device", {"slots_per_device": 1}),
        ("max_packed", {"max_packed": 1}),
        ("num_devices", {"num_devices": 0}),
        ("num_devices", {"num_devices": 121}),
        ("nodes", {"nodes": 3}),
        ("num_groups", {"num_groups": 3}),
        ("policy", {"policy": "best"}),
        ("popularity", {"popularity_E": np.array([1.0, -1])}),
        ("popularity", {"popularity_E": np.array([1.0, np.nan])}),
        ("popularity", {"popularity_E": np.zeros((2, 2))}),
        ("popularity", {"popularity_E": np.zeros(0)}),
    ],
)
def test_a_bad_value_is_named(field: str, wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "popularity_E": np.ones(8),
        "num_devices": 4,
        "slots_per_device": 2,
    }
    with pytest.raises(ValueError, match=f"^{field} = "):
        place_experts(**(arguments | wrong))
