"""Values kept for the backward pass of a rematerialised layer."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name


def bits(x: jax.Array) -> jax.Array:
    """bfloat16 as uint16: XLA:CPU would convert a whole bfloat16 array to float32 to read or
    write a part of it.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def saved_residual(x: jax.Array, name: str) -> jax.Array:
    """`saved` for the residuals of a custom gradient: not differentiable."""
    return lax.bitcast_convert_type(checkpoint_name(bits(x), name), x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def saved(x: jax.Array, name: str) -> jax.Array:
    """x, named for `jax.checkpoint_policies.save_only_these_names`; kept as bits, so that a scan
    stacks it in place.
    """
    return saved_residual(x, name)


@saved.defjvp
def _saved_jvp(
    name: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # not `saved` itself, which would stay a call that the policy does not look into
    return saved_residual(primals[0], name), tangents[0]
