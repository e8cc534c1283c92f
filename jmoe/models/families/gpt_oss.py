"""gpt-oss."""

import dataclasses

from jmoe.config import ModelConfig
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import (
    EVERY_FAMILY,
    SupportedValues,
    harmless_fields,
    honoured_fields,
)
from jmoe.models.families.reader import ConfigFields, common_fields, softmax_router_config
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import as_stored_source, stacked_source, transposed_source
from jmoe.models.families.writer import common_json, layer_types_json, softmax_router_json
from jmoe.types import JsonObject

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(fields: ConfigFields) -> JsonObject:
    layers = fields.integer("num_hidden_layers")
    window = fields.integer_or_none("sliding_window", 128)
    types = fields.tuple_value("layer_types") or tuple(
        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
    )
    choices = fields.integer("num_experts_per_tok", default=4)
    router = softmax_router_config(fields, choices, True)
    return common_fields(fields, 1e-5) | {
        "head_dim": fields.integer_or_none("head_dim", 64),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_local_experts", "num_experts"),
        "num_experts_per_tok": choices,
        "hidden_act": "clamped_swiglu",
        "mlp_bias": True,
        "sliding_window": window,
        "layer_types": types,
        "attention_sinks": True,
        "attention_bias": fields.flag("attention_bias", True),
        "router": dataclasses.replace(router, bias=True),
        **read_rope_fields(fields, 150_000.0, _YARN),
    }


def _write(config: ModelConfig) -> JsonObject:
    return {
        **common_json(config),
        "intermediate_size": config.moe_intermediate_size,
        **softmax_router_json(config),
        "head_dim": config.dim_per_head,
        "num_local_experts": config.num_experts,
        "sliding_window": config.sliding_window,
        "attention_bias": config.attention_bias,
        "layer_types": layer_types_json(config),
    }


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields(
            """head_dim num_local_experts num_experts router_aux_loss_coef sliding_window
            layer_types attention_bias"""
        ),
        # hidden_act: the model class of transformers ignores it
        **harmless_fields("hidden_act initial_context_length experts_per_token"),
        "swiglu_alpha": SupportedValues((1.702,)),
        "swiglu_limit": SupportedValues((7.0,)),
    },
    tensors={
        "moe.router.kernel": transposed_source("mlp.router.weight"),
        "moe.router.bias": as_stored_source("mlp.router.bias"),
        "moe.experts.w_up": stacked_source("mlp.experts.gate_up_proj", interleaved=True),
        "moe.experts.b_up": stacked_source("mlp.experts.gate_up_proj_bias", interleaved=True),
        "moe.experts.w_down": stacked_source("mlp.experts.down_proj"),
        "moe.experts.b_down": stacked_source("mlp.experts.down_proj_bias"),
    },
    fused_tensors={},
)
