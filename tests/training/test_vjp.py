"""What is kept of a forward pass, and the gradients made of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.models.block import SAVED
from jmoe.training.vjp import apply_vjp, vjp_with_residuals
from kernels_pallas.saved import mark_saved


def mlp(
    params: Any, scale: jax.Array, x: jax.Array, places: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    h = mark_saved(jnp.take(x, places, axis=0) @ params["up"], "mlp_up")
    return jnp.tanh(h) @ params["down"] * scale, places + 1, jnp.square(h).sum()


def test_only_what_is_named_is_kept_and_gradients_are_the_same() -> None:
    key = jax.random.split(jax.random.key(0), 4)
    params = {"up": jax.random.normal(key[0], (8, 16)), "down": jax.random.normal(key[1], (16, 8))}
    x, dy = jax.random.normal(key[2], (5, 8)), jax.random.normal(key[3], (6, 8))
    places = jnp.array([0, 1, 1, 4, 2, 0])
    args = params, jnp.float32(0.5), x, places
    result, kept = jax.jit(lambda *args: vjp_with_residuals(mlp, args, wanted=(0, 2), names=SAVED))(
        *args
    )
    expected = mlp(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), result, expected
    )
    # neither parameters, nor x, nor the output
    assert [leaf.shape for leaf in jax.tree.leaves(kept)] == [(1, 6, 16)]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y, _, squares = mlp(params, args[1], x, places)
        return jnp.vdot(y, dy) + 3 * squares

    cotangents = dy, places, jnp.float32(3)  # what is no floating-point number has none
    gradients = jax.jit(lambda kept, *args: apply_vjp(kept, args, cotangents))(kept, *args)
    for found, wanted in zip(gradients, jax.grad(loss, argnums=(0, 1))(params, x), strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted
        )
