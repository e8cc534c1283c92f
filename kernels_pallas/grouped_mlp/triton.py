"""The grouped MLP in Triton: two grouped matmuls (`by_matmul.py`)."""

from collections.abc import Callable, Mapping
from functools import partial

import jax

from kernels_pallas.grouped_matmul import Implementation, triton
from kernels_pallas.grouped_matmul.triton_choices import matmul_of_choices
from kernels_pallas.grouped_mlp.by_matmul import (
    grouped_mlp_by_matmul,
    grouped_mlp_in_slots_by_matmul,
    mlp_in_slots,
)
from kernels_pallas.grouped_mlp.reference import MLPWeights, ProductChange
from kernels_pallas.token_permute import RowMap

TRITON = Implementation(triton.grouped_matmul, triton.weight_gradient, gates_slots=True)


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    batched_rows_per_group: int = 0,
    rows: RowMap | None = None,
    scale_N: jax.Array | None = None,
    matmul: Implementation = TRITON,
) -> jax.Array:
    """Return `grouped_mlp.api`'s result by the Triton kernels, which read the rows of `rows` by
    index. batched_rows_per_group: ignored; other implementations use it.
    """
    del batched_rows_per_group
    return grouped_mlp_by_matmul(
        matmul, x_ND, group_sizes_L, weights, activation=activation, rows=rows, scale_N=scale_N
    )


def grouped_mlp_in_slots(
    x_ND: jax.Array,
    group_sizes_E: jax.Array,
    slots: Mapping[str, jax.Array],
    slot_E: jax.Array,
    *,
    activation: str,
    change: ProductChange | None = None,
    matmul: Implementation = TRITON,
) -> jax.Array:
    """Return `grouped_mlp_in_slots_by_matmul`'s result by the Triton kernels."""
    return grouped_mlp_in_slots_by_matmul(
        matmul, x_ND, group_sizes_E, slots, slot_E, activation=activation, change=change
    )


def mlp_of_choices(
    h_TD: jax.Array,
    idx_TK: jax.Array,
    slots: Mapping[str, jax.Array],
    slot_E: jax.Array,
    *,
    activation: str,
    matmul: Callable[..., jax.Array] = matmul_of_choices,
) -> jax.Array:
    """Return [T, K, D] in h's dtype: the outputs of each token's experts, idx_TK, whose weights are
    in slots slot_E; arbitrary for E, which is no expert.

    slots: see `mlp_in_slots`. Not differentiable. Raises NotImplementedError for operands that
    `matmul_of_choices` does not take.
    """
    multiply = partial(matmul, idx_TK=idx_TK)
    y_ND = mlp_in_slots(multiply, h_TD, slots, slot_E, activation=activation, gates_all=True)
    return y_ND.reshape(*idx_TK.shape, -1)
