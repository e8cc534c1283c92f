"""Gated delta networks, gated attention and zero-centred norms, of Qwen3-Next and Qwen3.5-MoE."""

from jmoe.config import LINEAR_ATTENTION, LINEAR_SIZES, ModelConfig, check
from jmoe.models.families.outcomes import (
    EVERY_FAMILY,
    SupportedValues,
    harmless_fields,
    honoured_fields,
)
from jmoe.models.families.reader import ConfigFields, common_fields, softmax_router_config
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import TensorSource, as_stored_source, transposed_source
from jmoe.models.families.writer import (
    common_json,
    layer_types_json,
    same_named_fields,
    softmax_router_json,
)
from jmoe.types import JsonObject

LINEAR_FIELDS = {
    **EVERY_FAMILY,
    **honoured_fields(
        f"""head_dim moe_intermediate_size num_experts shared_expert_intermediate_size
        router_aux_loss_coef layer_types full_attention_interval partial_rotary_factor
        {" ".join(LINEAR_SIZES)}"""
    ),
    # the state is float32 here too; layers that predict further tokens change no logits
    **harmless_fields("mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings"),
    "attention_bias": SupportedValues((False,)),
    "attn_output_gate": SupportedValues((True,)),
}
_DEFAULTS = dict(zip(LINEAR_SIZES, (16, 32, 128, 128, 4), strict=True))


def read_qwen_linear_fields(
    fields: ConfigFields, intermediate_size: int, *, norm_topk_prob: bool
) -> JsonObject:
    """Return the arguments of `ModelConfig` that both families have in common.

    intermediate_size: the default of the field.
    """
    choices, layers = fields.integer("num_experts_per_tok"), fields.integer("num_hidden_layers")
    every = fields.integer("full_attention_interval", default=4)
    check(every > 0, "full_attention_interval", every, "must be above 0")
    in_turn = (LINEAR_ATTENTION if (i + 1) % every else "full_attention" for i in range(layers))
    types = fields.tuple_value("layer_types") or tuple(in_turn)
    check(LINEAR_ATTENTION in types, "layer_types", types, f"must have a layer {LINEAR_ATTENTION}")
    return common_fields(fields, 1e-6, intermediate_size) | {
        **{name: fields.integer(name, default=size) for name, size in _DEFAULTS.items()},
        "layer_types": types,
        "head_dim": fields.integer("head_dim", default=256),
        "norm": "zero_centered_rmsnorm",
        "qk_norm": "head",
        "attention_gate": True,
        "num_experts_per_tok": choices,
        "moe_intermediate_size": fields.integer("moe_intermediate_size", default=512),
        "shared_expert_intermediate_size": fields.integer(
            "shared_expert_intermediate_size", default=512
        ),
        "shared_expert_gate": True,
        "router": softmax_router_config(fields, choices, norm_topk_prob),
        **read_rope_fields(fields, 1e4, partial=0.25),
    }


def qwen_linear_json(config: ModelConfig) -> JsonObject:
    """Return the fields of `config.json` that both families have in common."""
    return {
        **common_json(config),
        **softmax_router_json(config),
        **same_named_fields(config, "moe_intermediate_size", "num_experts", *LINEAR_SIZES),
        **same_named_fields(config, "shared_expert_intermediate_size", "partial_rotary_factor"),
        "head_dim": config.dim_per_head,
        "layer_types": layer_types_json(config),
    }


def linear_tensors(*projections: str) -> dict[str, TensorSource]:
    """Return the tensors of a gated delta network. projections: those of its input, in order."""
    names = (f"linear_attn.{name}.weight" for name in projections)
    taps = TensorSource(("linear_attn.conv1d.weight",), transposed=True, by_channel=True)
    return {
        "attention.w_in": transposed_source(*names),
        "attention.w_conv": taps,
        "attention.log_rate": as_stored_source("linear_attn.A_log"),
        "attention.b_rate": as_stored_source("linear_attn.dt_bias"),
        "attention.out_norm.scale": as_stored_source("linear_attn.norm.weight"),
        "attention.w_delta_out": transposed_source("linear_attn.out_proj.weight"),
    }
