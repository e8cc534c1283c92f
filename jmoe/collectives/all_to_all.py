"""All-to-alls of equal blocks of rows between devices, flat or in two hops, inside `shard_map`.

All users call `make_all_to_all`: the exchange of tokens, the embedding, the loss and the mesh
engine.

Legend: R devices = P nodes x Q devices per node, C rows per destination.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax import lax

from jmoe.types import PyTree
from kernels_pallas.saved import bfloat16_as_uint16

AllToAll = Callable[[PyTree], PyTree]


def flat_all_to_all_local(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return [R, C, ...], where block r came from device r of `axes`. Block r of x goes to device
    r.
    """
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def hierarchical_all_to_all_local(x: jax.Array, axes: tuple[str, str]) -> jax.Array:
    """Return the array that `flat_all_to_all_local` returns, bit for bit, by two hops: within the
    node to the destination's place in its node, then across nodes.

    axes: (across nodes, within a node).
    """
    inter, intra = axes
    shape = x.shape
    x = x.reshape(lax.axis_size(inter), lax.axis_size(intra), *shape[1:])
    x = lax.all_to_all(x, intra, 1, 1, tiled=True)
    x = lax.all_to_all(x, inter, 0, 0, tiled=True)
    return x.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _apply_to_bits(x: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Apply `move`, an all-to-all, to the bits of x.

    XLA:CPU would send bfloat16 as float32. The gradient is moved by the same function, since an
    all-to-all is its own transpose.
    """
    return lax.bitcast_convert_type(move(bfloat16_as_uint16(x)), x.dtype)


def _apply_to_bits_fwd(
    x: jax.Array, move: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, None]:
    return _apply_to_bits(x, move), None


def _apply_to_bits_bwd(
    move: Callable[[jax.Array], jax.Array], _: None, g: jax.Array
) -> tuple[jax.Array]:
    return (_apply_to_bits(g, move),)


_apply_to_bits.defvjp(_apply_to_bits_fwd, _apply_to_bits_bwd)


def make_all_to_all(axes: tuple[str, ...], hierarchical: bool = False) -> AllToAll:
    """Return a function that applies an all-to-all over `axes` to every array [R, ...] of a pytree.

    hierarchical: two hops; `axes` are then (across nodes, within a node).
    """
    if hierarchical:
        inter, intra = axes
        move: Callable[[jax.Array], jax.Array] = partial(
            hierarchical_all_to_all_local, axes=(inter, intra)
        )
    else:
        move = partial(flat_all_to_all_local, axes=axes)
    return lambda tree: jax.tree.map(lambda x: _apply_to_bits(x, move), tree)
