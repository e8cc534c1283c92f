"""The grouped matmul by `lax.ragged_dot`: the reference for tests.

XLA masks rows of other groups, which is E times the work, so no program uses this implementation.

Legend: N rows sorted by group, D inner, F outer dimension, E groups; T tokens.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.matmul import float32_precision
from kernels_pallas.token_permute.reference import take_rows_or_last


def grouped_matmul(
    x_ND: jax.Array,
    w: jax.Array,
    group_sizes_E: jax.Array,
    *,
    transpose_rhs: bool = False,
    src_N: jax.Array | None = None,
    scale_EF: jax.Array | None = None,
) -> jax.Array:
    """Return [N, F] in x's dtype with float32 sums. Rows beyond the groups are 0.

    w: [E, D, F], or [E, F, D] with `transpose_rhs`. src_N: row n is x[src_N[n]], where x is [T, D].
    scale_EF: factors of the columns of w, which may then have another dtype.
    """
    x_ND = x_ND if src_N is None else take_rows_or_last(x_ND, src_N)
    w_EDF = w.swapaxes(1, 2) if transpose_rhs else w
    if scale_EF is None:
        exact = float32_precision(x_ND, w_EDF)
        y_NF = lax.ragged_dot(x_ND, w_EDF, group_sizes_E, exact, preferred_element_type=jnp.float32)
        return y_NF.astype(x_ND.dtype)
    w32_EDF = w_EDF.astype(jnp.float32) * scale_EF[:, None]
    exact = lax.Precision.HIGHEST
    return lax.ragged_dot(x_ND.astype(jnp.float32), w32_EDF, group_sizes_E, exact).astype(
        x_ND.dtype
    )


def weight_gradient(
    x_ND: jax.Array, dy_NF: jax.Array, group_sizes_E: jax.Array, *, src_N: jax.Array | None = None
) -> jax.Array:
    """Return [E, D, F] in x's dtype: x^T dy over each group's rows. src_N: as in
    `grouped_matmul`.
    """
    x_ND = x_ND if src_N is None else take_rows_or_last(x_ND, src_N)
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    exact = float32_precision(x_ND, dy_NF)
    dw = lax.ragged_dot_general(
        x_ND, dy_NF, group_sizes_E, dims, exact, preferred_element_type=jnp.float32
    )
    return dw.astype(x_ND.dtype)
