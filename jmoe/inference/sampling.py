"""Sample tokens from logits, with jittable functions of static shapes that compute in float32.

    params = batch_params(sequences, size=bucket, vocab_size=V)
    tokens_B, logprobs, state = sample(
        logits_BV, params, state, rows_B, positions_B, with_logprobs=False
    )

`SamplingParams` defines the parameters. A row's token and log-probabilities depend on that row
alone, not on its place or on other rows; the noise is a function of (the sequence's `noise_seed`,
position, token id). If every request is `is_plain_greedy`, `greedy(logits_BV)` returns the same
tokens faster.

Legend:
B rows of the batch
V vocabulary
M rows of the cache
N sparse token ids of a row
C candidates in falling order
W words of a mask of allowed tokens
I bits of a word
K most likely tokens
T positions of a prompt
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.inference.sampler_arrays import BatchParams, Logprobs, SamplerState
from jmoe.inference.sampling_params import MAX_LOGPROBS, SamplingParams
from jmoe.inference.token_filters import (
    batch_invariant_row_sums,
    candidate_filter_mask,
    threshold_mask,
    top_k,
    vocabulary_filter_mask,
)
from jmoe.types import PyTree

NUM_CANDIDATES = 256  # filters that keep at most this many tokens need no search of the vocabulary
NOT_FINITE = -1  # returned in place of a token if the row's logits contain NaN or +infinity


def greedy(logits_BV: jax.Array) -> jax.Array:
    """Return int32 [B], the token of the largest logit, the lowest id among equals.

    `NOT_FINITE` for rows whose logits are not finite.
    """
    return _tokens_if_finite(logits_BV, _argmax(logits_BV))


def _tokens_if_finite(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    """Return the tokens, with `NOT_FINITE` in rows whose logits are not finite."""
    # the maximum of a row with a NaN is NaN; -inf is allowed, for tokens of probability 0
    top_B = jnp.max(logits_BV, axis=1)
    return jnp.where(top_B < jnp.inf, tokens_B, NOT_FINITE)


def _argmax(logits_BV: jax.Array) -> jax.Array:
    """Return int32 [B], the lowest id of the largest logit."""
    # Unlike a maximum and a minimum, argmax is a two-operand reduction, which XLA:CPU does not
    # vectorise: several times slower.
    ids_BV = lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    best_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    return jnp.min(jnp.where(logits_BV == best_B1, ids_BV, logits_BV.shape[1] - 1), axis=1)


def sample(
    logits_BV: jax.Array,
    params: BatchParams,
    state: SamplerState,
    rows_B: jax.Array,
    positions_B: jax.Array,
    allowed_BW: jax.Array | None = None,
    *,
    with_logprobs: bool,
) -> tuple[jax.Array, Logprobs | None, SamplerState]:
    """Return (tokens int32 [B], `Logprobs` with K = 20 or None, the state that counts the tokens).

    Rows whose logits are not finite get `NOT_FINITE`.

    rows_B: int32, the sequences' rows of the cache; M for padding.
    positions_B: int32, the position of the sampled token in its sequence: the prompt's length for
        the first.
    allowed_BW: int32 words, one bit a token, lowest first; tokens with a bit of 0 are banned. None,
        which compiles another program, allows all.
    with_logprobs: static.
    """

    def sample_rows(
        logits_BV: jax.Array,
        params: BatchParams,
        rows_B: jax.Array,
        positions_B: jax.Array,
        allowed_BW: jax.Array | None,
    ) -> tuple[jax.Array, Logprobs | None]:
        logits_BV = logits_BV.astype(jnp.float32)
        with jax.named_scope("adjust"):
            x_BV = _adjusted_logits(logits_BV, params, state, rows_B, positions_B)
            if allowed_BW is not None:
                x_BV = jnp.where(_unpack_bits(allowed_BW, logits_BV.shape[1]), x_BV, -jnp.inf)
        with jax.named_scope("draw"):
            tokens_B = _tokens_if_finite(
                logits_BV, _sample_from_adjusted_logits(x_BV, params, positions_B)
            )
        if not with_logprobs:
            return tokens_B, None
        with jax.named_scope("logprobs"):
            return tokens_B, _logprobs_of_tokens(logits_BV, tokens_B, MAX_LOGPROBS)

    tokens_B, logprobs = _map_rows_on_cpu(
        sample_rows, logits_BV, params, rows_B, positions_B, allowed_BW
    )
    # NOT_FINITE = -1 counts the last token here, which is harmless: such a sequence ends
    counts_MV = state.output_counts_MV.at[rows_B, tokens_B].add(1, mode="drop")
    return (
        tokens_B,
        logprobs,
        SamplerState(in_prompt_MV=state.in_prompt_MV, output_counts_MV=counts_MV),
    )


def prompt_logprobs(logits_TV: jax.Array, next_tokens_T: jax.Array, num_logprobs: int) -> Logprobs:
    """Return `Logprobs` at T positions of a prompt, of the next tokens and the `num_logprobs`
    likeliest.

    num_logprobs: static; one value for all requests, 20, avoids further programs.
    """
    logprobs: Logprobs = _map_rows_on_cpu(
        partial(_logprobs_of_tokens, num_logprobs=num_logprobs), logits_TV, next_tokens_T
    )
    return logprobs


def _map_rows_on_cpu(function: Callable[..., PyTree], *batch: PyTree) -> PyTree:
    """Return `function(*batch)` for arguments with a leading B; on a CPU one row at a time.

    On a CPU a row's intermediates then stay in its cache, and a row does not pay for branches that
    only other rows need.
    """

    def map_one_by_one(*batch: PyTree) -> PyTree:
        rows = lax.map(lambda row: function(*jax.tree.map(lambda x: x[None], row)), batch)
        return jax.tree.map(lambda x: x[:, 0], rows)

    return lax.platform_dependent(*batch, cpu=map_one_by_one, default=function)


def _logprobs_of_tokens(logits_BV: jax.Array, tokens_B: jax.Array, num_logprobs: int) -> Logprobs:
    """Return the log-probabilities of one token a row and of the `num_logprobs` likeliest."""
    logits_BV = logits_BV.astype(jnp.float32)
    top_BK, top_ids_BK = top_k(logits_BV, min(num_logprobs, logits_BV.shape[1]))
    max_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    log_total_B1 = jnp.log(batch_invariant_row_sums(jnp.exp(logits_BV - max_B1)))
    chosen_B1 = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=1)
    return Logprobs(
        chosen_B=(chosen_B1 - max_B1 - log_total_B1)[:, 0],
        top_ids_BK=top_ids_BK,
        top_BK=top_BK - max_B1 - log_total_B1,
    )


def _adjusted_logits(
    logits_BV: jax.Array,
    params: BatchParams,
    state: SamplerState,
    rows_B: jax.Array,
    positions_B: jax.Array,
) -> jax.Array:
    """Return the logits after bias, penalties and the ban of stop tokens below `min_position`."""
    vocab_size = logits_BV.shape[1]
    repetition_B1, presence_B1, frequency_B1 = (
        penalty_B[:, None]
        for penalty_B in (
            params.repetition_penalty_B,
            params.presence_penalty_B,
            params.frequency_penalty_B,
        )
    )
    penalised_B = (repetition_B1 != 1) | (presence_B1 != 0) | (frequency_B1 != 0)
    banned_BN = jnp.where(
        positions_B[:, None] < params.min_position_B[:, None], params.stop_ids_BN, vocab_size
    )
    rows_B1 = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]

    def add_logit_bias(x_BV: jax.Array) -> jax.Array:
        return x_BV.at[rows_B1, params.bias_ids_BN].add(params.bias_BN, mode="drop")

    def ban_tokens(x_BV: jax.Array) -> jax.Array:
        return x_BV.at[rows_B1, banned_BN].set(-jnp.inf, mode="drop")

    def apply_penalties(x_BV: jax.Array) -> jax.Array:
        counts_BV = state.output_counts_MV.at[rows_B].get(mode="clip")
        in_prompt_BV = state.in_prompt_MV.at[rows_B].get(mode="clip")
        repeated_BV = jnp.where(x_BV > 0, x_BV / repetition_B1, x_BV * repetition_B1)
        x_BV = jnp.where(in_prompt_BV | (counts_BV > 0), repeated_BV, x_BV)
        x_BV = x_BV - jnp.where(counts_BV > 0, presence_B1, 0.0)
        return x_BV - frequency_B1 * counts_BV.astype(jnp.float32)

    def identity(x_BV: jax.Array) -> jax.Array:
        return x_BV

    # Each of these leaves a row without such parameters unchanged to the bit, so one condition for
    # the whole batch suffices.
    x_BV = lax.cond(jnp.any(params.bias_ids_BN < vocab_size), add_logit_bias, identity, logits_BV)
    x_BV = lax.cond(jnp.any(penalised_B), apply_penalties, identity, x_BV)
    return lax.cond(jnp.any(banned_BN < vocab_size), ban_tokens, identity, x_BV)


def _unpack_bits(words_BW: jax.Array, size: int) -> jax.Array:
    """Return bool [B, size]: element 32 w + i is bit i of word w."""
    bits_BWI = (words_BW[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits_BWI.reshape(words_BW.shape[0], -1)[:, :size] != 0


def _sample_from_adjusted_logits(
    x_BV: jax.Array, params: BatchParams, positions_B: jax.Array
) -> jax.Array:
    """Return int32 [B], a token for each row of adjusted logits: sampled within top-k, top-p and
    min-p, or the most likely one where the temperature is 0.
    """
    vocab_size = x_BV.shape[1]
    random_B = params.temperature_B > 0
    z_BV = _scaled_logits(x_BV, params)
    filtered_B = _have_filters(params, vocab_size)

    def sample_candidates() -> tuple[jax.Array, jax.Array]:
        few_B, settled_B = _sample_candidates(z_BV, params, positions_B)
        return few_B, filtered_B & settled_B

    nothing = (jnp.zeros_like(positions_B), jnp.zeros_like(filtered_B))
    few_B, settled_B = lax.cond(jnp.any(filtered_B), sample_candidates, lambda: nothing)

    def sample_vocabulary() -> jax.Array:
        searched_B = filtered_B & ~settled_B
        everything_BV = jnp.ones_like(z_BV, jnp.bool_)
        kept_BV = lax.cond(
            jnp.any(searched_B),
            lambda: vocabulary_filter_mask(z_BV, params),
            lambda: everything_BV,
        )
        kept_BV &= threshold_mask(z_BV, params)
        ids_BV = lax.broadcasted_iota(jnp.int32, z_BV.shape, 1)
        return jnp.where(
            settled_B, few_B, _gumbel_max(z_BV, ids_BV, kept_BV, params.seed_B2, positions_B)
        )

    tokens_B = lax.cond(jnp.any(random_B & ~settled_B), sample_vocabulary, lambda: few_B)
    # in a row with a NaN no token equals the maximum, and `_gumbel_max` returns an id beyond V
    return jnp.where(random_B, jnp.minimum(tokens_B, vocab_size - 1), _argmax(x_BV))


def sample_settled(logits_BV: jax.Array, params: BatchParams, positions_B: jax.Array) -> jax.Array:
    """Return `sample`'s tokens, int32 [B], of rows that `is_settled_by_candidates` and that have no
    constraint.

    Has no branches: on a GPU each would make the host wait for the logits.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    vocab_size = logits_BV.shape[1]
    z_BV = _scaled_logits(logits_BV, params)
    few_B, _ = _sample_candidates(z_BV, params, positions_B)
    kept_BV = threshold_mask(z_BV, params)
    ids_BV = lax.broadcasted_iota(jnp.int32, z_BV.shape, 1)
    any_B = _gumbel_max(z_BV, ids_BV, kept_BV, params.seed_B2, positions_B)
    drawn_B = jnp.where(_have_filters(params, vocab_size), few_B, any_B)
    tokens_B = jnp.where(
        params.temperature_B > 0, jnp.minimum(drawn_B, vocab_size - 1), _argmax(logits_BV)
    )
    # no maximum as in `_tokens_if_finite`: fused with others, XLA:CPU's loses a NaN
    return jnp.where(jnp.all(logits_BV < jnp.inf, axis=1), tokens_B, NOT_FINITE)


