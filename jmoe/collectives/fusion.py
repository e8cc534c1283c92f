"""Sharded parameters gathered for use, and their gradients reduced onto the shards (ZeRO-3), one by
one or fused into a flat buffer.

A buffer [R, C] has one row per device, which holds that device's shards end to end. With two levels
(across nodes, within a node) each element crosses between two nodes once; rows are therefore
ordered by place within the node, then by node.

Legend: R devices, C elements of a device's row of a parameter buffer, G elements of a device's row
of a gradient buffer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmoe.types import PyTree

Hierarchy = tuple[tuple[str, ...], ...]  # the axes of each level, the slowest level first


def axis_names(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Return the axes of all levels, the slowest level's first."""
    return tuple(axis for axes in hierarchy for axis in axes)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_parameter_local(
    shard: jax.Array, dim: int, dtype: DTypeLike, axes: tuple[str, ...]
) -> jax.Array:
    """Return the unsharded parameter in `dtype`, all-gathered along `dim` over the devices of
    `axes` from float32 shards.

    The transfer is in `dtype`. The gradient is reduce-scattered in float32 onto the shard.
    """
    return lax.all_gather(shard.astype(dtype), axes, axis=dim, tiled=True)


def _gather_fwd(
    shard: jax.Array, dim: int, dtype: DTypeLike, axes: tuple[str, ...]
) -> tuple[jax.Array, None]:
    return gather_parameter_local(shard, dim, dtype, axes), None


def _gather_bwd(
    dim: int, dtype: DTypeLike, axes: tuple[str, ...], _: None, g: jax.Array
) -> tuple[jax.Array]:
    return (lax.psum_scatter(g.astype(jnp.float32), axes, scatter_dimension=dim, tiled=True),)


gather_parameter_local.defvjp(_gather_fwd, _gather_bwd)


