"""Scan over stacked MoE layers with rematerialization.

Usage: python examples/stacked_layers.py
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe import MoEConfig, MoELayer

NUM_LAYERS = 4
config = MoEConfig(hidden_size=32, num_experts=4, intermediate_size=64)
layers = [MoELayer(config, rngs=nnx.Rngs(i)) for i in range(NUM_LAYERS)]
graph, _ = nnx.split(layers[0])
states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.split(layer)[1] for layer in layers))


@jax.checkpoint
def residual_layer(x_TD: jax.Array, state: nnx.State) -> tuple[jax.Array, jax.Array]:
    """Return (x + layer(x), the sum of the layer's weighted losses)."""
    y_TD, metrics = nnx.merge(graph, state)(x_TD)
    return x_TD + y_TD, metrics.balance_loss + metrics.z_loss


@jax.jit
def loss_fn(states: nnx.State, x_TD: jax.Array) -> jax.Array:
    """Return the loss of all layers. The scan compiles the layer once for any number of layers."""
    y_TD, losses = jax.lax.scan(residual_layer, x_TD, states)
    return jnp.mean(y_TD**2) + losses.mean()


loss, grads = jax.value_and_grad(loss_fn)(states, jax.random.normal(jax.random.key(0), (64, 32)))
norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
print(f"{NUM_LAYERS} layers, loss {loss:.4f}, gradient norm {norm:.4f}")
