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
from kernels_pallas.token_permute import RowMap, dispatch

BASE = 0  # the number of no adapter: the model as it is
EXPERTS = ("w_up", "w_down")
# Up to so many ranks of all experts of a layer together, one plain product with all of them
# replaces a grouped one: it costs as much as so many more outputs of the weight.
MOST_MASKED_RANKS = 256


class LowRank(NamedTuple):
    """The adapters of a weight [I, O], or of each expert's.

    a: [I, R] or [E, I, R]. b: [R, O] or [E, R, O], multiplied by the adapters' scales. owner_R:
    int32, the number of the adapter that each rank belongs to, from 1; None if all rows have all
    ranks, as in training.
    """

    a: jax.Array
    b: jax.Array
    owner_R: jax.Array | None = None

    def product_change(self, x: jax.Array, adapter: jax.Array) -> jax.Array:
        """Return float32 [..., O]: what each row's adapter adds to the product x @ weight.

        adapter: int32, the number of each row's adapter; `BASE` adds zero.
        """
        ranks = self._zero_ranks_of_other_adapters(dot(x, self.a.astype(x.dtype)), adapter)
        return dot(ranks.astype(x.dtype), self.b.astype(x.dtype))

    def for_expert(self, expert: jax.Array) -> "LowRank":
        """Return the adapters of one expert's weight."""
        a, b = (lax.dynamic_index_in_dim(w, expert, 0, keepdims=False) for w in (self.a, self.b))
        return LowRank(a, b, self.owner_R)

    def grouped_product_change(
        self,
        x_NI: jax.Array,
        adapter_N: jax.Array | None,
        group_sizes_E: jax.Array,
        rows: RowMap | None = None,
    ) -> jax.Array:
        """Return [N, O] in x's dtype: `product_change` of rows sorted by expert. Rows beyond the
        groups hold arbitrary values. rows: if given, x is [T, I] and row n is x[rows.src_M[n]].
        """
        if self.owner_R is None and self.a.shape[0] * self.a.shape[2] <= MOST_MASKED_RANKS:
            return self._change_by_masked_ranks(x_NI, group_sizes_E, rows)
        ranks = grouped_matmul(x_NI, self.a.astype(x_NI.dtype), group_sizes_E, rows=rows)
        own_NR = self._zero_ranks_of_other_adapters(ranks, adapter_N)
        return grouped_matmul(own_NR, self.b.astype(x_NI.dtype), group_sizes_E)

    def _change_by_masked_ranks(
        self, x: jax.Array, group_sizes_E: jax.Array, rows: RowMap | None
    ) -> jax.Array:
        """Return `grouped_product_change`, zeros beyond the groups, by products with all experts'
        ranks side by side, of which each row keeps its own expert's.
        """
        experts, inputs, rank = self.a.shape
        a = self.a.transpose(1, 0, 2).reshape(inputs, experts * rank).astype(x.dtype)
        b = self.b.reshape(experts * rank, -1).astype(x.dtype)
        num_rows = (x if rows is None else rows.src_M).shape[0]
        row_N1 = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        inside_N1 = row_N1 < group_sizes_E.sum()
        if rows is None:
            # what lies beyond the groups may be NaN, which a factor 0 keeps
            ranks = dot(jnp.where(inside_N1, x, 0), a).astype(x.dtype)
        else:
            ranks = dispatch(dot(x, a).astype(x.dtype), rows.src_M, rows.row_TK, rows.complete)
        ends_R = jnp.repeat(jnp.cumsum(group_sizes_E), rank)
        begins_R = ends_R - jnp.repeat(group_sizes_E, rank)
        own_NR = jnp.where((row_N1 >= begins_R) & (row_N1 < ends_R), ranks, 0)
        return jnp.where(inside_N1, dot(own_NR, b).astype(x.dtype), 0)

    def _zero_ranks_of_other_adapters(
        self, ranks: jax.Array, adapter: jax.Array | None
    ) -> jax.Array:
        """Return `ranks` [..., R] with 0 for ranks that are not of the row's own adapter."""
        if self.owner_R is None or adapter is None:
            return ranks
        return jnp.where(self.owner_R == adapter[..., None], ranks, jnp.zeros((), ranks.dtype))


class AdaptedParam(nnx.Param):
    """A weight of a module to whose products adapters are added.

    Its metadata: `low_rank`, and `adapter_T`, the number of each token's adapter.
    """

    def product_change(self, x: jax.Array) -> jax.Array:
        """Return float32: what adapters add to x @ weight, with x of [..., I] for all tokens."""
        low_rank: LowRank = self.get_metadata("low_rank")
        adapter_T: jax.Array = self.get_metadata("adapter_T")
        return low_rank.product_change(x, adapter_T.reshape(x.shape[:-1]))


class ExpertAdapters(NamedTuple):
    """The adapters of a layer's experts, by name of their weight, and each token's adapter."""

    low_rank: Mapping[str, LowRank]
    adapter_T: jax.Array

    def product_change_of_expert(self, expert: jax.Array, rows_B: jax.Array) -> ProductChange:
        """Return a function of (weight name, x) that returns what adapters add to x times that
        weight of the expert, for the tokens `rows_B`; None for a weight without adapters.
        """
        adapter_B = self.adapter_T[rows_B]

        def change(name: str, x: jax.Array) -> jax.Array | None:
            low_rank = self.low_rank.get(name)
            return (
                None
                if low_rank is None
                else low_rank.for_expert(expert).product_change(x, adapter_B)
            )

        return change

    def product_change_of_groups(
        self, token_N: jax.Array, group_sizes_E: jax.Array
    ) -> ProductChange:
        """Return the function of `product_change_of_expert` for rows sorted by expert, where row n
        is token `token_N[n]`.
        """
        adapter_N = self.adapter_T[token_N]

        def change(name: str, x: jax.Array) -> jax.Array | None:
            low_rank = self.low_rank.get(name)
            if low_rank is None:
                return None
            return low_rank.grouped_product_change(x, adapter_N, group_sizes_E)

        return change


class LayerAdapters(NamedTuple):
    """The adapters of one layer's weights, by path in the layer, and the rows' adapters.

    low_rank: "attention/w_qkv" and so on. adapter_P: int32, the number of each row's adapter.
    """

    low_rank: Mapping[str, LowRank]
    adapter_P: jax.Array

    def adapter_T(self, num_tokens: int) -> jax.Array:
        """Return each token's adapter; every row has num_tokens / P tokens."""
        return jnp.repeat(self.adapter_P, num_tokens // self.adapter_P.size)

    def install(self, block: nnx.Module, num_tokens: int) -> None:
        """Replace the adapted weights of a block, except experts, by `AdaptedParam`s, whose
        products include the adapters.
        """
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

    def expert_adapters(self, num_tokens: int) -> ExpertAdapters | None:
        """Return the adapters of the layer's experts; None if these have none."""
        of_experts = {
            path.rpartition("/")[2]: low_rank
            for path, low_rank in self.low_rank.items()
            if "/experts/" in path
        }
        if not of_experts:
            return None
        return ExpertAdapters(of_experts, self.adapter_T(num_tokens))
