"""DeepSeek-V3, and Kimi-K2 by its own model type."""

from jmoe.config import ModelConfig
from jmoe.models.families.deepseek import (
    EXPERT_FIELDS,
    LATENT_FIELDS,
    SHARED_EXPERTS,
    expert_sizes_json,
    group_limited_router_json,
    latent_attention_json,
    read_expert_sizes,
    read_group_limited_router,
    read_latent_attention,
)
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import EVERY_FAMILY, SupportedValues, honoured_fields
from jmoe.models.families.reader import ConfigFields, common_fields
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.writer import common_json
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    return common_fields(fields, 1e-6) | {
        **read_latent_attention(fields),
        **read_expert_sizes(fields),
        "rope_interleave": fields.nullable_flag("rope_interleave", True),
        "router": read_group_limited_router(fields),
        **read_rope_fields(fields, 1e4),
    }


def _write(config: ModelConfig) -> JsonObject:
    return {
        **common_json(config),
        **expert_sizes_json(config),
        **group_limited_router_json(config),
        "num_nextn_predict_layers": 0,
        **latent_attention_json(config),
        "rope_interleave": config.rope_interleave,
    }


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **EXPERT_FIELDS,
        **LATENT_FIELDS,
        **honoured_fields("num_local_experts rope_interleave"),
        "scoring_func": SupportedValues(("sigmoid",)),
        "topk_method": SupportedValues(("noaux_tc",)),
        "moe_layer_freq": SupportedValues((1,)),
    },
    tensors=SHARED_EXPERTS,
    same_as=("kimi_k2",),
)
