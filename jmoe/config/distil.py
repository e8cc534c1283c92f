"""Settings of knowledge distillation: training with a larger teacher model in addition to text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jmoe.config.checks import (
    check_field,
    check_field_types,
    check_positive,
    check_positive_or_none,
    check_unset,
)


@dataclass(frozen=True)
class DistilConfig:
    """A teacher. The loss is (1 - weight) x cross-entropy + weight x temperature^2 x KL(teacher |
    student).

    Both distributions are softmax(logits / temperature). The teacher's experts are placed by the
    policy, as in `EngineConfig.policy`: with `ring`, layers take turns in `ring_slots` slots, so
    the teacher need not fit on the device.
    """

    teacher: str = ""  # a Hugging Face folder; "": none
    weight: float = 0.5
    temperature: float = 2.0
    policy: Literal["auto", "resident", "ring"] = "auto"
    ring_slots: int | None = None  # policy = ring: layers on the device at once; None: what fits

    def __post_init__(self) -> None:
        check_field_types(self)
        check_field(
            0 < self.weight <= 1, self, "distil.weight", "must be greater than 0 and at most 1"
        )
        check_positive(self, "temperature")
        check_positive_or_none(self, "ring_slots")
        if not self.teacher:
            check_unset(
                self,
                "distil",
                ["weight", "temperature", "policy", "ring_slots"],
                "without distil.teacher",
            )
        ring = self.ring_slots is None or self.policy == "ring"
        check_field(
            ring, self, "distil.ring_slots", f"must be None with distil.policy = {self.policy!r}"
        )
