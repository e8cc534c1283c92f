"""A block without its experts for few tokens on an NVIDIA GPU, in kernels that fold what XLA would
launch by itself: residual sums, biases, norms, the router's product and the choice of experts.

Legend: P rows of a step, C tokens a row, T tokens, D hidden, E experts, K experts that a token
chooses.
"""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe.config.router import RouterConfig
from jmoe.layers.norm import Norm
from jmoe.layers.router import Router
from jmoe.layers.slot_experts import ExpertInputs, UnchosenInputs
from jmoe.models.block import AttentionFn, Block
from kernels_pallas.expert_choices import ChoiceRules, RouterLogits, WeightedOutputs


def fit_few_token_kernels(num_tokens: int) -> bool:
    """Return whether the kernels of this module compute a step of `num_tokens` tokens."""
    from kernels_pallas.add_norm import MAX_TOKENS  # needs Pallas' Triton backend

    return num_tokens <= MAX_TOKENS


def attend_and_route(
    block: Block,
    hidden: tuple[jax.Array, jax.Array | WeightedOutputs],
    attend: AttentionFn,
    positions_T: jax.Array,
    padding_position: int,
    *,
    chooses: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | ExpertInputs | UnchosenInputs]:
    """Return (x + y + attention [P, C, D], the dense MLP's output [T, D] or the experts' inputs,
    with chosen experts if `chooses`).

    hidden: (x [P, C, D], y float32 [T, D]). attend: (attention, normed input [P, C, D]) -> its
    output without its bias, float32. positions_T: of each token; those at `padding_position` are
    padding, which chooses no expert. Raises NotImplementedError for norms and routers that the
    kernels do not compute.
    """
    # imported on first use: needs Pallas' Triton backend
    from kernels_pallas.add_norm import RouterWeights, add_and_norm
    from kernels_pallas.choose_experts import TokenChoice, choose_experts

    _check_kernels_support(block)
    (x_PCD, added_TD), options = hidden, dict[str, Any](interpret=interpret)
    shape, x_TD = x_PCD.shape, x_PCD.reshape(-1, x_PCD.shape[-1])
    with jax.named_scope("attention"):
        of_attention = _norm_operands(block.attention_norm)
        x_TD, h_TD, _ = add_and_norm(x_TD, added_TD, *of_attention, **options)
        y_TD = attend(block.attention, h_TD.reshape(shape)).reshape(h_TD.shape)
    bias, norm = block.attention.b_out, _norm_operands(block.feed_forward_norm)
    added: dict[str, Any] = {"bias_D": None if bias is None else bias[...], **options}
    if block.moe is None:
        assert block.mlp is not None
        x_TD, h_TD, _ = add_and_norm(x_TD, y_TD, *norm, **added)
        return x_TD.reshape(shape), block.mlp(h_TD)
    router = block.moe.router
    assert isinstance(router, Router)  # checked
    weights = RouterWeights(router.kernel[...], _array_or_none(router.bias))
    with jax.named_scope("moe"):
        x_TD, h_TD, logits_TE = add_and_norm(x_TD, y_TD, *norm, router=weights, **added)
        assert logits_TE is not None
        logits = RouterLogits(
            logits_TE,
            kernel_choice_rules(router.config, router.num_experts_per_tok),
            _array_or_none(router.e_score_correction_bias),
            positions_T,
            padding_position,
        )
        if not chooses:
            TokenChoice.from_logits(logits)  # raises for what no kernel chooses
            has_shared = block.shared_expert is not None
            shared_TD = block.shared_output(h_TD) if has_shared else None
            return x_TD.reshape(shape), UnchosenInputs(h_TD, logits, shared_TD)
        chosen = choose_experts(logits, **options)
        return x_TD.reshape(shape), ExpertInputs(h_TD, *chosen, block.shared_output(h_TD))


def kernel_choice_rules(config: RouterConfig, num_experts_per_tok: int) -> ChoiceRules:
    """Return the rules by which `choose_experts` chooses a router's experts in inference."""
    return ChoiceRules(
        config.rules.scores,
        num_experts_per_tok,
        config.normalizes_weights(num_experts_per_tok),
        config.routed_scaling_factor,
        config.n_group,
        config.topk_group,
        config.rules.limits_groups,
    )


def _check_kernels_support(block: Block) -> None:
    """Raise NotImplementedError for a block that the kernels do not compute."""
    for norm in (block.attention_norm, block.feed_forward_norm):
        if norm.bias is not None or norm.axes:
            raise NotImplementedError("LayerNorm, or norms over several devices")
    if block.moe is not None and type(block.moe.router) is not Router:
        raise NotImplementedError(f"a router of type {type(block.moe.router).__name__}")
    if block.moe is not None and block.moe.config.router.rules.weighs_inputs:
        raise NotImplementedError("weights of the experts' inputs")


def _norm_operands(norm: Norm) -> tuple[jax.Array, float]:
    """Return (scale, epsilon) of a norm, for `add_and_norm`."""
    return norm.factors, norm.eps


def _array_or_none(parameter: nnx.Variable[jax.Array] | None) -> jax.Array | None:
    return None if parameter is None else jnp.asarray(parameter[...])
