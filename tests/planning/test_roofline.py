"""The formulas of streaming on numbers worked out by hand."""

import dataclasses
import math
from typing import Any

import pytest

from jmoe.planning.roofline import (
    ExpertWeightSizes,
    Measurements,
    distinct_experts,
    predict_experts,
    predict_hybrid,
    predict_resident,
    predict_ring,
    scale_chosen_share,
)

# 8 layers of 64 experts of 1 MB, top-2; a link of 1 GB/s: a layer takes 64 ms, an expert 1 ms.
WEIGHTS = ExpertWeightSizes(num_layers=8, num_experts=64, num_experts_per_tok=2, expert_bytes=10**6)
DECODE = Measurements(bandwidth_bytes_per_s=1e9, compute_s=0.002, num_tokens=1)
PREFILL = Measurements(bandwidth_bytes_per_s=1e9, compute_s=0.100, num_tokens=4096)


def test_distinct_experts() -> None:
    assert distinct_experts(64, 2, 0) == 0
    assert distinct_experts(64, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 2) == pytest.approx(3.5)  # 8 (1 - (3/4)^2)
    assert distinct_experts(64, 2, 100_000) == pytest.approx(64)
    assert distinct_experts(4, 4, 1) == 4


def test_a_measured_share_changes_as_with_uniform_routing() -> None:
    def scaled(share: float, measured_tokens: int, num_tokens: int) -> float:
        return scale_chosen_share(
            share, 8, 2, measured_tokens=measured_tokens, num_tokens=num_tokens
        )

    assert scaled(0.3, 10, 10) == pytest.approx(0.3)
    assert scaled(0.4, 1, 2) == pytest.approx(0.4 * 3.5 / 2)
    assert scaled(0.9, 1, 2) == 1
    assert scaled(0.3, 100, 1) == 0.25  # what one token chooses
    assert scaled(0.2, 100, 1) == 0.2  # random second experts
    assert scaled(0, 10, 20) == 0


def test_resident() -> None:
    assert WEIGHTS.total_bytes == 512 * 10**6
    fits = predict_resident(WEIGHTS, DECODE, 512 * 10**6)
    assert (fits.fits, fits.step_s, fits.streamed_bytes) == (True, 8 * 0.002, 0)
    assert not predict_resident(WEIGHTS, DECODE, 512 * 10**6 - 1).fits


def test_ring() -> None:
    half = 256 * 10**6
    mixed = predict_ring(WEIGHTS, DECODE, half)  # 2 stay, 6 move
    assert mixed.streamed_bytes == 384e6
    assert mixed.step_s == pytest.approx(6 * 0.064)
    assert predict_ring(WEIGHTS, PREFILL, half).step_s == pytest.approx(8 * 0.1)  # compute hides it
    assert not predict_ring(WEIGHTS, DECODE, 127 * 10**6).fits
    assert predict_ring(WEIGHTS, DECODE, 128 * 10**6).fits
    assert predict_ring(WEIGHTS, DECODE, 10**9).streamed_bytes == 0


def test_expert_granular() -> None:
    quarter = 128 * 10**6
    measured = dataclasses.replace(DECODE, sync_s=0.001, hit_rate=0.5)
    predicted = predict_experts(WEIGHTS, measured, quarter)
    # 2 experts, half of them there: 1 ms to fetch, 1 ms to read back, 2 ms to compute.
    assert predicted.step_s == pytest.approx(8 * 0.004)
    assert predicted.streamed_bytes == pytest.approx(8e6)
    assert predicted.fits
    early = predict_experts(WEIGHTS, dataclasses.replace(measured, early_fraction=0.75), quarter)
    assert early.step_s == pytest.approx(8 * (0.001 + 0.00025 + 0.002))
    # without a measured hit rate: 128 slots less the 2 that a layer passes through, of 512 experts
    unmeasured = predict_experts(WEIGHTS, DECODE, quarter)
    assert unmeasured.streamed_bytes == pytest.approx(8 * 2 * (1 - 126 / 512) * 1e6)
    skewed = predict_experts(
        WEIGHTS, dataclasses.replace(DECODE, active_experts=1.0, hit_rate=0.0), quarter
    )
    assert skewed.streamed_bytes == pytest.approx(8e6)
    assert not predict_experts(WEIGHTS, PREFILL, 63 * 10**6).fits  # a layer may need all 64
    assert predict_experts(WEIGHTS, DECODE, 2 * 10**6).fits
    assert not predict_experts(WEIGHTS, DECODE, 10**6).fits


def test_hybrid() -> None:
    """Host and link share what is missing, while the device computes; one alone, and none, are
    limits.
    """
    quarter = 128 * 10**6
    measured = dataclasses.replace(
        DECODE, sync_s=0.001, active_experts=8.0, hit_rate=0.0, host_bytes_per_s=3e9
    )
    predicted = predict_hybrid(WEIGHTS, measured, quarter)
    # 8 MB a layer at 1 + 3 GB/s: 2 ms beside 2 ms of compute
    assert predicted.step_s == pytest.approx(8 * (0.001 + 0.002))
    assert predicted.streamed_bytes == pytest.approx(8 * 2e6)
    slower = predict_hybrid(WEIGHTS, dataclasses.replace(measured, host_bytes_per_s=1e9), quarter)
    assert slower.step_s == pytest.approx(8 * (0.001 + 0.004))
    alone = predict_hybrid(WEIGHTS, dataclasses.replace(measured, host_bytes_per_s=0.0), quarter)
    fetched = predict_experts(WEIGHTS, measured, quarter)
    assert alone.streamed_bytes == fetched.streamed_bytes
    assert alone.step_s == fetched.step_s - 8 * 0.002  # here compute and link overlap
    nothing_moves = dataclasses.replace(measured, bandwidth_bytes_per_s=math.inf)
    assert predict_hybrid(WEIGHTS, nothing_moves, quarter).step_s == pytest.approx(8 * 0.003)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: distinct_experts(8, 9, 1),
            r"num_experts_per_tok = 9: must be in \[1, num_experts = 8\]",
        ),
        (lambda: distinct_experts(8, 2, -1), "num_tokens = -1"),
        (lambda: Measurements(0, 0.1, 1), "bandwidth_bytes_per_s = 0"),
        (lambda: ExpertWeightSizes(0, 1, 1, 1), "num_layers = 0"),
        (lambda: ExpertWeightSizes(1, 2, 3, 1), "num_experts_per_tok = 3"),
        (lambda: Measurements(1e9, 0.1, 1, hit_rate=1.5), "hit_rate = 1.5"),
        (lambda: Measurements(1e9, -0.1, 1), "compute_s = -0.1"),
    ],
)
def test_numbers_that_make_no_sense(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
