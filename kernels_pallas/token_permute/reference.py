"""Dispatch and combine as gathers, in plain XLA: no scatter, no atomics, forwards and backwards.

Legend: T tokens, K choices a token, M rows of a buffer, D hidden.
`src_M` names the token of each row (T: the row is empty); `slot_TK` the row of each choice (M: it was dropped).
They are each other's inverse: src_M[slot_TK[t, k]] == t wherever slot_TK[t, k] < M.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first dimension; zeros where index == len(x)."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def take_any_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first dimension; the last row where index == len(x). Spares the pass that fills in zeros."""
    return jnp.take(x, index, axis=0, mode="clip")


def _take_choices(x: jax.Array, slot_TK: jax.Array, complete: bool) -> jax.Array:
    return take_any_rows(x, slot_TK) if complete else take_rows(x, slot_TK)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch(x_TD: jax.Array, src_M: jax.Array, slot_TK: jax.Array, complete: bool = False) -> jax.Array:
    """Copy tokens into their rows: y_MD[m] = x_TD[src_M[m]]; empty rows hold some token. The gradient is a gather too.

    complete: promises that no choice was dropped.
    """
    return take_any_rows(x_TD, src_M)


def _dispatch_fwd(x_TD: jax.Array, src_M: jax.Array, slot_TK: jax.Array, complete: bool) -> tuple[Any, jax.Array]:
    return take_any_rows(x_TD, src_M), slot_TK


def _dispatch_bwd(complete: bool, slot_TK: jax.Array, dy_MD: jax.Array) -> tuple[jax.Array, None, None]:
    rows_TKD = _take_choices(dy_MD, slot_TK, complete)
    if slot_TK.shape[1] == 1:
        return rows_TKD[:, 0], None, None
    return rows_TKD.astype(jnp.float32).sum(axis=1).astype(dy_MD.dtype), None, None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def sum_rows(y_MD: jax.Array, src_M: jax.Array, slot_TK: jax.Array) -> jax.Array:
    """Sum of each token's rows, float32: out_TD[t] = sum_k y_MD[slot_TK[t, k]]. The transpose of `dispatch`.

    The gradient of an empty row is that of some token.
    """
    return take_rows(y_MD, slot_TK).astype(jnp.float32).sum(axis=1)


def _sum_rows_fwd(y_MD: jax.Array, src_M: jax.Array, slot_TK: jax.Array) -> tuple[jax.Array, Any]:
    return sum_rows(y_MD, src_M, slot_TK), (src_M, jnp.zeros(0, y_MD.dtype))


def _sum_rows_bwd(residuals: tuple[jax.Array, jax.Array], dout_TD: jax.Array) -> tuple[jax.Array, None, None]:
    src_M, of_dtype = residuals
    return take_any_rows(dout_TD.astype(of_dtype.dtype), src_M), None, None


sum_rows.defvjp(_sum_rows_fwd, _sum_rows_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def combine(
    y_MD: jax.Array, weights_TK: jax.Array, src_M: jax.Array, slot_TK: jax.Array, complete: bool = False
) -> jax.Array:
    """Weighted sum of each token's rows, float32: out_TD[t] = sum_k weights_TK[t, k] y_MD[slot_TK[t, k]].

    complete: promises that no choice was dropped and no row is empty.
    """
    rows_TKD = _take_choices(y_MD, slot_TK, complete).astype(jnp.float32)
    return (rows_TKD * weights_TK[:, :, None]).sum(axis=1)


def _combine_fwd(
    y_MD: jax.Array, weights_TK: jax.Array, src_M: jax.Array, slot_TK: jax.Array, complete: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return combine(y_MD, weights_TK, src_M, slot_TK, complete), (y_MD, weights_TK, src_M, slot_TK)


def _combine_bwd(complete: bool, residuals: tuple[jax.Array, ...], dout_TD: jax.Array) -> tuple[Any, ...]:
    y_MD, weights_TK, src_M, slot_TK = residuals
    dout_TD = dout_TD.astype(y_MD.dtype)
    # dweights as a sum over each row, then a gather of scalars
    dout_MD = take_any_rows(dout_TD, src_M).astype(jnp.float32)
    dweight_M = (y_MD.astype(jnp.float32) * dout_MD).sum(axis=-1)
    dweights_TK = take_rows(dweight_M, slot_TK)
    # the weight of a row: the choice of its token that points back at it; none for an empty row
    mine_MK = take_any_rows(slot_TK, src_M) == jnp.arange(src_M.shape[0], dtype=slot_TK.dtype)[:, None]
    weight_M = jnp.where(mine_MK, take_any_rows(weights_TK, src_M), 0).sum(axis=-1)
    return (dout_MD * weight_M[:, None]).astype(y_MD.dtype), dweights_TK, None, None


combine.defvjp(_combine_fwd, _combine_bwd)
