"""Dispatch and combine as gathers, in plain XLA: no scatter, no atomics, forwards and backwards.

Legend: T tokens, K choices a token, M rows of a buffer, D hidden.
`src_M` names the token of each row (T: the row is empty); `slot_TK` the row of each choice (M: it was dropped).
They are each other's inverse: src_M[slot_TK[t, k]] == t wherever slot_TK[t, k] < M.
"""

import jax
import jax.numpy as jnp


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first dimension; zeros where index == len(x)."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _sum_choices(rows_TKD: jax.Array) -> jax.Array:
    return rows_TKD.astype(jnp.float32).sum(axis=1)


@jax.custom_vjp
def dispatch(x_TD: jax.Array, src_M: jax.Array, slot_TK: jax.Array) -> jax.Array:
    """Copy tokens into their rows: y_MD[m] = x_TD[src_M[m]]. Its gradient gathers through `slot_TK`."""
    return take_rows(x_TD, src_M)


def _dispatch_fwd(x_TD: jax.Array, src_M: jax.Array, slot_TK: jax.Array) -> tuple[jax.Array, jax.Array]:
    return take_rows(x_TD, src_M), slot_TK


def _dispatch_bwd(slot_TK: jax.Array, dy_MD: jax.Array) -> tuple[jax.Array, None, None]:
    return _sum_choices(take_rows(dy_MD, slot_TK)).astype(dy_MD.dtype), None, None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def combine(y_MD: jax.Array, weights_TK: jax.Array, src_M: jax.Array, slot_TK: jax.Array) -> jax.Array:
    """Weighted sum of each token's rows, float32: out_TD[t] = sum_k weights_TK[t, k] y_MD[slot_TK[t, k]]."""
    rows_TKD = take_rows(y_MD, slot_TK).astype(jnp.float32)
    return (rows_TKD * weights_TK[:, :, None]).sum(axis=1)


def _combine_fwd(y_MD, weights_TK, src_M, slot_TK):  # type: ignore[no-untyped-def]
    return combine(y_MD, weights_TK, src_M, slot_TK), (y_MD, weights_TK, src_M, slot_TK)


def _combine_bwd(residuals, dout_TD):  # type: ignore[no-untyped-def]
    y_MD, weights_TK, src_M, slot_TK = residuals
    dout_TD = dout_TD.astype(jnp.float32)
    rows_TKD = take_rows(y_MD, slot_TK).astype(jnp.float32)
    dweights_TK = (rows_TKD * dout_TD[:, None, :]).sum(axis=-1)
    # the weight of a row: the choice of its token that points back at it
    mine_MK = take_rows(slot_TK, src_M) == jnp.arange(src_M.shape[0], dtype=slot_TK.dtype)[:, None]
    weight_M = jnp.where(mine_MK, take_rows(weights_TK, src_M), 0).sum(axis=-1)
    dy_MD = take_rows(dout_TD.astype(y_MD.dtype), src_M).astype(jnp.float32) * weight_M[:, None]
    return dy_MD.astype(y_MD.dtype), dweights_TK, None, None


combine.defvjp(_combine_fwd, _combine_bwd)