@dataclass(frozen=True)
class ShardInBuffer:
    """A parameter in a flat buffer: the shape of one device's shard, the dimension that is split,
    and the dtype in which it is used.
    """

    shape: tuple[int, ...]
    dim: int
    dtype: DTypeLike

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class BufferLayout:
    """The split of a pytree's arrays into those that travel in one flat buffer and the others.

    entries: for each array its place in the buffer, or None if it is not in the buffer. The arrays'
    first dimension is the layer.
    """

    def __init__(self, tree: PyTree, entries: Sequence[ShardInBuffer | None]) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._in_buffer = [i for i, entry in enumerate(entries) if entry is not None]
        self._outside_buffer = [i for i, entry in enumerate(entries) if entry is None]
        self.entries = [entry for entry in entries if entry is not None]
        self.num_layers = leaves[0].shape[0] if leaves else 0

    def split(self, tree: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return (arrays of the buffer, other arrays)."""
        leaves = jax.tree.leaves(tree)
        return [leaves[i] for i in self._in_buffer], [leaves[i] for i in self._outside_buffer]

    def join(self, in_buffer: Sequence[jax.Array], outside_buffer: Sequence[jax.Array]) -> PyTree:
        """Return the pytree whose leaves are these arrays: those of the buffer and the others, as
        `split` returns them.
        """
        leaves = dict(
            zip(self._in_buffer + self._outside_buffer, [*in_buffer, *outside_buffer], strict=True)
        )
        return jax.tree.unflatten(self._structure, [leaves[i] for i in range(len(leaves))])


def _buffer_dtype(entries: Sequence[ShardInBuffer]) -> np.dtype:
    """Return the dtype of a buffer: float32 if all its parameters are used in float32, else
    uint16.
    """
    return jnp.dtype(
        jnp.float32 if all(entry.dtype == jnp.float32 for entry in entries) else jnp.uint16
    )


def _num_words(entry: ShardInBuffer, buffer_dtype: np.dtype) -> int:
    """Return the elements of the buffer's dtype that a shard takes."""
    return entry.num_elements * (jnp.dtype(entry.dtype).itemsize // buffer_dtype.itemsize)


def flatten_shards(shards: Sequence[jax.Array], entries: Sequence[ShardInBuffer]) -> jax.Array:
    """Return a device's row [C]: its shards end to end, each cast to the dtype of its use."""
    buffer_dtype = _buffer_dtype(entries)
    rows = [
        lax.bitcast_convert_type(w.astype(entry.dtype), buffer_dtype)
        for w, entry in zip(shards, entries, strict=True)
    ]
    return jnp.concatenate([jnp.zeros(0, buffer_dtype), *(row.reshape(-1) for row in rows)])


def unflatten_parameters(
    buffer_RC: jax.Array, entries: Sequence[ShardInBuffer], hierarchy: Hierarchy
) -> list[jax.Array]:
    """Return the unsharded parameters from the rows of all devices, buffer_RC."""
    buffer_dtype, sizes = buffer_RC.dtype, _level_sizes(hierarchy)
    unsharded, start = [], 0
    for entry in entries:
        words = buffer_RC[:, start : start + (width := _num_words(entry, buffer_dtype))]
        start += width
        if width > entry.num_elements:
            words = words.reshape(words.shape[0], entry.num_elements, -1)
        shards = lax.bitcast_convert_type(words, entry.dtype).reshape(
            *reversed(sizes), *entry.shape
        )
        # [fast, slow, *shape] -> [..., slow, fast, split dimension, ...]
        places = [len(sizes) - 1 - i + entry.dim for i in range(len(sizes))]
        shards = jnp.moveaxis(shards, range(len(sizes)), places)
        unsharded.append(shards.reshape(_unsharded_shape(entry, sizes)))
    return unsharded


def flatten_gradients(
    grads: Sequence[jax.Array], entries: Sequence[ShardInBuffer], hierarchy: Hierarchy
) -> jax.Array:
    """Return float32 [R, G] from this device's unsharded gradients: row r holds the shards of
    device r.
    """
    sizes = _level_sizes(hierarchy)
    rows = [jnp.zeros((math.prod(sizes), 0))]
    for g, entry in zip(grads, entries, strict=True):
        split = (*entry.shape[: entry.dim], *sizes, *entry.shape[entry.dim :])
        places = [len(sizes) - 1 - i + entry.dim for i in range(len(sizes))]
        shards = jnp.moveaxis(g.astype(jnp.float32).reshape(split), places, range(len(sizes)))
        rows.append(shards.reshape(math.prod(sizes), entry.num_elements))
    return jnp.concatenate(rows, axis=1)


def add_to_own_row_local(
    rows_RG: jax.Array, shards: Sequence[jax.Array], hierarchy: Hierarchy
) -> jax.Array:
    """Return `flatten_gradients`' result with `shards`, gradients of this device's shards that are
    reduced already, added to this device's row, so that their reduction adds them once.
    """
    if not shards:
        return rows_RG
    row: jax.Array | int = 0
    for axes in reversed(hierarchy):  # rows are ordered by place in the node, then by node
        row = row * lax.axis_size(axes) + lax.axis_index(axes)
    own_G = jnp.concatenate([shard.astype(jnp.float32).reshape(-1) for shard in shards])
    return rows_RG.at[row].add(own_G)


def unflatten_gradient_shards(
    row_G: jax.Array, entries: Sequence[ShardInBuffer]
) -> list[jax.Array]:
    """Return a device's shards of the gradients from its row [G]."""
    shards, start = [], 0
    for entry in entries:
        shards.append(row_G[start : start + entry.num_elements].reshape(entry.shape))
        start += entry.num_elements
    return shards


def _level_sizes(hierarchy: Hierarchy) -> tuple[int, ...]:
    return tuple(lax.axis_size(axes) for axes in hierarchy)


def _unsharded_shape(entry: ShardInBuffer, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the parameter from the shape of its shard and the sizes of all levels."""
    shape = list(entry.shape)
    shape[entry.dim] *= math.prod(sizes)
    return tuple(shape)


def all_gather_buffer_local(row_C: jax.Array, hierarchy: Hierarchy) -> jax.Array:
    """Return [R, C], the rows of all devices.

    Gathers across nodes first, so that each element crosses between two nodes once.
    """
    rows = row_C[None]
    for axes in hierarchy:
        gathered = lax.all_gather(rows, axes)
        rows = gathered.reshape(math.prod(gathered.shape[:2]), row_C.size)
    return rows


def reduce_scatter_buffer_local(rows_RG: jax.Array, hierarchy: Hierarchy) -> jax.Array:
    """Return [G], this device's row of the sum over devices: the transpose of
    `all_gather_buffer_local`.
    """
    for axes in reversed(hierarchy):
        rows_RG = rows_RG.reshape(lax.axis_size(axes), -1)
        rows_RG = lax.psum_scatter(rows_RG, axes, scatter_dimension=0)
    return rows_RG


def all_reduce_local(tree: PyTree, hierarchy: Hierarchy) -> PyTree:
    """Return the float32 sum over devices of every array of a pytree, reduced as one vector."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    entries = [ShardInBuffer(leaf.shape, 0, jnp.float32) for leaf in leaves]
    total = all_reduce_buffer_local(flatten_shards(leaves, entries), hierarchy)
    return jax.tree.unflatten(structure, unflatten_gradient_shards(total, entries))


def all_reduce_buffer_local(row_G: jax.Array, hierarchy: Hierarchy) -> jax.Array:
    """Return [G], the sum over devices.

    With two levels: a reduce-scatter within the node, an all-reduce across nodes, an all-gather
    within the node.
    """
    if len(hierarchy) == 1:
        return lax.psum(row_G, hierarchy[0])
    across, inside = hierarchy
    padded = jnp.pad(row_G, (0, -row_G.size % lax.axis_size(inside)))
    shard = lax.psum(lax.psum_scatter(padded, inside, scatter_dimension=0, tiled=True), across)
    return lax.all_gather(shard, inside, tiled=True)[: row_G.size]


_Entries = tuple[ShardInBuffer, ...]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_parameters_fused_local(
    shards: list[jax.Array], entries: _Entries, hierarchy: Hierarchy
) -> list[jax.Array]:
    """Return the unsharded parameters, all-gathered as one buffer; their gradients are
    reduce-scattered as one buffer.
    """
    return unflatten_parameters(
        all_gather_buffer_local(flatten_shards(shards, entries), hierarchy), entries, hierarchy
    )


def _gather_fused_fwd(
    shards: list[jax.Array], entries: _Entries, hierarchy: Hierarchy
) -> tuple[list[jax.Array], None]:
    return gather_parameters_fused_local(shards, entries, hierarchy), None


def _gather_fused_bwd(
    entries: _Entries, hierarchy: Hierarchy, _: None, grads: list[jax.Array]
) -> tuple[list[jax.Array]]:
    row_G = reduce_scatter_buffer_local(flatten_gradients(grads, entries, hierarchy), hierarchy)
    return (unflatten_gradient_shards(row_G, entries),)


gather_parameters_fused_local.defvjp(_gather_fused_fwd, _gather_fused_bwd)
