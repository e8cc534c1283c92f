"""The expert MLP over ragged groups of rows, by the best implementation for the platform and the
case.

Legend: N rows sorted by group, L groups (local experts), D hidden, F expert hidden, U = 2F (SwiGLU)
or F (GELU).
"""

import jax

from kernels_pallas.grouped_mlp.native import grouped_mlp as native_grouped_mlp
from kernels_pallas.grouped_mlp.native import supports
from kernels_pallas.grouped_mlp.reference import MLPWeights
from kernels_pallas.implementations import Name, run
from kernels_pallas.token_permute import RowMap

MODULES: dict[Name, str] = {
    "mosaic_gpu": "kernels_pallas.grouped_mlp.mosaic_gpu",
    "xla": "kernels_pallas.grouped_mlp.xla",
}


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    slots: int,
    rows: RowMap | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    """Apply group l's MLP, activate(x w_up[l] + b_up[l]) w_down[l] + b_down[l], to its rows; others
    hold anything.

    weights: those of the products are rounded to x's dtype, and their gradients are of their own.
    slots: rows of each group that `xla` takes in one batched product; rows beyond them are exact
    but slower. A fair share of the rows plus an eighth is a good value.
    rows: x is [T, D], not dispatched: row n is x[rows.src_M[n]], as `dispatch` would write it;
    `xla` does not.
    """
    if rows is not None:
        rows.check(x_ND.shape[0])
    if implementation is None and supports(x_ND, weights, activation):
        return native_grouped_mlp(x_ND, group_sizes_L, rows, weights)
    w_up, w_down = weights.w_up.astype(x_ND.dtype), weights.w_down.astype(x_ND.dtype)
    weights = weights._replace(w_up=w_up, w_down=w_down)
    options = {"activation": activation, "slots": slots, "rows": rows}
    return run(MODULES, implementation, "grouped_mlp", x_ND, group_sizes_L, weights, **options)
