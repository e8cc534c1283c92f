"""Dispatch (tokens -> rows by expert) and combine (rows -> weighted sums by token). Both directions
are gathers, without atomics.

`src_M` is the token of each row, T for an empty row. `row_TK` is the row of each choice, M for a
dropped choice. They are inverse: src_M[row_TK[t, k]] == t wherever row_TK[t, k] < M.
`sort_by_expert` computes both.

Legend: T tokens, K choices per token, M rows of a buffer, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from kernels_pallas.implementations import Name, call_first_supported
from kernels_pallas.token_permute.reference import take_rows, take_rows_or_last


class Implementation(NamedTuple):
    """`gather_rows` and `gather_sum` for a platform; `reference.py` defines their results."""

    gather_rows: Callable[..., jax.Array]
    gather_sum: Callable[..., jax.Array]


Choice: TypeAlias = Name | Implementation | None  # None: the best that supports the operands


@partial(
    jax.tree_util.register_dataclass, data_fields=["src_M", "row_TK"], meta_fields=["complete"]
)
@dataclass(frozen=True)
class RowMap:
    """The arguments of a `dispatch` that the consumer of the rows performs itself, so that no rows
    are written.

    complete: promises that no choice was dropped.
    """

    src_M: jax.Array
    row_TK: jax.Array
    complete: bool = False

    def check(self, num_tokens: int) -> None:
        """Raise ValueError if the arrays do not fit `num_tokens` tokens."""
        for name, index, ndim in (("src", self.src_M, 1), ("row", self.row_TK, 2)):
            if index.ndim != ndim or not jnp.issubdtype(index.dtype, jnp.integer):
                raise ValueError(
                    f"{name} {index.dtype} {index.shape}: must be integers"
                    f" {('[M]', '[T, K]')[ndim - 1]}"
                )
        if self.row_TK.shape[0] != num_tokens:
            raise ValueError(
                f"row {self.row_TK.shape}: must have a line for each of the {num_tokens} tokens"
            )


MODULES: dict[Name, str] = {
    "mosaic_gpu": "kernels_pallas.token_permute.mosaic_gpu",
    "triton": "kernels_pallas.token_permute.triton",
    "xla": "kernels_pallas.token_permute.reference",
}
_run = partial(call_first_supported, MODULES)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _dispatch(
    x_TD: jax.Array, src_M: jax.Array, row_TK: jax.Array, complete: bool, implementation: Choice
) -> jax.Array:
    return _run(implementation, "gather_rows", x_TD, src_M)


def _dispatch_fwd(
    x_TD: jax.Array, src_M: jax.Array, row_TK: jax.Array, complete: bool, implementation: Choice
) -> tuple[jax.Array, jax.Array]:
    return _dispatch(x_TD, src_M, row_TK, complete, implementation), row_TK


def _dispatch_bwd(
    complete: bool, implementation: Choice, row_TK: jax.Array, dy_MD: jax.Array
) -> tuple[jax.Array, None, None]:
    if complete and row_TK.shape[1] == 1:  # one row each: a sum would only widen and round again
        return _run(implementation, "gather_rows", dy_MD, row_TK[:, 0]), None, None
    dx_TD = _run(implementation, "gather_sum", dy_MD, row_TK, complete=complete)
    return dx_TD.astype(dy_MD.dtype), None, None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def dispatch(
    x_TD: jax.Array,
    src_M: jax.Array,
    row_TK: jax.Array,
    complete: bool = False,
    *,
    implementation: Choice = None,
) -> jax.Array:
    """Return y_MD[m] = x_TD[src_M[m]]: each token copied into its rows. Empty rows hold an
    arbitrary token.

    complete: promises that no choice was dropped, which can make the gradient cheaper.
    """
    return _dispatch(x_TD, src_M, row_TK, complete, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _sum_rows(
    y_MD: jax.Array, src_M: jax.Array, row_TK: jax.Array, complete: bool, implementation: Choice
) -> jax.Array:
    return _run(implementation, "gather_sum", y_MD, row_TK, complete=complete)


def _sum_rows_fwd(
    y_MD: jax.Array, src_M: jax.Array, row_TK: jax.Array, complete: bool, implementation: Choice
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _sum_rows(y_MD, src_M, row_TK, complete, implementation), (
        src_M,
        jnp.zeros(0, y_MD.dtype),
    )


def _sum_rows_bwd(
    complete: bool, implementation: Choice, residuals: tuple[jax.Array, ...], dout_TD: jax.Array
) -> tuple[jax.Array, None, None]:
    src_M, of_dtype = residuals
    return _run(implementation, "gather_rows", dout_TD.astype(of_dtype.dtype), src_M), None, None


_sum_rows.defvjp(_sum_rows_fwd, _sum_rows_bwd)


def sum_rows(
    y_MD: jax.Array,
    src_M: jax.Array,
    row_TK: jax.Array,
    complete: bool = False,
    *,
    implementation: Choice = None,
) -> jax.Array:
    """Return float32 out_TD[t] = sum_k y_MD[row_TK[t, k]], the sum of each token's rows: the
    transpose of `dispatch`.

    complete: promises that no choice was dropped. An empty row gets the gradient of an arbitrary
    token.
    """
    return _sum_rows(y_MD, src_M, row_TK, complete, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _combine(
    y_MD: jax.Array,
    weights_TK: jax.Array,
    src_M: jax.Array,
    row_TK: jax.Array,
    complete: bool,
    implementation: Choice,
) -> jax.Array:
    return _run(implementation, "gather_sum", y_MD, row_TK, weights_TK, complete=complete)


def _combine_fwd(
    y_MD: jax.Array,
    weights_TK: jax.Array,
    src_M: jax.Array,
    row_TK: jax.Array,
    complete: bool,
    implementation: Choice,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out_TD = _combine(y_MD, weights_TK, src_M, row_TK, complete, implementation)
    return out_TD, (y_MD, weights_TK, src_M, row_TK)


def _combine_bwd(
    complete: bool, implementation: Choice, residuals: tuple[jax.Array, ...], dout_TD: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    y_MD, weights_TK, src_M, row_TK = residuals
    dout_TD = dout_TD.astype(y_MD.dtype)
    # compute dweights per row, a sum that XLA fuses with the gather of dout, then gather scalars
    dout_MD = take_rows_or_last(dout_TD, src_M).astype(jnp.float32)
    dweight_M = (y_MD.astype(jnp.float32) * dout_MD).sum(axis=-1)
    dweights_TK = take_rows(dweight_M, row_TK)
    # a row's weight is that of the choice that is this row; an empty row has none
    mine_MK = (
        take_rows_or_last(row_TK, src_M) == jnp.arange(src_M.shape[0], dtype=row_TK.dtype)[:, None]
    )
    weight_M = jnp.where(mine_MK, take_rows_or_last(weights_TK, src_M), 0).sum(axis=-1)
    return _run(implementation, "gather_rows", dout_TD, src_M, weight_M), dweights_TK, None, None


_combine.defvjp(_combine_fwd, _combine_bwd)


def combine(
    y_MD: jax.Array,
    weights_TK: jax.Array,
    src_M: jax.Array,
    row_TK: jax.Array,
    complete: bool = False,
    *,
    implementation: Choice = None,
) -> jax.Array:
    """Return float32 out_TD[t] = sum_k weights_TK[t, k] y_MD[row_TK[t, k]], the weighted sum of
    each token's rows. A dropped choice adds 0.

    complete: promises that no choice was dropped and no row is empty.
    """
    return _combine(y_MD, weights_TK, src_M, row_TK, complete, implementation)


@jax.custom_vjp
def row_weights(weights_TK: jax.Array, choice_M: jax.Array, row_TK: jax.Array) -> jax.Array:
    """Return [M], the weight of each row's choice; 0 for an empty row.

    choice_M: the choice of each row, an index into weights_TK.reshape(-1); T K for an empty row. It
    is the inverse of row_TK, by which the gradient is gathered.
    """
    return take_rows(weights_TK.reshape(-1), choice_M)


def _row_weights_fwd(
    weights_TK: jax.Array, choice_M: jax.Array, row_TK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return row_weights(weights_TK, choice_M, row_TK), row_TK


def _row_weights_bwd(row_TK: jax.Array, dweight_M: jax.Array) -> tuple[jax.Array, None, None]:
    return take_rows(dweight_M, row_TK), None, None


row_weights.defvjp(_row_weights_fwd, _row_weights_bwd)
