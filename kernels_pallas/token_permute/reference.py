"""Gathered rows, and sums of gathered rows, in plain XLA: no scatter, no atomics.

Legend: T tokens, K choices per token, M rows of a buffer, D hidden.
"""

import jax
import jax.numpy as jnp


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[index] along the first dimension; zeros where index == len(x)."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def take_rows_or_last(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[index] along the first dimension, and the last row of x for an index of len(x),
    where the caller ignores the result.

    Cheaper than `take_rows`, which needs a pass to fill in zeros.
    """
    return jnp.take(x, index, axis=0, mode="clip")


def take_mapped_rows(x: jax.Array, src_M: jax.Array | None, index: jax.Array) -> jax.Array:
    """Return x[src_M[index]], or x[index] without a map, as one gather; an arbitrary row for an
    index out of range.
    """
    return take_rows_or_last(x, index if src_M is None else take_rows_or_last(src_M, index))


def gather_rows(x_TD: jax.Array, src_M: jax.Array, scale_M: jax.Array | None = None) -> jax.Array:
    """Return x_TD[src_M] [M, D], times scale_M if given; the last row of x where src_M == T."""
    rows_MD = take_rows_or_last(x_TD, src_M)
    if scale_M is None:
        return rows_MD
    return (rows_MD.astype(jnp.float32) * scale_M[:, None]).astype(x_TD.dtype)


def gather_sum(
    y_MD: jax.Array,
    row_TK: jax.Array,
    weights_TK: jax.Array | None = None,
    *,
    complete: bool = False,
) -> jax.Array:
    """Return float32 [T, D], the (weighted) sum over k of rows y_MD[row_TK[t, k]]; a row of M
    adds 0.

    complete: promises that no row is M.
    """
    take = take_rows_or_last if complete else take_rows
    rows_TKD = take(y_MD, row_TK).astype(jnp.float32)
    if weights_TK is not None:
        rows_TKD = rows_TKD * weights_TK[:, :, None]
    return rows_TKD[:, 0] if row_TK.shape[1] == 1 else rows_TKD.sum(axis=1)
