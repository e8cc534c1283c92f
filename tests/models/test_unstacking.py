"""The layers of a stack, and the gradients that return to the stack."""

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.models.unstacking import layers_of_stack
from jmoe.types import PyTree


def test_layers_and_gradients() -> None:
    """Integers pass; a layer that is not used has a gradient of zeros."""
    rng = np.random.default_rng(0)
    stack = {"w": jnp.asarray(rng.normal(size=(3, 4, 2)), jnp.float32), "n": jnp.arange(3)}
    layers = layers_of_stack(stack)
    assert [int(layer["n"]) for layer in layers] == [0, 1, 2]
    for n, layer in enumerate(layers):
        assert np.array_equal(layer["w"], stack["w"][n])

    def loss(w: jax.Array, entries: PyTree) -> jax.Array:
        first, _, last = entries({"w": w, "n": stack["n"]})
        return jnp.sum(jnp.sin(first["w"]) * last["w"] * last["n"].astype(jnp.float32))

    def indexed(stack: PyTree) -> list[PyTree]:
        return [jax.tree.map(lambda x, n=n: x[n], stack) for n in range(3)]

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    ours, expected = (gradient(stack["w"], form) for form in (layers_of_stack, indexed))
    np.testing.assert_array_equal(ours, expected)
    assert not ours[1].any() and ours[0].any() and ours[2].any()
