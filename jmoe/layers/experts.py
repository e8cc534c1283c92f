"""The experts of a MoE layer (`Experts`) and the dense feed-forward layer (`MLP`).

Legend: N rows sorted by expert, D hidden, F expert hidden, U = 2F (SwiGLU: gate, up) or F (GELU), L
local experts, M the local experts whose weights are loaded.
"""

import math
from collections.abc import Mapping
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe.config import check
from jmoe.layers.low_rank import AdaptedParam, LowRank
from kernels_pallas.grouped_mlp import MLPWeights, activate, changed_grouped_mlp, grouped_mlp
from kernels_pallas.matmul import matmul
from kernels_pallas.saved import mark_saved
from kernels_pallas.token_permute import RowMap

# rows of an expert in the batched product / an even share; the other rows are computed in tiles
SLOT_FACTOR = 1.125
SLOT_MULTIPLE = 32


def normal_parameter(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    """Return a float32 parameter drawn from a normal distribution with mean 0."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


def affine(x: jax.Array, weight: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """Return float32 x @ weight + bias, and what adapters add if the weight is an `AdaptedParam`.
    The operands of the product have x's dtype.
    """
    y = matmul(x, weight[...].astype(x.dtype))
    if isinstance(weight, AdaptedParam):
        y = y + weight.product_change(x)
    return y if bias is None else y + bias[...].astype(jnp.float32)


def batched_rows_per_expert(expected_rows: int, num_local_experts: int) -> int:
    """Return the number of rows of each expert in the batched product.

    An even share of `expected_rows` times `SLOT_FACTOR`, rounded up to a multiple of
    `SLOT_MULTIPLE`.
    """
    fair = SLOT_FACTOR * expected_rows / num_local_experts
    return math.ceil(fair / SLOT_MULTIPLE) * SLOT_MULTIPLE


def up_projection_columns(intermediate_size: int, activation: str) -> int:
    """Return U, the columns of the up projection: F for GELU, 2F for SwiGLU, whose gate and up
    projections lie side by side.

    Raises ValueError for an unknown activation.
    """
    kinds = ("swiglu", "gelu", "clamped_swiglu")
    check(activation in kinds, "activation", activation, f"must be one of {', '.join(kinds)}")
    return intermediate_size if activation == "gelu" else 2 * intermediate_size


class _MLPParameters(nnx.Module):
    """Weights and optional biases of MLPs, stacked along the dimensions `leading`."""

    def __init__(
        self,
        leading: tuple[int, ...],
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        init_std: float = 0.02,
        init_out_std: float | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        up = up_projection_columns(intermediate_size, activation)
        self.activation = activation
        self.w_up = normal_parameter(rngs, (*leading, hidden_size, up), init_std)
        self.w_down = normal_parameter(
            rngs, (*leading, intermediate_size, hidden_size), init_out_std or init_std
        )
        self.b_up = nnx.Param(jnp.zeros((*leading, up))) if bias else None
        self.b_down = nnx.Param(jnp.zeros((*leading, hidden_size))) if bias else None


class Experts(_MLPParameters):
    """MLP experts: `experts(x_ND, group_sizes_L, expected_rows) -> y_ND` applies each group's
    weights to the group's rows.

    options: activation ("swiglu", "gelu" or "clamped_swiglu"), bias, init_std, init_out_std, rngs.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, **options: Any
    ) -> None:
        super().__init__((num_experts,), hidden_size, intermediate_size, **options)
        # ascending numbers of the experts whose weights are loaded; None: all of them
        self.ids_M: jax.Array | None = nnx.data(None)
        # adapters added to the products, by name of their weight; None: there are none
        self.low_rank: Mapping[str, LowRank] | None = nnx.data(None)

    def __call__(
        self,
        x_ND: jax.Array,
        group_sizes_L: jax.Array,
        expected_rows: int,
        rows: RowMap | None = None,
        scale_N: jax.Array | None = None,
    ) -> jax.Array:
        """Return [N, D], each row through the weights of its group, times `scale_N` if given.

        x_ND: rows sorted by expert; with `rows` the tokens [T, D], from which the kernel gathers
        rows. group_sizes_L: rows per local expert. expected_rows: the number of rows that hold
        tokens when the load is balanced; it sizes the batched product and does not change the
        result.
        """
        biases = (None if b is None else b[...] for b in (self.b_up, self.b_down))
        weights = MLPWeights(self.w_up[...], self.w_down[...], *biases)
        if self.low_rank is not None:
            return self._with_adapters(x_ND, group_sizes_L, weights, rows, scale_N)
        batched_rows = batched_rows_per_expert(expected_rows, group_sizes_L.shape[0])
        # experts that are not loaded have no rows, so the loaded experts' rows are contiguous
        if self.ids_M is not None:
            group_sizes_L = jnp.take(group_sizes_L, self.ids_M, mode="fill", fill_value=0)
        return grouped_mlp(
            x_ND,
            group_sizes_L,
            weights,
            activation=self.activation,
            batched_rows_per_group=batched_rows,
            rows=rows,
            scale_N=scale_N,
        )

    def _with_adapters(
        self,
        x_ND: jax.Array,
        group_sizes_L: jax.Array,
        weights: MLPWeights,
        rows: RowMap | None,
        scale_N: jax.Array | None,
    ) -> jax.Array:
        """Return the outputs with the adapters' low-rank products beside those of the weights."""
        own = self.low_rank or {}

        def change(name: str, x: jax.Array) -> jax.Array | None:
            gathered = rows if name == "w_up" else None
            adapter = own.get(name)
            if adapter is None:
                return None
            return adapter.grouped_product_change(x, None, group_sizes_L, gathered)

        w_up, w_down = weights.w_up.astype(x_ND.dtype), weights.w_down.astype(x_ND.dtype)
        return changed_grouped_mlp(
            x_ND,
            group_sizes_L,
            weights._replace(w_up=w_up, w_down=w_down),
            change,
            activation=self.activation,
            rows=rows,
            scale_N=scale_N,
        )


class MLP(_MLPParameters):
    """Dense feed-forward layer: activate(x w_up + b_up) w_down + b_down, [..., D] -> float32 [...,
    D].

    options: as of `Experts`.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, **options: Any) -> None:
        super().__init__((), hidden_size, intermediate_size, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = mark_saved(affine(x, self.w_up, self.b_up).astype(x.dtype), "mlp_up").astype(
            jnp.float32
        )
        return affine(activate(h, self.activation).astype(x.dtype), self.w_down, self.b_down)
