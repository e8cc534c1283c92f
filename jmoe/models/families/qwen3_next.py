"""Qwen3-Next."""

from jmoe.config import ModelConfig
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import honoured_fields
from jmoe.models.families.qwen_linear import (
    LINEAR_FIELDS,
    linear_tensors,
    qwen_linear_json,
    read_qwen_linear_fields,
)
from jmoe.models.families.reader import ConfigFields
from jmoe.models.families.writer import dense_layers_json, normalization_json
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    norm_topk_prob = fields.flag("norm_topk_prob", True)
    return read_qwen_linear_fields(fields, 5632, norm_topk_prob=norm_topk_prob) | {
        "num_experts": fields.integer("num_experts", default=512),
        "decoder_sparse_step": fields.integer("decoder_sparse_step", default=1),
        "mlp_only_layers": fields.tuple_value("mlp_only_layers"),
        "linear_projections_by_head": True,
    }


def _write(config: ModelConfig) -> JsonObject:
    return {
        **qwen_linear_json(config),
        **normalization_json(config),
        **dense_layers_json(config),
        "decoder_sparse_step": 1,
    }


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _read,
    _write,
    fields={
        **LINEAR_FIELDS,
        **honoured_fields("norm_topk_prob decoder_sparse_step mlp_only_layers"),
    },
    tensors=linear_tensors("in_proj_qkvz", "in_proj_ba"),
)
