"""The flat buffers in which a layer's parameters travel in a `ReverseScan`: one for dense
parameters, split over the devices of a replica, and one for experts, split over the data axis.

Legend:
R devices among which a buffer is split
C elements of a device's row of a parameter buffer
G elements of a device's row of a gradient buffer
N layers of a kind
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
from jax import lax

from jmoe.collectives.fusion import (
    BufferLayout,
    Hierarchy,
    ShardInBuffer,
    axis_names,
    flatten_gradients,
    flatten_shards,
    unflatten_gradient_shards,
    unflatten_parameters,
)
from jmoe.mesh import DATA
from jmoe.types import PyTree

EXPERT_SHARDS: Hierarchy = ((DATA,),)  # the devices that split an array of experts


class BufferPair(NamedTuple):
    """One array of the dense buffer and one of the experts' buffer, each with 0 elements if nothing
    of the layer travels in that buffer.
    """

    dense: jax.Array
    experts: jax.Array


class ParamsByBuffer(NamedTuple):
    """A layer's parameters, or their gradients, by the way in which they travel: lists in tree
    order.
    """

    dense: list[jax.Array]
    experts: list[jax.Array]
    others: list[jax.Array]  # in no buffer


class LayerBuffers:
    """The buffers of one kind of layer.

    dense: the layout of the parameters in the dense buffer. expert_entries: for each parameter
    outside that buffer its place in the experts' buffer, or None. hierarchy: of the dense buffer's
    collectives.
    """

    def __init__(
        self,
        state: PyTree,
        dense: BufferLayout,
        expert_entries: Sequence[ShardInBuffer | None],
        hierarchy: Hierarchy,
    ) -> None:
        self._dense, self.num_layers = dense, dense.num_layers
        self._experts = BufferLayout(dense.split(state)[1], expert_entries)
        self._entries = dense.entries, self._experts.entries
        self._hierarchies = hierarchy, EXPERT_SHARDS

    def split(self, tree: PyTree) -> ParamsByBuffer:
        """Return the leaves of a tree like the layer's parameters."""
        dense, others = self._dense.split(tree)
        return ParamsByBuffer(dense, *self._experts.split(others))

    def join(self, params: ParamsByBuffer) -> PyTree:
        """Return the tree with these leaves: the inverse of `split`."""
        others = self._experts.join(params.experts, params.others)
        return self._dense.join(params.dense, others)

    def flatten_stack(self, state: PyTree) -> BufferPair:
        """Return this device's rows [N, C] of all layers' buffers. state: a stack of layers."""
        in_buffers = self.split(state)[:2]
        rows = (
            jax.vmap(partial(flatten_shards, entries=entries), axis_size=self.num_layers)(shards)
            for shards, entries in zip(in_buffers, self._entries, strict=True)
        )
        return BufferPair(*rows)

    def unflatten_dense(self, buffer_RC: jax.Array) -> list[jax.Array]:
        """Return the dense parameters from a layer's gathered dense buffer."""
        return unflatten_parameters(buffer_RC, self._entries[0], self._hierarchies[0])

    def unflatten_experts(self, buffer_RC: jax.Array) -> list[jax.Array]:
        """Return the experts from a layer's gathered experts' buffer."""
        return unflatten_parameters(buffer_RC, self._entries[1], self._hierarchies[1])

    def flatten_gradients(
        self, dense: Sequence[jax.Array], experts: Sequence[jax.Array]
    ) -> BufferPair:
        """Return this device's gradients of a layer as float32 [R, G]: row r of a buffer holds the
        gradients of its r-th device's shards.
        """
        of_buffers = zip((dense, experts), self._entries, self._hierarchies, strict=True)
        return BufferPair(*(flatten_gradients(*each) for each in of_buffers))

    def unflatten_gradient_stack(
        self, rows_NG: BufferPair
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the gradients of this device's shards, of all layers: (dense, experts)."""
        dense, experts = (
            jax.vmap(partial(unflatten_gradient_shards, entries=entries))(rows)
            for rows, entries in zip(rows_NG, self._entries, strict=True)
        )
        return dense, experts

    def num_shard_elements(self) -> tuple[int, int]:
        """Return the elements of a layer that this device holds of (the dense buffer, the experts'
        buffer).
        """
        dense, experts = (sum(entry.num_elements for entry in entries) for entries in self._entries)
        return dense, experts

    def num_unsharded_elements(self) -> int:
        """Return the elements of both of a layer's buffers on all devices that share them. Call
        this inside `shard_map`.
        """
        sizes = (lax.axis_size(axis_names(hierarchy)) for hierarchy in self._hierarchies)
        return sum(n * size for n, size in zip(self.num_shard_elements(), sizes, strict=True))


MakeBuffers = Callable[[PyTree], LayerBuffers]  # from a stack of layers
