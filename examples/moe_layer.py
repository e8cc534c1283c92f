"""Train a MoE layer whose experts are sharded over the devices of a mesh.

Usage: python examples/moe_layer.py
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import optax

from jmoe import ExpertParallel, MoEConfig, MoELayer

mesh = jax.make_mesh((jax.device_count(),), ("gpu",))
config = MoEConfig(hidden_size=64, num_experts=8, num_experts_per_tok=2, intermediate_size=128)
layer = MoELayer(config, ExpertParallel(mesh, expert_axes=("gpu",)), rngs=nnx.Rngs(0))
graph, params = nnx.split(layer)
optimizer = optax.adamw(3e-3)

x_BSD = jax.random.normal(jax.random.key(1), (8, 32, 64))
target_BSD = jnp.roll(x_BSD, 1, axis=-1)  # an arbitrary target to fit


def loss_fn(params: nnx.State) -> jax.Array:
    """Return the mean squared error plus the weighted losses that balance the experts' load."""
    y_BSD, metrics = nnx.merge(graph, params)(x_BSD)
    return jnp.mean((y_BSD - target_BSD) ** 2) + metrics.balance_loss + metrics.z_loss


@jax.jit
def step(params: nnx.State, state: optax.OptState) -> tuple[nnx.State, optax.OptState, jax.Array]:
    """Take one AdamW step; return (params, optimizer state, loss)."""
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


state = optimizer.init(params)
for i in range(50):
    params, state, loss = jax.block_until_ready(step(params, state))
    if i % 10 == 0 or i == 49:
        print(f"step {i}: loss {loss:.4f}")
