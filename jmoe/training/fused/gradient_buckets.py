"""A layer's gradients while they wait to be reduced over devices, for `ReverseScan`.

Legend:
R devices
G elements of a device's row of a gradient buffer
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import KeyPath

from jmoe.collectives.fusion import ShardInBuffer, flatten_shards, unflatten_gradient_shards
from jmoe.config import LayerKind
from jmoe.layers.router import RouterBias
from jmoe.mesh import EXPERT_COPIES, is_expert
from jmoe.training.fused.layer_buffers import LayerBuffers
from jmoe.types import PyTree

Index = int | jax.Array  # of a layer in the stack of its kind


def set_layer_at(stack: jax.Array, index: Index, value: jax.Array) -> jax.Array:
    """Return a stack of layers with `value` as its entry `index`."""
    return lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), index, 0)


def is_nnx_variable(x: object) -> bool:
    """Return whether `x` is an `nnx` variable."""
    return isinstance(x, nnx.Variable)


class UnreducedGradients(NamedTuple):
    """A layer's gradients on this device, before they are reduced over devices.

    dense_rows, expert_rows: [R, G], row r holds the gradients of device r's shards, in the layer's
    two buffers (`LayerBuffers`). replicated: flat, of parameters that every device holds. experts:
    flat, of experts that have whole replicas.
    """

    dense_rows: jax.Array
    expert_rows: jax.Array
    replicated: jax.Array
    experts: jax.Array


class ReducedGradients(NamedTuple):
    """A layer's `UnreducedGradients` summed over devices. dense_row, expert_row: [G], the gradients
    of this device's shards.
    """

    dense_row: jax.Array
    expert_row: jax.Array
    replicated: jax.Array
    experts: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["indices", "grads"], meta_fields=["kinds"])
@dataclass(frozen=True)
class Bucket:
    """The pending gradients of some layers, with each layer's kind and its index in its kind's
    stack.
    """

    kinds: tuple[LayerKind, ...] = ()
    indices: tuple[jax.Array, ...] = ()
    grads: tuple[UnreducedGradients, ...] = ()

    def add(self, kind: LayerKind, index: Index, grads: UnreducedGradients) -> "Bucket":
        """Return the bucket with the gradients of layer `index` of `kind` added."""
        return Bucket((*self.kinds, kind), (*self.indices, jnp.int32(index)), (*self.grads, grads))


class UnbufferedParams:
    """The parameters of one kind of layer that are in neither of its buffers, grouped by their
    gradients' reduction: none, over all devices, or over replicas of experts.
    """

    def __init__(self, layers: LayerBuffers, state: PyTree, *, reduces: bool) -> None:
        def reduced_over(path: KeyPath, variable: PyTree) -> str:
            if isinstance(variable, RouterBias) or not reduces:
                return "none"
            if not is_expert(path):
                return "all"
            return "replicas" if lax.axis_size(EXPERT_COPIES) > 1 else "none"

        sums = layers.split(
            jax.tree_util.tree_map_with_path(reduced_over, state, is_leaf=is_nnx_variable)
        ).others
        own = layers.split(state).others
        self._entries = [ShardInBuffer(w.shape[1:], 0, jnp.float32) for w in own]
        self._unreduced, self._replicated, self._experts = (
            [i for i, over in enumerate(sums) if over == name]
            for name in ("none", "all", "replicas")
        )

    def num_all_reduced_elements(self) -> int:
        """Return the number of gradient elements per layer that an all-reduce sums."""
        return sum(self._entries[i].num_elements for i in self._replicated + self._experts)

    def flatten(self, grads: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return two flat vectors: the gradients to sum over all devices, and the gradients to sum
        over replicas of experts.
        """
        replicated, experts = (
            flatten_shards([grads[i] for i in some], [self._entries[i] for i in some])
            for some in (self._replicated, self._experts)
        )
        return replicated, experts

    def store_needing_no_reduction(
        self, stacks: list[jax.Array], index: Index, grads: list[jax.Array]
    ) -> list[jax.Array]:
        """Return `stacks` with the gradients of layer `index` that need no reduction written at
        that index.
        """
        return self._set_gradients_at(
            stacks, index, self._unreduced, [grads[i] for i in self._unreduced]
        )

    def store_reduced(
        self, stacks: list[jax.Array], index: Index, reduced: ReducedGradients
    ) -> list[jax.Array]:
        """Return `stacks` with the reduced gradients of layer `index`, undoing `flatten`, written
        at that index.
        """
        for some, row_G in (
            (self._replicated, reduced.replicated),
            (self._experts, reduced.experts),
        ):
            stacks = self._set_gradients_at(
                stacks,
                index,
                some,
                unflatten_gradient_shards(row_G, [self._entries[i] for i in some]),
            )
        return stacks

    @staticmethod
    def _set_gradients_at(
        stacks: list[jax.Array], index: Index, positions: list[int], grads: list[jax.Array]
    ) -> list[jax.Array]:
        """Return `stacks` with `grads` written at `index` of the stacks at `positions`."""
        by_position = dict(zip(positions, grads, strict=True))
        return [
            set_layer_at(w, index, by_position[i]) if i in by_position else w
            for i, w in enumerate(stacks)
        ]
