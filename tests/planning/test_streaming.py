"""The plan of an engine: what each number of tokens does, and what it is expected to take."""

import dataclasses
import math
from typing import Any

import pytest

from jmoe.config.engine import EngineConfig
from jmoe.planning.memory_plan import FreeMemory, ModelBytes, plan_memory
from jmoe.planning.roofline import ExpertWeightSizes
from jmoe.planning.streaming import MOST_TOKENS_ON_HOST, Calibration, RoutingStats, StreamingPlan
from kernels_pallas.native import MAX_ROWS

# 8 layers of 64 experts of 1 MB; half of them fit
MODEL = ModelBytes(
    ExpertWeightSizes(8, 64, 2, 10**6), record_bytes=10**6, dense_bytes=0, cache_bytes=0
)
FREE = FreeMemory(10**10, 10**10, shared=False)
HALF = plan_memory(MODEL, FREE, EngineConfig(device_bytes=256 * 10**6))
SPEEDS = Calibration(
    (1, 8, 512), (0.002, 0.003, 0.1), rest_s=0.01, sync_s=0.001, bandwidth_bytes_per_s=1e9
)


def test_each_number_of_tokens_takes_the_fastest_policy() -> None:
    plan = StreamingPlan(HALF, SPEEDS)
    policies = [plan.choose_policy(num_tokens) for num_tokens in range(1, 521)]
    whole = 1 + policies.index("ring")
    assert 8 < whole < 512
    assert policies == ["experts"] * (whole - 1) + ["ring"] * (521 - whole)
    for num_tokens in (1, 2, 8, whole - 1, whole, whole + 1, 300, 520):
        fastest = min((p for p in plan.predictions(num_tokens) if p.fits), key=lambda p: p.step_s)
        assert plan.choose_policy(num_tokens) == fastest.policy
        assert plan.predicted_step_s(num_tokens) == pytest.approx(fastest.step_s + 0.01)
    assert plan.interpolate_measurements(8).compute_s == 0.003
    # halfway from 8 to 512
    assert plan.interpolate_measurements(260).compute_s == pytest.approx(0.0515)
    assert plan.interpolate_measurements(1000).compute_s == 0.1
    # 512 tokens: compute of 100 ms hides what moves, 6 of 8 layers' 64 ms
    assert plan.predicted_step_s(512) == pytest.approx(8 * 0.1 + 0.01)
    assert plan.describe(512).startswith(
        "512 tokens a step: ring, predicted: resident 800.0 ms (does not fit), ring 800.0 ms"
    )


def test_before_anything_is_measured() -> None:
    """Whole layers for steps whose tokens choose most experts, if two layers fit."""
    plan = StreamingPlan(HALF)
    assert [plan.choose_policy(n) for n in (1, 8, 21, 22, 512)] == ["experts"] * 3 + ["ring"] * 2
    narrow = plan_memory(MODEL, FREE, EngineConfig(device_bytes=127 * 10**6))
    assert StreamingPlan(narrow).choose_policy(512) == "experts"
    assert plan.predictions(8) == () and plan.describe(8) == "8 tokens a step: experts"


@pytest.mark.parametrize(
    ("changes", "num_tokens", "policy"),
    [
        ({}, 1, "experts"),
        # every expert is used anyway: the ring hides what it moves
        ({"layer_s": (0.002, 0.003, 0.1)}, 4096, "ring"),
        ({"sync_s": 0.060}, 1, "ring"),  # the read-back eats the gain
    ],
)
def test_what_decides_between_a_ring_and_single_experts(
    changes: dict[str, Any], num_tokens: int, policy: str
) -> None:
    assert (
        StreamingPlan(HALF, dataclasses.replace(SPEEDS, **changes)).choose_policy(num_tokens)
        == policy
    )


@pytest.mark.parametrize(("hit_rate", "policy"), [(0.2, "ring"), (0.9, "experts")])
def test_hits_decide_for_many_tokens(hit_rate: float, policy: str) -> None:
    seen = RoutingStats(256, 256, active_experts=64, hit_rate=hit_rate, early_fraction=0)
    speeds = Calibration((1, 512), (0.002, 0.002), bandwidth_bytes_per_s=1e9)
    assert StreamingPlan(HALF, speeds, seen).choose_policy(256) == policy


def test_a_host_that_computes_takes_steps_of_few_tokens() -> None:
    """As fast as it is measured; a given policy takes it for few tokens without asking."""
    fast = StreamingPlan(HALF, dataclasses.replace(SPEEDS, host_bytes_per_s=2e10))
    assert [fast.choose_policy(n) for n in (1, 8, MOST_TOKENS_ON_HOST)] == ["hybrid"] * 3
    assert (
        fast.choose_policy(MOST_TOKENS_ON_HOST + 1) == "experts"
        and fast.choose_policy(512) == "ring"
    )
    assert "hybrid" in fast.describe(1) and "hybrid" not in fast.describe(33)
    given = StreamingPlan(
        plan_memory(MODEL, FREE, EngineConfig(policy="hybrid", device_bytes=256 * 10**6))
    )
    assert (given.memory.expert_tier, given.choose_policy(32), given.choose_policy(33)) == (
        "host",
        "hybrid",
        "ring",
    )
    assert MOST_TOKENS_ON_HOST == MAX_ROWS


