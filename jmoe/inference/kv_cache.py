"""The KV cache, one array of keys and one of values per layer, and attention over it.

Steps update the arrays in place (by donation). bfloat16 is stored as its bits, uint16: XLA:CPU
would otherwise convert the whole cache to read or write a part of it.

Legend:
B cache rows
S positions of a row
P rows of a step
C tokens a row in this step
G key/value heads
H query heads
R query heads a group, H / G
Q queries of a group, R * C
L positions of a block
d dimension of a key head
e dimension of a value head
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.config import ModelConfig
from kernels_pallas.matmul import dot
from kernels_pallas.native import cached_attention, uses_native_attention
from kernels_pallas.saved import bfloat16_as_uint16

BLOCK = 128
_NONE = -1e30  # the score of masked keys: finite, as differences of -inf would be NaN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values."""

    k_BGSd: jax.Array
    v_BGSe: jax.Array

    @property
    def length(self) -> int:
        """S, the positions of a row. Position S marks a padding token of a step."""
        return self.k_BGSd.shape[2]


def empty_caches(
    config: ModelConfig, max_batch: int, max_seq_len: int, dtype: jnp.dtype
) -> list[KVCache]:
    """Return zeroed caches, one for each layer, with `max_batch` rows.

    max_seq_len: positions of a row, rounded up to a multiple of `BLOCK`.
    """
    length = -(-max_seq_len // BLOCK) * BLOCK
    stored = jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else dtype
    value_dim = config.v_head_dim if config.kv_lora_rank is not None else config.dim_per_head
    dims = [
        (max_batch, config.num_key_value_heads, length, dim)
        for dim in (config.dim_per_head, value_dim)
    ]
    return [
        KVCache(*(jnp.zeros(shape, stored) for shape in dims))
        for _ in range(config.num_hidden_layers)
    ]


def write_keys_and_values(
    cache: KVCache, rows_P: jax.Array, positions_PC: jax.Array, k_PCGd: jax.Array, v_PCGe: jax.Array
) -> KVCache:
    """Return the cache with this step's keys and values written; tokens at position S are skipped.

    The positions of a row must be consecutive: each row is written as one slice, as scatters are
    slow on XLA:CPU. A slice that would pass the end starts earlier and keeps the old content there.
    """
    new = KVCache(
        bfloat16_as_uint16(k_PCGd).swapaxes(1, 2), bfloat16_as_uint16(v_PCGe).swapaxes(1, 2)
    )
    width, real_PC = positions_PC.shape[1], positions_PC < cache.length

    def write_row(p: jax.Array, cache: KVCache) -> KVCache:
        start = jnp.minimum(positions_PC[p, 0], cache.length - width)
        late = positions_PC[p, 0] - start
        real_C1 = jnp.roll(real_PC[p], late)[:, None]

        def put_tokens(all_BGSd: jax.Array, new_PGCd: jax.Array) -> jax.Array:
            at = (rows_P[p], 0, start, 0)
            old = lax.dynamic_slice(all_BGSd, at, (1, all_BGSd.shape[1], width, all_BGSd.shape[3]))
            piece = jnp.where(real_C1, jnp.roll(new_PGCd[p], late, axis=1), old[0])
            return lax.dynamic_update_slice(all_BGSd, piece[None], at)

        return jax.tree.map(put_tokens, cache, new)

    return lax.fori_loop(0, rows_P.shape[0], write_row, cache)


def _write_one_token_per_row(
    cache: KVCache, rows_P: jax.Array, positions_P: jax.Array, k_P1Gd: jax.Array, v_P1Ge: jax.Array
) -> KVCache:
    """Return the cache with one token's key and value written in each row, by one scatter."""

    def put_token(all_BGSd: jax.Array, new_P1Gd: jax.Array) -> jax.Array:
        return all_BGSd.at[rows_P, :, positions_P].set(
            bfloat16_as_uint16(new_P1Gd)[:, 0], mode="drop"
        )

    return KVCache(put_token(cache.k_BGSd, k_P1Gd), put_token(cache.v_BGSe, v_P1Ge))


def write_and_attend(
    new: tuple[jax.Array, jax.Array, jax.Array],
    cache: KVCache,
    rows_P: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | np.int32 | None = None,
    sinks_H: jax.Array | None = None,
    context: int | None = None,
) -> tuple[jax.Array, KVCache]:
    """Write this step's keys and values; return (attention output [P, C, H, e], cache).

    new: (q_PCHd, k_PCGd, v_PCGe) of this step's tokens.
    context: for one token a row, an exclusive bound on all positions, which selects
        `attend_single_tokens`; None selects `attend`, or the native operation where available.
    """
    if context is not None:
        cache = _write_one_token_per_row(cache, rows_P, positions_PC[:, 0], *new[1:])
        at = new[0], cache, rows_P, positions_PC
        return attend_single_tokens(
            *at, context=context, scale=scale, window=window, sinks_H=sinks_H
        ), cache
    if uses_native_attention(new[0].dtype, new[0].shape[3], new[2].shape[3]):
        caches = (cache.k_BGSd, cache.v_BGSe)
        out_PCHe, k_BGSd, v_BGSe = cached_attention(
            new, caches, rows_P, positions_PC, scale=scale, window=window, sinks_H=sinks_H
        )
        return out_PCHe, KVCache(k_BGSd, v_BGSe)
    q_PCHd, k_PCGd, v_PCGe = new
    cache = write_keys_and_values(cache, rows_P, positions_PC, k_PCGd, v_PCGe)
    return attend(
        q_PCHd, cache, rows_P, positions_PC, scale=scale, window=window, sinks_H=sinks_H
    ), cache


def attend_single_tokens(
    q_P1Hd: jax.Array,
    cache: KVCache,
    rows_P: jax.Array,
    positions_P1: jax.Array,
    *,
    context: int,
    scale: float,
    window: jax.Array | np.int32 | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention [P, 1, H, e] for one token a row, over the first `context` positions at
    once.

    The positions only enter a mask, so a GPU needs no loop whose length depends on data. Otherwise
    as `attend`.
    """
    p, _, h, d = q_P1Hd.shape
    g = cache.k_BGSd.shape[1]
    last_P1 = jnp.where(positions_P1 < cache.length, positions_P1, -1)
    at_L = jnp.arange(context, dtype=jnp.int32)
    seen_PL = at_L <= last_P1
    if window is not None:
        seen_PL &= at_L > last_P1 - window

    def read_rows(x_BGSd: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x_BGSd[:, :, :context][rows_P], q_P1Hd.dtype)

    s_PGRL = (
        dot(q_P1Hd.reshape(p, g, h // g, d), read_rows(cache.k_BGSd), b_transposed=True) * scale
    )
    s_PGRL = jnp.where(seen_PL[:, None, None], s_PGRL, _NONE)
    top = s_PGRL.max(axis=-1, keepdims=True)
    if sinks_H is not None:
        sinks = sinks_H.astype(jnp.float32).reshape(1, g, h // g, 1)
        top = jnp.maximum(top, sinks)
    weights = jnp.exp(s_PGRL - top)
    total = weights.sum(axis=-1, keepdims=True) + (0.0 if sinks_H is None else jnp.exp(sinks - top))
    # values of an earlier request may be NaN beyond the last position, and 0 times NaN is not 0
    v_PGLe = jnp.where((at_L <= last_P1)[:, None, :, None], read_rows(cache.v_BGSe), 0)
    out = dot(weights.astype(q_P1Hd.dtype), v_PGLe) / total
    return out.astype(q_P1Hd.dtype).reshape(p, 1, h, -1)


@partial(jax.jit, donate_argnums=0)
def copy_row(
    cache: KVCache, source: jax.Array, target: jax.Array, num_tokens: jax.Array
) -> KVCache:
    """Return the cache with the first `num_tokens` positions of row `source` copied to row
    `target`.

    Copies whole blocks, so up to `BLOCK` - 1 further positions too.
    """

    def copy_row_blocks(x_BGSd: jax.Array) -> jax.Array:
        def copy_block(i: jax.Array, x_BGSd: jax.Array) -> jax.Array:
            size = (1, x_BGSd.shape[1], BLOCK, x_BGSd.shape[3])
            piece = lax.dynamic_slice(x_BGSd, (source, 0, i * BLOCK, 0), size)
            return lax.dynamic_update_slice(x_BGSd, piece, (target, 0, i * BLOCK, 0))

        return lax.fori_loop(0, (num_tokens + BLOCK - 1) // BLOCK, copy_block, x_BGSd)

    return jax.tree.map(copy_row_blocks, cache)


def attend(
    q_PCHd: jax.Array,
    cache: KVCache,
    rows_P: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | np.int32 | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention [P, C, H, e] of this step's tokens to the cached positions up to their own.

    Loops over the blocks in use, with a running maximum (FlashAttention, arXiv 2205.14135).

    window: number of positions that a token attends to, its own included; None for all.
    sinks_H: a logit for each head that takes part in the softmax and has no value (gpt-oss).
    """
    c = q_PCHd.shape[1]
    out = [
        _attend_query_block(
            q_PCHd[:, i : i + BLOCK],
            cache,
            rows_P,
            positions_PC[:, i : i + BLOCK],
            scale,
            window,
            sinks_H,
        )
        for i in range(0, c, BLOCK)  # each block of queries loops to its own last position only
    ]
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)


def _attend_query_block(
    q_PCHd: jax.Array,
    cache: KVCache,
    rows_P: jax.Array,
    positions_PC: jax.Array,
    scale: float,
    window: jax.Array | np.int32 | None,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Return `attend` for at most `BLOCK` queries a row, [P, C, H, e]."""
    p, c, h, d = q_PCHd.shape
    g, length, e = cache.k_BGSd.shape[1], cache.length, cache.v_BGSe.shape[3]
    q = q_PCHd.reshape(p, c, g, h // g, d).transpose(0, 2, 3, 1, 4).reshape(p, g, -1, d)
    at_Q = jnp.tile(positions_PC, (1, h // g))[:, None, :, None]  # [P, 1, Q, 1]
    last_P1 = jnp.max(jnp.where(positions_PC < length, positions_PC, -1), axis=1, keepdims=True)

    def read_block(x_BGSd: jax.Array, i: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(x_BGSd, i * BLOCK, BLOCK, axis=2)[rows_P]
        return lax.bitcast_convert_type(part, q.dtype)

    def attend_block(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = carry
        s = dot(q, read_block(cache.k_BGSd, i), b_transposed=True) * scale
        at_L = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        seen = at_L <= at_Q
        if window is not None:
            seen &= at_L > at_Q - window
        s = jnp.where(seen, s, _NONE)
        new_top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        kept = jnp.exp(top - new_top)
        # a row without a visible key so far gets weights of 1 for masked keys; its first visible
        # key makes `kept` 0, which discards them
        weights = jnp.exp(s - new_top)
        # values of an earlier request may be NaN beyond the last position, and 0 times NaN is not 0
        v_PGLe = jnp.where((at_L <= last_P1)[:, None, :, None], read_block(cache.v_BGSe, i), 0)
        out = out * kept + dot(weights.astype(q.dtype), v_PGLe)
        return new_top, total * kept + weights.sum(axis=-1, keepdims=True), out

    carry = (*_initial_softmax_state(sinks_H, (p, g, h // g, c)), jnp.zeros((*q.shape[:3], e)))
    _, total, out = lax.fori_loop(
        *_used_block_range(positions_PC, length, window), attend_block, carry
    )
    out = (out / jnp.maximum(total, 1e-30)).astype(q.dtype)
    return out.reshape(p, g, h // g, c, e).transpose(0, 3, 1, 2, 4).reshape(p, c, h, e)


def _used_block_range(
    positions_PC: jax.Array, length: int, window: jax.Array | np.int32 | None
) -> tuple[jax.Array, jax.Array]:
    """Return (first, end) of the blocks to which this step's tokens attend."""
    real = positions_PC < length
    end = jnp.max(jnp.where(real, positions_PC, -1)) // BLOCK + 1
    if window is None:
        return jnp.int32(0), end
    first = jnp.min(jnp.where(real, positions_PC, length)) - window + 1
    return jnp.maximum(first, 0) // BLOCK, end


def _initial_softmax_state(
    sinks_H: jax.Array | None, shape_PGRC: tuple[int, int, int, int]
) -> tuple[jax.Array, jax.Array]:
    """Return (maximum score, sum of weights) of each query before its first key, [P, G, Q, 1].

    They count the sinks alone.
    """
    p, g, r, c = shape_PGRC
    shape = (p, g, r * c, 1)
    if sinks_H is None:
        return jnp.full(shape, _NONE), jnp.zeros(shape)
    sinks = sinks_H.astype(jnp.float32).reshape(1, g, r, 1)
    top = jnp.broadcast_to(jnp.repeat(sinks, c, axis=3).reshape(1, g, -1, 1), shape)
    return top, jnp.ones(shape)
