"""Which runs may hold copies of their state (`mesh.replicate`). Standard library only."""

from __future__ import annotations

from typing import Any

from jmoe.config.checks import check

TrainConfig = Any  # `config.train`, which imports this module


def check_may_replicate(config: TrainConfig) -> None:
    """Raise ValueError if the run is to hold several copies of its state, and another setting
    forbids it.
    """
    replicas = config.mesh.replicate
    reasons = {
        "with experts on other tiers": config.tiers.any_off_device,
        "with lora.rank": config.lora.rank is not None,
        "for image tasks": hasattr(config, "tasks"),
        f"with comm.packing = {config.comm.packing!r}": config.comm.packing != 1,
    }
    for why, holds in reasons.items():
        check(replicas == 1 or not holds, "mesh.replicate", replicas, f"must be 1 {why}")
