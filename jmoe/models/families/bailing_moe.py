"""Ling and Ring (Bailing-MoE): a softmax router in version 1; groups, sigmoid scores and normed
queries and keys in version 2. transformers has no class of theirs; their code lies beside the
weights.
"""

from jmoe.config import ModelConfig, RouterConfig, check
from jmoe.models.families.deepseek import (
    SHARED_EXPERTS,
    group_limited_router_json,
    read_group_limited_router,
)
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import (
    EVERY_FAMILY,
    SupportedValues,
    TrainingOnlyField,
    harmless_fields,
    honoured_fields,
)
from jmoe.models.families.reader import ConfigFields, common_fields
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import as_stored_source, transposed_source
from jmoe.models.families.writer import common_json, normalization_json, same_named_fields
from jmoe.types import JsonObject

_VERSION_2 = "BailingMoeV2ForCausalLM"


def _read_biases(fields: ConfigFields, version_2: bool) -> JsonObject:
    qkv, output = fields.flag("use_qkv_bias", False), fields.flag("use_bias", not version_2)
    check(qkv or not output, "use_bias", output, "is not supported without use_qkv_bias")
    return {"attention_bias": output, "qkv_bias": qkv}


def _read_version_1(fields: ConfigFields) -> JsonObject:
    for name, only in (("use_qk_norm", False), ("partial_rotary_factor", 1.0)):
        fields.require_value(name, only)  # the code of version 1 ignores them
    normalizes = fields.flag("norm_topk_prob", True)
    router = RouterConfig(kind="softmax", norm_topk_prob=normalizes, aux_loss_coef=0.0)
    return {"router": router, **read_rope_fields(fields, 1e4)}


def _read_version_2(fields: ConfigFields) -> JsonObject:
    fields.require_value("norm_topk_prob", True)
    head_dim = fields.integer("head_dim", default=128)
    check(head_dim > 0, "head_dim", head_dim, "must be greater than 0")
    rotated = fields.integer_or_none("rotary_dim")
    share = fields.number("partial_rotary_factor", 1.0) if rotated is None else rotated / head_dim
    return {
        "head_dim": head_dim,
        "qk_norm": "head" if fields.flag("use_qk_norm", True) else "none",
        "router": read_group_limited_router(fields),
        **read_rope_fields(fields, 6e5, partial=share),
        "partial_rotary_factor": share,
    }


def _read(fields: ConfigFields) -> JsonObject:
    sigmoid = fields.value("score_function") == "sigmoid"
    version_2 = sigmoid or _VERSION_2 in fields.tuple_value("architectures")
    moe_size = fields.integer("moe_intermediate_size")
    fields.require_value("moe_shared_expert_intermediate_size", moe_size)
    shared = fields.integer("num_shared_experts", default=int(version_2))
    return common_fields(fields, 1e-6 if version_2 else 1e-5) | {
        "head_dim": fields.integer_or_none("head_dim"),
        "moe_intermediate_size": moe_size,
        "shared_expert_intermediate_size": moe_size * shared,
        **fields.integers(("num_experts", "num_experts_per_tok")),
        "first_k_dense_replace": fields.integer("first_k_dense_replace", default=int(version_2)),
        **_read_biases(fields, version_2),
        **(_read_version_2(fields) if version_2 else _read_version_1(fields)),
    }


def _write(config: ModelConfig) -> JsonObject:
    moe_size, written = config.moe_intermediate_size, common_json(config)
    rope = written.pop("rope_parameters")  # of transformers 5, which the code does not read
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    share = rope.pop("partial_rotary_factor", 1.0)
    written |= {
        **same_named_fields(config, "moe_intermediate_size", "num_experts"),
        **same_named_fields(config, "first_k_dense_replace"),
        **normalization_json(config),
        "head_dim": config.dim_per_head,
        "num_shared_experts": config.shared_expert_intermediate_size // moe_size,
        "use_qkv_bias": config.qkv_bias or config.attention_bias,
        "use_bias": config.attention_bias,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {**rope, "type": kind},
    }
    if config.router.rules.scores != "sigmoid":
        return written
    return {
        **written,
        **group_limited_router_json(config),
        "architectures": [_VERSION_2],
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": config.qk_norm == "head",
        "partial_rotary_factor": share,
    }


FAMILY = Family(
    "bailing_moe",
    "BailingMoeForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields(
            """architectures head_dim moe_intermediate_size moe_shared_expert_intermediate_size
            num_experts num_shared_experts first_k_dense_replace norm_topk_prob n_group topk_group
            routed_scaling_factor use_bias use_qkv_bias use_qk_norm partial_rotary_factor
            rotary_dim"""
        ),
        **harmless_fields(
            """router_dtype num_nextn_predict_layers mtp_loss_scaling_factor max_window_layers
            pretraining_tp sliding_window"""
        ),
        "score_function": SupportedValues(("sigmoid",)),
        "moe_router_enable_expert_bias": SupportedValues((True,)),
        "use_rmsnorm": SupportedValues((True,)),
        **dict.fromkeys(
            ("norm_head", "norm_softmax", "multi_gate", "use_sliding_window"),
            SupportedValues((False,)),
        ),
        **dict.fromkeys(("embedding_dropout", "output_dropout"), TrainingOnlyField(0.0)),
    },
    tensors={
        **SHARED_EXPERTS,
        "embedding": as_stored_source("model.word_embeddings.weight"),
        "attention.w_qkv": transposed_source("attention.query_key_value.weight"),
        "attention.b_qkv": as_stored_source("attention.query_key_value.bias"),
        "attention.q_norm.scale": as_stored_source("attention.query_layernorm.weight"),
        "attention.k_norm.scale": as_stored_source("attention.key_layernorm.weight"),
        "attention.w_out": transposed_source("attention.dense.weight"),
        "attention.b_out": as_stored_source("attention.dense.bias"),
        "moe.router.e_score_correction_bias": as_stored_source("mlp.gate.expert_bias"),
    },
    fused_tensors={},
    same_as=("bailing_moe_v2",),
)
