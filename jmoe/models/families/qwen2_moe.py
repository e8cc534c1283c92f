"""Qwen2-MoE."""

from jmoe.config import ModelConfig, check
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import honoured_fields
from jmoe.models.families.qwen import QWEN_FIELDS, qwen_json, read_qwen_fields
from jmoe.models.families.reader import ConfigFields
from jmoe.models.families.writer import layer_types_json, same_named_fields
from jmoe.types import JsonObject


def _read(fields: ConfigFields) -> JsonObject:
    model = read_qwen_fields(fields)
    types = fields.tuple_value("layer_types")
    if model["sliding_window"] is None:
        check("sliding_attention" not in types, "layer_types", types, "needs use_sliding_window")
        types = ()
    elif not types:
        below = fields.integer("max_window_layers", default=28)
        layers = range(model["num_hidden_layers"])
        types = tuple(
            "full_attention" if i % 2 or i >= below else "sliding_attention" for i in layers
        )
    return model | {
        "moe_intermediate_size": fields.integer("moe_intermediate_size", default=1408),
        "num_experts": fields.integer("num_experts", default=60),
        "layer_types": types,
        "qkv_bias": fields.flag("qkv_bias", True),
        "shared_expert_intermediate_size": fields.integer(
            "shared_expert_intermediate_size", default=5632
        ),
        "shared_expert_gate": True,
    }


def _write(config: ModelConfig) -> JsonObject:
    full = ["full_attention"] * config.num_hidden_layers
    return (
        qwen_json(config)
        | same_named_fields(config, "qkv_bias", "shared_expert_intermediate_size")
        | {"layer_types": layer_types_json(config) if config.sliding_window else full}
    )


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _read,
    _write,
    fields={
        **QWEN_FIELDS,
        **honoured_fields("shared_expert_intermediate_size qkv_bias layer_types max_window_layers"),
    },
)
