"""The KV cache, one array of keys and one of values per layer, and attention over it.

A cache of latents (DeepSeek) has one array: a token's normed latent and rotated shared key are one
key of a head that all query heads share, and its first dimensions are the value.

The arrays consist of blocks of `BLOCK` positions. A row of a step has a table of blocks: its
position i is in block i // BLOCK of its table. Several tables may share a block that is full; a
step writes only to blocks that one table has. `BlockPool` decides which blocks a table has, and
programs take tables as operands, so they do not depend on them. Blocks before the window of a layer
stay in the table, because other layers of the same model may read them.

Steps update the arrays in place (by donation). bfloat16 is stored as its bits, uint16: XLA:CPU
would otherwise convert the whole cache to read or write a part of it.

Legend:
N blocks of the cache
W blocks of a table
S positions of a table, W * BLOCK; position S marks a padding token of a step
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.config import ModelConfig
from jmoe.config.engine import CACHE_BLOCK
from jmoe.layers.attention import CacheInputs, Expand
from kernels_pallas.matmul import dot
from kernels_pallas.native import cached_attention, uses_native_attention
from kernels_pallas.saved import bfloat16_as_uint16

BLOCK = CACHE_BLOCK
_NONE = -1e30  # the score of masked keys: finite, as differences of -inf would be NaN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values.

    v_NGLe: None if the values are the first dimensions of the keys.
    """

    k_NGLd: jax.Array
    v_NGLe: jax.Array | None = None

    @property
    def num_positions(self) -> int:
        """Positions of all blocks."""
        return self.k_NGLd.shape[0] * BLOCK


def table_width(max_seq_len: int) -> int:
    """Return W, the number of blocks of a table for sequences of up to `max_seq_len` tokens."""
    return -(-max_seq_len // BLOCK)


def consecutive_blocks(num_rows: int, max_seq_len: int) -> np.ndarray:
    """Return tables with blocks of their own for rows 0, 1, ..., int32 [num_rows, W]: row r has
    blocks r W to r W + W - 1.
    """
    width = table_width(max_seq_len)
    return np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)


def empty_caches(
    config: ModelConfig, num_blocks: int, dtype: jnp.dtype, copies: int = 1
) -> list[KVCache]:
    """Return zeroed caches of `num_blocks` blocks, one cache for each layer.

    copies: how often every key/value head is repeated.
    """
    stored = jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else dtype
    if config.kv_lora_rank is not None:
        heads, dims = 1, [config.kv_lora_rank + config.qk_rope_head_dim]
    else:
        heads, dims = config.num_key_value_heads, [config.dim_per_head] * 2
    shapes = [(num_blocks, heads * copies, BLOCK, dim) for dim in dims]
    return [
        KVCache(*(jnp.zeros(shape, stored) for shape in shapes))
        for _ in range(config.num_hidden_layers)
    ]


def _select_stored(cache: KVCache, k_PCGd: jax.Array, v_PCGe: jax.Array) -> KVCache:
    """Return the arrays of a step's keys and values that `cache` stores, bfloat16 as its bits."""
    values = None if cache.v_NGLe is None else bfloat16_as_uint16(v_PCGe)
    return KVCache(bfloat16_as_uint16(k_PCGd), values)


def is_real(positions_PC: jax.Array, blocks_PW: jax.Array) -> jax.Array:
    """Return which tokens of a step are no padding, bool [P, C]."""
    return positions_PC < blocks_PW.shape[1] * BLOCK


def write_keys_and_values(
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    k_PCGd: jax.Array,
    v_PCGe: jax.Array,
) -> KVCache:
    """Return the cache with this step's keys and values written; tokens at position S are skipped.

    The positions of a row must be consecutive.
    """
    operands = cache, blocks_PW, positions_PC, k_PCGd, v_PCGe
    written: KVCache = lax.platform_dependent(*operands, cpu=write_slices, default=write_scattered)
    return written


