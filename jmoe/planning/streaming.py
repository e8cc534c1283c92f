"""Policy of serving with streamed experts: the memory plan, the measurements behind it, and
predicted step times. Used by the inference engine.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jmoe.config.engine import Policy
from jmoe.planning.memory_plan import MemoryPlan
from jmoe.planning.roofline import (
    RING_SLOTS,
    ExpertWeightSizes,
    Measurements,
    StepPrediction,
    busiest_device_experts,
    distinct_experts,
    predict_experts,
    predict_hybrid,
    predict_resident,
    predict_ring,
)

MOST_TOKENS_ON_HOST = 32  # limit of the native CPU operations, in tokens of a step


def _tokens_text(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


@dataclass(frozen=True)
class Calibration:
    """Measurements of machine and model at the engine's start.

    step_tokens, layer_s: tokens of a step (ascending), and compute seconds of a layer for each.
    rest_s: seconds of a step besides its layers. sync_s: reading a layer's routing back to the
    host. bandwidth_bytes_per_s: from host memory into device slots. nvme_bytes_per_s: from NVMe
    into host memory. Rates are infinite if nothing is moved. host_bytes_per_s: expert bytes that
    the CPU computes with per second; 0 if it does not.
    """

    step_tokens: tuple[int, ...]
    layer_s: tuple[float, ...]
    rest_s: float = 0.0
    sync_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    nvme_bytes_per_s: float = math.inf
    host_bytes_per_s: float = 0.0

    def __str__(self) -> str:
        of_steps = zip(self.step_tokens, self.layer_s, strict=True)
        layers = ", ".join(
            f"{seconds * 1e3:.3g} ms for {_tokens_text(tokens)}" for tokens, seconds in of_steps
        )
        rates = {
            "experts are copied": self.bandwidth_bytes_per_s,
            "read from NVMe": self.nvme_bytes_per_s,
            "computed by the CPU": self.host_bytes_per_s,
        }
        said = [
            f"{what} at {rate / 1e9:.3g} GB/s"
            for what, rate in rates.items()
            if 0 < rate < math.inf
        ]
        return "; ".join(
            [
                f"measured: a layer takes {layers}, the rest of a step {self.rest_s * 1e3:.3g} ms",
                *said,
            ]
        )


@dataclass(frozen=True)
class RoutingStats:
    """Routing of recent steps of at most `max_tokens` tokens (`num_tokens` on average); means over
    layers.

    active_experts: distinct experts that a layer's tokens chose. hit_rate: fraction of these that
    were on the device. early_fraction: fraction of the others that were predicted early.
    """

    max_tokens: int
    num_tokens: float
    active_experts: float
    hit_rate: float
    early_fraction: float


@dataclass(frozen=True)
class StreamingPlan:
    """Memory plan of the experts, and how each step fetches them.

    calibration: None if nothing is measured: the policy was configured, or no request has been
    answered yet. routing: of recent steps; None assumes uniform routing.
    """

    memory: MemoryPlan
    calibration: Calibration | None = None
    routing: RoutingStats | None = None

    @property
    def weights(self) -> ExpertWeightSizes:
        """Return the sizes of one device's share of the experts."""
        return self.memory.model.weights.per_device(self.memory.num_devices)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Return the rate in bytes/s from the experts' tier to device slots, counting the NVMe
        reads that the cache in host memory saves.
        """
        assert self.calibration is not None
        all_bytes = self.memory.model.num_experts * self.memory.model.record_bytes
        missed = (
            0.0 if self.memory.expert_tier != "nvme" else 1 - self.memory.host_bytes / all_bytes
        )
        nvme = self.calibration.nvme_bytes_per_s / missed if missed > 0 else math.inf
        return min(self.calibration.bandwidth_bytes_per_s, nvme)

    def interpolate_measurements(self, num_tokens: int) -> Measurements:
        """Return the measurements, interpolated for a step of `num_tokens` tokens."""
        assert self.calibration is not None
        layer_s = float(
            np.interp(num_tokens, self.calibration.step_tokens, self.calibration.layer_s)
        )
        rates = self.bandwidth_bytes_per_s, self.calibration.host_bytes_per_s
        uniform = Measurements(
            rates[0], layer_s, num_tokens, self.calibration.sync_s, host_bytes_per_s=rates[1]
        )
        routing, weights = self.routing, self.memory.model.weights
        if routing is None or num_tokens > routing.max_tokens:
            if self.memory.num_devices == 1:
                return uniform
            sizes = weights.num_experts, weights.num_experts_per_tok
            active = busiest_device_experts(*sizes, num_tokens, self.memory.num_devices)
            return replace(uniform, active_experts=active)
        touched = partial(distinct_experts, weights.num_experts, weights.num_experts_per_tok)
        active = routing.active_experts * touched(num_tokens) / touched(routing.num_tokens)
        return replace(
            uniform,
            active_experts=min(weights.num_experts, active),
            hit_rate=routing.hit_rate,
            early_fraction=routing.early_fraction,
        )

    def choose_policy(self, num_tokens: int) -> Policy:
        """Return how a step of `num_tokens` tokens gets its experts; the fastest way if the memory
        plan's policy is `auto`.

        `ring` loads whole layers one after another; `experts` loads the chosen experts; `hybrid`
        does so too, while the CPU computes with some of them, for at most `MOST_TOKENS_ON_HOST`
        tokens.
        """
        if self.memory.policy == "hybrid":
            return "hybrid" if num_tokens <= MOST_TOKENS_ON_HOST else "ring"
        if self.memory.policy != "auto":
            return self.memory.policy
        if self.calibration is None:
            return self._choose_policy_unmeasured(num_tokens)
        ways = [p for p in self.predictions(num_tokens)[1:] if p.fits]
        return min(ways, key=lambda p: p.step_s).policy if ways else "experts"

    def _choose_policy_unmeasured(self, num_tokens: int) -> Policy:
        """Return `ring` if the tokens are expected to choose more than half of a layer's experts
        and the ring's slots fit, else `experts`.

        Whole layers need no choices, so that they load while the layers before compute.
        """
        whole, weights = self.memory.model.weights, self.weights
        device_bytes, experts = self.memory.device_expert_bytes, whole.num_experts
        most = 2 * distinct_experts(experts, whole.num_experts_per_tok, num_tokens) > experts
        slots = min(RING_SLOTS, weights.num_layers)
        return "ring" if most and device_bytes >= slots * weights.layer_bytes else "experts"

    def predictions(self, num_tokens: int) -> tuple[StepPrediction, ...]:
        """Return the prediction for every policy that may be chosen, `resident` first; empty
        without measurements.
        """
        if self.calibration is None:
            return ()
        measured, weights = self.interpolate_measurements(num_tokens), self.weights
        device_bytes = self.memory.device_expert_bytes
        resident = predict_resident(weights, measured, device_bytes)
        if self.memory.policy == "resident":
            return (resident,)
        ways = [predict_ring, predict_experts]
        if measured.host_bytes_per_s > 0 and num_tokens <= MOST_TOKENS_ON_HOST:
            ways.append(predict_hybrid)
        return resident, *(predict(weights, measured, device_bytes) for predict in ways)

    def predicted_step_s(self, num_tokens: int) -> float | None:
        """Return the predicted seconds of a step of `num_tokens` tokens, with logits and sampling;
        None without measurements.
        """
        policy, calibration = self.choose_policy(num_tokens), self.calibration
        predicted = [p.step_s for p in self.predictions(num_tokens) if p.policy == policy]
        return predicted[0] + calibration.rest_s if predicted and calibration is not None else None

    def describe(self, num_tokens: int) -> str:
        """Return a line about the policy and predicted times of steps of `num_tokens` tokens."""
        said = ", ".join(
            f"{p.policy} {p.step_s * 1e3:.1f} ms" + ("" if p.fits else " (does not fit)")
            for p in self.predictions(num_tokens)
        )
        line = f"{_tokens_text(num_tokens)} a step: {self.choose_policy(num_tokens)}"
        return f"{line}, predicted: {said}" if said else line
