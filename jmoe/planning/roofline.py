"""How long a step takes when expert weights are streamed, predicted from measured numbers.

Pure functions. Symbols: N layers with experts, E experts per layer, k experts per token, B tokens
in a step, c compute seconds of a layer, s bytes of a layer's experts, s_e bytes of one expert, W
bytes/s of the link to the device. A layer's time under a ring is max(c, s / W): its bytes move
while other layers compute.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jmoe.config.checks import check, not_negative, positive

Policy = Literal["resident", "ring", "experts", "hybrid"]
RING_SLOTS = 2  # one loads a layer while the other is in use: the fewest that overlap


def distinct_experts(num_experts: int, num_experts_per_tok: int, num_tokens: float) -> float:
    """Return expected distinct experts that B tokens touch in a layer under uniform routing: E
    (1 - (1 - k/E)^B).
    """
    check(num_experts > 0, "num_experts", num_experts, "must be greater than 0")
    k, name = num_experts_per_tok, "num_experts_per_tok"
    check(0 < k <= num_experts, name, k, f"must be in [1, num_experts = {num_experts}]")
    check(num_tokens >= 0, "num_tokens", num_tokens, "must not be negative")
    return num_experts * (1 - (1 - num_experts_per_tok / num_experts) ** num_tokens)


def scaled_share(
    share: float,
    num_experts: int,
    num_experts_per_tok: int,
    *,
    measured_tokens: float,
    num_tokens: float,
) -> float:
    """Return the share of a layer's experts that `num_tokens` touch, where `measured_tokens` touch
    `share` of them.

    It changes by the factor of uniform routing, but not below what one token chooses.
    """
    touched = distinct_experts(num_experts, num_experts_per_tok, num_tokens)
    scaled = share * touched / distinct_experts(num_experts, num_experts_per_tok, measured_tokens)
    return min(1.0, max(scaled, min(share, num_experts_per_tok / num_experts)))


@dataclass(frozen=True)
class ExpertWeights:
    """The weights to stream: `num_layers` layers with `num_experts` experts of `expert_bytes`
    each.
    """

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    expert_bytes: int

    def __post_init__(self) -> None:
        positive(self, "num_layers", "num_experts", "expert_bytes")
        k, name = self.num_experts_per_tok, "num_experts_per_tok"
        check(
            0 < k <= self.num_experts, name, k, f"must be in [1, num_experts = {self.num_experts}]"
        )

    @property
    def layer_bytes(self) -> int:
        return self.num_experts * self.expert_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True)
class Measured:
    """Measurements of the machine and of one phase (prefill or decode).

    bandwidth_bytes_per_s: of the tier that holds the weights to the device. compute_s: one layer's,
    with its weights there. sync_s: to read the router's choice back, per layer. num_tokens: of a
    step. active_experts: distinct ones a layer touches in a step; None: as under uniform routing.
    hit_rate: share of those already on the device; None: as under uniform routing, the share of all
    experts that has a slot for good (one layer's worth passes through).
    early_fraction: share of the fetched experts guessed early enough to move while something else
    computed.
    host_bytes_per_s: at which the host computes with experts that lie there; 0: it does not.
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
        positive(self, "bandwidth_bytes_per_s", "num_tokens")
        not_negative(self, "compute_s", "sync_s")
        for name in ("hit_rate", "early_fraction"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= 1, name, value, "must be in [0, 1]")


@dataclass(frozen=True)
class Prediction:
    """Forecast for one policy: whether its slots fit the device, seconds and bytes moved of a
    step.
    """

    policy: Policy
    fits: bool
    step_s: float
    streamed_bytes: float


def predict_resident(weights: ExpertWeights, measured: Measured, device_bytes: int) -> Prediction:
    """Predict a step with all experts on the device: N c, nothing streamed; it fits if N E s_e
    bytes do.
    """
    return Prediction(
        "resident",
        weights.total_bytes <= device_bytes,
        weights.num_layers * measured.compute_s,
        0.0,
    )


def predict_ring(weights: ExpertWeights, measured: Measured, device_bytes: int) -> Prediction:
    """Predict a step whose layers pass through two slots; layers that have room beside these stay
    on the device.

    K layers fit. With R = K - 2 of them resident, N - R layers move in a step, and spread evenly
    they have the whole step's compute to hide in: T = N max(c, (N - R) s / (N W)). If all layers
    fit none moves.
    """
    num_layers = weights.num_layers
    fitting = min(num_layers, device_bytes // weights.layer_bytes)
    slots = min(RING_SLOTS, num_layers)
    resident = num_layers if fitting == num_layers else max(0, fitting - slots)
    streamed_bytes = (num_layers - resident) * weights.layer_bytes
    layer_s = max(measured.compute_s, streamed_bytes / num_layers / measured.bandwidth_bytes_per_s)
    return Prediction("ring", fitting >= slots, num_layers * layer_s, float(streamed_bytes))


def predict_experts(weights: ExpertWeights, measured: Measured, device_bytes: int) -> Prediction:
    """Predict a step that fetches only the experts its tokens chose, into slots shared with a
    resident hot set.

    A layer: t_sync + (1 - g) f + max(c, g f) with f = E_act (1 - hit) s_e / W seconds of fetching,
    a share g of it early. Fits if the slots take all experts that a layer may need, min(E, B k).
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
    return Prediction("experts", slots >= needed, step_s, weights.num_layers * layer_streamed_bytes)


def predict_hybrid(weights: ExpertWeights, measured: Measured, device_bytes: int) -> Prediction:
    """Predict a step as `predict_experts` does, where the host computes a part of what is missing.

    Link and host work at the same time, each on the share that makes both end together: f = E_act
    (1 - hit) s_e / (W + H) with H bytes/s of the host. The device computes what it has meanwhile: a
    layer takes t_sync + max(c, f).
    """
    fetched = predict_experts(weights, measured, device_bytes)
    both = measured.bandwidth_bytes_per_s + measured.host_bytes_per_s
    missing_s = fetched.streamed_bytes / weights.num_layers / both if both < math.inf else 0.0
    step_s = weights.num_layers * (measured.sync_s + max(measured.compute_s, missing_s))
    streamed_bytes = fetched.streamed_bytes * (
        measured.bandwidth_bytes_per_s / both if both < math.inf else 1.0
    )
    return Prediction("hybrid", fetched.fits, step_s, streamed_bytes)