def write_slices(
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    k_PCGd: jax.Array,
    v_PCGe: jax.Array,
) -> KVCache:
    """Return `write_keys_and_values`, by one slice for each row and block that the row touches:
    scatters are slow on XLA:CPU.

    A slice that would pass the block's end starts earlier and keeps the old content there.
    """
    width = min(positions_PC.shape[1], BLOCK)
    slices = (positions_PC.shape[1] - 2) // BLOCK + 2  # the most blocks that a row can touch
    around = (width, width)  # a slice may begin before the first token, and end after the last
    new = jax.tree.map(
        lambda x_PCGd: jnp.pad(x_PCGd.swapaxes(1, 2), ((0, 0), (0, 0), around, (0, 0))),
        _select_stored(cache, k_PCGd, v_PCGe),
    )
    real_PC = jnp.pad(is_real(positions_PC, blocks_PW), ((0, 0), around))

    def write_slice(i: jax.Array, cache: KVCache) -> KVCache:
        p, start = i // slices, positions_PC[i // slices, 0]
        place = start // BLOCK + i % slices  # in the table
        first = jnp.clip(start - place * BLOCK, 0, BLOCK - width)  # of the block's positions
        token = width + place * BLOCK + first - start
        block = blocks_PW[p, jnp.minimum(place, blocks_PW.shape[1] - 1)]
        real_C1 = lax.dynamic_slice_in_dim(real_PC[p], token, width)[:, None]

        def put_tokens(all_NGLd: jax.Array, new_PGCd: jax.Array) -> jax.Array:
            at, size = (block, 0, first, 0), (1, all_NGLd.shape[1], width, all_NGLd.shape[3])
            old = lax.dynamic_slice(all_NGLd, at, size)
            piece = lax.dynamic_slice(new_PGCd, (p, 0, token, 0), size)
            return lax.dynamic_update_slice(all_NGLd, jnp.where(real_C1, piece, old), at)

        return jax.tree.map(put_tokens, cache, new)

    return lax.fori_loop(0, blocks_PW.shape[0] * slices, write_slice, cache)


def write_scattered(
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    k_PCGd: jax.Array,
    v_PCGe: jax.Array,
) -> KVCache:
    """Return `write_keys_and_values`, by one scatter for each array."""
    row_P1 = jnp.arange(positions_PC.shape[0])[:, None]
    # padding is beyond the table, and gets block N, which does not exist
    block_PC = blocks_PW.at[row_P1, positions_PC // BLOCK].get(
        mode="fill", fill_value=cache.k_NGLd.shape[0]
    )

    def put_tokens(all_NGLd: jax.Array, new_PCGd: jax.Array) -> jax.Array:
        at = block_PC, slice(None), positions_PC % BLOCK
        return all_NGLd.at[at].set(new_PCGd, mode="drop")

    return jax.tree.map(put_tokens, cache, _select_stored(cache, k_PCGd, v_PCGe))


def write_and_attend(
    new: CacheInputs,
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | np.int32 | None = None,
    sinks_H: jax.Array | None = None,
    context: int | None = None,
) -> tuple[jax.Array, KVCache]:
    """Write this step's keys and values; return (attention output [P, C, H, e], cache).

    new: of this step's tokens.
    context: for one token a row, an exclusive bound on all positions, a multiple of `BLOCK`, which
        selects `attend_single_tokens` if its copies are at most as large as the cache, else
        `attend`; None selects `attend`, or the native operation if there is one.
    """
    q_PCHd, k_PCGd, v_PCGe, expand = new
    masks: dict[str, Any] = {"scale": scale, "window": window, "sinks_H": sinks_H}
    if context is not None:
        assert expand is None, "single tokens attend to what is cached"
        cache = write_scattered(cache, blocks_PW, positions_PC, k_PCGd, v_PCGe)
        if len(blocks_PW) * context <= cache.num_positions:
            out_PCHe = attend_single_tokens(
                q_PCHd, cache, blocks_PW, positions_PC, context=context, **masks
            )
        else:  # copies of all rows' contexts would be larger than the layer's cache
            out_PCHe = attend(q_PCHd, cache, blocks_PW, positions_PC, **masks)
    elif expand is None and uses_native_attention(q_PCHd.dtype, q_PCHd.shape[3], v_PCGe.shape[3]):
        caches = (cache.k_NGLd, cache.v_NGLe)
        out_PCHe, k_NGLd, v_NGLe = cached_attention(
            (q_PCHd, k_PCGd, v_PCGe), caches, blocks_PW, positions_PC, **masks
        )
        cache = KVCache(k_NGLd, v_NGLe)
    else:
        cache = write_keys_and_values(cache, blocks_PW, positions_PC, k_PCGd, v_PCGe)
        out_PCHe = attend(q_PCHd, cache, blocks_PW, positions_PC, expand=expand, **masks)
    if expand is None and cache.v_NGLe is None:  # drop the sums of what follows a key's value
        out_PCHe = out_PCHe[..., : v_PCGe.shape[3]]
    return out_PCHe, cache