def is_settled_by_candidates(sampling: SamplingParams) -> bool:
    """Return whether the `NUM_CANDIDATES` most likely tokens always settle the filters, and nothing
    else changes the logits.

    top_p alone may keep more tokens, if the model is very unsure.
    """
    few = 0 < sampling.top_k <= NUM_CANDIDATES
    unfiltered = sampling.top_k <= 0 and sampling.top_p >= 1
    return sampling.uses_logits_as_they_are and (sampling.is_greedy or few or unfiltered)


def _scaled_logits(x_BV: jax.Array, params: BatchParams) -> jax.Array:
    """Return (logits - their maximum) / temperature; a temperature of 0 counts as 1."""
    # Subtracts the maximum before dividing: a low temperature gives -inf at worst, never NaN.
    temperature_B1 = jnp.where(params.temperature_B > 0, params.temperature_B, 1.0)[:, None]
    return (x_BV - jnp.max(x_BV, axis=1, keepdims=True)) / temperature_B1


def _have_filters(params: BatchParams, vocab_size: int) -> jax.Array:
    """Return bool [B], which rows are sampled under top-k or top-p."""
    return (params.temperature_B > 0) & ((params.top_k_B < vocab_size) | (params.top_p_B < 1))


def _sample_candidates(
    z_BV: jax.Array, params: BatchParams, positions_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (a token int32 [B] among the most likely ones, bool [B] whether the filters keep none
    beyond these).
    """
    vocab_size = z_BV.shape[1]
    num_candidates = min(NUM_CANDIDATES, vocab_size)
    z_BC, ids_BC = top_k(z_BV, num_candidates)
    kept_BC = candidate_filter_mask(z_BC, batch_invariant_row_sums(jnp.exp(z_BV)), params)
    # The filters keep a prefix of the ranked tokens: if the last candidate is dropped, so are all
    # tokens beyond the candidates.
    settled_B = (params.top_k_B <= num_candidates) | (
        (params.top_k_B == vocab_size) & ~kept_BC[:, -1]
    )
    return _gumbel_max(z_BC, ids_BC, kept_BC, params.seed_B2, positions_B), settled_B


def _gumbel_max(
    z_BC: jax.Array,
    ids_BC: jax.Array,
    kept_BC: jax.Array,
    seed_B2: jax.Array,
    positions_B: jax.Array,
) -> jax.Array:
    """Return int32 [B], token ids sampled from the softmax of z over the kept tokens (Gumbel-max).

    The noise -log(-log(1 - u)) has u from a hash of seed, position and token id, so the result
    depends neither on the candidates' order nor on their number.
    """
    bits_BC = _threefry(
        seed_B2[:, :1], seed_B2[:, 1:], positions_B[:, None].astype(jnp.uint32), ids_BC
    )
    # u near 0 gives the largest noise and needs the finest steps; u < 1 keeps log1p finite.
    u_BC = jnp.minimum((bits_BC.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    noisy_BC = jnp.where(kept_BC, z_BC - jnp.log(-jnp.log1p(-u_BC)), -jnp.inf)
    best_B1 = jnp.max(noisy_BC, axis=1, keepdims=True)
    return jnp.min(jnp.where(noisy_BC == best_B1, ids_BC, jnp.iinfo(jnp.int32).max), axis=1)


def _threefry(
    key_0: jax.Array, key_1: jax.Array, counter_0: jax.Array, counter_1: jax.Array
) -> jax.Array:
    """Return the first word of Threefry-2x32 with 20 rounds (Salmon et al., SC '11), uint32,
    elementwise.

    `jax.random` offers it for consecutive counters only; `fold_in`, for chosen ones, does not fuse
    on a CPU.
    """
    keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA))
    x, y = counter_0 + key_0, counter_1.astype(jnp.uint32) + key_1
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x
