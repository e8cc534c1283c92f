"""The exchange of token rows between the devices that hold experts, flat and in two levels.

Legend: R expert devices = P nodes x Q devices a node, C rows per destination. All run inside `shard_map`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from kernels_pallas.saved import bits

Exchange = Callable[[Any], Any]


def flat_local(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[R, C, ...]: block r goes to device r of `axes`; block r of the result came from device r."""
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def two_level_local(x: jax.Array, axes: tuple[str, str]) -> jax.Array:
    """The same exchange in two hops: inside the node by destination slot, then across nodes. Bit-equal to flat."""
    inter, intra = axes
    shape = x.shape
    x = x.reshape(lax.axis_size(inter), lax.axis_size(intra), *shape[1:])
    x = lax.all_to_all(x, intra, 1, 1, tiled=True)
    x = lax.all_to_all(x, inter, 0, 0, tiled=True)
    return x.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _exchange(x: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`move` on the bits of x: XLA:CPU would send bfloat16 as float32. The exchange is its own transpose."""
    return lax.bitcast_convert_type(move(bits(x)), x.dtype)


def _exchange_fwd(x: jax.Array, move: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, None]:
    return _exchange(x, move), None


def _exchange_bwd(move: Callable[[jax.Array], jax.Array], _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_exchange(g, move),)


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


def make_exchange(kind: str, axes: tuple[str, ...]) -> Exchange:
    """The exchange over `axes`, named `flat` or `two_level` (which needs two axes), applied to a pytree of [R, ...]."""
    if kind not in ("flat", "two_level"):
        raise ValueError(f"exchange = {kind!r}: must be one of flat, two_level")
    if kind == "two_level" and len(axes) == 2:
        move = partial(two_level_local, axes=(axes[0], axes[1]))
    else:
        move = partial(flat_local, axes=axes)
    return lambda tree: jax.tree.map(lambda x: _exchange(x, move), tree)
