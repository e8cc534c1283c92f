"""The expert MLP over ragged groups of rows, by the best implementation for the platform and the case.

Legend: N rows sorted by group, L groups (local experts), D hidden, F expert hidden, U = 2F (SwiGLU) or F (GELU).
"""

import jax

from kernels_pallas.implementations import Name, run
from kernels_pallas.token_permute import RowMap

MODULES: dict[Name, str] = {
    "mosaic_gpu": "kernels_pallas.grouped_mlp.mosaic_gpu",
    "xla": "kernels_pallas.grouped_mlp.xla",
}


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    w_up_LDU: jax.Array,
    w_down_LFD: jax.Array,
    b_up_LU: jax.Array | None,
    b_down_LD: jax.Array | None,
    *,
    activation: str,
    slots: int,
    rows: RowMap | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    """Row n of group l -> activate(x w_up[l] + b_up[l]) w_down[l] + b_down[l]; rows beyond the groups hold anything.

    slots: rows of each group that `xla` takes in one batched product; rows beyond them are exact but slower. A fair
    share of the rows plus an eighth is a good value.
    rows: x is [T, D], not dispatched: row n is x[rows.src_M[n]], as `dispatch` would write it; `xla` does not.
    """
    if rows is not None:
        rows.check(x_ND.shape[0])
    operands = x_ND, group_sizes_L, w_up_LDU, w_down_LFD, b_up_LU, b_down_LD
    return run(MODULES, implementation, "grouped_mlp", *operands, activation=activation, slots=slots, rows=rows)
