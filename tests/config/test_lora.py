"""LoRA's settings: the scale, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jmoe.config import ModelConfig, RouterConfig, TiersConfig, TrainConfig
from jmoe.config.lora import LoraConfig


def test_scale() -> None:
    assert LoraConfig(rank=4, alpha=8).scale == 2
    assert LoraConfig(rank=4, alpha=8, rslora=True).scale == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "lora.rank = 0: must be at least 1"),
        ({"rank": 4, "targets": ("expert",)}, "lora.targets = 'expert': must be among attention"),
        ({"rank": 4, "targets": ()}, r"lora.targets = \(\): must name a part of a layer"),
        ({"rank": 4, "alpha": 0.0}, "alpha = 0.0: must be greater than 0"),
        ({"rank": 4, "dropout": 1.0}, r"lora.dropout = 1.0: must be in \[0, 1\)"),
        ({"rank": 4, "dropout": 0.1}, "lora.dropout = 0.1: must be 0 unless lora.targets is att"),
        ({"alpha": 32.0}, "lora.alpha = 32.0: .*without lora.rank"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_from": ""}, "lora.rank = 4: must be given together with init_from"),
        ({"compute_dtype": "float16"}, "compute_dtype = 'float16': must be float32 or bfloat16"),
        (
            {"model": ModelConfig(router=RouterConfig("sigmoid", bias_update_speed=0.01))},
            "model.router.bias_update_speed = 0.01: must be 0 with lora.rank",
        ),
        ({"plan": True}, "plan = True: must not be given with lora.rank"),
        ({"estimate": "h100"}, "estimate = 'h100': must not be given with lora.rank"),
    ],
)
def test_runs_that_cannot_train_adapters(options: dict[str, Any], message: str) -> None:
    config = TrainConfig(init_from="model", lora=LoraConfig(rank=4))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"experts": "auto", "optimizer": "auto"},
            "tiers.experts = 'auto': must be device, host or",
        ),
        ({"optimizer": "nvme"}, "tiers.optimizer = 'nvme': must be host with lora.rank: frozen"),
        ({"device_experts": 0.5}, "tiers.device_experts = 0.5: must be 1.0 with lora.rank, whose"),
        (
            {"gradient_dtype": "bfloat16"},
            "tiers.gradient_dtype = 'bfloat16': must be 'float32' with",
        ),
        ({"update": "host"}, "tiers.update = 'host': must be 'device' with lora.rank"),
    ],
)
def test_tiers_that_frozen_experts_cannot_have(options: dict[str, Any], message: str) -> None:
    tiers = TiersConfig(**{"experts": "host", "optimizer": "host"} | options)
    with pytest.raises(ValueError, match=message):
        TrainConfig(init_from="model", lora=LoraConfig(rank=4), tiers=tiers)
