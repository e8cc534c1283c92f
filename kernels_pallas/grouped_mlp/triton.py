"""The grouped MLP in Triton: two grouped matmuls (`by_matmul.py`)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from kernels_pallas.expert_choices import RouterLogits
from kernels_pallas.grouped_matmul import Implementation, triton
from kernels_pallas.grouped_matmul.triton_choices import choose_and_multiply, matmul_of_choices
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
    fp8_inputs: bool = False,
    matmul: Implementation = TRITON,
) -> jax.Array:
    """Return `grouped_mlp_in_slots_by_matmul`'s result by the Triton kernels."""
    options: dict[str, Any] = {"activation": activation, "change": change, "fp8_inputs": fp8_inputs}
    return grouped_mlp_in_slots_by_matmul(matmul, x_ND, group_sizes_E, slots, slot_E, **options)


def mlp_of_choices(
    h_TD: jax.Array,
    idx_TK: jax.Array,
    slots: Mapping[str, jax.Array],
    slot_E: jax.Array,
    *,
    activation: str,
    fp8_inputs: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Return [T, K, D] in h's dtype: the outputs of each token's experts, idx_TK, whose weights are
    in slots slot_E; arbitrary for E, which is no expert.

    slots: see `mlp_in_slots`. Not differentiable. Raises NotImplementedError for operands that
    `matmul_of_choices` does not take.
    """
    multiply = partial(matmul_of_choices, idx_TK=idx_TK, interpret=interpret)
    options: dict[str, Any] = {"activation": activation, "fp8_inputs": fp8_inputs}
    y_ND = mlp_in_slots(multiply, h_TD, slots, slot_E, gates_all=True, **options)
    return y_ND.reshape(*idx_TK.shape, -1)


def mlp_of_logits(
    h_TD: jax.Array,
    logits: RouterLogits,
    slots: Mapping[str, jax.Array],
    slot_E: jax.Array,
    *,
    activation: str,
    fp8_inputs: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (`mlp_of_choices` of the experts that the logits choose; the results of
    `choose_experts`): the kernel of the first product chooses.

    Raises NotImplementedError for operands that `choose_and_multiply` does not take.
    """
    chosen: list[jax.Array] = []

    def multiply(x: jax.Array, w: jax.Array, **operands: Any) -> jax.Array:
        if chosen:
            return matmul_of_choices(x, w, chosen[0], interpret=interpret, **operands)
        y_NF, *chosen[:] = choose_and_multiply(x, w, logits, interpret=interpret, **operands)
        return y_NF

    options: dict[str, Any] = {"activation": activation, "fp8_inputs": fp8_inputs}
    y_ND = mlp_in_slots(multiply, h_TD, slots, slot_E, gates_all=True, **options)
    idx_TK, weights_TK = chosen
    return y_ND.reshape(*idx_TK.shape, -1), idx_TK, weights_TK
