"""Settings of sparse upcycling: training experts that a dense model becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jmoe.config.checks import check, check_field, check_field_types, check_unset

TrainConfig = Any  # `config.train`, which imports this module


@dataclass(frozen=True)
class UpcycleConfig:
    """The experts that each MLP of `init_from`, a dense model, becomes (arXiv 2212.05055). Routers
    begin with random weights of `seed`.
    """

    # experts of each layer; None: `init_from` is trained as it is. Also --model.num-experts
    num_experts: int | None = None
    num_experts_per_tok: int = 2  # that a token chooses

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.num_experts is None:
            check_unset(self, "upcycle", ["num_experts_per_tok"], "without upcycle.num_experts")
            return
        check_field(self.num_experts >= 2, self, "upcycle.num_experts", "must be at least 2")
        fits = 2 <= self.num_experts_per_tok <= self.num_experts
        least = f"must be from 2 to upcycle.num_experts = {self.num_experts}, so weights sum to 1"
        check_field(fits, self, "upcycle.num_experts_per_tok", least)


def check_may_upcycle(config: TrainConfig) -> None:
    """Raise ValueError if experts are to be made of no model, or by what writes nothing."""
    number = config.upcycle.num_experts
    if number is None:
        return
    check(bool(config.init_from), "upcycle.num_experts", number, "must be None without init_from")
    for name in ("plan", "estimate"):
        first = (
            f"must not be given with upcycle.num_experts = {number}: run jmoe.deploy.upcycle first"
        )
        check_field(not getattr(config, name), config, name, first)
