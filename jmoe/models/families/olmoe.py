"""OLMoE."""

from jmoe.config import ModelConfig
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import EVERY_FAMILY, SupportedValues, honoured_fields
from jmoe.models.families.reader import ConfigFields, common_fields, softmax_router_config
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.writer import (
    common_json,
    normalization_json,
    same_named_fields,
    softmax_router_json,
)
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    fields.require_value(
        "head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads")
    )
    choices = fields.integer("num_experts_per_tok", default=8)
    normalizes = fields.flag("norm_topk_prob", False)
    return common_fields(fields, 1e-5) | {
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_experts", "num_local_experts", default=64),
        "num_experts_per_tok": choices,
        "qk_norm": "full",
        "clip_qkv": None if fields.value("clip_qkv") is None else fields.number("clip_qkv"),
        "attention_bias": fields.flag("attention_bias", False),
        "router": softmax_router_config(fields, choices, normalizes, 0.01),
        **read_rope_fields(fields, 1e4),
    }


def _write(config: ModelConfig) -> JsonObject:
    return {
        **common_json(config),
        "intermediate_size": config.moe_intermediate_size,
        **softmax_router_json(config),
        **normalization_json(config),
        **same_named_fields(config, "num_experts", "clip_qkv", "attention_bias"),
    }


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields(
            """head_dim num_experts num_local_experts norm_topk_prob router_aux_loss_coef clip_qkv
            attention_bias"""
        ),
        "sliding_window": SupportedValues(()),
    },
)
