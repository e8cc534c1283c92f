"""The grouped MLP by native CPU operations, for groups of any sizes.

Legend: N rows sorted by group, L groups (local experts), D hidden, F expert hidden, U = 2F (SwiGLU)
or F (GELU); T tokens.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.grouped_mlp.reference import MLPWeights
from kernels_pallas.saved import mark_saved_residual
from kernels_pallas.token_permute.api import RowMap, sum_rows


def supports(x_ND: jax.Array, weights: MLPWeights, activation: str) -> bool:
    """Return whether native training is enabled for the current trace and supports these
    operands.
    """
    _, f, d = weights.w_down.shape
    return activation in ("swiglu", "gelu") and native.uses_native_training(
        x_ND.dtype, multiples=(d, f)
    )


def _in_native_dtypes(weights: MLPWeights) -> native.MLPArrays:
    w_up, w_down = weights.w_up.astype(jnp.bfloat16), weights.w_down.astype(jnp.bfloat16)
    b_up, b_down = (
        None if b is None else b.astype(jnp.float32) for b in (weights.b_up, weights.b_down)
    )
    return w_up, w_down, b_up, b_down


# x, group_sizes_L, rows, weights, scale_N, h_NU
_Residuals: TypeAlias = tuple[
    jax.Array, jax.Array, RowMap | None, MLPWeights, jax.Array | None, jax.Array
]


@jax.custom_vjp
def grouped_mlp(
    x: jax.Array,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    weights: MLPWeights,
    scale_N: jax.Array | None = None,
) -> jax.Array:
    """Return `grouped_mlp.api`'s result; call only if `supports` returns True.

    Weights may be float32; gradients then are too.
    """
    return _grouped_mlp_fwd(x, group_sizes_L, rows, weights, scale_N)[0]


def _grouped_mlp_fwd(
    x: jax.Array,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    weights: MLPWeights,
    scale_N: jax.Array | None,
) -> tuple[jax.Array, _Residuals]:
    grouped = native.GroupedRows(x, None if rows is None else rows.src_M, group_sizes_L, scale_N)
    y_ND, h_NU = native.grouped_mlp(grouped, _in_native_dtypes(weights))
    saved = mark_saved_residual(h_NU, "expert_up")
    return y_ND, (x, group_sizes_L, rows, weights, scale_N, saved)


def _grouped_mlp_bwd(
    residuals: _Residuals, dy_ND: jax.Array
) -> tuple[jax.Array, None, None, MLPWeights, jax.Array | None]:
    x, group_sizes_L, rows, weights, scale_N, h_NU = residuals
    grouped = native.GroupedRows(x, None if rows is None else rows.src_M, group_sizes_L, scale_N)
    dx_ND, dscale_N, gradients = native.grouped_mlp_gradient(
        grouped, _in_native_dtypes(weights), h_NU, dy_ND
    )
    dweights = jax.tree.map(lambda w, dw: dw.astype(w.dtype), weights, MLPWeights(*gradients))
    if rows is None:
        return dx_ND, None, None, dweights, dscale_N
    dx_TD = sum_rows(dx_ND, rows.src_M, rows.row_TK, rows.complete).astype(x.dtype)
    return dx_TD, None, None, dweights, dscale_N


grouped_mlp.defvjp(_grouped_mlp_fwd, _grouped_mlp_bwd)
