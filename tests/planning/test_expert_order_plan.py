"""Orders of experts by load."""

import itertools

import numpy as np
import pytest

from jmoe.planning.expert_order import LEAST_GAIN, balanced_orders, busiest_share


def best_possible(load_E: np.ndarray, num_devices: int) -> float:
    """The smallest busiest share of any order of so few experts."""
    return min(
        busiest_share(load_E[list(order)], num_devices)
        for order in itertools.permutations(range(load_E.size))
    )


def test_loads_are_near_the_best_of_all_orders() -> None:
    rng = np.random.default_rng(0)
    load_LE = rng.pareto(1.5, (20, 6)) + 0.01
    orders_LE = balanced_orders(load_LE, 3)
    for load_E, order_E in zip(load_LE, orders_LE, strict=True):
        assert sorted(order_E) == list(range(6))
        best = best_possible(load_E, 3)
        assert best <= busiest_share(load_E[order_E], 3) + 1e-12
        assert busiest_share(load_E[order_E], 3) <= LEAST_GAIN * 1.1 * best


def test_two_popular_neighbours_part_and_the_rest_stays() -> None:
    load_LE = np.array([[40.0, 40.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    orders_LE = balanced_orders(load_LE, 4)
    assert busiest_share(load_LE[0], 4) == pytest.approx(80 / 21.5)
    assert busiest_share(load_LE[0][orders_LE[0]], 4) == pytest.approx(41 / 21.5)
    assert (orders_LE[0] != np.arange(8)).sum() == 2


@pytest.mark.parametrize(
    "load_E",
    [
        [1.0, 1.0, 1.0, 1.0],  # even
        [0.0, 0.0, 0.0, 0.0],  # none
        [9.0, 0.0, 0.0, 0.0],  # one expert is as busy on any device
        [1.0, 1.04, 1.0, 1.0],  # too little to move for
    ],
)
def test_a_layer_keeps_its_order_if_none_is_better(load_E: list[float]) -> None:
    np.testing.assert_array_equal(balanced_orders(np.array([load_E]), 2), [[0, 1, 2, 3]])


def test_one_device_has_nothing_to_exchange() -> None:
    np.testing.assert_array_equal(balanced_orders(np.array([[5.0, 1.0]]), 1), [[0, 1]])


def test_experts_must_divide() -> None:
    with pytest.raises(ValueError, match="num_devices = 3: must divide the 4 experts of a layer"):
        balanced_orders(np.ones((1, 4)), 3)
