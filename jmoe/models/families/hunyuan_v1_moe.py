"""Hunyuan-A13B: a shared expert as large as the others, norms of rotated queries and keys."""

from jmoe.config import ModelConfig, RouterConfig, check
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import (
    EVERY_FAMILY,
    SupportedValues,
    harmless_fields,
    honoured_fields,
)
from jmoe.models.families.reader import ConfigFields, common_fields
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import FUSED, as_stored_source, transposed_source
from jmoe.models.families.writer import common_json, same_named_fields
from jmoe.types import JsonObject


def _equal_in_all_layers(fields: ConfigFields, name: str, default: int) -> int:
    """Return an integer that a file may list once for each layer."""
    value = fields.value(name)
    if not isinstance(value, list):
        return fields.integer(name, default=default)
    check(len(set(map(str, value))) == 1, name, value, "must be the same for all layers")
    return ConfigFields({name: value[0]}).integer(name)


def _read(fields: ConfigFields) -> JsonObject:
    size = fields.integer("intermediate_size")
    choices = _equal_in_all_layers(
        fields, "moe_topk", fields.integer("num_experts_per_tok", default=1)
    )
    fields.require_value("num_experts_per_tok", choices)
    words = "must be at least 2: weights are divided by their sum"
    check(choices > 1, "moe_topk", choices, words)
    for name, only in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        size_or_count = _equal_in_all_layers(fields, name, only)
        check(size_or_count == only, name, fields.value(name), f"is not supported, only {only}")
    return common_fields(fields, 1e-5) | {
        "head_dim": fields.integer_or_none("head_dim"),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
        "num_experts": fields.integer("num_experts", "num_local_experts", default=1),
        "num_experts_per_tok": choices,
        "qk_norm": "rotated_head",
        "attention_bias": fields.flag("attention_bias", False),
        "router": RouterConfig(kind="softmax", aux_loss_coef=0.0),
        **read_rope_fields(fields, 1e4, alpha=True),
    }


def _write(config: ModelConfig) -> JsonObject:
    fields = common_json(config)
    choices = fields.pop("num_experts_per_tok")
    return {
        **fields,
        **same_named_fields(config, "num_experts", "attention_bias"),
        "moe_topk": choices,
        "intermediate_size": config.moe_intermediate_size,
        "head_dim": config.dim_per_head,
    }


_ROUTER = {"moe.router.kernel": transposed_source("mlp.gate.wg.weight")}
FAMILY = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields("head_dim num_experts num_local_experts moe_topk attention_bias"),
        **honoured_fields("moe_intermediate_size num_shared_expert"),
        **harmless_fields("pretraining_tp eod_token_id sep_token_id"),
        "use_cla": SupportedValues((False,)),
        "use_qk_norm": SupportedValues((True,)),
        "mlp_bias": SupportedValues((False,)),
        "moe_layer_num_skipped": SupportedValues((0,)),
    },
    tensors={
        **_ROUTER,
        "attention.q_norm.scale": as_stored_source("self_attn.query_layernorm.weight"),
        "attention.k_norm.scale": as_stored_source("self_attn.key_layernorm.weight"),
        "shared_expert.w_up": transposed_source(
            "mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"
        ),
        "shared_expert.w_down": transposed_source("mlp.shared_mlp.down_proj.weight"),
    },
    fused_tensors={**FUSED, **_ROUTER},
)
