"""Which runs may reorder their experts by load (`comm.balance_every_steps`). Standard library
only.
"""

from __future__ import annotations

from typing import Any

from jmoe.config.checks import check
from jmoe.config.layers import STACKS

TrainConfig = Any  # `config.train`, which imports this module


def check_may_balance_experts(config: TrainConfig) -> None:
    """Raise ValueError if the run is to reorder its experts by load, and another setting forbids
    it.
    """
    every, model = config.comm.balance_every_steps, config.model
    if not every:
        return
    kinds = {layer.kind for layer in model.expert_layers}
    reasons = {
        "without experts": not kinds,
        f"with layers other than {STACKS['moe']} that have experts": bool(kinds - {"moe"}),
        # groups are experts of consecutive ids
        f"with model.router.n_group = {model.router.n_group}": model.router.n_group > 1,
        # which may move experts to another tier
        "with comm.packing = 'auto'": config.comm.packing == "auto",
        "with experts on other tiers": config.tiers.any_off_device,
        "with lora.rank": config.lora.rank is not None,
        "with distil.teacher": bool(config.distil.teacher),
        "with dpo.beta": config.dpo.beta is not None,
        "with optimizer.moments = '8bit'": config.optimizer.moments == "8bit",
    }
    for why, holds in reasons.items():
        check(not holds, "comm.balance_every_steps", every, f"must be 0 {why}")
