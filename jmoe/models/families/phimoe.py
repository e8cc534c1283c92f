"""Phi-3.5-MoE: Mixtral's tensors with LayerNorm, the sparsemixer router and a bias of the head."""

import dataclasses

from jmoe.config import LongRopeConfig, ModelConfig, check
from jmoe.models.families.family import Family
from jmoe.models.families.mixtral import FAMILY as MIXTRAL
from jmoe.models.families.outcomes import EVERY_FAMILY, TrainingOnlyField, honoured_fields
from jmoe.models.families.reader import ConfigFields, common_fields, softmax_router_config
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import FUSED, transposed_source
from jmoe.models.families.writer import common_json, same_named_fields, softmax_router_json
from jmoe.types import JsonObject


def _read_rope(fields: ConfigFields) -> JsonObject:
    """Return the positions, whose scales of cos and sin are called short_mscale and long_mscale."""
    read = read_rope_fields(fields, 1e6)
    scaling = read.get("rope_scaling")
    if scaling is None:
        return read
    name = "rope_scaling" if fields.value("rope_scaling") else "rope_parameters"
    is_longrope = isinstance(scaling, LongRopeConfig)
    words = "is not supported, only longrope"
    check(is_longrope, f"{name}.rope_type", scaling.rope_type, words)
    table = ConfigFields(fields.value(name), f"{name}.")
    factors = {
        "attention_factor": table.number("short_mscale"),
        "long_attention_factor": table.number("long_mscale"),
    }
    return read | {"rope_scaling": dataclasses.replace(scaling, **factors)}


def _read(fields: ConfigFields) -> JsonObject:
    fields.require_value("num_experts_per_tok", 2)
    jitter = fields.number("router_jitter_noise", 0.01)
    words = "must be greater than 0: the logits that count lie within it of the largest"
    check(jitter > 0, "router_jitter_noise", jitter, words)
    router = softmax_router_config(fields, 2, True)
    return common_fields(fields, 1e-5) | {
        "norm": "layernorm",
        "head_dim": fields.integer_or_none("head_dim"),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_local_experts", default=16),
        "num_experts_per_tok": 2,
        "sliding_window": fields.integer_or_none("sliding_window"),
        "attention_bias": fields.flag("attention_bias", False),
        "head_bias": fields.flag("lm_head_bias", False),
        "router": dataclasses.replace(router, kind="sparsemixer", mask_distance=2 * jitter),
        **_read_rope(fields),
    }


def _write(config: ModelConfig) -> JsonObject:
    written = {
        **common_json(config),
        **softmax_router_json(config),
        **same_named_fields(config, "sliding_window", "attention_bias"),
        "intermediate_size": config.moe_intermediate_size,
        "head_dim": config.dim_per_head,
        "num_local_experts": config.num_experts,
        "lm_head_bias": config.head_bias,
        "router_jitter_noise": config.router.mask_distance / 2,
    }
    rope = written["rope_parameters"]
    if "attention_factor" in rope:
        short = rope.pop("attention_factor")
        rope |= {"short_mscale": short, "long_mscale": rope.pop("long_attention_factor", short)}
    return written


FAMILY = Family(
    "phimoe",
    "PhimoeForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields("head_dim num_local_experts router_aux_loss_coef sliding_window"),
        **honoured_fields("attention_bias lm_head_bias router_jitter_noise"),
        "input_jitter_noise": TrainingOnlyField(0.0),
    },
    tensors=MIXTRAL.tensors,
    fused_tensors={**FUSED, "moe.router.kernel": transposed_source("mlp.router.weight")},
)
