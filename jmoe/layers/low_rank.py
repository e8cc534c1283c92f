"""Products of weights with LoRA adapters, in which each token has an adapter of its own, or none.

The adapters of a weight lie side by side: their A as columns of one matrix, their B as rows of
another. A token's product with all A keeps the columns of the token's adapter, and the product
with all B adds the adapter's change. No row is gathered or sorted by adapter.

Legend: T tokens, N rows sorted by expert, I inputs, O outputs, R ranks of all adapters together, E
experts of a layer.
"""

from collections.abc import Mapping
from typing import NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_mlp.reference import ProductChange
from kernels_pallas.matmul import dot

BASE = 0  # the number of no adapter: the model as it is
EXPERTS = ("w_up", "w_down")


class LowRank(NamedTuple):
    """The adapters of a weight [I, O], or of each expert's.

    a: [I, R] or [E, I, R]. b: [R, O] or [E, R, O], multiplied by the adapters' scales. owner_R:
    int32, the number of the adapter that each rank belongs to, from 1.
    """

    a: jax.Array
    b: jax.Array
    owner_R: jax.Array

    def change(self, x: jax.Array, adapter: jax.Array) -> jax.Array:
        """Return float32 [..., O]: what each row's adapter adds to the product x @ weight.

        adapter: int32, the number of each row's adapter; `BASE` adds zero.
        """
        ranks = self._own_ranks(dot(x, self.a.astype(x.dtype)), adapter)
        return dot(ranks.astype(x.dtype), self.b.astype(x.dtype))

    def of_expert(self, expert: jax.Array) -> "LowRank":
        """Return the adapters of one expert's weight."""
        a, b = (lax.dynamic_index_in_dim(w, expert, 0, keepdims=False) for w in (self.a, self.b))
        return LowRank(a, b, self.owner_R)

    def change_of_groups(
        self, x_NI: jax.Array, adapter_N: jax.Array, group_sizes_E: jax.Array
    ) -> jax.Array:
        """Return [N, O] in x's dtype: `change` for rows sorted by expert. Rows beyond the groups
        hold arbitrary values.
        """
        ranks = grouped_matmul(x_NI, self.a.astype(x_NI.dtype), group_sizes_E)
        own_NR = self._own_ranks(ranks, adapter_N)
        return grouped_matmul(own_NR, self.b.astype(x_NI.dtype), group_sizes_E)

    def _own_ranks(self, ranks: jax.Array, adapter: jax.Array) -> jax.Array:
        return jnp.where(self.owner_R == adapter[..., None], ranks, jnp.zeros((), ranks.dtype))


class AdaptedParam(nnx.Param):
    """A weight of a module to whose products adapters are added.

    Its metadata: `low_rank`, and `adapter_T`, the number of each token's adapter.
    """

    def change(self, x: jax.Array) -> jax.Array:
        """Return float32: what adapters add to x @ weight, with x of [..., I] for all tokens."""
        low_rank: LowRank = self.get_metadata("low_rank")
        adapter_T: jax.Array = self.get_metadata("adapter_T")
        return low_rank.change(x, adapter_T.reshape(x.shape[:-1]))


class ExpertChanges(NamedTuple):
    """The adapters of a layer's experts, by name of their weight, and each token's adapter."""

    low_rank: Mapping[str, LowRank]
    adapter_T: jax.Array

    def for_rows(self, expert: jax.Array, rows_B: jax.Array) -> ProductChange:
        """Return the change of one expert's products, for the tokens `rows_B`."""
        adapter_B = self.adapter_T[rows_B]

        def change(name: str, x: jax.Array) -> jax.Array | None:
            low_rank = self.low_rank.get(name)
            return None if low_rank is None else low_rank.of_expert(expert).change(x, adapter_B)

        return change

    def for_groups(self, token_N: jax.Array, group_sizes_E: jax.Array) -> ProductChange:
        """Return the change of products of rows sorted by expert; row n is token `token_N[n]`."""
        adapter_N = self.adapter_T[token_N]

        def change(name: str, x: jax.Array) -> jax.Array | None:
            low_rank = self.low_rank.get(name)
            if low_rank is None:
                return None
            return low_rank.change_of_groups(x, adapter_N, group_sizes_E)

        return change


class LayerAdapters(NamedTuple):
    """The adapters of one layer's weights, by path in the layer, and the rows' adapters.

    low_rank: "attention/w_qkv" and so on. adapter_P: int32, the number of each row's adapter.
    """

    low_rank: Mapping[str, LowRank]
    adapter_P: jax.Array

    def adapter_T(self, num_tokens: int) -> jax.Array:
        """Return each token's adapter, where every row has as many tokens."""
        return jnp.repeat(self.adapter_P, num_tokens // self.adapter_P.size)

    def adapt(self, block: nnx.Module, num_tokens: int) -> None:
        """Add the adapters to the products of a block's weights, save those of experts."""
        adapter_T = self.adapter_T(num_tokens)
        for path, low_rank in self.low_rank.items():
            *modules, name = path.split("/")
            if "experts" in modules:
                continue
            module = block
            for attribute in modules:
                module = getattr(module, attribute)
            weight = getattr(module, name)[...]
            setattr(module, name, AdaptedParam(weight, low_rank=low_rank, adapter_T=adapter_T))

    def expert_changes(self, num_tokens: int) -> ExpertChanges | None:
        """Return the adapters of the layer's experts; None if these have none."""
        of_experts = {
            path.rpartition("/")[2]: low_rank
            for path, low_rank in self.low_rank.items()
            if "/experts/" in path
        }
        if not of_experts:
            return None
        return ExpertChanges(of_experts, self.adapter_T(num_tokens))
