"""Configurations with gated delta networks: what is refused beside them, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jmoe.config import LoraConfig, MeshConfig, ModelConfig, TiersConfig, TrainConfig

MODEL = ModelConfig(
    hidden_size=24,
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=4,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3: must be a multiple of"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0: must be"),
        ({"layer_types": ("linear_attention",) * 2}, "layer_types = .* must have a layer of att"),
        ({"layer_types": ()}, "linear_num_key_heads = 2: must be 0 without linear_attention"),
        ({"sliding_window": 4}, "sliding_window = 4: is not supported beside linear_attention"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2: must give every layer experts"),
        ({"mlp_only_layers": (0,)}, r"mlp_only_layers = \(0,\): must give every layer experts"),
        ({"attention_gate": True, "qkv_bias": True}, "attention_gate = True: is not supported"),
    ],
)
def test_models_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MODEL, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiers": TiersConfig(experts="host", optimizer="host")}, "tiers.experts = 'host': must"),
        ({"lora": LoraConfig(rank=2), "init_from": "x"}, "lora.rank = 2: must be None with"),
        ({"mesh": MeshConfig(context=2)}, "mesh.context = 2: must be 0 or 1 with linear"),
    ],
)
def test_runs_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TrainConfig(model=MODEL), **change)
