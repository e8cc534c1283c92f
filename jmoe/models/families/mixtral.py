"""Mixtral."""

from jmoe.config import ModelConfig
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import EVERY_FAMILY, TrainingOnlyField, honoured_fields
from jmoe.models.families.reader import ConfigFields, common_fields, softmax_router_config
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.tensors import transposed_source
from jmoe.models.families.writer import common_json, softmax_router_json
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    choices = fields.integer("num_experts_per_tok", default=2)
    return common_fields(fields, 1e-5) | {
        "head_dim": fields.integer_or_none("head_dim"),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_local_experts", "num_experts", default=8),
        "num_experts_per_tok": choices,
        "sliding_window": fields.integer_or_none("sliding_window"),
        "router": softmax_router_config(fields, choices, True),
        **read_rope_fields(fields, 1e6),
    }


def _write(config: ModelConfig) -> JsonObject:
    return (
        common_json(config)
        | softmax_router_json(config)
        | {
            "intermediate_size": config.moe_intermediate_size,
            "head_dim": config.dim_per_head,
            "num_local_experts": config.num_experts,
            "sliding_window": config.sliding_window,
        }
    )


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields(
            "head_dim num_local_experts num_experts router_aux_loss_coef sliding_window"
        ),
        "router_jitter_noise": TrainingOnlyField(0.0),
    },
    tensors={
        "moe.router.kernel": transposed_source("block_sparse_moe.gate.weight"),
        "moe.experts.w_up": transposed_source(
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
        ),
        "moe.experts.w_down": transposed_source("block_sparse_moe.experts.{expert}.w2.weight"),
    },
)
