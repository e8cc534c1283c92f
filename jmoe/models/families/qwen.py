"""The fields that Qwen2-MoE and Qwen3-MoE share."""

from jmoe.config import ModelConfig
from jmoe.models.families.outcomes import EVERY_FAMILY, honoured_fields
from jmoe.models.families.reader import ConfigFields, common_fields, softmax_router_config
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.writer import (
    common_json,
    dense_layers_json,
    normalization_json,
    same_named_fields,
    softmax_router_json,
)
from jmoe.types import JsonObject

QWEN_FIELDS = {
    **EVERY_FAMILY,
    **honoured_fields(
        """head_dim moe_intermediate_size num_experts norm_topk_prob decoder_sparse_step
        mlp_only_layers router_aux_loss_coef use_sliding_window sliding_window"""
    ),
}


def read_qwen_fields(fields: ConfigFields) -> JsonObject:
    """Return the arguments of `ModelConfig` that Qwen2-MoE and Qwen3-MoE have in common."""
    sliding = fields.flag("use_sliding_window", False)
    choices = fields.integer("num_experts_per_tok")
    return common_fields(fields, 1e-6) | {
        "head_dim": fields.integer_or_none("head_dim"),
        "num_experts_per_tok": choices,
        "decoder_sparse_step": fields.integer("decoder_sparse_step", default=1),
        "mlp_only_layers": fields.tuple_value("mlp_only_layers"),
        "sliding_window": fields.integer_or_none("sliding_window", 4096) if sliding else None,
        "router": softmax_router_config(fields, choices, fields.flag("norm_topk_prob", False)),
        **read_rope_fields(fields, 1e4),
    }


def qwen_json(config: ModelConfig) -> JsonObject:
    """Return the fields of `config.json` that Qwen2-MoE and Qwen3-MoE have in common."""
    return {
        **common_json(config),
        **softmax_router_json(config),
        "head_dim": config.dim_per_head,
        **normalization_json(config),
        **same_named_fields(config, "moe_intermediate_size", "num_experts", "sliding_window"),
        **dense_layers_json(config),
        "decoder_sparse_step": 1,
        "use_sliding_window": config.sliding_window is not None,
    }
