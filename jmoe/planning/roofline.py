"""How long a step takes when expert weights are streamed, predicted from measured numbers; which policy to take.

Pure functions. Symbols: N layers with experts, E experts per layer, k experts per token, B tokens in a step, c
compute seconds of a layer, s bytes of a layer's experts, s_e bytes of one expert, W bytes/s of the link to the device.
A layer's time under a ring is max(c, s / W): its bytes move while other layers compute.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Literal["resident", "ring", "experts"]
# Slots that a ring needs to load one layer while another is in use.
MIN_RING_SLOTS = 2


def _check(ok: bool, name: str, value: object, constraint: str) -> None:
    if not ok:
        raise ValueError(f"{name} = {value!r}: {constraint}")


def distinct_experts(num_experts: int, num_experts_per_tok: int, num_tokens: float) -> float:
    """Expected distinct experts that B tokens touch in a layer under uniform routing: E (1 - (1 - k/E)^B)."""
    _check(num_experts > 0, "num_experts", num_experts, "must be greater than 0")
    _check(
        0 < num_experts_per_tok <= num_experts,
        "num_experts_per_tok",
        num_experts_per_tok,
        f"must be in [1, num_experts = {num_experts}]",
    )
    _check(num_tokens >= 0, "num_tokens", num_tokens, "must not be negative")
    return num_experts * (1 - (1 - num_experts_per_tok / num_experts) ** num_tokens)


def ring_step_time_s(
    compute_s: Sequence[float], streamed_bytes: Sequence[float], bandwidth_bytes_per_s: float
) -> float:
    """Seconds of a step whose layers are streamed while others compute: sum over layers of max(c_l, s_l / W)."""
    _check(bandwidth_bytes_per_s > 0, "bandwidth_bytes_per_s", bandwidth_bytes_per_s, "must be greater than 0")
    if len(compute_s) != len(streamed_bytes):
        raise ValueError(f"compute_s has {len(compute_s)} layers, streamed_bytes {len(streamed_bytes)}")
    return math.fsum(max(c, s / bandwidth_bytes_per_s) for c, s in zip(compute_s, streamed_bytes))


def serial_step_time_s(
    compute_s: Sequence[float], streamed_bytes: Sequence[float], bandwidth_bytes_per_s: float
) -> float:
    """Seconds of the same step without overlap: sum over layers of c_l + s_l / W."""
    _check(bandwidth_bytes_per_s > 0, "bandwidth_bytes_per_s", bandwidth_bytes_per_s, "must be greater than 0")
    return math.fsum(compute_s) + math.fsum(streamed_bytes) / bandwidth_bytes_per_s


def roofline_fraction(streamed_bytes: float, bandwidth_bytes_per_s: float, step_s: float) -> float:
    """Share of a step's time that its transfers would need at full bandwidth: (S / W) / T. 1: the link never rests."""
    _check(bandwidth_bytes_per_s > 0, "bandwidth_bytes_per_s", bandwidth_bytes_per_s, "must be greater than 0")
    _check(step_s > 0, "step_s", step_s, "must be greater than 0")
    return streamed_bytes / bandwidth_bytes_per_s / step_s


def expert_granular_wins(
    *,
    active_experts: float,
    hit_rate: float,
    num_experts: int,
    expert_bytes: int,
    compute_s: float,
    bandwidth_bytes_per_s: float,
    sync_s: float,
) -> bool:
    """Whether to fetch single experts beats a ring of layers: E_act (1 - hit) s_e / W + t_sync < max(c, E s_e / W)."""
    fetch_s = active_experts * (1 - hit_rate) * expert_bytes / bandwidth_bytes_per_s
    return fetch_s + sync_s < max(compute_s, num_experts * expert_bytes / bandwidth_bytes_per_s)


def spread(num_layers: int, num_chosen: int) -> tuple[int, ...]:
    """`num_chosen` of the layers 0 … num_layers - 1, as evenly as they go; the last is among them if any is."""
    _check(0 <= num_chosen <= num_layers, "num_chosen", num_chosen, f"must be in [0, num_layers = {num_layers}]")
    return tuple((n + 1) * num_layers // num_chosen - 1 for n in range(num_chosen))


@dataclass(frozen=True)
class ExpertWeights:
    """What is streamed: `num_layers` layers with `num_experts` experts of `expert_bytes` each."""

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    expert_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "expert_bytes"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "must be greater than 0")
        _check(
            0 < self.num_experts_per_tok <= self.num_experts,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"must be in [1, num_experts = {self.num_experts}]",
        )

    @property
    def layer_bytes(self) -> int:
        return self.num_experts * self.expert_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True)
