"""The layers of a stack, with gradients that are written in place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.types import PyTree


def layers_of_stack(stack: PyTree) -> list[PyTree]:
    """Return the tree of each layer of a stack, whose arrays have a leading layer dimension.

    The gradient of a stacked array is one array into which each layer's gradient is written, by the
    kernel that computes it if XLA can. JAX alone would concatenate the gradients, and XLA would
    update a parameter in several passes, each of which reads the concatenation.
    """
    structure: Any
    leaves, structure = jax.tree.flatten(stack)
    entries = [
        _entries(w) if jnp.issubdtype(w.dtype, jnp.floating) else _plain_entries(w) for w in leaves
    ]
    return [structure.unflatten(layer) for layer in zip(*entries, strict=True)]


def _plain_entries(stack: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(stack[n] for n in range(stack.shape[0]))


@jax.custom_vjp
def _entries(stack: jax.Array) -> tuple[jax.Array, ...]:
    return _plain_entries(stack)


def _entries_fwd(stack: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return _plain_entries(stack), None


def _entries_bwd(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    stack = lax.empty((len(gradients), *gradients[0].shape), gradients[0].dtype)
    for n, gradient in enumerate(gradients):
        stack = lax.dynamic_update_index_in_dim(stack, gradient, n, 0)
    return (stack,)


_entries.defvjp(_entries_fwd, _entries_bwd)
