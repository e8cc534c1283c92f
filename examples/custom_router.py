"""A MoE layer with a custom router, which hashes a token's position to an expert.

Usage: python examples/custom_router.py
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe import MoEConfig, MoELayer, Routing

NUM_EXPERTS = 4


def hash_router(x_TD: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> Routing:
    """Return the routing of token t to expert t mod E with weight 1 (arXiv 2106.04426)."""
    num_tokens = x_TD.shape[0]
    topk_idx_TK = (jnp.arange(num_tokens, dtype=jnp.int32) % NUM_EXPERTS)[:, None]
    counts_E = jnp.bincount(topk_idx_TK[:, 0], length=NUM_EXPERTS).astype(jnp.int32)
    return Routing(
        topk_idx_TK=topk_idx_TK,
        topk_weights_TK=jnp.ones((num_tokens, 1)),
        counts_E=counts_E,
        # the router is deterministic: probability 1 for the chosen expert
        probs_sum_E=counts_E.astype(jnp.float32),
        z_sum=jnp.float32(0),
        entropy_sum=jnp.float32(0),
    )


config = MoEConfig(
    hidden_size=32, num_experts=NUM_EXPERTS, num_experts_per_tok=1, intermediate_size=64
)
layer = MoELayer(config, router=hash_router, rngs=nnx.Rngs(0))
y, metrics = layer(jax.random.normal(jax.random.key(0), (2, 16, 32)))
print(f"output {y.shape}, load of the experts {[round(float(load), 3) for load in metrics.load_E]}")
