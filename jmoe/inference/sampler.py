"""Sample tokens from logits, with jittable functions of static shapes that compute in float32.

    params = batch_params(sequences, size=bucket, vocab_size=V)
    tokens_B, logprobs, state = sample(
        logits_BV, params, state, rows_B, positions_B, with_logprobs=False
    )

`SamplingParams` defines the parameters. A row's token and log-probabilities depend on that row
alone, not on its place or on other rows; the noise is a function of (the sequence's `noise_seed`,
position, token id). If every request is `is_plain_greedy`, `greedy(logits_BV)` returns the same
tokens faster. The engine uses `Sampler`.

Legend:
B rows of the batch
V vocabulary
M rows of the cache
N sparse token ids of a row
C candidates in falling order; in `prompt_logprobs`, tokens of a chunk
H chunks of the vocabulary
W tokens of such a chunk; in masks of allowed tokens, words
I bits of a word
K most likely tokens
T positions of a prompt
P rows of a step with drafts, of C tokens each
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product, starmap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.config import check
from jmoe.inference.sampling_params import MAX_IDS, MAX_LOGPROBS, SamplingParams
from jmoe.inference.scheduler import Chunk
from jmoe.inference.sequence import Sequence, TokenLogprob
from jmoe.types import PyTree

# Programs are compiled for these N. The second holds the maximum of a request, plus 24 end-of-text
# tokens.
ID_BUCKETS = (16, MAX_IDS + 24)
NUM_CANDIDATES = 256  # filters that keep at most this many tokens need no search of the vocabulary
CHUNK_TOKENS = 32
NOT_FINITE = -1  # returned in place of a token if the row's logits contain NaN or +infinity
# Parameters are clipped to these limits: float32 would overflow or underflow beyond them, and the
# tokens would be the same.
MIN_TOP_P = 2.0**-31
MAX_TEMPERATURE = 1e30
REPETITION_PENALTIES = (1e-20, 1e20)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchParams:
    """`SamplingParams` of B rows as arrays; see `batch_params`."""

    temperature_B: jax.Array  # float32; 0: greedy
    top_k_B: jax.Array  # int32 in 1 ... V; V: all
    top_p_B: jax.Array  # float32
    min_p_B: jax.Array  # float32
    repetition_penalty_B: jax.Array  # float32
    presence_penalty_B: jax.Array  # float32
    frequency_penalty_B: jax.Array  # float32
    seed_B2: jax.Array  # uint32, high and low half
    bias_ids_BN: jax.Array  # int32; V: none
    bias_BN: jax.Array  # float32
    stop_ids_BN: jax.Array  # int32, banned below min_position; V: none
    min_position_B: jax.Array  # int32, prompt length + min_new_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """The tokens that each row of the cache has seen, for the penalties. Donated to jitted
    functions.
    """

    in_prompt_MV: jax.Array  # bool
    output_counts_MV: jax.Array  # int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Float32 log-probabilities under the model's own distribution, before any sampling
    parameter.
    """

    chosen_B: jax.Array
    top_ids_BK: jax.Array  # int32, the most likely tokens, most likely first
    top_BK: jax.Array


