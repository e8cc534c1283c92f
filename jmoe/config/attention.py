"""Attention in a configuration: what does not fit of its heads, positions and windows. Standard
library only.
"""

from __future__ import annotations

from typing import Any

from jmoe.config.checks import (
    check,
    check_field,
    check_not_negative,
    check_positive,
    check_positive_or_none,
    check_unset,
)
from jmoe.config.denoising import check_encoder
from jmoe.config.linear_attention import LINEAR_ATTENTION, check_linear_attention
from jmoe.config.masking import check_bidirectional

ModelConfig = Any  # `config.model`, which imports this module
CHUNKED_ATTENTION = "chunked_attention"  # of `ModelConfig.layer_types`
LAYER_TYPES = ("sliding_attention", "full_attention", CHUNKED_ATTENTION, LINEAR_ATTENTION)


def check_attention(config: ModelConfig) -> None:
    """Raise ValueError naming a field of a model that does not fit its attention."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    check(
        heads % groups == 0,
        "num_key_value_heads",
        groups,
        f"must divide num_attention_heads = {heads}",
    )
    _check_windows(config)
    _check_chunks(config)
    check_linear_attention(config)
    check_bidirectional(config)
    check_encoder(config)
    check_positive_or_none(config, "clip_qkv")
    has_bias = config.attention_bias or config.qkv_bias
    words = "is not supported beside attention_bias or qkv_bias"
    check_field(not (config.attention_gate and has_bias), config, "attention_gate", words)
    rope = config.position == "rope"
    check_field(
        config.rope_scaling is None or rope, config, "rope_scaling", "needs position = 'rope'"
    )
    if config.kv_lora_rank is not None:
        _check_latent_attention(config)
        if config.rope_scaling is not None:
            config.rope_scaling.check_rotary_dim(config.qk_rope_head_dim)
        return
    latent_fields = ["q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    check_unset(config, "", latent_fields, "without kv_lora_rank: needs latent attention")
    divides = config.head_dim is not None or config.hidden_size % heads == 0
    constraint = f"must divide hidden_size = {config.hidden_size} when head_dim is not given"
    check(divides, "num_attention_heads", heads, constraint)
    _check_rotary_dims(config)


def _check_rotary_dims(config: ModelConfig) -> None:
    if config.position != "rope":
        for name, default in (("rope_interleave", False), ("partial_rotary_factor", 1.0)):
            unset = getattr(config, name) == default
            check_field(unset, config, name, "needs position = 'rope'")
        return
    even = config.dim_per_head % 2 == 0
    check(even, "head_dim", config.dim_per_head, "must be even for rotary positions")
    share, dims = config.partial_rotary_factor, config.rotary_dim
    fits = 0 < share <= 1 and dims > 0 and dims % 2 == 0
    words = f"must be an even share of head_dim = {config.dim_per_head}, in (0, 1]"
    check(fits, "partial_rotary_factor", share, words)
    if config.rope_scaling is not None:
        config.rope_scaling.check_rotary_dim(dims)


def _check_windows(config: ModelConfig) -> None:
    if config.sliding_window is not None:
        check_positive(config, "sliding_window")
    types, layers = config.layer_types, config.num_hidden_layers
    check(len(types) in (0, layers), "layer_types", types, f"must have {layers} entries or none")
    check(
        set(types) <= set(LAYER_TYPES),
        "layer_types",
        types,
        f"must each be one of {', '.join(LAYER_TYPES)}",
    )
    sliding = "sliding_attention" in types
    check(
        not sliding or config.sliding_window is not None,
        "sliding_window",
        None,
        "is needed by layer_types",
    )


def _check_chunks(config: ModelConfig) -> None:
    if not config.has_chunked_attention:
        names = ["attention_chunk_size", "attn_scale", "floor_scale"]
        check_unset(config, "", names, "without chunked_attention in layer_types")
        return
    size = config.attention_chunk_size
    check(size is not None, "attention_chunk_size", size, "is needed by layer_types")
    check_positive(config, "attention_chunk_size", "floor_scale")
    check_not_negative(config, "attn_scale")
    unset: dict[str, object] = {"sliding_window": None, "kv_lora_rank": None}
    unset |= {"position": "rope", "attention_sinks": False}
    words = "is not supported beside chunked_attention in layer_types"
    for name, value in unset.items():
        check_field(getattr(config, name) == value, config, name, words)
    linear = LINEAR_ATTENTION in config.layer_types
    check(not linear, "layer_types", config.layer_types, f"has {LINEAR_ATTENTION}, which {words}")


def _check_latent_attention(config: ModelConfig) -> None:
    check_positive(config, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    check_field(
        config.q_lora_rank is None or config.q_lora_rank > 0,
        config,
        "q_lora_rank",
        "must be above 0",
    )
    check_field(config.qk_rope_head_dim % 2 == 0, config, "qk_rope_head_dim", "must be even")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    check(
        heads == groups,
        "num_key_value_heads",
        groups,
        f"must be {heads} for latent attention",
    )
    plain = {
        "qk_norm": "none",
        "clip_qkv": None,
        "attention_gate": False,
        "qkv_bias": False,
        "attention_sinks": False,
        "partial_rotary_factor": 1.0,
        "attention_multiplier": None,
    }
    for name, value in plain.items():
        check_field(getattr(config, name) == value, config, name, "is not part of latent attention")
    rope = config.position == "rope"
    check_field(rope, config, "position", "must be 'rope' for latent attention")
