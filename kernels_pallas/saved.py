"""Named residuals: values that a rematerialised layer saves for its backward pass."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name


def bfloat16_as_uint16(x: jax.Array) -> jax.Array:
    """Return x; bfloat16 as its uint16 bits.

    To read or write a part of a bfloat16 array, XLA:CPU would convert the whole array to float32.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def mark_saved_residual(x: jax.Array, name: str) -> jax.Array:
    """Return x, named like `mark_saved` but not differentiable: for the residuals of a custom
    gradient.
    """
    return lax.bitcast_convert_type(checkpoint_name(bfloat16_as_uint16(x), name), x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def mark_saved(x: jax.Array, name: str) -> jax.Array:
    """Return x, named for `jax.checkpoint_policies.save_only_these_names`.

    The value is saved as its bits, so that a scan over layers stacks it in place.
    """
    return mark_saved_residual(x, name)


@mark_saved.defjvp
def _saved_jvp(
    name: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # `mark_saved` itself would remain a call, into which the checkpoint policy does not look
    return mark_saved_residual(primals[0], name), tangents[0]
