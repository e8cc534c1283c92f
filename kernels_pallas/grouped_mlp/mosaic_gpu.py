"""The grouped MLP on Hopper: two grouped matmuls (`by_matmul.py`)."""

from collections.abc import Mapping
from typing import Any

import jax

from kernels_pallas.grouped_matmul import Implementation, mosaic_gpu
from kernels_pallas.grouped_mlp.by_matmul import (
    grouped_mlp_by_matmul,
    grouped_mlp_in_slots_by_matmul,
)
from kernels_pallas.grouped_mlp.reference import MLPWeights, ProductChange
from kernels_pallas.saved import mark_saved
from kernels_pallas.token_permute import RowMap, dispatch

HOPPER = Implementation(mosaic_gpu.grouped_matmul, mosaic_gpu.weight_gradient)


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    batched_rows_per_group: int = 0,
    rows: RowMap | None = None,
    scale_N: jax.Array | None = None,
    matmul: Implementation = HOPPER,
) -> jax.Array:
    """Return `grouped_mlp.api`'s result by the Hopper kernels. batched_rows_per_group: ignored;
    other implementations use it.

    rows: the rows are gathered into memory here. A product that reads rows by index would copy each
    row once per tile of its columns, 128 bytes at a time; no measurement shows that to be faster
    than writing the rows once. A rematerialization policy may save them as `dispatched_rows`.
    """
    del batched_rows_per_group
    if rows is not None:
        x_ND = mark_saved(dispatch(x_ND, rows.src_M, rows.row_TK, rows.complete), "dispatched_rows")
    return grouped_mlp_by_matmul(
        matmul, x_ND, group_sizes_L, weights, activation=activation, scale_N=scale_N
    )


def grouped_mlp_in_slots(
    x_ND: jax.Array,
    group_sizes_E: jax.Array,
    slots: Mapping[str, jax.Array],
    slot_E: jax.Array,
    *,
    activation: str,
    change: ProductChange | None = None,
    fp8_inputs: bool = False,
    matmul: Implementation = HOPPER,
) -> jax.Array:
    """Return `grouped_mlp_in_slots_by_matmul`'s result by the Hopper kernels."""
    options: dict[str, Any] = {"activation": activation, "change": change, "fp8_inputs": fp8_inputs}
    return grouped_mlp_in_slots_by_matmul(matmul, x_ND, group_sizes_E, slots, slot_E, **options)
