"""The language model of Llama 4: attention in chunks, layers without positions, top-1 of sigmoid
scores that multiply the expert's input.
"""

from jmoe.config import NO_WINDOW, ModelConfig, RouterConfig, check
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import EVERY_FAMILY, harmless_fields, honoured_fields
from jmoe.models.families.reader import ConfigFields, common_fields
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import stacked_source, transposed_source
from jmoe.models.families.writer import common_json, layer_types_json, same_named_fields
from jmoe.types import JsonObject

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _read_layer_types(fields: ConfigFields) -> JsonObject:
    layers = fields.integer("num_hidden_layers")
    listed = fields.tuple_value("layer_types")
    words = f"must have {layers} entries or none"
    check(len(listed) in (0, layers), "layer_types", listed, words)
    interval = fields.integer("no_rope_layer_interval", default=4)
    check(interval > 0, "no_rope_layer_interval", interval, "must be greater than 0")
    rotated = fields.tuple_value("no_rope_layers") or tuple(
        int((i + 1) % interval != 0) for i in range(layers)
    )
    fits = len(rotated) >= layers and any(rotated[:layers])
    words = f"must have {layers} numbers, and 1 for some layer"
    check(fits, "no_rope_layers", rotated, words)
    chunk = fields.integer_or_none("attention_chunk_size", 8192)
    types = tuple(_CHUNKED if each else _FULL for each in rotated[:layers])
    named = types if chunk is not None else (_FULL,) * layers
    words = f"must be {_CHUNKED} in the layers with 1 in no_rope_layers, and {_FULL} in others"
    check(listed in ((), named), "layer_types", listed, words)
    longest = min(fields.integer("max_position_embeddings"), NO_WINDOW - 1)
    return {"layer_types": types, "attention_chunk_size": longest if chunk is None else chunk}


def _read_dense_layers(fields: ConfigFields) -> tuple[int, ...]:
    layers = fields.integer("num_hidden_layers")
    step = fields.integer("interleave_moe_layer_step", default=1)
    check(step > 0, "interleave_moe_layer_step", step, "must be greater than 0")
    listed = fields.value("moe_layers")
    with_experts = range(step - 1, layers, step) if listed is None else listed
    check(isinstance(with_experts, range | list), "moe_layers", listed, "must be a list")
    return tuple(i for i in range(layers) if i not in with_experts)


def _read(fields: ConfigFields) -> JsonObject:
    fields.require_value("num_experts_per_tok", 1)
    size = fields.integer("intermediate_size")
    tuned = fields.flag("attn_temperature_tuning", True)
    return common_fields(fields, 1e-5) | {
        "head_dim": fields.integer_or_none("head_dim", 128),
        "intermediate_size": fields.integer("intermediate_size_mlp", default=16384),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
        "num_experts": fields.integer("num_local_experts", default=16),
        "num_experts_per_tok": 1,
        "mlp_only_layers": _read_dense_layers(fields),
        "qk_norm": "rotated_l2" if fields.flag("use_qk_norm", True) else "none",
        "attention_bias": fields.flag("attention_bias", False),
        "attn_scale": fields.number("attn_scale", 0.1) if tuned else 0.0,
        "floor_scale": fields.integer("floor_scale", default=8192),
        "rope_interleave": True,
        "router": RouterConfig(kind="input_weighted", norm_topk_prob=False, aux_loss_coef=0.0),
        **_read_layer_types(fields),
        **read_rope_fields(fields, 5e5),
    }


def _write(config: ModelConfig) -> JsonObject:
    types = layer_types_json(config)
    return {
        **common_json(config),
        **same_named_fields(config, "attention_bias", "attention_chunk_size"),
        **same_named_fields(config, "attn_scale", "floor_scale"),
        "intermediate_size": config.moe_intermediate_size,
        "intermediate_size_mlp": config.intermediate_size,
        "head_dim": config.dim_per_head,
        "num_local_experts": config.num_experts,
        "moe_layers": [i for i, kind in enumerate(config.layer_kinds) if kind == "moe"],
        "no_rope_layers": [int(kind == _CHUNKED) for kind in types],
        "layer_types": types,
        "use_qk_norm": config.qk_norm == "rotated_l2",
        "attn_temperature_tuning": config.attn_scale > 0,
    }


FAMILY = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields(
            """head_dim intermediate_size_mlp num_local_experts moe_layers attention_bias
            interleave_moe_layer_step use_qk_norm no_rope_layers no_rope_layer_interval layer_types
            attention_chunk_size attn_temperature_tuning attn_scale floor_scale"""
        ),
        # the class of transformers has no balance loss and no noise
        **harmless_fields("router_aux_loss_coef router_jitter_noise for_llm_compressor"),
    },
    tensors={
        "mlp.w_up": transposed_source(
            "feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"
        ),
        "mlp.w_down": transposed_source("feed_forward.down_proj.weight"),
        "moe.router.kernel": transposed_source("feed_forward.router.weight"),
        "moe.experts.w_up": stacked_source("feed_forward.experts.gate_up_proj"),
        "moe.experts.w_down": stacked_source("feed_forward.experts.down_proj"),
        "shared_expert.w_up": transposed_source(
            "feed_forward.shared_expert.gate_proj.weight",
            "feed_forward.shared_expert.up_proj.weight",
        ),
        "shared_expert.w_down": transposed_source("feed_forward.shared_expert.down_proj.weight"),
    },
    fused_tensors={},
)