class Measured:
    """What was measured of the machine and of one phase (prefill or decode).

    bandwidth_bytes_per_s: of the tier that holds the weights to the device. compute_s: one layer's, with its weights
    there. sync_s: to read the router's choice back, per layer. num_tokens: of a step. active_experts: distinct ones
    a layer touches in a step; None: as under uniform routing. hit_rate: share of those already on the device; None:
    as under uniform routing, the share of all experts that has a slot for good (one layer's worth passes through).
    early_fraction: share of the fetched experts guessed early enough to move while something else computed.
    """

    bandwidth_bytes_per_s: float
    compute_s: float
    num_tokens: int
    sync_s: float = 0.0
    active_experts: float | None = None
    hit_rate: float | None = None
    early_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "num_tokens"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "must be greater than 0")
        for name in ("compute_s", "sync_s"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        for name in ("hit_rate", "early_fraction"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= 1, name, value, "must be in [0, 1]")


@dataclass(frozen=True)
class Prediction:
    """One policy: whether it fits, and what a step is expected to take.

    device_bytes: of expert weights. ring_slots: slots that layers pass through; resident_layers: those that stay
    (`spread` evenly); expert_slots: slots for single experts.
    """

    policy: Policy
    fits: bool
    step_s: float
    streamed_bytes: float
    device_bytes: int
    ring_slots: int = 0
    resident_layers: tuple[int, ...] = ()
    expert_slots: int = 0


@dataclass(frozen=True)
class Plan:
    """The policy chosen, and what was predicted of every one, for the log beside what is then measured."""

    chosen: Prediction
    predictions: tuple[Prediction, ...]

    @property
    def policy(self) -> Policy:
        return self.chosen.policy


def predict_resident(weights: ExpertWeights, measured: Measured, device_bytes: int) -> Prediction:
    """All experts on the device: N c, nothing streamed; fits if N E s_e bytes do."""
    step_s = weights.num_layers * measured.compute_s
    return Prediction("resident", weights.total_bytes <= device_bytes, step_s, 0.0, weights.total_bytes)


def predict_ring(
    weights: ExpertWeights, measured: Measured, device_bytes: int, ring_slots: int | None = None
) -> Prediction:
    """Whole layers through `ring_slots` slots; the layers that have room beside the ring stay on the device.

    K layers fit. With R = K - ring_slots of them resident, N - R layers move in a step, and spread evenly they have
    the whole step's compute to hide in: T = N max(c, (N - R) s / (N W)). ring_slots = K is the plain ring,
    T = N max(c, s / W). None: 2, which moves the fewest bytes that still overlap. If all layers fit none moves.
    """
    num_layers = weights.num_layers
    fitting = min(num_layers, device_bytes // weights.layer_bytes)
    slots = min(MIN_RING_SLOTS if ring_slots is None else ring_slots, num_layers)
    _check(slots > 0, "ring_slots", ring_slots, "must be greater than 0")
    resident = num_layers if fitting == num_layers else max(0, fitting - slots)
    streamed_bytes = (num_layers - resident) * weights.layer_bytes
    step_s = ring_step_time_s(
        [measured.compute_s] * num_layers, [streamed_bytes / num_layers] * num_layers, measured.bandwidth_bytes_per_s
    )
    used = resident if resident == num_layers else resident + slots
    return Prediction(
        "ring",
        fitting >= slots,
        step_s,
        float(streamed_bytes),
        used * weights.layer_bytes,
        ring_slots=slots,
        resident_layers=spread(num_layers, resident),
    )


def predict_experts(weights: ExpertWeights, measured: Measured, device_bytes: int) -> Prediction:
    """Only the experts a step's tokens chose, into slots shared with a resident hot set.

    A layer: t_sync + (1 - g) f + max(c, g f) with f = E_act (1 - hit) s_e / W seconds of fetching, a share g of it
    early. Fits if the slots take all experts that a layer may need, min(E, B k).
    """
    slots = min(weights.num_layers * weights.num_experts, device_bytes // weights.expert_bytes)
    active = measured.active_experts
    if active is None:
        active = distinct_experts(weights.num_experts, weights.num_experts_per_tok, measured.num_tokens)
    hit_rate = measured.hit_rate
    if hit_rate is None:
        hit_rate = max(0.0, slots - active) / (weights.num_layers * weights.num_experts)
    layer_streamed_bytes = active * (1 - hit_rate) * weights.expert_bytes
    fetch_s = layer_streamed_bytes / measured.bandwidth_bytes_per_s
    early_s = measured.early_fraction * fetch_s
    layer_s = measured.sync_s + (fetch_s - early_s) + max(measured.compute_s, early_s)
    needed = min(weights.num_experts, measured.num_tokens * weights.num_experts_per_tok)
    return Prediction(
        "experts",
        slots >= needed,
        weights.num_layers * layer_s,
        weights.num_layers * layer_streamed_bytes,
        slots * weights.expert_bytes,
        expert_slots=slots,
    )


def choose_policy(
    weights: ExpertWeights, measured: Measured, device_bytes: int, *, ring_slots: int | None = None
) -> Plan:
    """The fastest policy whose expert weights fit `device_bytes`; on a tie resident, then ring.

    Call it once for prefill and once for decode: they differ in `measured`. Raises `ValueError` if nothing fits,
    naming the bytes that the smallest policy needs.
    """
    predictions = (
        predict_resident(weights, measured, device_bytes),
        predict_ring(weights, measured, device_bytes, ring_slots),
        predict_experts(weights, measured, device_bytes),
    )
    fitting = [p for p in predictions if p.fits]
    needed = min(weights.num_experts, measured.num_tokens * weights.num_experts_per_tok) * weights.expert_bytes
    smallest_bytes = min(needed, MIN_RING_SLOTS * weights.layer_bytes, weights.total_bytes)
    _check(bool(fitting), "device_bytes", device_bytes, f"must be at least {smallest_bytes} for the expert weights")
    return Plan(min(fitting, key=lambda p: p.step_s), predictions)