def test_what_bandwidth_does_to_the_choice() -> None:
    slow = StreamingPlan(HALF, dataclasses.replace(SPEEDS, bandwidth_bytes_per_s=1e6))
    fast = StreamingPlan(HALF, dataclasses.replace(SPEEDS, bandwidth_bytes_per_s=1e13))
    assert slow.choose_policy(1) == slow.choose_policy(8) == "experts"
    # nothing to save, and the read-back to lose
    assert fast.choose_policy(1) == fast.choose_policy(512) == "ring"
    # no room for two layers
    no_ring = plan_memory(MODEL, FREE, EngineConfig(device_bytes=100 * 10**6))
    assert StreamingPlan(no_ring, SPEEDS).choose_policy(512) == "experts"


def test_what_steps_told_of_routing() -> None:
    """It counts for decode steps; prefill ones are predicted as before."""
    seen = RoutingStats(
        max_tokens=32, num_tokens=8, active_experts=10.0, hit_rate=0.9, early_fraction=0.5
    )
    uniform, plan = StreamingPlan(HALF, SPEEDS), StreamingPlan(HALF, SPEEDS, seen)
    assert plan.interpolate_measurements(8).active_experts == 10.0
    # 1 of 10 experts is fetched, 1 ms, half of it early: 1 ms to read back, 0.5 ms to wait, 3 ms to
    # compute
    assert plan.predicted_step_s(8) == pytest.approx(8 * 0.0045 + 0.01)
    at_one = plan.interpolate_measurements(1).active_experts
    assert at_one is not None and 1 < at_one < 2  # 2 choices, as skewed as those of 8 tokens
    assert plan.interpolate_measurements(100) == uniform.interpolate_measurements(100)
    mostly_wrong = dataclasses.replace(seen, active_experts=60.0, hit_rate=0.0, early_fraction=0.0)
    assert StreamingPlan(HALF, SPEEDS, mostly_wrong).choose_policy(8) == "ring"
    assert uniform.choose_policy(8) == plan.choose_policy(8) == "experts"


def test_a_cache_in_host_memory_saves_reads() -> None:
    nvme = plan_memory(
        MODEL, FREE, EngineConfig(device_bytes=256 * 10**6, host_cache_bytes=128 * 10**6)
    )
    plan = StreamingPlan(nvme, dataclasses.replace(SPEEDS, nvme_bytes_per_s=3e8))
    assert plan.bandwidth_bytes_per_s == pytest.approx(4e8)  # a quarter is read from the cache
    everything = plan_memory(
        MODEL, FREE, EngineConfig(device_bytes=256 * 10**6, host_cache_bytes=10**9)
    )
    plan = StreamingPlan(everything, dataclasses.replace(SPEEDS, nvme_bytes_per_s=3e8))
    assert plan.bandwidth_bytes_per_s == 1e9


def test_resident_and_given_policies() -> None:
    resident = StreamingPlan(
        plan_memory(MODEL, FREE, EngineConfig()), Calibration((1, 512), (0.002, 0.1), rest_s=0.01)
    )
    assert resident.choose_policy(1) == "resident"
    assert resident.bandwidth_bytes_per_s == math.inf
    assert resident.predicted_step_s(1) == pytest.approx(8 * 0.002 + 0.01)
    given = StreamingPlan(plan_memory(MODEL, FREE, EngineConfig(policy="ring")))
    assert (given.choose_policy(1), given.predictions(1), given.predicted_step_s(1)) == (
        "ring",
        (),
        None,
    )
    assert given.describe(1) == "1 token a step: ring"


def test_what_was_measured_is_said_in_words() -> None:
    """Rates where something moves, and none that is infinite."""
    speeds = (
        "measured: a layer takes 2 ms for 1 token, 3 ms for 8 tokens, 100 ms for 512 tokens, the"
        " rest of a step 10 ms"
    )
    assert str(SPEEDS) == speeds + "; experts are copied at 1 GB/s"
    assert str(dataclasses.replace(SPEEDS, bandwidth_bytes_per_s=math.inf)) == speeds
    all_of_them = dataclasses.replace(SPEEDS, nvme_bytes_per_s=2e9, host_bytes_per_s=5e8)
    assert str(all_of_them).endswith(
        "copied at 1 GB/s; read from NVMe at 2 GB/s; computed by the CPU at 0.5 GB/s"
    )
