"""The grouped matmul and its gradients, by the best implementation for the platform and operands.

Legend: N rows sorted by group, D inner, F outer dimension, E groups; T tokens, K choices per token.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from kernels_pallas.grouped_matmul.quantize import LARGEST
from kernels_pallas.implementations import Name, call_first_supported
from kernels_pallas.token_permute.api import RowMap, sum_rows


class Implementation(NamedTuple):
    """The grouped matmul and its weight gradient for a platform; `reference.py` defines their
    results.

    gates_slots: whether a gated epilogue takes weights in slots of any width, compressed too.
    """

    grouped_matmul: Callable[..., jax.Array]
    weight_gradient: Callable[..., jax.Array]
    gates_slots: bool = False


Choice: TypeAlias = Name | Implementation | None  # None: the best that supports the operands
_Operands: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, RowMap | None]

MODULES: dict[Name, str] = {
    "mosaic_gpu": "kernels_pallas.grouped_matmul.mosaic_gpu",
    "triton": "kernels_pallas.grouped_matmul.triton",
    "xla": "kernels_pallas.grouped_matmul.xla",
}
_run = partial(call_first_supported, MODULES)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes_E: jax.Array,
    rows: RowMap | None,
    transpose_rhs: bool,
    implementation: Choice,
) -> jax.Array:
    options = {"transpose_rhs": transpose_rhs} | ({} if rows is None else {"src_N": rows.src_M})
    return _run(implementation, "grouped_matmul", x, w, group_sizes_E, **options)


def _grouped_matmul_fwd(
    x: jax.Array,
    w: jax.Array,
    group_sizes_E: jax.Array,
    rows: RowMap | None,
    transpose_rhs: bool,
    implementation: Choice,
) -> tuple[jax.Array, _Operands]:
    y_NF = _grouped_matmul(x, w, group_sizes_E, rows, transpose_rhs, implementation)
    return y_NF, (x, w, group_sizes_E, rows)


def _grouped_matmul_bwd(
    transpose_rhs: bool, implementation: Choice, residuals: _Operands, dy_NF: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    x, w, group_sizes_E, rows = residuals
    dx = _run(
        implementation, "grouped_matmul", dy_NF, w, group_sizes_E, transpose_rhs=not transpose_rhs
    )
    if rows is None:
        operands = (dy_NF, x) if transpose_rhs else (x, dy_NF)
        return dx, _run(implementation, "weight_gradient", *operands, group_sizes_E), None, None
    permute = None if isinstance(implementation, Implementation) else implementation
    dx_TD = sum_rows(dx, rows.src_M, rows.row_TK, rows.complete, implementation=permute).astype(
        x.dtype
    )
    dw = _run(implementation, "weight_gradient", x, dy_NF, group_sizes_E, src_N=rows.src_M)
    return dx_TD, dw.swapaxes(1, 2) if transpose_rhs else dw, None, None


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)


def grouped_matmul(
    x_ND: jax.Array,
    w: jax.Array,
    group_sizes_E: jax.Array,
    *,
    rows: RowMap | None = None,
    transpose_rhs: bool = False,
    implementation: Choice = None,
) -> jax.Array:
    """Return y_NF[n] = x_ND[n] @ w_EDF[e] for each row n of group e, in x's dtype with float32
    sums; differentiable in x and w.

    Args:
        x_ND: rows sorted by group: the first group_sizes_E[0] belong to group 0, and so on.
        w: [E, D, F], or [E, F, D] with transpose_rhs; in x's dtype.
        group_sizes_E: integers, zeros allowed, with a sum of at most N. Rows beyond the sum hold
            arbitrary values in the result, and so do their gradients.
        rows: if given, x is [T, D] and row n is x[rows.src_M[n]]; the implementation need not write
            these rows to memory.
        transpose_rhs: the last two dimensions of w are swapped.
        implementation: None for the best that supports the operands. A named implementation raises
            NotImplementedError for operands that it does not support.

    Raises ValueError if shapes or dtypes do not fit together.
    """
    _check_shapes(x_ND, w, group_sizes_E, transpose_rhs)
    if x_ND.dtype != w.dtype:
        raise ValueError(f"x {x_ND.dtype} and w {w.dtype}: must have one dtype")
    if rows is not None:
        rows.check(x_ND.shape[0])
    return _grouped_matmul(x_ND, w, group_sizes_E, rows, transpose_rhs, implementation)


def quantized_grouped_matmul(
    x_ND: jax.Array,
    w: jax.Array,
    scale_EF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    transpose_rhs: bool = False,
    implementation: Choice = None,
) -> jax.Array:
    """Return `grouped_matmul` with weights w * scale_EF[:, None], int8 or float8_e4m3fn as from
    `quantize`. Not differentiable.

    Weights are read as 8-bit values and converted just before the product; the scales multiply the
    float32 sums. Raises ValueError if shapes or dtypes do not fit together.
    """
    _check_shapes(x_ND, w, group_sizes_E, transpose_rhs)
    if w.dtype not in LARGEST:
        raise ValueError(f"w {w.dtype}: must be int8 or float8_e4m3fn")
    num_columns = w.shape[1 if transpose_rhs else 2]
    if scale_EF.shape != (w.shape[0], num_columns) or scale_EF.dtype != jnp.float32:
        raise ValueError(
            f"scale {scale_EF.dtype} {scale_EF.shape}: must be float32 {(w.shape[0], num_columns)}"
        )
    options = {"transpose_rhs": transpose_rhs, "scale_EF": scale_EF}
    return _run(implementation, "grouped_matmul", x_ND, w, group_sizes_E, **options)


def _check_shapes(
    x_ND: jax.Array, w: jax.Array, group_sizes_E: jax.Array, transpose_rhs: bool
) -> None:
    if x_ND.ndim != 2 or w.ndim != 3 or group_sizes_E.shape != w.shape[:1]:
        shapes = f"x {x_ND.shape}, w {w.shape}, group_sizes {group_sizes_E.shape}"
        raise ValueError(f"{shapes}: must be [N, D], [E, D, F] and [E]")
    if x_ND.shape[1] != w.shape[2 if transpose_rhs else 1]:
        raise ValueError(
            f"x {x_ND.shape} and w {w.shape}: the inner dimensions differ ({transpose_rhs=})"
        )
    if not jnp.issubdtype(group_sizes_E.dtype, jnp.integer):
        raise ValueError(f"group_sizes {group_sizes_E.dtype}: must be integers")
