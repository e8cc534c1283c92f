"""Attention over a KV cache in blocks, in XLA: a loop over blocks, or for single tokens one product
over all positions.

Legend: as `api.py`; S positions of a table, W L; R query heads a group, H / G; Q queries of a
group, R C.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.cached_values import decode
from kernels_pallas.matmul import dot

_NONE = -1e30  # the score of masked keys: finite, as differences of -inf would be NaN
Expand: TypeAlias = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def paged_attention(  # noqa: PLR0913  as `api.py`
    q_PCHd: jax.Array,
    k_NGLd: jax.Array,
    v_NGLe: jax.Array | None,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    value_dim: int,
    window: jax.Array | int | None = None,
    sinks_H: jax.Array | None = None,
    context: int | None = None,
) -> jax.Array:
    """Return [P, C, H, e] in q's dtype; see `api.py`.

    context: selects `attend_single_tokens` if its copies are at most as large as the cache, else
        `attend_by_block`, as None does.
    """
    num_blocks, _, length, _ = k_NGLd.shape
    operands = q_PCHd, k_NGLd, v_NGLe, blocks_PW, positions_PC
    if context is not None and len(blocks_PW) * context <= num_blocks * length:
        out = attend_single_tokens(
            *operands, context=context, scale=scale, window=window, sinks_H=sinks_H
        )
    else:  # copies of all rows' contexts would be larger than the layer's cache
        out = attend_by_block(*operands, scale=scale, window=window, sinks_H=sinks_H)
    return out[..., :value_dim]  # drops the sums of what follows a key's value


def attend_single_tokens(  # noqa: PLR0913  as `api.py`
    q_P1Hd: jax.Array,
    k_NGLd: jax.Array,
    v_NGLe: jax.Array | None,
    blocks_PW: jax.Array,
    positions_P1: jax.Array,
    *,
    context: int,
    scale: float,
    window: jax.Array | int | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention [P, 1, H, e] for one token a row, over the first `context` positions at
    once; [P, 1, H, d], weighted sums of keys, if the cache stores no values apart.

    The positions only enter a mask, so a GPU needs no loop whose length depends on data. Otherwise
    as `attend_by_block`. It copies the blocks of the context to one array first.
    """
    p, _, h, d = q_P1Hd.shape
    _, g, length, _ = k_NGLd.shape
    last_P1 = jnp.where(positions_P1 < blocks_PW.shape[1] * length, positions_P1, -1)
    at_L = jnp.arange(context, dtype=jnp.int32)
    seen_PL = at_L <= last_P1
    if window is not None:
        seen_PL &= at_L > last_P1 - window

    def read_rows(x_NGLd: jax.Array) -> jax.Array:
        x_PWGLd = x_NGLd.at[blocks_PW[:, : context // length]].get(mode="clip")
        x_PGLd = x_PWGLd.swapaxes(1, 2).reshape(p, g, context, -1)  # all positions of the context
        return decode(x_PGLd, q_P1Hd.dtype)

    def without_later(x_PGLd: jax.Array) -> jax.Array:
        # an earlier request may have left NaN behind the last position, and 0 times NaN is not 0
        return jnp.where((at_L <= last_P1)[:, None, :, None], x_PGLd, 0)

    k_PGLd = read_rows(k_NGLd)
    if v_NGLe is None:
        k_PGLd = v_PGLe = without_later(k_PGLd)
    else:
        v_PGLe = without_later(read_rows(v_NGLe))
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


def attend_by_block(  # noqa: PLR0913  as `api.py`
    q_PCHd: jax.Array,
    k_NGLd: jax.Array,
    v_NGLe: jax.Array | None,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    sinks_H: jax.Array | None = None,
    expand: Expand | None = None,
) -> jax.Array:
    """Return attention [P, C, H, e] of this step's tokens to the cached positions up to their own;
    [P, C, H, d], weighted sums of keys, if the cache stores no values apart.

    Loops over the blocks in use, with a running maximum (FlashAttention, arXiv 2205.14135).

    expand: makes keys [P, H, L, d] and values [P, H, L, e] of a block of cached keys [P, G, L, d];
        None if the queries attend to what is cached.
    """
    c = q_PCHd.shape[1]
    # every block of queries would expand the same cached tokens again
    width = k_NGLd.shape[2] if expand is None else c
    out = [
        _attend_query_block(
            q_PCHd[:, i : i + width],
            k_NGLd,
            v_NGLe,
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


def _attend_query_block(  # noqa: PLR0913  as `api.py`
    q_PCHd: jax.Array,
    k_NGLd: jax.Array,
    v_NGLe: jax.Array | None,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    scale: float,
    window: jax.Array | int | None,
    sinks_H: jax.Array | None,
    expand: Expand | None,
) -> jax.Array:
    """Return `attend_by_block` for one block of queries a row, [P, C, H, e]."""
    p, c, h, d = q_PCHd.shape
    g = k_NGLd.shape[1] if expand is None else h
    q = q_PCHd.reshape(p, c, g, h // g, d).transpose(0, 2, 3, 1, 4).reshape(p, g, -1, d)
    at_Q = jnp.tile(positions_PC, (1, h // g))[:, None, :, None]  # [P, 1, Q, 1]
    length = k_NGLd.shape[2]
    real_PC = positions_PC < blocks_PW.shape[1] * length
    last_P1 = jnp.max(jnp.where(real_PC, positions_PC, -1), axis=1, keepdims=True)

    def read_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys [P, G, L, d] and values [P, G, L, e] of a block; values behind the row's
        last position are 0.
        """
        block_P = lax.dynamic_index_in_dim(blocks_PW, i, 1, keepdims=False)
        at_L = i * length + jnp.arange(length, dtype=jnp.int32)

        def read(x_NGLd: jax.Array) -> jax.Array:
            return decode(x_NGLd.at[block_P].get(mode="clip"), q.dtype)

        def without_later(x_PGLd: jax.Array) -> jax.Array:
            # an earlier request may have left NaN there, and 0 times NaN is not 0
            return jnp.where((at_L <= last_P1)[:, None, :, None], x_PGLd, 0)

        k_PGLd = read(k_NGLd)
        if v_NGLe is not None:
            return k_PGLd, without_later(read(v_NGLe))
        k_PGLd = without_later(k_PGLd)
        return (k_PGLd, k_PGLd) if expand is None else expand(k_PGLd)

    def attend_block(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = carry
        k_PGLd, v_PGLe = read_block(i)
        s = dot(q, k_PGLd, b_transposed=True) * scale
        at_L = i * length + jnp.arange(length, dtype=jnp.int32)
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
        *_used_block_range(positions_PC, real_PC, window, length), attend_block, carry
    )
    out = (out / jnp.maximum(total, 1e-30)).astype(q.dtype)
    return out.reshape(p, g, h // g, c, e).transpose(0, 3, 1, 2, 4).reshape(p, c, h, e)


def _used_block_range(
    positions_PC: jax.Array, real_PC: jax.Array, window: jax.Array | int | None, length: int
) -> tuple[jax.Array, jax.Array]:
    """Return (first, end) of the tables' places to which this step's tokens attend.

    real_PC: which tokens are no padding, whose position exceeds all others.
    """
    end = jnp.max(jnp.where(real_PC, positions_PC, -1)) // length + 1
    if window is None:
        return jnp.int32(0), end
    first = jnp.min(positions_PC) - window + 1
    return jnp.maximum(first, 0) // length, end


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
