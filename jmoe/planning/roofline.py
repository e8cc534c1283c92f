"""Roofline model of serving with streamed expert weights: predicts a step's time from measured
rates. Pure functions.

With a ring, a layer takes max(c, s / W): its weights move while other layers compute. Symbols:

N    layers with experts
E    experts per layer
k    experts per token
B    tokens of a step
c    compute seconds of a layer
s    bytes of a layer's experts
s_e  bytes of one expert
W    bytes/s of the link to the device
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from jmoe.config.checks import check, check_not_negative, check_positive

Policy = Literal["resident", "ring", "experts", "hybrid"]
ROUTING_DRAWS = 64  # random routings whose mean is an expected count
RING_SLOTS = 2  # the minimum for overlap: one slot loads a layer while the other is in use


def distinct_experts(num_experts: int, num_experts_per_tok: int, num_tokens: float) -> float:
    """Return the expected number of distinct experts of a layer that B tokens choose under uniform
    routing: E (1 - (1 - k/E)^B). Raises `ValueError` unless 0 < k <= E and B >= 0.
    """
    check(num_experts > 0, "num_experts", num_experts, "must be greater than 0")
    k, name = num_experts_per_tok, "num_experts_per_tok"
    check(0 < k <= num_experts, name, k, f"must be in [1, num_experts = {num_experts}]")
    check(num_tokens >= 0, "num_tokens", num_tokens, "must not be negative")
    return num_experts * (1 - (1 - num_experts_per_tok / num_experts) ** num_tokens)


@cache
def busiest_device_experts(
    num_experts: int, num_experts_per_tok: int, num_tokens: int, num_devices: int
) -> float:
    """Return the expected number of distinct experts that the tokens choose on the busiest device,
    if the devices share a layer's experts evenly and routing is uniform.

    The mean of `ROUTING_DRAWS` routings, drawn with a fixed seed; with one device as
    `distinct_experts` computes it.
    """
    if num_devices == 1:
        return distinct_experts(num_experts, num_experts_per_tok, num_tokens)
    rng, share = np.random.default_rng(0), -(-num_experts // num_devices)
    total = 0
    for _ in range(ROUTING_DRAWS):
        drawn_TE = rng.random((num_tokens, num_experts))
        order_TE = drawn_TE.argpartition(num_experts_per_tok - 1, axis=1)
        chosen = np.unique(order_TE[:, :num_experts_per_tok])
        total += int(np.max(np.bincount(chosen // share)))
    return total / ROUTING_DRAWS


def scale_chosen_share(
    share: float,
    num_experts: int,
    num_experts_per_tok: int,
    *,
    measured_tokens: float,
    num_tokens: float,
) -> float:
    """Return the fraction of a layer's experts that `num_tokens` tokens choose, given the fraction
    `share` measured for `measured_tokens`.

    The fraction scales as under uniform routing, up to 1, and down to k / E, the experts of a
    single token; a measured `share` below k / E is not scaled down.
    """
    touched = distinct_experts(num_experts, num_experts_per_tok, num_tokens)
    scaled = share * touched / distinct_experts(num_experts, num_experts_per_tok, measured_tokens)
    return min(1.0, max(scaled, min(share, num_experts_per_tok / num_experts)))


@dataclass(frozen=True)
class ExpertWeightSizes:
    """Size of the weights to stream: `num_layers` layers of `num_experts` experts of `expert_bytes`
    each.
    """

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    expert_bytes: int

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "num_experts", "expert_bytes")
        k, name = self.num_experts_per_tok, "num_experts_per_tok"
        check(
            0 < k <= self.num_experts, name, k, f"must be in [1, num_experts = {self.num_experts}]"
        )

    def per_device(self, num_devices: int) -> "ExpertWeightSizes":
        """Return the sizes of one device's share, if devices share each layer's experts evenly."""
        share = -(-self.num_experts // num_devices)
        return replace(
            self, num_experts=share, num_experts_per_tok=min(share, self.num_experts_per_tok)
        )

    @property
    def layer_bytes(self) -> int:
        return self.num_experts * self.expert_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True)
class Measurements:
    """Measured times and rates of the machine, and routing of one phase (prefill or decode).

    bandwidth_bytes_per_s: from the experts' tier to the device. compute_s: one layer with its
    weights on the device. sync_s: reading the router's choice back to the host, per layer.
    num_tokens: tokens of a step. host_bytes_per_s: rate at which the CPU computes with experts in
    host memory; 0: it does not.

    active_experts: distinct experts per layer and step. hit_rate: fraction of these that are
    already on the device. None for either means uniform routing, for which one layer's experts pass
    through slots and the other slots stay resident. early_fraction: fraction of the fetched experts
    that were predicted early enough to overlap with computation.
    """

    bandwidth_bytes_per_s: float
    compute_s: float
    num_tokens: int
    sync_s: float = 0.0
    active_experts: float | None = None
    hit_rate: float | None = None
    early_fraction: float = 0.0
    host_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "bandwidth_bytes_per_s", "num_tokens")
        check_not_negative(self, "compute_s", "sync_s")
        for name in ("hit_rate", "early_fraction"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= 1, name, value, "must be in [0, 1]")


@dataclass(frozen=True)
class StepPrediction:
    """Predicted step of one policy: whether its slots fit on the device, seconds, and bytes
    moved.
    """

    policy: Policy
    fits: bool
    step_s: float
    streamed_bytes: float


def predict_resident(
    weights: ExpertWeightSizes, measured: Measurements, device_bytes: int
) -> StepPrediction:
    """Predict a step with all experts on the device: N c seconds. Fits if N E s_e bytes fit."""
    return StepPrediction(
        "resident",
        weights.total_bytes <= device_bytes,
        weights.num_layers * measured.compute_s,
        0.0,
    )


def predict_ring(
    weights: ExpertWeightSizes, measured: Measurements, device_bytes: int
) -> StepPrediction:
    """Predict a step in which layers pass through two slots, and layers that fit besides stay
    resident.

    If K layers fit, R = K - 2 stay resident and N - R move in each step. Spread evenly, they
    overlap with the compute of the whole step: T = N max(c, (N - R) s / (N W)). If all layers fit,
    none moves.
    """
    num_layers = weights.num_layers
    fitting = min(num_layers, device_bytes // weights.layer_bytes)
    slots = min(RING_SLOTS, num_layers)
    resident = num_layers if fitting == num_layers else max(0, fitting - slots)
    streamed_bytes = (num_layers - resident) * weights.layer_bytes
    layer_s = max(measured.compute_s, streamed_bytes / num_layers / measured.bandwidth_bytes_per_s)
    return StepPrediction("ring", fitting >= slots, num_layers * layer_s, float(streamed_bytes))


def predict_experts(
    weights: ExpertWeightSizes, measured: Measurements, device_bytes: int
) -> StepPrediction:
    """Predict a step that fetches only the chosen experts, into slots shared with a resident set of
    frequent experts.

    A layer takes t_sync + (1 - g) f + max(c, g f), where f = E_act (1 - hit) s_e / W is the fetch
    time and g its early fraction. Fits if the slots hold all experts that a layer may need, min(E,
    B k).
    """
    slots = min(weights.num_layers * weights.num_experts, device_bytes // weights.expert_bytes)
    active = measured.active_experts
    if active is None:
        active = distinct_experts(
            weights.num_experts, weights.num_experts_per_tok, measured.num_tokens
        )
    hit_rate = measured.hit_rate
    if hit_rate is None:
        hit_rate = max(0.0, slots - active) / (weights.num_layers * weights.num_experts)
    layer_streamed_bytes = active * (1 - hit_rate) * weights.expert_bytes
    fetch_s = layer_streamed_bytes / measured.bandwidth_bytes_per_s
    early_s = measured.early_fraction * fetch_s
    layer_s = measured.sync_s + (fetch_s - early_s) + max(measured.compute_s, early_s)
    needed = min(weights.num_experts, measured.num_tokens * weights.num_experts_per_tok)
    step_s = weights.num_layers * layer_s
    return StepPrediction(
        "experts", slots >= needed, step_s, weights.num_layers * layer_streamed_bytes
    )


def predict_hybrid(
    weights: ExpertWeightSizes, measured: Measurements, device_bytes: int
) -> StepPrediction:
    """Predict a step like `predict_experts` in which the CPU computes with some of the missing
    experts.

    Link and CPU work at the same time, with shares that let both finish together: f = E_act (1 -
    hit) s_e / (W + H), where H is the CPU's bytes/s. The device computes its experts meanwhile: a
    layer takes t_sync + max(c, f).
    """
    fetched = predict_experts(weights, measured, device_bytes)
    both = measured.bandwidth_bytes_per_s + measured.host_bytes_per_s
    missing_s = fetched.streamed_bytes / weights.num_layers / both if both < math.inf else 0.0
    step_s = weights.num_layers * (measured.sync_s + max(measured.compute_s, missing_s))
    streamed_bytes = fetched.streamed_bytes * (
        measured.bandwidth_bytes_per_s / both if both < math.inf else 1.0
    )
    return StepPrediction("hybrid", fetched.fits, step_s, streamed_bytes)
