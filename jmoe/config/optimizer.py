"""The optimizer's settings. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_steps_within_limit,
    check_unset,
)

AnyTrainConfig = Any  # `config.train` and `config.vision`, which import this module


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay, or Muon for the matrices of layers and AdamW for the rest;
    and a learning rate with warm-up, then cosine, constant, or constant with a linear decay at the
    end ("wsd").

    Norms, biases and router biases are not decayed.
    """

    learning_rate: float = 1e-3
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    warmup_steps: int = 100
    # cosine and wsd end at this fraction of learning_rate
    final_learning_rate_fraction: float = 0.1
    decay_steps: int = 0  # wsd: the last steps, in which the rate falls; 0: a tenth of the run
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # global norm; 0: no clip
    # muon: attention, MLPs and experts by Muon; embeddings, head, routers, norms by AdamW
    kind: Literal["adamw", "muon"] = "adamw"
    # adamw: how the moments of the layers' matrices are kept. 8bit: codes, with a float32 scale for
    # each 256 of them
    moments: Literal["float32", "8bit"] = "float32"
    momentum: float = 0.95  # of Muon

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "learning_rate", "eps")
        check_not_negative(self, "warmup_steps", "decay_steps", "weight_decay", "clip_norm")
        check_steps_within_limit(self, "warmup_steps", "decay_steps")
        for name in ("beta1", "beta2", "momentum"):
            check_field(
                0 <= getattr(self, name) < 1, self, f"optimizer.{name}", "must be in [0, 1)"
            )
        if self.kind == "muon":
            one = "must be float32 with optimizer.kind = 'muon', which keeps one moment of a matrix"
            check_field(self.moments == "float32", self, "optimizer.moments", one)
        else:
            check_unset(self, "optimizer", ["momentum"], "with optimizer.kind = 'adamw'")
        fraction = self.final_learning_rate_fraction
        check(
            0 <= fraction <= 1,
            "optimizer.final_learning_rate_fraction",
            fraction,
            "must be between 0 and 1",
        )
        if self.schedule == "constant":
            check_unset(
                self,
                "optimizer",
                ["final_learning_rate_fraction"],
                "with optimizer.schedule = 'constant'",
            )
        if self.schedule != "wsd":
            check_unset(self, "optimizer", ["decay_steps"], "unless optimizer.schedule = 'wsd'")

    def check_phases(self, num_steps: int) -> None:
        """Raise ValueError if warm-up and decay exceed a run of `num_steps` steps."""
        fits = not self.decay_steps or self.warmup_steps + self.decay_steps <= num_steps
        words = f"must not exceed num_steps {num_steps} - optimizer.warmup_steps"
        check_field(fits, self, "optimizer.decay_steps", f"{words} {self.warmup_steps}")


def check_may_change_optimizer(config: AnyTrainConfig, reasons: dict[str, bool]) -> None:
    """Raise ValueError if one of the reasons holds and the optimizer is another than AdamW with
    float32 moments. reasons: {end of a message: whether it holds}.
    """
    for why, holds in reasons.items():
        for name, only in (("kind", "adamw"), ("moments", "float32")):
            fits = not holds or getattr(config.optimizer, name) == only
            check_field(fits, config.optimizer, f"optimizer.{name}", f"must be {only} {why}")
