"""MiniMax-M2: Mixtral's tensors, a sigmoid router, heads that are rotated in part."""

from jmoe.config import ModelConfig, RouterConfig, check
from jmoe.models.families.family import Family
from jmoe.models.families.mixtral import FAMILY as MIXTRAL
from jmoe.models.families.outcomes import (
    EVERY_FAMILY,
    SupportedValues,
    TrainingOnlyField,
    harmless_fields,
    honoured_fields,
)
from jmoe.models.families.reader import ConfigFields, common_fields
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import FUSED, as_stored_source
from jmoe.models.families.writer import common_json
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    types = fields.tuple_value("attn_type_list")
    check(set(types) <= {1}, "attn_type_list", types, "must be all 1, softmax attention")
    head_dim = fields.integer("head_dim", default=128)
    check(head_dim > 0, "head_dim", head_dim, "must be greater than 0")
    share = fields.integer("rotary_dim", default=head_dim) / head_dim
    return common_fields(fields, 1e-6) | {
        "head_dim": head_dim,
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_local_experts", "num_experts", default=256),
        "num_experts_per_tok": fields.integer("num_experts_per_tok", default=8),
        "qk_norm": "full",
        "router": RouterConfig(kind="sigmoid", aux_loss_coef=0.0),  # the bias balances the experts
        **read_rope_fields(fields, 5e6, partial=share),
    }


def _write(config: ModelConfig) -> JsonObject:
    return {
        **common_json(config),
        "intermediate_size": config.moe_intermediate_size,
        "head_dim": config.dim_per_head,
        "num_local_experts": config.num_experts,
        "router_aux_loss_coef": 0.0,
        "rotary_dim": config.rotary_dim,
    }


_BIAS = "moe.router.e_score_correction_bias"
FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields(
            """head_dim num_local_experts num_experts rotary_dim partial_rotary_factor
            attn_type_list"""
        ),
        **harmless_fields("num_mtp_modules mtp_transformer_layers use_mtp"),
        "router_aux_loss_coef": TrainingOnlyField(0.0),
        "router_jitter_noise": TrainingOnlyField(0.0),
        "scoring_func": SupportedValues(("sigmoid",)),
        "qk_norm_type": SupportedValues(("per_layer",)),
        "use_qk_norm": SupportedValues((True,)),
        "use_routing_bias": SupportedValues((True,)),
        "shared_intermediate_size": SupportedValues((0,)),
    },
    tensors={
        **MIXTRAL.tensors,
        _BIAS: as_stored_source("block_sparse_moe.e_score_correction_bias"),
    },
    fused_tensors={**FUSED, _BIAS: as_stored_source("mlp.e_score_correction_bias")},
)
