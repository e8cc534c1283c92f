"""GLM-4.5 and GLM-4.6: DeepSeek's experts, heads that are rotated in part."""

from jmoe.config import ModelConfig
from jmoe.models.families.deepseek import (
    EXPERT_FIELDS,
    SHARED_EXPERTS,
    expert_sizes_json,
    group_limited_router_json,
    read_expert_sizes,
    read_group_limited_router,
)
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import EVERY_FAMILY, honoured_fields
from jmoe.models.families.reader import ConfigFields, common_fields
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.writer import common_json
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    return common_fields(fields, 1e-5) | {
        "head_dim": fields.integer_or_none("head_dim"),
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": "head" if fields.flag("use_qk_norm", False) else "none",
        **read_expert_sizes(fields),
        "router": read_group_limited_router(fields, groups=1),
        **read_rope_fields(fields, 1e4, partial=0.5),
    }


def _write(config: ModelConfig) -> JsonObject:
    return {
        **common_json(config),
        "partial_rotary_factor": config.partial_rotary_factor,
        "head_dim": config.dim_per_head,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm == "head",
        **expert_sizes_json(config),
        **group_limited_router_json(config),
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **EXPERT_FIELDS,
        **honoured_fields(
            "num_local_experts head_dim attention_bias use_qk_norm partial_rotary_factor"
        ),
    },
    tensors=SHARED_EXPERTS,
)
