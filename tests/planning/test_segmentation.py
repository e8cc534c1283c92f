"""Experts over unlike devices: the last one done as early as can be, by trying all; and what does not fit."""

import itertools

import pytest

from jmoe.config.cluster import DevicesConfig
from jmoe.planning.memory_plan import ModelBytes
from jmoe.planning.roofline import ExpertWeights
from jmoe.planning.segmentation import plan_segments

MUCH = 10**12


def model(num_experts: int, rest_bytes: int = 0) -> ModelBytes:
    return ModelBytes(ExpertWeights(2, num_experts, 1, 100), 4096, rest_bytes, 0)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (3.0, 1.0), (5.0, 2.0, 2.0), (1.0, 10.0, 4.0)])
@pytest.mark.parametrize("num_experts", [1, 7, 8])
def test_no_other_counts_are_faster(speeds: tuple[float, ...], num_experts: int) -> None:
    plan = plan_segments(model(num_experts), [DevicesConfig(1, MUCH, speed) for speed in speeds])
    others = itertools.product(range(num_experts + 1), repeat=len(speeds))
    fastest = min(
        max(n * 100 / speed for n, speed in zip(counts, speeds)) for counts in others if sum(counts) == num_experts
    )
    assert plan.layer_s == pytest.approx(fastest) and plan.layer_s <= plan.even_layer_s
    assert sum(plan.counts) == num_experts


def test_segments_are_neighbours() -> None:
    plan = plan_segments(model(5), [DevicesConfig(1, MUCH, 3.0), DevicesConfig(2, MUCH, 1.0)])
    assert plan.counts == (3, 1, 1)
    assert plan.segments(2) == [[[0, 1, 2], [0, 1, 2]], [[3], [3]], [[4], [4]]]
    assert (plan.layer_s, plan.even_layer_s) == (100.0, 200.0)


def test_the_least_memory_bounds_all() -> None:
    """Every device has room for as many experts as the fullest one."""
    fast, small = DevicesConfig(1, MUCH, 100.0), DevicesConfig(2, 1000, 1.0)
    assert plan_segments(model(10, 100), [fast, small]).counts == (4, 3, 3)  # 900 bytes - 100, two layers of 100
    message = (
        r"machines\[1\].device_bytes = 1000: has room for 4 experts of every layer beside 100 bytes on each device"
    )
    with pytest.raises(ValueError, match=f"{message}; 3 devices hold 12 of 13 so"):
        plan_segments(model(13, 100), [fast, small])
    with pytest.raises(ValueError, match="has room for 0 experts"):
        plan_segments(model(1, 2000), [fast, small])