def batch_params(
    sequences: list[Sequence],
    *,
    size: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    with_max_ids: bool = False,
) -> BatchParams:
    """Return the parameters of `size` rows: one row per sequence, then padding, which is greedy.

    with_max_ids: make N the largest of `ID_BUCKETS`; otherwise N is the smallest that holds every
        row's ids.

    Raises ValueError if there are more than 24 end-of-text tokens beside a full list of ids.
    """
    params = [sequence.sampling for sequence in sequences]
    padding = size - len(params)
    least, most = REPETITION_PENALTIES

    def padded_array(values: list[float], fill: float, dtype: type = np.float32) -> np.ndarray:
        return np.array([*values, *[fill] * padding], dtype)

    seed_B2 = np.zeros((size, 2), np.uint32)
    for row, sequence in enumerate(sequences):
        seed_B2[row] = divmod(sequence.noise_seed % 2**64, 2**32)
    arrays = _token_id_arrays(
        params, size, vocab_size, eos_token_ids, with_max_ids=with_max_ids
    ) | {
        "temperature_B": padded_array(
            [0.0 if r.is_greedy else min(r.temperature, MAX_TEMPERATURE) for r in params], 0
        ),
        "top_k_B": padded_array(
            [min(r.top_k, vocab_size) if r.top_k > 0 else vocab_size for r in params], 1, np.int32
        ),
        "top_p_B": padded_array([max(r.top_p, MIN_TOP_P) for r in params], 1),
        "min_p_B": padded_array([r.min_p for r in params], 0),
        "repetition_penalty_B": padded_array(
            [min(max(r.repetition_penalty, least), most) for r in params], 1
        ),
        "presence_penalty_B": padded_array([r.presence_penalty for r in params], 0),
        "frequency_penalty_B": padded_array([r.frequency_penalty for r in params], 0),
        "seed_B2": seed_B2,
        "min_position_B": padded_array(
            [len(s.prompt_token_ids) + s.sampling.min_new_tokens for s in sequences], 0, np.int32
        ),
    }
    return BatchParams(**jax.device_put(arrays))


def _token_id_arrays(
    params: list[SamplingParams],
    size: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    *,
    with_max_ids: bool,
) -> dict[str, np.ndarray]:
    """Return the [B, N] arrays of `BatchParams` by name: biased tokens, their biases, stop tokens.

    Arguments and errors are those of `batch_params`.
    """
    bias_ids = [list(sampling.logit_bias) for sampling in params]
    stop_ids = [
        sorted({*eos_token_ids, *r.stop_token_ids}) if r.min_new_tokens else [] for r in params
    ]
    num_ids = max((len(ids) for ids in bias_ids + stop_ids), default=0)
    check(
        num_ids <= ID_BUCKETS[-1],
        "eos_token_ids",
        eos_token_ids,
        f"must be at most {ID_BUCKETS[-1] - MAX_IDS} tokens",
    )
    width = ID_BUCKETS[-1] if with_max_ids else next(n for n in ID_BUCKETS if n >= num_ids)
    bias_ids_BN, stop_ids_BN = np.full((2, size, width), vocab_size, np.int32)
    bias_BN = np.zeros((size, width), np.float32)
    for row, sampling in enumerate(params):
        bias_ids_BN[row, : len(bias_ids[row])] = bias_ids[row]
        bias_BN[row, : len(bias_ids[row])] = list(sampling.logit_bias.values())
        stop_ids_BN[row, : len(stop_ids[row])] = stop_ids[row]
    return {"bias_ids_BN": bias_ids_BN, "bias_BN": bias_BN, "stop_ids_BN": stop_ids_BN}


def initial_sampler_state(max_batch: int, vocab_size: int) -> SamplerState:
    """Return the initial state of `max_batch` rows, on the default device; it takes
    5 * max_batch * vocab_size bytes.
    """
    shape = (max_batch, vocab_size)
    # host arrays, which need no program
    zeros = np.zeros(shape, np.bool_), np.zeros(shape, np.int32)
    in_prompt_MV, output_counts_MV = jax.device_put(zeros, jax.devices()[0])
    return SamplerState(in_prompt_MV=in_prompt_MV, output_counts_MV=output_counts_MV)


def start_sequence(
    state: SamplerState,
    row: int | jax.Array,
    in_prompt_V: jax.Array | np.ndarray,
    output_counts_V: jax.Array | np.ndarray | int = 0,
) -> SamplerState:
    """Return the state after a sequence took a row; only needed for sequences with penalties.

    in_prompt_V: bool, the tokens that occur in its prompt.
    output_counts_V: int32, how often each token occurs in the output that it has already.
    """
    return SamplerState(
        in_prompt_MV=state.in_prompt_MV.at[row].set(in_prompt_V),
        output_counts_MV=state.output_counts_MV.at[row].set(output_counts_V),
    )


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
    log_total_B1 = jnp.log(_batch_invariant_row_sums(jnp.exp(logits_BV - max_B1)))
    chosen_B1 = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=1)
    return Logprobs(
        chosen_B=(chosen_B1 - max_B1 - log_total_B1)[:, 0],
        top_ids_BK=top_ids_BK,
        top_BK=top_BK - max_B1 - log_total_B1,
    )


