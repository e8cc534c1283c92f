"""DeepSeek-V2 and V2-Lite: latent attention, a softmax router among all experts or some groups."""

import dataclasses

from jmoe.config import ModelConfig, RouterConfig, check
from jmoe.models.families.deepseek import (
    EXPERT_FIELDS,
    LATENT_FIELDS,
    SHARED_EXPERTS,
    expert_sizes_json,
    latent_attention_json,
    read_expert_sizes,
    read_latent_attention,
)
from jmoe.models.families.family import Family
from jmoe.models.families.outcomes import (
    EVERY_FAMILY,
    SupportedValues,
    TrainingOnlyField,
    honoured_fields,
)
from jmoe.models.families.reader import ConfigFields, common_fields
from jmoe.models.families.rope import read_rope_fields
from jmoe.models.families.writer import common_json
from jmoe.types import JsonObject

_GROUPED = "group_limited_greedy"


def _read(fields: ConfigFields) -> JsonObject:
    router = RouterConfig(
        norm_topk_prob=False,
        aux_loss_coef=0.0,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )
    method = fields.value("topk_method", "greedy")
    words = f"is not supported, only 'greedy' and {_GROUPED!r}"
    check(method in ("greedy", _GROUPED), "topk_method", method, words)
    if method == _GROUPED:
        router = dataclasses.replace(
            router,
            kind="softmax_group_limited",
            n_group=fields.integer("n_group"),
            topk_group=fields.integer("topk_group"),
        )
    return common_fields(fields, 1e-6) | {
        **read_latent_attention(fields),
        **read_expert_sizes(fields, 2, alias="num_experts"),
        "rope_interleave": True,
        "router": router,
        **read_rope_fields(fields, 1e4),
    }


def _write(config: ModelConfig) -> JsonObject:
    router = config.router
    grouped = router.kind == "softmax_group_limited"
    return {
        **common_json(config),
        **expert_sizes_json(config),
        "topk_method": _GROUPED if grouped else "greedy",
        "n_group": router.n_group if grouped else None,
        "topk_group": router.topk_group if grouped else None,
        "norm_topk_prob": False,
        "routed_scaling_factor": router.routed_scaling_factor,
        **latent_attention_json(config),
    }


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _read,
    _write,
    fields={
        **EVERY_FAMILY,
        **EXPERT_FIELDS,
        **LATENT_FIELDS,
        **honoured_fields("num_experts topk_method"),
        "aux_loss_alpha": TrainingOnlyField(0.0),
        "norm_topk_prob": SupportedValues((False,)),
        "scoring_func": SupportedValues(("softmax",)),
        "moe_layer_freq": SupportedValues((1,)),
        "mlp_bias": SupportedValues((False,)),
    },
    tensors=SHARED_EXPERTS,
)
