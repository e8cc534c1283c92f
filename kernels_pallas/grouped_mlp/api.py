"""The expert MLP over ragged groups of rows, by the best implementation for the platform and
operands.

Legend: N rows sorted by group, L groups (local experts), D hidden, F expert hidden, U = 2F (SwiGLU)
or F (GELU); T tokens.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.grouped_mlp.native import grouped_mlp as native_grouped_mlp
from kernels_pallas.grouped_mlp.native import supports
from kernels_pallas.grouped_mlp.reference import MLPWeights
from kernels_pallas.implementations import Name, call_first_supported
from kernels_pallas.token_permute import RowMap

MODULES: dict[Name, str] = {
    "mosaic_gpu": "kernels_pallas.grouped_mlp.mosaic_gpu",
    "triton": "kernels_pallas.grouped_mlp.triton",
    "xla": "kernels_pallas.grouped_mlp.xla",
}


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    batched_rows_per_group: int,
    rows: RowMap | None = None,
    scale_N: jax.Array | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    """Return [N, D] in x's dtype: group l's MLP, activate(x w_up[l] + b_up[l]) w_down[l] +
    b_down[l], applied to its rows. Rows beyond the groups hold arbitrary values.

    weights: matrices are rounded to x's dtype; gradients have the weights' own dtype.
    batched_rows_per_group: rows of each group that `xla` computes in one batched product; the rest
    are computed exactly, but slower. An even share of the rows plus an eighth is a good value.
    rows: if given, x is [T, D] and row n is x[rows.src_M[n]]; `xla` and the native kernel do not
    write these rows to memory. scale_N: float32 factor of each row's output; it multiplies the
    activations (and `b_down`), so that its gradient needs no outputs. implementation: None for the
    best that supports the operands. Raises ValueError if `scale_N` does not fit the rows.
    """
    if rows is not None:
        rows.check(x_ND.shape[0])
    num_rows = (x_ND if rows is None else rows.src_M).shape[0]
    if scale_N is not None and (scale_N.shape != (num_rows,) or scale_N.dtype != jnp.float32):
        raise ValueError(f"scale {scale_N.dtype} {scale_N.shape}: must be float32 [{num_rows}]")
    if implementation is None and supports(x_ND, weights, activation):
        return native_grouped_mlp(x_ND, group_sizes_L, rows, weights, scale_N)
    w_up, w_down = weights.w_up.astype(x_ND.dtype), weights.w_down.astype(x_ND.dtype)
    weights = weights._replace(w_up=w_up, w_down=w_down)
    options = {
        "activation": activation,
        "batched_rows_per_group": batched_rows_per_group,
        "rows": rows,
        "scale_N": scale_N,
    }
    return call_first_supported(
        MODULES, implementation, "grouped_mlp", x_ND, group_sizes_L, weights, **options
    )
