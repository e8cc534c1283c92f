"""Routers: the experts of each token and their weights. Nothing here calls a collective.

`MoELayer.route` calls `Router` (from hidden states) or `TaskRouter` (from the token's task). The
loss terms are local: their *sum* over devices is the loss of the global batch. Only the integer
counts need a sum over devices first, and they are not differentiable.

Legend: T local tokens, D hidden, E experts, K chosen experts per token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.nn.initializers import Initializer, normal

from jmoe.config import RouterConfig, check, check_routing
from jmoe.layers.low_rank import AdaptedParam
from kernels_pallas.implementations import target_device
from kernels_pallas.matmul import dot, matmul_by_parts
from kernels_pallas.native import matmul as native_matmul
from kernels_pallas.native import top_k_indices as native_top_k_indices
from kernels_pallas.native import uses_native_inference

_TINY = 1e-20  # keeps a sum of sigmoids that all underflowed from dividing 0 by 0


class RouterBias(nnx.Variable[jax.Array]):
    """A per-expert bias of the choice, updated by `updated_bias` and not by gradients."""


class LossTokens(NamedTuple):
    """The tokens that a router's losses count.

    number: int32 scalar, how many they are; None if all tokens count. counts_E: int32, their
    assignments to each expert.
    """

    number: jax.Array | None
    counts_E: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """A router's decisions for T local tokens. Its sums are over local tokens; a sum over devices
    is global.

    topk_idx_TK: int32, expert ids in [0, E) by falling score, a tie to the lower id; or E for no
    expert, with weight 0.

    topk_weights_TK: float32, the factor of each expert's output.

    counts_E: int32, assignments to each expert; they sum to T * K if every choice is an expert.

    probs_sum_E: float32, router probabilities (which sum to 1 over experts) summed over tokens.

    z_sum: float32 scalar, sum of logsumexp(logits)^2.

    entropy_sum: float32 scalar in nats, sum of -sum_e p_e log p_e, without gradient. Divided by the
    number of tokens it is the mean entropy: log E for uniform probabilities, 0 for one certain
    expert.

    logits_TE: float32, the router's logits; None from a router without logits.

    loss_tokens: the tokens that `probs_sum_E`, `z_sum` and `entropy_sum` count, if these are not
    all tokens that go to experts.
    """

    topk_idx_TK: jax.Array
    topk_weights_TK: jax.Array
    counts_E: jax.Array
    probs_sum_E: jax.Array
    z_sum: jax.Array
    entropy_sum: jax.Array
    logits_TE: jax.Array | None = None
    loss_tokens: LossTokens | None = None


def route(
    logits_TE: jax.Array,
    num_experts_per_tok: int,
    config: RouterConfig = RouterConfig(),  # noqa: B008 (frozen)
    bias_E: jax.Array | None = None,
    topk_idx_TK: jax.Array | None = None,
    key: jax.Array | None = None,
    token_mask_T: jax.Array | None = None,
    loss_mask_T: jax.Array | None = None,
) -> Routing:
    """Choose K experts for each token from its logits.

    With p = softmax(logits) and s = sigmoid(logits), in float32:

    - `switch` (arXiv:2101.03961): K = 1, weight p.
    - `gshard` (arXiv:2006.16668): K = 2, weights p divided by their sum. With a `key` and
      `second_expert_policy` = random, a token goes to its second expert with probability min(1, 2
      weight) (GShard's Algorithm 1); the weights do not change.
    - `softmax`: the K largest p.
    - `softmax_biased` (ERNIE 4.5): the K largest p + bias_E. The weights are p.
    - `softmax_group_limited` (DeepSeek-V2, arXiv:2405.04434): the K largest p of the `topk_group`
      groups with the largest p.
    - `sigmoid` (DeepSeek-V3, arXiv:2412.19437): the K largest s + bias_E. The weights are s: the
      bias affects the choice only.
    - `group_limited` (DeepSeek-V3): experts form `n_group` groups of consecutive ids, ranked by the
      sum of their two largest s + bias. Choose among the best `topk_group` groups as `sigmoid`
      does.
    - `sparsemixer` (Phi-3.5-MoE, arXiv:2409.12136): the two largest logits. The weight of each is
      its probability in a softmax over the experts whose logit is near it (`mask_distance`); the
      first is left out for the second. Training draws no experts at random.
    - `input_weighted` (Llama 4): K = 1, weight s, by which `weigh_inputs` multiplies the expert's
      input.

    With `norm_topk_prob` the weights, but for `switch`, `gshard` and `sparsemixer`, are divided by
    their sum. No kind divides for K = 1: all weights would be 1 and the router would get no
    gradient. All weights are multiplied by `routed_scaling_factor`.

    logits_TE: [T, E], cast to float32. bias_E: [E], for a router whose rules have a bias; None is
    zero. topk_idx_TK: use these choices, made earlier from the same logits. key: for the random
    second expert. token_mask_T: bool; a token with False goes to no expert and is in no count and
    no sum. loss_mask_T: bool; the tokens in the sums, if they are not all tokens of `token_mask_T`.
    Gradients flow through the weights, `probs_sum_E` and `z_sum`. Raises ValueError if
    shapes or `config` do not fit.
    """
    if logits_TE.ndim != 2:
        raise ValueError(f"logits_TE.shape = {logits_TE.shape}: must be [tokens, experts]")
    num_experts = logits_TE.shape[1]
    check_routing(num_experts, num_experts_per_tok, config)
    if bias_E is not None:
        check(config.rules.has_bias, "router.kind", config.kind, "takes no bias_E")
        check(
            bias_E.shape == (num_experts,),
            "bias_E.shape",
            bias_E.shape,
            f"must be ({num_experts},)",
        )
    logits_TE = logits_TE.astype(jnp.float32)
    scores_TE, probs_TE = SCORES[config.rules.scores](logits_TE)
    sampled = config.second_expert_policy == "random"
    if topk_idx_TK is None or sampled:
        chosen_TK = _choose_experts(scores_TE, num_experts_per_tok, config, bias_E)
    else:
        chosen_TK = topk_idx_TK
    weights_TK, counts_E = _gather_and_count(scores_TE, chosen_TK)
    if config.rules.masks_distant_logits:
        weights_TK = _weights_among_near_logits(logits_TE, chosen_TK, config.mask_distance)
    if config.normalizes_weights(num_experts_per_tok):
        weights_TK = weights_TK / (jnp.sum(weights_TK, axis=1, keepdims=True) + _TINY)
    idx_TK = chosen_TK if topk_idx_TK is None else topk_idx_TK
    if sampled and topk_idx_TK is None and key is not None:
        idx_TK = _sample_second_expert(idx_TK, weights_TK, num_experts, key)
    if token_mask_T is not None:
        idx_TK = jnp.where(token_mask_T[:, None], idx_TK, num_experts)
    if sampled or token_mask_T is not None:
        weights_TK = jnp.where(idx_TK < num_experts, weights_TK, 0.0)
        counts_E = _count_choices(idx_TK, num_experts)
    if config.routed_scaling_factor != 1.0:
        weights_TK = weights_TK * config.routed_scaling_factor
    summed_T = token_mask_T if loss_mask_T is None else loss_mask_T
    sums = _routing_sums(logits_TE, probs_TE, summed_T)
    loss_tokens = None
    if loss_mask_T is not None:
        counted_TK = jnp.where(loss_mask_T[:, None], idx_TK, num_experts)
        loss_tokens = LossTokens(
            loss_mask_T.sum(dtype=jnp.int32), _count_choices(counted_TK, num_experts)
        )
    return Routing(
        idx_TK, weights_TK, counts_E, *sums, logits_TE=logits_TE, loss_tokens=loss_tokens
    )


def weigh_inputs(
    x_TD: jax.Array, routing: Routing, config: RouterConfig
) -> tuple[jax.Array, Routing]:
    """Return (the experts' input, their routing): x times each token's weight, and weights of 1,
    for a router that weighs inputs; otherwise the arguments.
    """
    if not config.rules.weighs_inputs:
        return x_TD, routing
    weighed_TD = (x_TD.astype(jnp.float32) * routing.topk_weights_TK).astype(x_TD.dtype)
    is_expert_TK = routing.topk_idx_TK < routing.counts_E.size
    return weighed_TD, replace(routing, topk_weights_TK=is_expert_TK.astype(jnp.float32))


def _count_choices(idx_TK: jax.Array, num_experts: int) -> jax.Array:
    """Return int32 [E], how often each expert is chosen."""
    experts_E = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.sum(idx_TK.reshape(-1, 1) == experts_E, axis=0, dtype=jnp.int32)


def _softmax_scores_and_probs(logits_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
    scores_TE = jax.nn.softmax(logits_TE, axis=1)
    return scores_TE, scores_TE


def _sigmoid_scores_and_probs(logits_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
    scores_TE = jax.nn.sigmoid(logits_TE)
    return scores_TE, scores_TE / (jnp.sum(scores_TE, axis=1, keepdims=True) + _TINY)


def _logits_and_probs(logits_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
    return logits_TE, jax.nn.softmax(logits_TE, axis=1)


# Functions of float32 logits that return (scores, by which experts are chosen and weighted;
# probabilities, which sum to 1 over experts). `RouterRules.scores` names one.
SCORES: dict[str, Callable[[jax.Array], tuple[jax.Array, jax.Array]]] = {
    "softmax": _softmax_scores_and_probs,
    "sigmoid": _sigmoid_scores_and_probs,
    "logits": _logits_and_probs,
}


def _weights_among_near_logits(
    logits_TE: jax.Array, idx_TK: jax.Array, distance: float
) -> jax.Array:
    """Return float32 [T, K]: the probability of each choice in a softmax over the experts that are
    not chosen before it and whose logit l is near the largest of these, m: m - l <= distance
    max(m, |l|).
    """
    columns_TE = lax.broadcasted_iota(idx_TK.dtype, logits_TE.shape, 1)
    left_TE, weights = logits_TE, []
    for idx_T1 in jnp.split(idx_TK, idx_TK.shape[1], axis=1):
        largest_T1 = jnp.max(left_TE, axis=1, keepdims=True)
        scale_TE = jnp.maximum(largest_T1, jnp.abs(logits_TE))
        is_far_TE = largest_T1 - logits_TE > distance * scale_TE
        probs_TE = jax.nn.softmax(jnp.where(is_far_TE, -jnp.inf, left_TE), axis=1)
        is_choice_TE = columns_TE == idx_T1
        weights.append(jnp.sum(jnp.where(is_choice_TE, probs_TE, 0.0), axis=1))
        left_TE = jnp.where(is_choice_TE, -jnp.inf, left_TE)
    return jnp.stack(weights, axis=1)


def _choose_experts(
    scores_TE: jax.Array, num_experts_per_tok: int, config: RouterConfig, bias_E: jax.Array | None
) -> jax.Array:
    """Return int32 [T, K], the experts with the largest score plus bias, best first; with a router
    that limits groups, only experts of a token's best groups.
    """
    selection_TE = lax.stop_gradient(scores_TE)
    if bias_E is not None:
        selection_TE = selection_TE + lax.stop_gradient(bias_E.astype(jnp.float32))
    if config.rules.limits_groups:
        selection_TE = _mask_outside_best_groups(selection_TE, config)
    return top_k_indices(selection_TE, num_experts_per_tok)


def _routing_sums(
    logits_TE: jax.Array, probs_TE: jax.Array, token_mask_T: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `probs_sum_E`, `z_sum` and `entropy_sum` of a `Routing`, over the unmasked tokens."""

    def zero_masked(v_TN: jax.Array) -> jax.Array:
        return v_TN if token_mask_T is None else jnp.where(token_mask_T[:, None], v_TN, 0.0)

    p_TE = lax.stop_gradient(probs_TE)
    return (
        jnp.sum(zero_masked(probs_TE), axis=0),
        jnp.sum(zero_masked(jnp.square(jax.nn.logsumexp(logits_TE, axis=1, keepdims=True)))),
        -jnp.sum(zero_masked(jnp.where(p_TE > 0, p_TE * jnp.log(p_TE), 0.0))),
    )


def top_k_indices(scores_TE: jax.Array, k: int) -> jax.Array:
    """Return int32 [T, k], the columns of each row's k largest scores, by falling score; a tie goes
    to the lowest column.

    Equal to `lax.top_k(scores_TE, k)[1]` for scores above -inf. A row with a NaN gives valid
    columns, which may repeat. An accelerator runs `lax.top_k`, one kernel launch instead of 2 k.
    XLA:CPU would sort the rows one after the other; there k passes of maximum and compare fuse with
    the operations around them.
    """
    if uses_native_inference():
        return native_top_k_indices(scores_TE, k)
    in_passes = partial(_top_k_in_passes, k=k)

    def lax_top_k_indices(scores_TE: jax.Array) -> jax.Array:
        return lax.top_k(scores_TE, k)[1]

    return lax.platform_dependent(
        lax.stop_gradient(scores_TE), cpu=in_passes, default=lax_top_k_indices
    )


def _top_k_in_passes(scores_TE: jax.Array, k: int) -> jax.Array:
    last = scores_TE.shape[1] - 1
    columns_TE = lax.broadcasted_iota(jnp.int32, scores_TE.shape, 1)
    chosen = []
    for _ in range(k):
        best_T1 = jnp.max(scores_TE, axis=1, keepdims=True)
        # Maximum and minimum vectorise; on a CPU argmax, a two-operand reduction, takes 3 to 10
        # times as long.
        idx_T1 = jnp.min(jnp.where(scores_TE == best_T1, columns_TE, last), axis=1, keepdims=True)
        chosen.append(idx_T1)
        scores_TE = jnp.where(columns_TE == idx_T1, -jnp.inf, scores_TE)
    return jnp.concatenate(chosen, axis=1)


def _sample_second_expert(
    idx_T2: jax.Array, weights_T2: jax.Array, num_experts: int, key: jax.Array
) -> jax.Array:
    """Return the choices with E (no expert) in place of each second expert that GShard's random
    draw rejects.
    """
    drawn_T = jax.random.uniform(key, (idx_T2.shape[0],), jnp.float32)
    goes_T = 2.0 * lax.stop_gradient(weights_T2[:, 1]) > drawn_T
    return idx_T2.at[:, 1].set(jnp.where(goes_T, idx_T2[:, 1], num_experts))


def _mask_outside_best_groups(scores_TE: jax.Array, config: RouterConfig) -> jax.Array:
    """Return the scores with -inf for experts outside each token's best `topk_group` groups, ranked
    by the sum of a group's best scores, whose number `RouterRules.limits_groups` says.
    """
    n_group, topk_group = config.n_group, config.topk_group
    tokens, num_experts = scores_TE.shape
    size = num_experts // n_group
    members = scores_TE.reshape(tokens * n_group, size)
    count = min(config.rules.limits_groups, size)
    best, _ = _gather_and_count(members, top_k_indices(members, count))
    group_scores_TG = jnp.sum(best, axis=1).reshape(tokens, n_group)
    groups_TE = lax.broadcasted_iota(jnp.int32, scores_TE.shape, 1) // size
    open_TE = jnp.zeros(scores_TE.shape, jnp.bool_)
    for group_T1 in jnp.split(top_k_indices(group_scores_TG, topk_group), topk_group, axis=1):
        open_TE |= groups_TE == group_T1
    return jnp.where(open_TE, scores_TE, -jnp.inf)


def _gather_and_count(values_TE: jax.Array, idx_TK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (values at `idx_TK`, [T, K]; int32 [E], how often each column occurs).

    Columns are compared, not indexed, so that neither the backward pass nor the count is a scatter:
    choice by choice on a CPU, all choices in one launch on an accelerator. With native kernels
    (inference, where neither gradients nor counts are used) the counts are zeros.
    """
    if uses_native_inference():
        return jnp.take_along_axis(values_TE, idx_TK, axis=1), jnp.zeros(
            values_TE.shape[1], jnp.int32
        )
    result: tuple[jax.Array, jax.Array] = lax.platform_dependent(
        values_TE, idx_TK, cpu=_gather_and_count_by_choice, default=_gather_and_count_at_once
    )
    return result


def _gather_and_count_at_once(
    values_TE: jax.Array, idx_TK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    hit_TKE = idx_TK[:, :, None] == jnp.arange(values_TE.shape[1], dtype=idx_TK.dtype)
    gathered_TK = jnp.sum(jnp.where(hit_TKE, values_TE[:, None], 0.0), axis=2)
    return gathered_TK, jnp.sum(hit_TKE, axis=(0, 1), dtype=jnp.int32)


def _gather_and_count_by_choice(
    values_TE: jax.Array, idx_TK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    columns_TE = lax.broadcasted_iota(jnp.int32, values_TE.shape, 1)
    gathered, hits_TE = [], jnp.zeros(values_TE.shape, jnp.int32)
    for idx_T1 in jnp.split(idx_TK, idx_TK.shape[1], axis=1):
        hit_TE = columns_TE == idx_T1
        gathered.append(jnp.sum(jnp.where(hit_TE, values_TE, 0.0), axis=1, keepdims=True))
        # faster than one sum over the tokens per choice
        hits_TE = hits_TE + hit_TE.astype(jnp.int32)
    return jnp.concatenate(gathered, axis=1), jnp.sum(hits_TE, axis=0, dtype=jnp.int32)


def balance_loss_local(
    probs_sum_E: jax.Array,
    counts_global_E: jax.Array,
    num_tokens_global: int | jax.Array | np.ndarray,
    num_experts: int,
    num_experts_per_tok: int,
) -> jax.Array:
    """Return this device's term of the balance loss E * sum_e f_e P_e; the sum over devices is the
    loss of the global batch.

    f_e = counts_e / (tokens * K) is the fraction of all assignments that went to e, without
    gradient. P_e is the mean router probability of e, a sum over devices of local terms, so that
    gradients need no collective. Uniform probabilities give 1. Source: Switch Transformer
    (arXiv:2101.03961), over the global batch (arXiv:2501.11873).

    probs_sum_E: local. counts_global_E: summed over devices. Leading axes (layers) are kept: [...,
    E] gives [...]. num_tokens_global: a number, or one for each of the leading axes.
    """
    for name, value in (("probs_sum_E", probs_sum_E), ("counts_global_E", counts_global_E)):
        ok = value.ndim > 0 and value.shape[-1] == num_experts
        check(ok, f"{name}.shape", value.shape, f"must end in num_experts = {num_experts}")
    tokens = jnp.asarray(num_tokens_global, jnp.float32)
    tokens = tokens[..., None] if tokens.ndim else tokens
    share_E = lax.stop_gradient(counts_global_E.astype(jnp.float32)) / (
        tokens * num_experts_per_tok
    )
    return num_experts * jnp.sum(share_E * probs_sum_E / tokens, axis=-1)


def updated_bias(bias_E: jax.Array, load_E: jax.Array, speed: float | jax.Array) -> jax.Array:
    """Return bias + speed * sign(mean load - load): loss-free balancing (arXiv:2408.15664), once
    per optimizer step.

    load_E: `Routing.counts_E` summed over devices and accumulation steps, or as a fraction,
    `MoEMetrics.load_E`. Leading axes (layers) are kept. Raises ValueError if the shapes differ.
    """
    check(
        bias_E.shape == load_E.shape,
        "load_E.shape",
        load_E.shape,
        f"must be bias_E.shape = {bias_E.shape}",
    )
    load_E = load_E.astype(jnp.float32)
    direction_E = jnp.sign(jnp.mean(load_E, axis=-1, keepdims=True) - load_E)
    return bias_E + jnp.asarray(speed, bias_E.dtype) * direction_E.astype(bias_E.dtype)


# of fewer tokens, splitting the kernel takes longer than the float32 product
MIN_TOKENS_BY_PARTS = 512


def _router_logits(x_TD: jax.Array, kernel_DE: jax.Array) -> jax.Array:
    """Return the float32 product of a router, in the form that is fastest on the platform."""
    if uses_native_inference():
        return native_matmul(x_TD.astype(jnp.float32), kernel_DE)
    kernel_DE = kernel_DE.astype(jnp.float32)
    by_parts = x_TD.dtype == jnp.bfloat16 and x_TD.shape[0] >= MIN_TOKENS_BY_PARTS
    if by_parts and target_device().platform == "gpu":
        return matmul_by_parts(x_TD, kernel_DE)
    return dot(x_TD.astype(jnp.float32), kernel_DE)


class Router(nnx.Module):
    """Linear router: logits = x @ kernel (+ bias), then `route`.

    kernel: float32 [hidden_size, num_experts]. bias: float32 [num_experts], initially zero, if
    `config.bias`; else None. e_score_correction_bias: float32 [num_experts] `RouterBias`, initially
    zero, for the kinds `sigmoid` and `group_limited`; else None.

    The product is float32 whatever the dtype of x, on a GPU too, where XLA's default would be TF32.
    Raises ValueError if `num_experts_per_tok`, `num_experts` and `config` contradict each other.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        config: RouterConfig = RouterConfig(),  # noqa: B008 (frozen)
        *,
        rngs: nnx.Rngs,
        kernel_init: Initializer = normal(0.02),  # noqa: B008 (stateless)
    ) -> None:
        check(hidden_size > 0, "hidden_size", hidden_size, "must be greater than 0")
        check_routing(num_experts, num_experts_per_tok, config)
        self.num_experts_per_tok = num_experts_per_tok
        self.config = config
        self.kernel = nnx.Param(kernel_init(rngs.params(), (hidden_size, num_experts), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_experts, jnp.float32)) if config.bias else None
        has_bias = config.rules.has_bias
        self.e_score_correction_bias = (
            RouterBias(jnp.zeros(num_experts, jnp.float32)) if has_bias else None
        )

    def __call__(
        self,
        x_TD: jax.Array,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        topk_idx_TK: jax.Array | None = None,
        token_mask_T: jax.Array | None = None,
        loss_mask_T: jax.Array | None = None,
    ) -> Routing:
        """Return the `Routing` of T tokens x_TD.

        In training, x is multiplied by uniform(1 - jitter_noise, 1 + jitter_noise) for the logits,
        and a random draw may leave out second experts. key: needed then (if
        `config.draws_random_numbers`), and must differ between devices: fold in the device's index.
        topk_idx_TK, token_mask_T, loss_mask_T: as in `route`. Raises ValueError for a wrong shape
        of x or a missing key.
        """
        kernel_DE = self.kernel[...]
        ok = x_TD.ndim == 2 and x_TD.shape[1] == kernel_DE.shape[0]
        check(ok, "x_TD.shape", x_TD.shape, f"must be [tokens, hidden_size = {kernel_DE.shape[0]}]")
        jitter, policy = self.config.jitter_noise, self.config.second_expert_policy
        if train and self.config.draws_random_numbers and key is None:
            draws = f"jitter_noise = {jitter}" if jitter else f"second_expert_policy = {policy!r}"
            raise ValueError(f"key = None: is needed in training with {draws}")
        if train and jitter > 0:
            assert key is not None
            x_TD = x_TD.astype(jnp.float32) * jax.random.uniform(
                key, x_TD.shape, jnp.float32, 1.0 - jitter, 1.0 + jitter
            )
        logits_TE = _router_logits(x_TD, kernel_DE)
        if isinstance(self.kernel, AdaptedParam):
            logits_TE = logits_TE + self.kernel.product_change(x_TD.astype(jnp.float32))
        if self.bias is not None:
            logits_TE = logits_TE + self.bias[...].astype(jnp.float32)
        bias_E = None if self.e_score_correction_bias is None else self.e_score_correction_bias[...]
        second_key = None if key is None or not train else jax.random.fold_in(key, 1)
        chosen = topk_idx_TK, second_key, token_mask_T, loss_mask_T
        return route(logits_TE, self.num_experts_per_tok, self.config, bias_E, *chosen)


class TaskRouter(nnx.Module):
    """A router without parameters that sends each token to the experts of the token's task."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def __call__(
        self,
        x_TD: jax.Array,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        topk_idx_TK: jax.Array | None = None,
        topk_weights_TK: jax.Array | None = None,
    ) -> Routing:
        """Return a `Routing` that sends token t to the experts topk_idx_TK[t], which the caller
        must give.

        topk_weights_TK: None for weight 1. key and train are ignored; they match the call of
        `Router`. Raises ValueError without topk_idx_TK.
        """
        if topk_idx_TK is None:
            raise ValueError(
                "topk_idx_TK = None: a layer routed by task needs every token's expert"
            )
        experts_E = jnp.arange(self.num_experts, dtype=jnp.int32)
        counts_E = jnp.sum(topk_idx_TK[:, :, None] == experts_E, axis=(0, 1), dtype=jnp.int32)
        zero = jnp.zeros((), jnp.float32)
        weights_TK = (
            jnp.ones(topk_idx_TK.shape, jnp.float32) if topk_weights_TK is None else topk_weights_TK
        )
        return Routing(topk_idx_TK, weights_TK, counts_E, counts_E.astype(jnp.float32), zero, zero)
