"""Sharded parameters made whole for use, and their gradients reduced back onto the shards (ZeRO-3)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_local(shard: jax.Array, dim: int, dtype: Any, axes: tuple[str, ...]) -> jax.Array:
    """The whole parameter in `dtype` from the float32 shards that the devices of `axes` hold of dimension `dim`.

    Crosses the network in `dtype`; its gradient is summed over devices in float32, onto the shard.
    """
    return lax.all_gather(shard.astype(dtype), axes, axis=dim, tiled=True)


def _gather_fwd(shard: jax.Array, dim: int, dtype: Any, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return gather_local(shard, dim, dtype, axes), None


def _gather_bwd(dim: int, dtype: Any, axes: tuple[str, ...], _: None, g: jax.Array) -> tuple[jax.Array]:
    return (lax.psum_scatter(g.astype(jnp.float32), axes, scatter_dimension=dim, tiled=True),)


gather_local.defvjp(_gather_fwd, _gather_bwd)
