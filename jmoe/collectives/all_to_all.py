"""All-to-alls of blocks of rows between the devices that hold experts, flat and in two hops.

Legend: R devices = P nodes x Q devices a node, C rows per destination. All run inside `shard_map`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from kernels_pallas.saved import bits

AllToAll = Callable[[Any], Any]


def flat_local(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[R, C, ...]: block r goes to device r of `axes`; block r of the result came from device r."""
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def hierarchical_local(x: jax.Array, axes: tuple[str, str]) -> jax.Array:
    """Exchange [R, C, ...] in two hops, inside the node by destination slot, then across nodes;
    bit-equal to flat.
    """
    inter, intra = axes
    shape = x.shape
    x = x.reshape(lax.axis_size(inter), lax.axis_size(intra), *shape[1:])
    x = lax.all_to_all(x, intra, 1, 1, tiled=True)
    x = lax.all_to_all(x, inter, 0, 0, tiled=True)
    return x.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _moved(x: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`move` on the bits of x: XLA:CPU would send bfloat16 as float32. An all-to-all is its own
    transpose.
    """
    return lax.bitcast_convert_type(move(bits(x)), x.dtype)


def _moved_fwd(x: jax.Array, move: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, None]:
    return _moved(x, move), None


def _moved_bwd(move: Callable[[jax.Array], jax.Array], _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_moved(g, move),)


_moved.defvjp(_moved_fwd, _moved_bwd)


def make_all_to_all(axes: tuple[str, ...], hierarchical: bool = False) -> AllToAll:
    """Make an all-to-all over `axes` of every array [R, ...] of a pytree; hierarchical: over
    (across nodes, inside).
    """
    if hierarchical:
        inter, intra = axes
        move: Callable[[jax.Array], jax.Array] = partial(hierarchical_local, axes=(inter, intra))
    else:
        move = partial(flat_local, axes=axes)
    return lambda tree: jax.tree.map(lambda x: _moved(x, move), tree)
