"""jmoe's own GPT-MoE, which transformers lacks: LayerNorm, exact GELU, learned positions, biases.

Its field names are those of transformers.
"""

from jmoe.config import ModelConfig
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import SupportedValues, harmless_fields, honoured_fields
from jmoe.models.families.reader import SIZES, ConfigFields, softmax_router_config
from jmoe.models.families.tensors import as_stored_source, transposed_source
from jmoe.models.families.writer import (
    dense_layers_json,
    normalization_json,
    same_named_fields,
    size_fields,
    softmax_router_json,
)
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    sizes, choices = fields.integers(SIZES), fields.integer("num_experts_per_tok", default=1)
    normalizes = fields.flag("norm_topk_prob", False)
    return sizes | {
        "num_key_value_heads": fields.integer(
            "num_key_value_heads", default=sizes["num_attention_heads"]
        ),
        "head_dim": fields.integer_or_none("head_dim"),
        "intermediate_size": fields.integer("intermediate_size"),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "num_experts": fields.integer("num_experts"),
        "num_experts_per_tok": choices,
        "mlp_only_layers": fields.tuple_value("mlp_only_layers"),
        "hidden_act": "gelu",
        "norm": "layernorm",
        "norm_eps": fields.number("layer_norm_eps", 1e-5),
        "position": "learned",
        "attention_bias": fields.flag("attention_bias", True),
        "mlp_bias": fields.flag("mlp_bias", True),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "initializer_range": fields.number("initializer_range", 0.02),
        "router": softmax_router_config(fields, choices, normalizes, 0.01),
    }


def _write(config: ModelConfig) -> JsonObject:
    return {
        **size_fields(config),
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_eps,
        **softmax_router_json(config),
        "head_dim": config.dim_per_head,
        **normalization_json(config),
        **dense_layers_json(config),
        **same_named_fields(config, "moe_intermediate_size", "num_experts"),
        **same_named_fields(config, "attention_bias", "mlp_bias"),
    }


FAMILY = Family(
    "gpt_moe",
    "GptMoeForCausalLM",
    _read,
    _write,
    fields={
        **honoured_fields(
            """model_type vocab_size hidden_size num_hidden_layers num_attention_heads
            num_key_value_heads head_dim intermediate_size moe_intermediate_size num_experts
            num_experts_per_tok mlp_only_layers max_position_embeddings layer_norm_eps
            attention_bias mlp_bias tie_word_embeddings norm_topk_prob router_aux_loss_coef
            initializer_range eos_token_id quantization_config expert_dtype"""
        ),
        **harmless_fields("architectures dtype bos_token_id pad_token_id output_router_logits"),
        "hidden_act": SupportedValues(("gelu",)),
    },
    tensors={
        "mlp.w_up": transposed_source("mlp.up_proj.weight"),
        "mlp.b_up": as_stored_source("mlp.up_proj.bias"),
        "mlp.b_down": as_stored_source("mlp.down_proj.bias"),
        "moe.experts.w_up": transposed_source("mlp.experts.{expert}.up_proj.weight"),
        "moe.experts.b_up": as_stored_source("mlp.experts.{expert}.up_proj.bias"),
        "moe.experts.b_down": as_stored_source("mlp.experts.{expert}.down_proj.bias"),
    },
    fused_tensors={},
)
