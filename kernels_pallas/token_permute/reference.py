"""Rows gathered, and gathered and added, in plain XLA: no scatter, no atomics.

Legend: T tokens, K choices a token, M rows of a buffer, D hidden.
"""

import jax
import jax.numpy as jnp


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first dimension; zeros where index == len(x)."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def take_any_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first dimension; the last row where index == len(x). Spares the pass
    that fills in zeros.
    """
    return jnp.take(x, index, axis=0, mode="clip")


def take_mapped_rows(x: jax.Array, src_M: jax.Array | None, index: jax.Array) -> jax.Array:
    """x[src_M[index]], or x[index] without a map: one gather of rows; some row where an index is
    out of range.
    """
    return take_any_rows(x, index if src_M is None else take_any_rows(src_M, index))


def gather_rows(x_TD: jax.Array, src_M: jax.Array, scale_M: jax.Array | None = None) -> jax.Array:
    """x_TD[src_M] (times scale_M) [M, D]; some row where src_M == T."""
    rows_MD = take_any_rows(x_TD, src_M)
    if scale_M is None:
        return rows_MD
    return (rows_MD.astype(jnp.float32) * scale_M[:, None]).astype(x_TD.dtype)


def gather_sum(
    y_MD: jax.Array,
    slot_TK: jax.Array,
    weights_TK: jax.Array | None = None,
    *,
    complete: bool = False,
) -> jax.Array:
    """float32 [T, D]: the (weighted) sum of rows y_MD[slot_TK[t, k]] over k; nothing where
    slot_TK[t, k] == M.

    complete: promises that there is no such slot.
    """
    take = take_any_rows if complete else take_rows
    rows_TKD = take(y_MD, slot_TK).astype(jnp.float32)
    if weights_TK is not None:
        rows_TKD = rows_TKD * weights_TK[:, :, None]
    return rows_TKD[:, 0] if slot_TK.shape[1] == 1 else rows_TKD.sum(axis=1)
