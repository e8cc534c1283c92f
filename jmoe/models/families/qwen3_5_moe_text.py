"""The language model of Qwen3.5-MoE, saved alone."""

from jmoe.config import ModelConfig
from jmoe.models.families.family import Family
from jmoe.models.families.qwen_linear import (
    LINEAR_FIELDS,
    linear_tensors,
    qwen_linear_json,
    read_qwen_linear_fields,
)
from jmoe.models.families.reader import ConfigFields
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    # intermediate_size: no layer is dense
    return read_qwen_linear_fields(fields, 1024, norm_topk_prob=True) | {
        "num_experts": fields.integer("num_experts", default=256)
    }


def _write(config: ModelConfig) -> JsonObject:
    written = qwen_linear_json(config)
    del written["intermediate_size"]
    return written


FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _read,
    _write,
    fields=LINEAR_FIELDS,
    tensors=linear_tensors("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
