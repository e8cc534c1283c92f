"""How a model is served in memory that may be too small for it: the plan, what it was made from, what it predicts."""

import math
from dataclasses import dataclass

import numpy as np

from jmoe.planning.capacity import MemoryPlan, Policy
from jmoe.planning.roofline import (
    Measured,
    Prediction,
    predict_experts,
    predict_resident,
    predict_ring,
    ring_from_tokens,
)


@dataclass(frozen=True)
class Speeds:
    """What was measured of machine and model at the start.

    step_tokens, layer_s: tokens of a step, ascending, and seconds that a layer then computes. rest_s: of a step,
    beside its layers. sync_s: to read a layer's choices back. bandwidth_bytes_per_s: from host memory into slots;
    nvme_bytes_per_s: from NVMe into host memory. Infinite where nothing moves.
    """

    step_tokens: tuple[int, ...]
    layer_s: tuple[float, ...]
    rest_s: float = 0.0
    sync_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    nvme_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class StreamingPlan:
    """Where the experts are and how steps get them.

    speeds: None where the policy was given, so that nothing had to be measured. whole_layers_from_tokens: with the
    memory plan's policy `auto`, steps of so many tokens get whole layers as a ring, and smaller ones the experts that
    their tokens chose; None: all get single experts.
    """

    memory: MemoryPlan
    speeds: Speeds | None = None
    whole_layers_from_tokens: int | None = None

    @classmethod
    def of(cls, memory: MemoryPlan, speeds: Speeds, max_tokens: int) -> "StreamingPlan":
        """The plan for steps of at most `max_tokens` tokens."""
        plan = cls(memory, speeds)
        if memory.policy != "auto":
            return plan
        whole = ring_from_tokens(memory.model.weights, memory.device_expert_bytes, plan.measured, max_tokens)
        return cls(memory, speeds, whole)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Of the tier that holds the experts, to the slots: of NVMe reads, which a cache in host memory saves some."""
        assert self.speeds is not None
        all_bytes = self.memory.model.num_experts * self.memory.model.record_bytes
        missed = 0.0 if self.memory.expert_tier != "nvme" else 1 - self.memory.host_bytes / all_bytes
        nvme = self.speeds.nvme_bytes_per_s / missed if missed > 0 else math.inf
        return min(self.speeds.bandwidth_bytes_per_s, nvme)

    def measured(self, num_tokens: int) -> Measured:
        """For a step of so many tokens, whose choices are taken as uniform: nothing else is known at the start."""
        assert self.speeds is not None
        layer_s = float(np.interp(num_tokens, self.speeds.step_tokens, self.speeds.layer_s))
        return Measured(self.bandwidth_bytes_per_s, layer_s, num_tokens, sync_s=self.speeds.sync_s)

    def policy(self, num_tokens: int) -> Policy:
        """What a step of so many tokens does."""
        if self.memory.policy != "auto":
            return self.memory.policy
        whole = self.whole_layers_from_tokens
        return "experts" if whole is None or num_tokens < whole else "ring"

    def predictions(self, num_tokens: int) -> tuple[Prediction, ...]:
        """Of every policy that comes into question; none where nothing was measured."""
        if self.speeds is None:
            return ()
        measured, weights = self.measured(num_tokens), self.memory.model.weights
        device_bytes = self.memory.device_expert_bytes
        resident = predict_resident(weights, measured, device_bytes)
        if self.memory.policy == "resident":
            return (resident,)
        return resident, predict_ring(weights, measured, device_bytes), predict_experts(weights, measured, device_bytes)

    def predicted_step_s(self, num_tokens: int) -> float | None:
        """Of a step of so many tokens, logits and sampling included."""
        policy, speeds = self.policy(num_tokens), self.speeds
        found = [p.step_s for p in self.predictions(num_tokens) if p.policy == policy]
        return found[0] + speeds.rest_s if found and speeds is not None else None

    def describe(self, num_tokens: int) -> str:
        """One line about steps of so many tokens."""
        said = ", ".join(
            f"{p.policy} {p.step_s * 1e3:.1f} ms" + ("" if p.fits else " (does not fit)")
            for p in self.predictions(num_tokens)
        )
        return f"{num_tokens} tokens a step: {self.policy(num_tokens)}" + (f" of {said}" if said else "")
