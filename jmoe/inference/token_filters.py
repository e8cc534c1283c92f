"""Filters of tokens, as masks: top-k, top-p and min-p over the most likely tokens or over the
vocabulary.

A row's mask depends on that row alone.

Legend:
B rows of the batch
V vocabulary
C candidates in falling order
H chunks of the vocabulary
W tokens of such a chunk
N tokens, all or some
K most likely tokens
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.inference.sampler_arrays import BatchParams

CHUNK_TOKENS = 32


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


def batch_invariant_row_sums(x_BV: jax.Array) -> jax.Array:
    """Return sums over V, [B, 1], in an order of addition that depends on V alone.

    The order of `jnp.sum` depends on B too, which would change the last bits.
    """
    while x_BV.shape[1] > 1:
        parts = min(16, x_BV.shape[1])
        x_BV = jnp.pad(x_BV, ((0, 0), (0, -x_BV.shape[1] % parts)))
        x_BV = sum(jnp.split(x_BV, parts, axis=1)[1:], start=x_BV[:, : x_BV.shape[1] // parts])
    return x_BV


def candidate_filter_mask(z_BC: jax.Array, total_B1: jax.Array, params: BatchParams) -> jax.Array:
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
    return in_top_k_BC & in_top_p_BC & threshold_mask(z_BC, params)


def threshold_mask(z_BN: jax.Array, params: BatchParams) -> jax.Array:
    """Return bool, True for the tokens that min-p keeps, whichever tokens z holds.

    z_BN: logits / temperature minus their maximum, of all or of some tokens.
    """
    return jnp.exp(z_BN) >= params.min_p_B[:, None]


def vocabulary_filter_mask(z_BV: jax.Array, params: BatchParams) -> jax.Array:
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
    units_BV = jnp.round(weights_BV * (2.0**31 / batch_invariant_row_sums(weights_BV))).astype(
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
