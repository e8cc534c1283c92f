"""A cache whose rows are contiguous, [B, G, S, d], and attention over it: the reference for blocks.

It attends in the same steps of 128 positions, so results are equal bit for bit.

Legend: as `jmoe/inference/kv_cache.py`, and B rows of the cache, S positions of a row.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.matmul import dot

STEP = 128
NONE = -1e30


def write(
    x_BGSd: np.ndarray, rows_P: np.ndarray, positions_PC: np.ndarray, new_PCGd: np.ndarray
) -> np.ndarray:
    """Return the keys or values with those of a step's tokens written."""
    written = x_BGSd.copy()
    for row, positions_C, new_CGd in zip(rows_P, positions_PC, new_PCGd, strict=True):
        for position, new_Gd in zip(positions_C, new_CGd, strict=True):
            if position < x_BGSd.shape[2]:
                written[row, :, position] = new_Gd
    return written


@partial(jax.jit, static_argnames="scale")
def attend(
    q_PCHd: jax.Array,
    caches: tuple[jax.Array, jax.Array],
    rows_P: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | None,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Return attention [P, C, H, e] of at most 128 tokens a row to the positions up to their own."""
    k_BGSd, v_BGSe = caches
    (p, c, h, d), (_, g, length, e) = q_PCHd.shape, v_BGSe.shape
    q = q_PCHd.reshape(p, c, g, h // g, d).transpose(0, 2, 3, 1, 4).reshape(p, g, -1, d)
    at_Q = jnp.tile(positions_PC, (1, h // g))[:, None, :, None]
    real_PC = positions_PC < length
    last_P1 = jnp.max(jnp.where(real_PC, positions_PC, -1), axis=1, keepdims=True)
    sinks = jnp.full(h, NONE) if sinks_H is None else sinks_H.astype(jnp.float32)
    top = jnp.repeat(sinks.reshape(1, g, h // g, 1), c, axis=3).reshape(1, g, -1, 1)
    top = jnp.broadcast_to(top, (p, *top.shape[1:]))
    total = jnp.zeros(top.shape) if sinks_H is None else jnp.ones(top.shape)

    def attend_step(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = carry
        k, v = (
            lax.dynamic_slice_in_dim(x, i * STEP, STEP, axis=2)[rows_P] for x in (k_BGSd, v_BGSe)
        )
        s = dot(q, k, b_transposed=True) * scale
        at_L = i * STEP + jnp.arange(STEP, dtype=jnp.int32)
        seen = at_L <= at_Q
        if window is not None:
            seen &= at_L > at_Q - window
        s = jnp.where(seen, s, NONE)
        new_top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        kept, weights = jnp.exp(top - new_top), jnp.exp(s - new_top)
        v = jnp.where((at_L <= last_P1)[:, None, :, None], v, 0)
        out = out * kept + dot(weights.astype(q.dtype), v)
        return new_top, total * kept + weights.sum(axis=-1, keepdims=True), out

    end = jnp.max(jnp.where(real_PC, positions_PC, -1)) // STEP + 1
    first = jnp.int32(0)
    if window is not None:
        first = jnp.maximum(jnp.min(positions_PC) - window + 1, 0) // STEP
    carry = (top, total, jnp.zeros((*q.shape[:3], e)))
    _, total, out = lax.fori_loop(first, end, attend_step, carry)
    out = (out / jnp.maximum(total, 1e-30)).astype(q.dtype)
    return out.reshape(p, g, h // g, c, e).transpose(0, 3, 1, 2, 4).reshape(p, c, h, e)


def as_blocks(x_BGSd: np.ndarray, blocks_BW: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return the rows as blocks [N, G, 128, d] where tables say; the other blocks hold NaN."""
    b, g, length, d = x_BGSd.shape
    blocks = np.full((num_blocks, g, STEP, d), np.nan, x_BGSd.dtype)
    blocks[blocks_BW] = x_BGSd.reshape(b, g, length // STEP, STEP, d).swapaxes(1, 2)
    return blocks


def as_rows(blocks: np.ndarray, blocks_BW: np.ndarray) -> np.ndarray:
    """Return the blocks of each table one after the other, [B, G, S, d]."""
    rows = blocks[blocks_BW].swapaxes(1, 2)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[4])
