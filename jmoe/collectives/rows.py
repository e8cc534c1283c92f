"""All-gather and reduce-scatter of rows in two levels, across nodes and within a node, inside
`shard_map`.

The vocabulary-parallel loss, the embedding split by blocks of rows, and the mesh engine use these
functions. No caller differentiates through them.

Legend: T rows of a device, R devices = P nodes x Q devices per node, M = R T rows of all devices, D
width. The rows of all devices are ordered by (place within the node, node). axes: the devices' mesh
axes; the last lies within a node.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.all_to_all import make_all_to_all
from kernels_pallas.saved import bfloat16_as_uint16


def _axes_of_levels(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return [axes across nodes, axes within a node], without levels of one device."""
    return [level for level in (axes[:-1], axes[-1:]) if level and lax.axis_size(level) > 1]


def all_gather_rows_local(x_TD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the rows of all devices, [R T, ...]. Each row crosses to each node once, then spreads
    within it.
    """
    rows = bfloat16_as_uint16(x_TD)
    for level in _axes_of_levels(axes):
        rows = lax.all_gather(rows, level, tiled=True)
    return lax.bitcast_convert_type(rows, x_TD.dtype)


def own_rows_local(x_M: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return this device's rows [T, ...] of those that `all_gather_rows_local` returns."""
    place = jnp.int32(0)
    for level in reversed(_axes_of_levels(axes)):
        place = place * lax.axis_size(level) + lax.axis_index(level)
    rows = x_M.shape[0] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x_M, place * rows, rows)


def reduce_scatter_rows_local(x_MD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return float32 [T, D], this device's rows of the sum over devices of x_MD, summed within the
    node, then across nodes.

    Each level transfers in x's dtype and sums in float32.
    """
    sum_MD = x_MD.astype(jnp.float32)
    for level in reversed(_axes_of_levels(axes)):
        parts = sum_MD.astype(x_MD.dtype).reshape(lax.axis_size(level), -1, x_MD.shape[1])
        sum_MD = make_all_to_all(level)(parts).astype(jnp.float32).sum(axis=0)
    return sum_MD
