"""Rows of all devices brought to each, and sums of all devices' parts brought back, in two levels,
inside `shard_map`.

Legend: T rows of a device, R devices = P nodes x Q devices a node, D width. Rows of all devices are
ordered by (place in the node, node). axes: the devices' mesh axes; the last is inside a node.
Neither function is differentiated.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.all_to_all import make_all_to_all
from kernels_pallas.saved import bits


def _hierarchy(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Axes across nodes, axes inside one: those of more than one device."""
    return [level for level in (axes[:-1], axes[-1:]) if level and lax.axis_size(level) > 1]


def all_gather_rows_local(x_TD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[R T, ...]: every row crosses once to each node, then inside it."""
    rows = bits(x_TD)
    for level in _hierarchy(axes):
        rows = lax.all_gather(rows, level, tiled=True)
    return lax.bitcast_convert_type(rows, x_TD.dtype)


def sum_scatter_rows_local(x_MD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """float32 [T, D] of [R T, D]: the sum over devices of the rows of this one; first inside a
    node, then across.

    Each level sends parts in the rows' dtype and adds them in float32.
    """
    sum_MD = x_MD.astype(jnp.float32)
    for level in reversed(_hierarchy(axes)):
        parts = sum_MD.astype(x_MD.dtype).reshape(lax.axis_size(level), -1, x_MD.shape[1])
        sum_MD = make_all_to_all(level)(parts).astype(jnp.float32).sum(axis=0)
    return sum_MD
