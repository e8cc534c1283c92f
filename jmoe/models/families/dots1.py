"""dots.llm1: DeepSeek's experts, Qwen3's attention."""

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
from jmoe.models.families.writer import common_json, layer_types_json, same_named_fields
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    window = fields.integer_or_none("sliding_window", 4096)
    below = fields.integer("max_window_layers", default=62)
    types = fields.tuple_value("layer_types") or tuple(
        "sliding_attention" if window is not None and i >= below else "full_attention"
        for i in range(fields.integer("num_hidden_layers"))
    )
    slides = "sliding_attention" in types
    return common_fields(fields, 1e-6) | {
        "head_dim": fields.integer_or_none("head_dim"),
        "attention_bias": fields.flag("attention_bias", False),
        "qk_norm": "head",
        "sliding_window": window if slides else None,
        "layer_types": types if slides else (),
        **read_expert_sizes(fields, None),
        "router": read_group_limited_router(fields, norm_topk_prob=False, groups=1),
        **read_rope_fields(fields, 1e4),
    }


def _write(config: ModelConfig) -> JsonObject:
    full = ["full_attention"] * config.num_hidden_layers
    return {
        **common_json(config),
        "head_dim": config.dim_per_head,
        **same_named_fields(config, "attention_bias", "sliding_window"),
        "layer_types": layer_types_json(config) if config.sliding_window else full,
        **expert_sizes_json(config),
        **group_limited_router_json(config),
    }


FAMILY = Family(
    "dots1",
    "Dots1ForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **EXPERT_FIELDS,
        **honoured_fields(
            "num_local_experts head_dim attention_bias sliding_window layer_types max_window_layers"
        ),
    },
    tensors=SHARED_EXPERTS,
)
