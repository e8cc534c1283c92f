"""The parts that DeepSeek-V3 and the families after it share: latent attention, shared experts."""

from jmoe.config import ModelConfig, RouterConfig, check
from jmoe.models.families.outcomes import harmless_fields, honoured_fields
from jmoe.models.families.reader import ConfigFields
from jmoe.models.families.tensors import TensorSource, transposed_source
from jmoe.models.families.writer import normalization_json, same_named_fields
from jmoe.types import JsonObject

SHARED_EXPERTS: dict[str, TensorSource] = {
    "shared_expert.w_up": transposed_source(
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "shared_expert.w_down": transposed_source("mlp.shared_experts.down_proj.weight"),
}
EXPERT_FIELDS = {
    **honoured_fields(
        """moe_intermediate_size n_routed_experts n_shared_experts
        first_k_dense_replace norm_topk_prob n_group topk_group routed_scaling_factor"""
    ),
    **harmless_fields(
        """num_mtp_layers num_nextn_predict_layers pretraining_tp ep_size aux_loss_alpha seq_aux"""
    ),
}
LATENT_FIELDS = {
    **honoured_fields(
        """head_dim attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim
        v_head_dim"""
    ),
    **harmless_fields("qk_head_dim"),
}
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_latent_attention(fields: ConfigFields) -> JsonObject:
    """Return the arguments of `ModelConfig` that describe latent attention. Raises ValueError if
    head_dim is not the size of the rotary part.
    """
    # transformers uses head_dim for the rotary positions alone
    fields.require_value("head_dim", fields.integer("qk_rope_head_dim"))
    return {
        "attention_bias": fields.flag("attention_bias", False),
        "q_lora_rank": fields.integer_or_none("q_lora_rank", 1536),
        **fields.integers(_LATENT_SIZES),
    }


def latent_attention_json(config: ModelConfig) -> JsonObject:
    """Return the fields of `config.json` that `read_latent_attention` reads."""
    return same_named_fields(config, "attention_bias", "q_lora_rank", *_LATENT_SIZES)


def read_expert_sizes(
    fields: ConfigFields, shared_default: int | None = 1, alias: str = "num_local_experts"
) -> JsonObject:
    """Return the arguments of `ModelConfig` that describe routed experts and shared experts, which
    are one wider MLP.

    shared_default: number of shared experts if `n_shared_experts` is missing; with None, or if the
    number is not positive, raises ValueError. alias: the other name of `n_routed_experts`.
    """
    moe_size = fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", default=shared_default)
    check(shared > 0, "n_shared_experts", shared, "must be greater than 0")
    return {
        "moe_intermediate_size": moe_size,
        "num_experts": fields.integer("n_routed_experts", alias),
        "num_experts_per_tok": fields.integer("num_experts_per_tok"),
        "first_k_dense_replace": fields.integer("first_k_dense_replace"),
        "shared_expert_intermediate_size": moe_size * shared,
    }


def expert_sizes_json(config: ModelConfig) -> JsonObject:
    """Return the fields of `config.json` that `read_expert_sizes` reads."""
    moe_size = config.moe_intermediate_size
    return {
        "moe_intermediate_size": moe_size,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_expert_intermediate_size // moe_size,
        "first_k_dense_replace": config.first_k_dense_replace,
    }


def read_group_limited_router(
    fields: ConfigFields, *, norm_topk_prob: bool = True, groups: int | None = None
) -> RouterConfig:
    """Return the configuration of the router with sigmoid scores, groups and a correction bias.

    norm_topk_prob, groups: the family's defaults; with None, a missing number of groups raises
    ValueError.
    """
    return RouterConfig(
        kind="group_limited",
        norm_topk_prob=fields.nullable_flag("norm_topk_prob", norm_topk_prob),
        aux_loss_coef=0.0,  # the correction bias balances the experts
        n_group=fields.integer("n_group", default=groups),
        topk_group=fields.integer("topk_group", default=groups),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
    )


def group_limited_router_json(config: ModelConfig) -> JsonObject:
    """Return the fields of `config.json` that `read_group_limited_router` reads."""
    router = config.router
    return {
        **normalization_json(config),
        "n_group": router.n_group,
        "topk_group": router.topk_group,
        "routed_scaling_factor": router.routed_scaling_factor,
    }
