"""Granite 3 MoE: Mixtral with constant factors of embeddings, scores, residuals and logits."""

from jmoe.config import ModelConfig
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import EVERY_FAMILY, honoured_fields
from jmoe.models.families.reader import ConfigFields, common_fields, softmax_router_config
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import TensorSource, transposed_source
from jmoe.models.families.writer import common_json, same_named_fields, softmax_router_json
from jmoe.types import JsonObject

_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def _read(fields: ConfigFields) -> JsonObject:
    choices = fields.integer("num_experts_per_tok", default=2)
    return common_fields(fields, 1e-6) | {
        "head_dim": fields.integer_or_none("head_dim"),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_local_experts", default=8),
        "num_experts_per_tok": choices,
        "attention_bias": fields.flag("attention_bias", False),
        "router": softmax_router_config(fields, choices, True),
        **{name: fields.number(name, 1.0) for name in _FACTORS},
        **read_rope_fields(fields, 1e4),
    }


def _write(config: ModelConfig) -> JsonObject:
    return {
        **common_json(config),
        **softmax_router_json(config),
        **same_named_fields(config, "attention_bias", *_FACTORS),
        "attention_multiplier": config.attention_scale,
        "intermediate_size": config.moe_intermediate_size,
        "head_dim": config.dim_per_head,
        "num_local_experts": config.num_experts,
    }


def _stacked(name: str) -> TensorSource:
    return TensorSource((f"block_sparse_moe.{name}",), transposed=True, stacked=True)


FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields("head_dim num_local_experts router_aux_loss_coef"),
        **honoured_fields("attention_bias"),
        **honoured_fields(" ".join(_FACTORS)),
    },
    tensors={
        "moe.router.kernel": transposed_source("block_sparse_moe.router.layer.weight"),
        "moe.experts.w_up": _stacked("input_linear.weight"),
        "moe.experts.w_down": _stacked("output_linear.weight"),
    },
    fused_tensors={
        "moe.router.kernel": transposed_source("block_sparse_moe.router.weight"),
        "moe.experts.w_up": _stacked("experts.gate_up_proj"),
        "moe.experts.w_down": _stacked("experts.down_proj"),
    },
)