def top_k(x_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k largest values [B, k] in falling order and their int32 ids; equal values by
    rising id.

    Equals `lax.top_k`, but faster: the k largest values lie in the k chunks of 32 tokens with the
    largest maxima (the first ones among equals), so only those chunks are ranked.
    """
    rows, vocab_size = x_BV.shape
    num_chunks = -(-vocab_size // CHUNK_TOKENS)
    if num_chunks < 8 * k:
        return lax.top_k(x_BV, k)
    x_BV = jnp.pad(
        x_BV, ((0, 0), (0, num_chunks * CHUNK_TOKENS - vocab_size)), constant_values=-jnp.inf
    )
    x_BHW = x_BV.reshape(rows, num_chunks, CHUNK_TOKENS)
    _, chunks_BK = lax.top_k(jnp.max(x_BHW, axis=2), k)
    chunks_BK = jnp.sort(chunks_BK, axis=1)  # keeps ids ascending, which decides between equals
    inside_BKW = jnp.take_along_axis(x_BHW, chunks_BK[:, :, None], axis=1)
    ids_BKW = chunks_BK[:, :, None] * CHUNK_TOKENS + jnp.arange(CHUNK_TOKENS, dtype=jnp.int32)
    values_BK, at_BK = lax.top_k(inside_BKW.reshape(rows, k * CHUNK_TOKENS), k)
    return values_BK, jnp.take_along_axis(ids_BKW.reshape(rows, k * CHUNK_TOKENS), at_BK, axis=1)


def _batch_invariant_row_sums(x_BV: jax.Array) -> jax.Array:
    """Return sums over V, [B, 1], in an order of addition that depends on V alone.

    The order of `jnp.sum` depends on B too, which would change the last bits.
    """
    while x_BV.shape[1] > 1:
        parts = min(16, x_BV.shape[1])
        x_BV = jnp.pad(x_BV, ((0, 0), (0, -x_BV.shape[1] % parts)))
        x_BV = sum(jnp.split(x_BV, parts, axis=1)[1:], start=x_BV[:, : x_BV.shape[1] // parts])
    return x_BV


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
            lambda: _vocabulary_filter_mask(z_BV, params),
            lambda: everything_BV,
        )
        kept_BV &= _threshold_mask(z_BV, params)
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
    kept_BV = _threshold_mask(z_BV, params)
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
    kept_BC = _candidate_filter_mask(z_BC, _batch_invariant_row_sums(jnp.exp(z_BV)), params)
    # The filters keep a prefix of the ranked tokens: if the last candidate is dropped, so are all
    # tokens beyond the candidates.
    settled_B = (params.top_k_B <= num_candidates) | (
        (params.top_k_B == vocab_size) & ~kept_BC[:, -1]
    )
    return _gumbel_max(z_BC, ids_BC, kept_BC, params.seed_B2, positions_B), settled_B


def _candidate_filter_mask(z_BC: jax.Array, total_B1: jax.Array, params: BatchParams) -> jax.Array:
    """Return bool [B, C]: True for the candidates that top-k, top-p and min-p keep.

    The candidates are the C most likely tokens, in falling order.

    z_BC: logits / temperature minus their maximum, so exp(z) is relative to the most likely token.
    total_B1: the sum of exp(z) over the vocabulary, used where top_k exceeds C. If the last
    candidate is kept in such a row, tokens beyond the candidates may be kept too, and the caller
    searches the vocabulary.
    """
    top_k_B1, top_p_B1 = params.top_k_B[:, None], params.top_p_B[:, None]
    in_top_k_BC = lax.broadcasted_iota(jnp.int32, z_BC.shape, 1) < top_k_B1
    weights_BC = jnp.where(in_top_k_BC, jnp.exp(z_BC), 0.0)
    sums_BC = jnp.cumsum(weights_BC, axis=1)
    total_B1 = jnp.where(top_k_B1 <= z_BC.shape[1], sums_BC[:, -1:], total_B1)
    before_BC = jnp.pad(sums_BC[:, :-1], ((0, 0), (1, 0)))
    in_top_p_BC = (top_p_B1 >= 1) | (before_BC < top_p_B1 * total_B1)
    return in_top_k_BC & in_top_p_BC & _threshold_mask(z_BC, params)


def _threshold_mask(z_BN: jax.Array, params: BatchParams) -> jax.Array:
    """Return bool, True for the tokens that min-p keeps, whichever tokens z holds.

    z_BN: logits / temperature minus their maximum, of all or of some tokens.
    """
    return jnp.exp(z_BN) >= params.min_p_B[:, None]


def _vocabulary_filter_mask(z_BV: jax.Array, params: BatchParams) -> jax.Array:
    """Return bool [B, V]: True for the tokens that top-k and top-p keep, without sorting the
    vocabulary.

    Finds the smallest value that each filter keeps by bisection, in 31 passes over the row, which
    is faster than a sort. Among tokens of that value the lowest ids are kept, as many as needed.
    """
    vocab_size = z_BV.shape[1]
    top_k_B1, top_p_B1 = params.top_k_B[:, None], params.top_p_B[:, None]
    # The bits of non-negative floats, read as integers, have the same order as the floats.
    distance_BV = lax.bitcast_convert_type(jnp.abs(z_BV), jnp.int32)
    ids_BV = lax.broadcasted_iota(jnp.int32, z_BV.shape, 1)

    def fewest_tokens_reaching(amount_BV: jax.Array, needed_B1: jax.Array) -> jax.Array:
        """Return bool [B, V], the fewest tokens whose integer amounts sum to at least `needed`.

        Tokens are taken by rising distance from the largest logit, then by id.
        """

        def reaches_needed(mask_BV: jax.Array) -> jax.Array:
            amounts_BV = jnp.where(mask_BV, amount_BV, jnp.uint32(0))
            return jnp.sum(amounts_BV, axis=1, keepdims=True, dtype=jnp.uint32) >= needed_B1

        infinity_B1 = jnp.full_like(
            top_k_B1, lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)
        )
        last_B1 = _bisect_smallest_true(
            lambda at_B1: reaches_needed(distance_BV <= at_B1),
            jnp.full_like(top_k_B1, -1),
            infinity_B1,
        )
        closer_BV, equal_BV = distance_BV < last_B1, distance_BV == last_B1
        alone_B1 = jnp.sum(equal_BV, axis=1, keepdims=True, dtype=jnp.int32) <= 1
        last_id_B1 = _bisect_smallest_true(
            lambda at_B1: reaches_needed(closer_BV | (equal_BV & (ids_BV <= at_B1))),
            jnp.where(alone_B1, vocab_size - 2, -1),
            jnp.full_like(top_k_B1, vocab_size - 1),
        )
        return closer_BV | (equal_BV & (ids_BV <= last_id_B1))

    def top_k_mask() -> jax.Array:
        return fewest_tokens_reaching(
            jnp.ones_like(z_BV, jnp.uint32), top_k_B1.astype(jnp.uint32)
        ) | (top_k_B1 == vocab_size)

    everything_BV = jnp.ones_like(z_BV, jnp.bool_)
    in_top_k_BV = lax.cond(jnp.any(top_k_B1 < vocab_size), top_k_mask, lambda: everything_BV)
    weights_BV = jnp.where(in_top_k_BV, jnp.exp(z_BV), 0.0)
    # Probabilities in units of 2^-31: integer sums are exact, so they are monotonic in the set of
    # tokens and do not depend on B.
    units_BV = jnp.round(weights_BV * (2.0**31 / _batch_invariant_row_sums(weights_BV))).astype(
        jnp.uint32
    )
    total_B1 = jnp.sum(units_BV, axis=1, keepdims=True, dtype=jnp.uint32).astype(jnp.float32)
    needed_B1 = jnp.maximum((top_p_B1 * total_B1).astype(jnp.uint32), jnp.uint32(1))
    return in_top_k_BV & ((top_p_B1 >= 1) | fewest_tokens_reaching(units_BV, needed_B1))


def _bisect_smallest_true(
    predicate: Callable[[jax.Array], jax.Array], low_B1: jax.Array, high_B1: jax.Array
) -> jax.Array:
    """Return the smallest integer in (low, high] for which `predicate` is true, for each row.

    `predicate` must be monotonic, and true at `high`.
    """

    def halve_interval(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B1, high_B1 = bounds
        middle_B1 = low_B1 + (high_B1 - low_B1) // 2
        enough_B1 = predicate(middle_B1)
        return jnp.where(enough_B1, low_B1, middle_B1), jnp.where(enough_B1, middle_B1, high_B1)

    return lax.while_loop(
        lambda bounds: jnp.any(bounds[1] - bounds[0] > 1), halve_interval, (low_B1, high_B1)
    )[1]


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


_sample = jax.jit(sample, static_argnames="with_logprobs", donate_argnames="state")
_greedy = jax.jit(greedy)
_start_sequence = jax.jit(start_sequence, donate_argnames="state")
_prompt_logprobs = jax.jit(prompt_logprobs, static_argnames="num_logprobs")


class Draw(NamedTuple):
    """The token sampled for a sequence, `NOT_FINITE` if its logits are not finite, and its
    log-probability.

    logprob: None if the request asks for none.
    """

    token: int
    logprob: TokenLogprob | None


class TokensInStep(NamedTuple):
    """The tokens that a program computed beside the logits of its rows.

    are_drawn: whether they follow the rows' sampling parameters; otherwise they are the most likely
        ones.
    """

    tokens_P: jax.Array
    are_drawn: bool


class PendingDraws(NamedTuple):
    """Tokens that the device is still sampling: one for each chunk, then padding.

    num_top_logprobs: for each chunk, the number of most likely tokens to report log-probabilities
        of; None for no log-probabilities.
    """

    tokens_B: jax.Array
    logprobs: Logprobs | None
    num_top_logprobs: list[int | None]

    def wait_and_read(self) -> list[Draw]:
        """Wait for the device, and return the draw of each chunk."""
        tokens = np.asarray(self.tokens_B).tolist()[: len(self.num_top_logprobs)]
        return [
            Draw(*pair)
            for pair in zip(
                tokens, _token_logprobs(tokens, self.logprobs, self.num_top_logprobs), strict=True
            )
        ]


class SamplingVariant(NamedTuple):
    """A program of `sample`.

    wide: takes many token ids, and masks of allowed tokens.
    """

    wide: bool
    with_logprobs: bool


SAMPLING_VARIANTS = tuple(starmap(SamplingVariant, product((False, True), repeat=2)))


class Sampler:
    """Samples tokens for chunks of sequences; owns the penalties' state on the device.

    before_sampling: called with the variant of `sample` that is used next.
    """

    def __init__(self, max_batch: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._max_batch = max_batch
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._state = initial_sampler_state(max_batch, vocab_size)
        # parameters of the last step's sequences, reused while these stay the same
        self._params: tuple[list[Sequence], BatchParams] | None = None
        self.before_sampling: Callable[[SamplingVariant], object] = lambda _: None

    def record_prompt_for_penalties(self, chunk: Chunk) -> None:
        """Write a sequence's prompt and output into the state of its row, for the penalties.

        Does nothing unless `chunk` is the sequence's first since it got the row and its sampling
        parameters have penalties. A preempted sequence already has output.
        """
        sequence, s = chunk.sequence, chunk.sequence.sampling
        is_first = chunk.start == sequence.first_position
        if is_first and (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (
            1,
            0,
            0,
        ):
            in_prompt_V = np.zeros(self._vocab_size, np.bool_)
            in_prompt_V[sequence.prompt_token_ids] = True
            counts_V = np.bincount(
                np.array(sequence.output_token_ids, np.int64), minlength=self._vocab_size
            )
            self._state = _start_sequence(
                self._state, np.int32(chunk.row), in_prompt_V, counts_V.astype(np.int32)
            )

    def params_in_step(self, sequences: list[Sequence]) -> BatchParams | None:
        """Return the parameters with which the program of the logits can sample for these
        sequences by `sample_settled`; None if it cannot, or if all take the most likely token.
        """
        sampling = [sequence.sampling for sequence in sequences]
        if (
            any(sequence.constraint is not None for sequence in sequences)
            or all(of_sequence.is_plain_greedy for of_sequence in sampling)
            or not all(map(is_settled_by_candidates, sampling))
        ):
            return None
        return self._batch_params(sequences, constrained=False)

    def padding_params(self) -> BatchParams:
        """Return parameters as `params_in_step` returns them, all padding, to compile programs."""
        return batch_params([], size=self._max_batch, vocab_size=self._vocab_size)

    def start_sampling(
        self,
        logits_BV: jax.Array,
        chunks: list[Chunk],
        step_tokens: TokensInStep | None = None,
    ) -> PendingDraws:
        """Start sampling a token after each chunk, and return the pending draws; does not wait.

        logits_BV: a row for each chunk, then padding.
        step_tokens: those that the program of the logits has sampled already, if it does.
        """
        sequences = [chunk.sequence for chunk in chunks]
        constrained = any(sequence.constraint is not None for sequence in sequences)
        if step_tokens is not None and step_tokens.are_drawn:
            return PendingDraws(step_tokens.tokens_P, None, [None] * len(chunks))
        if not constrained and all(sequence.sampling.is_plain_greedy for sequence in sequences):
            tokens_B = _greedy(logits_BV) if step_tokens is None else step_tokens.tokens_P
            return PendingDraws(tokens_B, None, [None] * len(chunks))
        size = self._max_batch
        logits_BV = self._pad_rows(logits_BV)
        params = self._batch_params(sequences, constrained)
        padding = size - len(chunks)
        rows_B = np.array([chunk.row for chunk in chunks] + [size] * padding, np.int32)
        positions_B = np.array([chunk.end for chunk in chunks] + [0] * padding, np.int32)
        # Requests with many token ids also use the program for constraints: fewer to compile.
        wide = params.bias_ids_BN.shape[1] == ID_BUCKETS[-1]
        allowed_BW = self._allowed_token_masks(sequences) if wide else None
        wanted = [sequence.sampling.logprobs for sequence in sequences]
        with_logprobs = any(count is not None for count in wanted)
        self.before_sampling(SamplingVariant(wide, with_logprobs))
        tokens_B, logprobs, self._state = _sample(
            logits_BV,
            params,
            self._state,
            rows_B,
            positions_B,
            allowed_BW,
            with_logprobs=with_logprobs,
        )
        return PendingDraws(tokens_B, logprobs, wanted)

    def prompt_logprobs(self, chunk: Chunk, logits_CV: jax.Array) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt tokens that follow each token of a chunk."""
        following = chunk.sequence.prompt_token_ids[chunk.start + 1 : chunk.end + 1]
        next_C = np.array(following + [0] * (logits_CV.shape[0] - len(following)), np.int32)
        logprobs = _prompt_logprobs(logits_CV, next_C, num_logprobs=MAX_LOGPROBS)
        wanted = [chunk.sequence.sampling.prompt_logprobs] * len(following)
        return [lp for lp in _token_logprobs(following, logprobs, wanted) if lp is not None]

    def warm_up(self, logits_BV: jax.Array) -> None:
        """Compile the programs of sampling that depend on the number of rows of the logits:
        `greedy`, and the padding to `max_batch` rows; and the counts of a prompt's tokens.
        """
        _greedy(logits_BV).block_until_ready()
        self._pad_rows(logits_BV)
        self._state = _start_sequence(
            self._state,
            np.int32(0),
            np.zeros(self._vocab_size, np.bool_),
            np.zeros(self._vocab_size, np.int32),
        )

    def warm_up_sampling(self, logits_BV: jax.Array, variant: SamplingVariant) -> None:
        """Compile a variant of `sample`, by sampling from zeros with a state of its own.

        logits_BV: logits as the model returns them, any number of rows. Any thread may call this.
        """
        size, vocab_size = self._max_batch, self._vocab_size
        params = batch_params([], size=size, vocab_size=vocab_size, with_max_ids=variant.wide)
        words_BW = np.full((size, -(-vocab_size // 32)), -1, np.int32)
        _sample(
            self._pad_rows(logits_BV),
            params,
            initial_sampler_state(size, vocab_size),
            np.full(size, size, np.int32),
            np.zeros(size, np.int32),
            words_BW if variant.wide else None,
            with_logprobs=variant.with_logprobs,
        )

    def warm_up_prompt_logprobs(self, logits_CV: jax.Array) -> None:
        """Compile the log-probabilities of prompts for logits of this shape."""
        _prompt_logprobs(
            logits_CV, np.zeros(logits_CV.shape[0], np.int32), num_logprobs=MAX_LOGPROBS
        )

    def _pad_rows(self, logits_BV: jax.Array) -> jax.Array:
        """Return the logits with `max_batch` rows, so that one program serves any batch."""
        missing = self._max_batch - logits_BV.shape[0]
        return jnp.pad(logits_BV, ((0, missing), (0, 0))) if missing else logits_BV

    def start_greedy(self, logits_PCV: jax.Array) -> jax.Array:
        """Start to find the most likely token after each token, int32 [P, C]; does not wait.

        logits_PCV: of C tokens in each of P rows.
        """
        return _greedy(logits_PCV.reshape(-1, logits_PCV.shape[2])).reshape(logits_PCV.shape[:2])

    def greedy_tokens_on_host(self, logits_BV: jax.Array) -> np.ndarray:
        """Return int32 [B], the most likely token of each row, on the host."""
        return np.asarray(_greedy(logits_BV))

    def _batch_params(self, sequences: list[Sequence], constrained: bool) -> BatchParams:
        """Return `batch_params` of the sequences; the last call's if they are the same."""
        if self._params is None or self._params[0] != sequences:
            params = batch_params(
                sequences,
                size=self._max_batch,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
                with_max_ids=constrained,
            )
            self._params = (sequences, params)
        return self._params[1]

    def _allowed_token_masks(self, sequences: list[Sequence]) -> np.ndarray:
        """Return the masks `allowed_BW` for `sample`; padding, unconstrained rows and
        rows whose constraint failed allow all tokens.
        """
        words_BW = np.full((self._max_batch, -(-self._vocab_size // 32)), -1, np.int32)
        for row, sequence in enumerate(sequences):
            if sequence.constraint is not None and sequence.failed is None:
                with sequence.catch_errors("constraint"):
                    sequence.constraint.fill_next_token_bitmask(words_BW[row])
        words_BW[[row for row, sequence in enumerate(sequences) if sequence.failed]] = -1
        return words_BW


def _token_logprobs(
    tokens: list[int], logprobs: Logprobs | None, num_top_logprobs: list[int | None]
) -> list[TokenLogprob | None]:
    """Return each token's log-probability with its `num_top_logprobs` of most likely tokens.

    None for tokens whose request asks for none.
    """
    if logprobs is None:
        return [None] * len(tokens)
    chosen, ids, top = (
        np.asarray(a).tolist() for a in (logprobs.chosen_B, logprobs.top_ids_BK, logprobs.top_BK)
    )
    return [
        None
        if n is None
        else TokenLogprob(token, chosen[i], tuple(zip(ids[i][:n], top[i][:n], strict=True)))
        for i, (token, n) in enumerate(zip(tokens, num_top_logprobs, strict=True))
    ]
