"""Gated delta networks in a configuration: their sizes, and what is refused beside them. Standard
library only.
"""

from __future__ import annotations

from typing import Any

from jmoe.config.checks import check, check_field, check_positive, check_unset
from jmoe.config.layers import TOKEN_ROUTED

ModelConfig = Any  # `config.model`, which imports this module
TrainConfig = Any  # `config.train`
LINEAR_ATTENTION = "linear_attention"  # of `ModelConfig.layer_types`
LINEAR_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_WITHOUT = "without linear_attention in layer_types"
_BESIDE = "is not supported beside linear_attention in layer_types"


def check_linear_attention(config: ModelConfig) -> None:
    """Raise ValueError naming a field of a model that does not fit its gated delta networks."""
    if not config.has_linear_attention:
        check_unset(config, "", [*LINEAR_SIZES, "linear_projections_by_head"], _WITHOUT)
        return
    check_positive(config, *LINEAR_SIZES)
    taps = config.linear_conv_kernel_dim
    check(taps > 1, "linear_conv_kernel_dim", taps, "must be above 1")
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    words = f"must be a multiple of linear_num_key_heads = {keys}"
    check(values % keys == 0, "linear_num_value_heads", values, words)
    unset: dict[str, object] = {"sliding_window": None, "kv_lora_rank": None}
    unset |= {"attention_bias": False, "mlp_bias": False, "position": "rope"}
    for name, value in unset.items():
        check_field(getattr(config, name) == value, config, name, _BESIDE)
    _check_layer_kinds(config)
    router = config.router
    check(not router.rules.has_bias, "router.kind", router.kind, _BESIDE)


def _check_layer_kinds(config: ModelConfig) -> None:
    """Raise ValueError unless every layer has experts and some layer attention."""
    makes_dense = {
        "num_experts": config.num_experts == 0,
        "decoder_sparse_step": config.decoder_sparse_step > 1,
        "first_k_dense_replace": config.first_k_dense_replace > 0,
    }
    name = next((name for name, makes in makes_dense.items() if makes), "mlp_only_layers")
    every = all(kind in TOKEN_ROUTED for kind in config.layer_kinds)
    words = "must give every layer experts where layer_types has linear_attention"
    check_field(every, config, name, words)
    words = "must have a layer of attention beside linear_attention"
    check_field(config.num_attention_layers > 0, config, "layer_types", words)


def num_linear_attention_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a gated delta network, without its layer's norms."""
    d, keys, values = config.hidden_size, config.linear_key_dim, config.linear_value_dim
    heads, channels = config.linear_num_value_heads, 2 * keys + values
    projections: int = d * (2 * keys + 2 * values + 2 * heads) + values * d
    taps: int = channels * config.linear_conv_kernel_dim
    return projections + taps + 2 * heads + int(config.linear_value_head_dim)


def check_may_train_linear_attention(config: TrainConfig) -> None:
    """Raise ValueError naming a setting of a run that gated delta networks do not support."""
    if not config.model.has_linear_attention:
        return
    why = "with model.layer_types of linear_attention"
    rank, packing, experts = config.lora.rank, config.comm.packing, config.tiers.experts
    check(rank is None, "lora.rank", rank, f"must be None {why}")
    on_device = config.tiers.all_on_device
    check(on_device, "tiers.experts", experts, f"must be device, as all tiers, {why}")
    check(packing == 1, "comm.packing", packing, f"must be 1 {why}")
