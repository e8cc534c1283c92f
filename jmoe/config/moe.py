"""Configuration of one layer of experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from jmoe.config.checks import (
    check_field,
    check_field_types,
    check_positive,
    check_positive_or_none,
)
from jmoe.config.router import RouterConfig, check_routing

HiddenAct = Literal["swiglu", "gelu", "clamped_swiglu"]


@dataclass(frozen=True)
class MoEConfig:
    """One Mixture-of-Experts feed-forward layer: `num_experts` MLPs, of which each token uses
    `num_experts_per_tok`.
    """

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int = 2
    intermediate_size: int = 1024  # of one expert
    hidden_act: HiddenAct = "swiglu"
    bias: bool = False  # experts add biases
    capacity_factor: float | None = None  # rows per destination device / fair share; None: dropless
    initializer_range: float = 0.02
    # of the down projections; None: initializer_range
    output_initializer_range: float | None = None
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "hidden_size", "num_experts", "intermediate_size", "initializer_range")
        check_positive_or_none(self, "output_initializer_range")
        check_routing(self.num_experts, self.num_experts_per_tok, self.router)
        fits = self.capacity_factor is None or self.capacity_factor > 0
        check_field(fits, self, "capacity_factor", "must be greater than 0, or None for dropless")

    def with_routing_by_task(self, experts_per_image: int) -> MoEConfig:
        """Return a copy in which the image's task selects the experts.

        With 2 experts per image, the second may be dropped at random.
        """
        some: RouterConfig = RouterConfig(
            kind="gshard", second_expert_policy="random", aux_loss_coef=0.0
        )
        router = RouterConfig(aux_loss_coef=0.0) if experts_per_image == 1 else some
        return dataclasses.replace(self, num_experts_per_tok=experts_per_image, router=router)
