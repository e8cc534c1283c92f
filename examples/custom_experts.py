"""A MoE layer whose experts are low-rank adapters instead of MLPs.

Usage: python examples/custom_experts.py
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe import MoEConfig, MoELayer


class LowRankExperts(nnx.Module):
    """Experts that compute x + (x @ a[e]) @ b[e] for expert e."""

    def __init__(self, num_experts: int, hidden_size: int, rank: int, rngs: nnx.Rngs) -> None:
        self.a = nnx.Param(0.1 * jax.random.normal(rngs.params(), (num_experts, hidden_size, rank)))
        self.b = nnx.Param(jnp.zeros((num_experts, rank, hidden_size)))

    def __call__(
        self, rows_ND: jax.Array, group_sizes_L: jax.Array, expected_rows: int
    ) -> jax.Array:
        """Return [N, D], each row after its expert's adapter.

        rows_ND: sorted by expert; rows after the last group hold arbitrary values. group_sizes_L:
        rows of each expert. expected_rows: the typical number of rows, unused here.
        """
        h_NR = jax.lax.ragged_dot(rows_ND, self.a[...], group_sizes_L)
        return rows_ND + jax.lax.ragged_dot(h_NR, self.b[...], group_sizes_L)


config = MoEConfig(hidden_size=32, num_experts=8, num_experts_per_tok=2, intermediate_size=1)
layer = MoELayer(config, experts=LowRankExperts(8, 32, 4, nnx.Rngs(1)), rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (4, 16, 32))
y, metrics = layer(x)
print(
    f"adapters that have learned nothing return their input: {bool(jnp.allclose(x, y, atol=1e-5))}"
)