def attend_single_tokens(
    q_P1Hd: jax.Array,
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_P1: jax.Array,
    *,
    context: int,
    scale: float,
    window: jax.Array | np.int32 | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention [P, 1, H, e] for one token a row, over the first `context` positions at
    once; [P, 1, H, d], weighted sums of keys, if the cache stores no values apart.

    The positions only enter a mask, so a GPU needs no loop whose length depends on data. Otherwise
    as `attend`. It copies the blocks of the context to one array first; a kernel that reads blocks
    in place (flash-decoding) would take this function's place.
    """
    p, _, h, d = q_P1Hd.shape
    g = cache.k_NGLd.shape[1]
    last_P1 = jnp.where(is_real(positions_P1, blocks_PW), positions_P1, -1)
    at_L = jnp.arange(context, dtype=jnp.int32)
    seen_PL = at_L <= last_P1
    if window is not None:
        seen_PL &= at_L > last_P1 - window

    def read_rows(x_NGLd: jax.Array) -> jax.Array:
        x_PWGLd = x_NGLd.at[blocks_PW[:, : context // BLOCK]].get(mode="clip")
        x_PGLd = x_PWGLd.swapaxes(1, 2).reshape(p, g, context, -1)  # all positions of the context
        return lax.bitcast_convert_type(x_PGLd, q_P1Hd.dtype)

    def without_later(x_PGLd: jax.Array) -> jax.Array:
        # an earlier request may have left NaN behind the last position, and 0 times NaN is not 0
        return jnp.where((at_L <= last_P1)[:, None, :, None], x_PGLd, 0)

    k_PGLd = read_rows(cache.k_NGLd)
    if cache.v_NGLe is None:
        k_PGLd = v_PGLe = without_later(k_PGLd)
    else:
        v_PGLe = without_later(read_rows(cache.v_NGLe))
    s_PGRL = dot(q_P1Hd.reshape(p, g, h // g, d), k_PGLd, b_transposed=True) * scale
    s_PGRL = jnp.where(seen_PL[:, None, None], s_PGRL, _NONE)
    top = s_PGRL.max(axis=-1, keepdims=True)
    if sinks_H is not None:
        sinks = sinks_H.astype(jnp.float32).reshape(1, g, h // g, 1)
        top = jnp.maximum(top, sinks)
    weights = jnp.exp(s_PGRL - top)
    total = weights.sum(axis=-1, keepdims=True) + (0.0 if sinks_H is None else jnp.exp(sinks - top))
    out = dot(weights.astype(q_P1Hd.dtype), v_PGLe) / total
    return out.astype(q_P1Hd.dtype).reshape(p, 1, h, -1)


@partial(jax.jit, donate_argnums=0)
def copy_blocks(
    cache: KVCache, sources_W: jax.Array, targets_W: jax.Array, count: jax.Array
) -> KVCache:
    """Return the cache with the first `count` of the blocks `sources_W` copied, in order, to the
    blocks `targets_W`.
    """

    def copy_block(i: jax.Array, x_NGLd: jax.Array) -> jax.Array:
        block = lax.dynamic_index_in_dim(x_NGLd, sources_W[i])
        return lax.dynamic_update_index_in_dim(x_NGLd, block, targets_W[i], 0)

    return jax.tree.map(lambda x_NGLd: lax.fori_loop(0, count, copy_block, x_NGLd), cache)


def attend(
    q_PCHd: jax.Array,
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | np.int32 | None = None,
    sinks_H: jax.Array | None = None,
    expand: Expand | None = None,
) -> jax.Array:
    """Return attention [P, C, H, e] of this step's tokens to the cached positions up to their own;
    [P, C, H, d], weighted sums of keys, if the cache stores no values apart.

    Loops over the blocks in use, with a running maximum (FlashAttention, arXiv 2205.14135).

    window: number of positions that a token attends to, its own included; None for all.
    sinks_H: a logit for each head that takes part in the softmax and has no value (gpt-oss).
    expand: see `CacheInputs`.
    """
    c = q_PCHd.shape[1]
    # every block of queries would expand the same cached tokens again
    width = BLOCK if expand is None else c
    out = [
        _attend_query_block(
            q_PCHd[:, i : i + width],
            cache,
            blocks_PW,
            positions_PC[:, i : i + width],
            scale,
            window,
            sinks_H,
            expand,
        )
        for i in range(0, c, width)  # each block of queries loops to its own last position only
    ]
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)


def _attend_query_block(
    q_PCHd: jax.Array,
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    scale: float,
    window: jax.Array | np.int32 | None,
    sinks_H: jax.Array | None,
    expand: Expand | None,
) -> jax.Array:
    """Return `attend` for one block of queries a row, [P, C, H, e]."""
    p, c, h, d = q_PCHd.shape
    g = cache.k_NGLd.shape[1] if expand is None else h
    q = q_PCHd.reshape(p, c, g, h // g, d).transpose(0, 2, 3, 1, 4).reshape(p, g, -1, d)
    at_Q = jnp.tile(positions_PC, (1, h // g))[:, None, :, None]  # [P, 1, Q, 1]
    real_PC = is_real(positions_PC, blocks_PW)
    last_P1 = jnp.max(jnp.where(real_PC, positions_PC, -1), axis=1, keepdims=True)

    def read_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys [P, G, L, d] and values [P, G, L, e] of a block; values behind the row's
        last position are 0.
        """
        block_P = lax.dynamic_index_in_dim(blocks_PW, i, 1, keepdims=False)
        at_L = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)

        def read(x_NGLd: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(x_NGLd.at[block_P].get(mode="clip"), q.dtype)

        def without_later(x_PGLd: jax.Array) -> jax.Array:
            # an earlier request may have left NaN there, and 0 times NaN is not 0
            return jnp.where((at_L <= last_P1)[:, None, :, None], x_PGLd, 0)

        k_PGLd = read(cache.k_NGLd)
        if cache.v_NGLe is not None:
            return k_PGLd, without_later(read(cache.v_NGLe))
        k_PGLd = without_later(k_PGLd)
        return (k_PGLd, k_PGLd) if expand is None else expand(k_PGLd)

    def attend_block(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = carry
        k_PGLd, v_PGLe = read_block(i)
        s = dot(q, k_PGLd, b_transposed=True) * scale
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
        out = out * kept + dot(weights.astype(q.dtype), v_PGLe)
        return new_top, total * kept + weights.sum(axis=-1, keepdims=True), out

    e = jax.eval_shape(read_block, jnp.int32(0))[1].shape[3]
    carry = (*_initial_softmax_state(sinks_H, (p, g, h // g, c)), jnp.zeros((*q.shape[:3], e)))
    _, total, out = lax.fori_loop(
        *_used_block_range(positions_PC, real_PC, window), attend_block, carry
    )
    out = (out / jnp.maximum(total, 1e-30)).astype(q.dtype)
    return out.reshape(p, g, h // g, c, e).transpose(0, 3, 1, 2, 4).reshape(p, c, h, e)


def _used_block_range(
    positions_PC: jax.Array, real_PC: jax.Array, window: jax.Array | np.int32 | None
) -> tuple[jax.Array, jax.Array]:
    """Return (first, end) of the tables' places to which this step's tokens attend.

    real_PC: which tokens are no padding, whose position exceeds all others.
    """
    end = jnp.max(jnp.where(real_PC, positions_PC, -1)) // BLOCK + 1
    if window is None:
        return jnp.int32(0), end
    first = jnp.min(positions_PC) - window + 1
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
