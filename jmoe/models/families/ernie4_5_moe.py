"""ERNIE 4.5: a softmax router whose choice has a bias, shared experts, neighbours rotated."""

from jmoe.config import ModelConfig, RouterConfig
from jmoe.models.families.deepseek import SHARED_EXPERTS
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
from jmoe.models.families.tensors import FUSED, TensorSource
from jmoe.models.families.writer import common_json
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    layers = fields.integer("num_hidden_layers")
    first = fields.integer("moe_layer_start_index", default=1)
    last = fields.integer("moe_layer_end_index", default=-1)
    last = layers - 1 if last == -1 else last
    step = fields.integer("moe_layer_interval", default=1)
    dense = [i for i in range(layers) if (i + 1) % max(step, 1) or not first <= i <= last]
    moe_size = fields.integer("moe_intermediate_size", default=1536)
    shared = fields.integer("moe_num_shared_experts", default=2)
    return common_fields(fields, 1e-5) | {
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "head_dim": fields.integer_or_none("head_dim"),
        "moe_intermediate_size": moe_size,
        "num_experts": fields.integer("moe_num_experts", "num_experts", default=64),
        "num_experts_per_tok": fields.integer("moe_k", "num_experts_per_tok", default=6),
        "shared_expert_intermediate_size": moe_size * shared,
        "mlp_only_layers": tuple(dense),
        "rope_interleave": True,
        "router": RouterConfig(kind="softmax_biased", aux_loss_coef=0.0),  # the bias balances
        **read_rope_fields(fields, 5e5),
    }


def _write(config: ModelConfig) -> JsonObject:
    experts = [i for i, kind in enumerate(config.layer_kinds) if kind == "moe"]
    written = {
        **common_json(config),
        "head_dim": config.dim_per_head,
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_num_experts": config.num_experts,
        "moe_k": config.num_experts_per_tok,
        "moe_num_shared_experts": (
            config.shared_expert_intermediate_size // config.moe_intermediate_size
        ),
        "moe_layer_start_index": experts[0],
        "moe_layer_end_index": experts[-1],
        "moe_layer_interval": experts[1] - experts[0] if len(experts) > 1 else 1,
        "router_aux_loss_coef": 0.0,
    }
    del written["num_experts_per_tok"]
    return written


_BIAS = "moe.router.e_score_correction_bias"
FAMILY = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **honoured_fields(
            """head_dim moe_intermediate_size moe_num_experts num_experts moe_k
            moe_num_shared_experts moe_layer_start_index moe_layer_end_index moe_layer_interval"""
        ),
        **harmless_fields("num_nextn_predict_layers"),
        "use_bias": SupportedValues((False,)),
        "moe_norm_min": SupportedValues((1e-12,)),
        "router_aux_loss_coef": TrainingOnlyField(0.0),
    },
    tensors={
        **SHARED_EXPERTS,
        _BIAS: TensorSource(("mlp.moe_statics.e_score_correction_bias",), as_row=True),
    },
    fused_tensors={
        **FUSED,
        _BIAS: TensorSource(("mlp.gate.moe_statics.e_score_correction_bias",), as_row=True),
    },
)
