"""Qwen3-MoE."""

from jmoe.config import ModelConfig
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import harmless_fields, honoured_fields
from jmoe.models.families.qwen import QWEN_FIELDS, qwen_json, read_qwen_fields
from jmoe.models.families.reader import ConfigFields
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    return read_qwen_fields(fields) | {
        "moe_intermediate_size": fields.integer("moe_intermediate_size", default=768),
        "num_experts": fields.integer("num_experts", "num_local_experts", default=128),
        "qk_norm": "head",
        "attention_bias": fields.flag("attention_bias", False),
    }


def _write(config: ModelConfig) -> JsonObject:
    return qwen_json(config) | {"attention_bias": config.attention_bias}


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _read,
    _write,
    fields={
        **QWEN_FIELDS,
        **honoured_fields("num_local_experts attention_bias"),
        **harmless_fields("max_window_layers layer_types"),
    },
)
