"""The keys that queries see: one range for each query.

A causal mask, the documents of a row and a window each leave a query a range of keys, and so do all
of them together.

Legend: B batch, S queries, C keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeyRanges(NamedTuple):
    """Query i sees keys first[i] <= j < end[i].

    first_BS, end_BS: int32, 0 to C; neither decreases along a row. A query with first >= end sees
    no key.
    """

    first_BS: jax.Array
    end_BS: jax.Array

    def seen(self, num_keys: int) -> jax.Array:
        """Return bool [B, S, C]: the keys that each query sees."""
        key_C = jnp.arange(num_keys, dtype=jnp.int32)
        return (key_C >= self.first_BS[..., None]) & (key_C < self.end_BS[..., None])

    def query_ranges(self, num_keys: int) -> tuple[jax.Array, jax.Array]:
        """Return (first, end), int32 [B, C]: the queries that see each key.

        Because ranges never go back, these are the queries after those that end before the key, and
        up to the last that begins at it or before it.
        """
        ended_BC = _count_up_to(self.end_BS, num_keys)
        begun_BC = _count_up_to(self.first_BS, num_keys)
        return ended_BC, begun_BC


def _count_up_to(x_BS: jax.Array, num_keys: int) -> jax.Array:
    """Return int32 [B, C]: for each key j, how many values of its row are at most j."""
    row_B1 = jnp.arange(x_BS.shape[0])[:, None]
    counts_BC = jnp.zeros((x_BS.shape[0], num_keys + 1), jnp.int32).at[row_B1, x_BS].add(1)
    return jnp.cumsum(counts_BC, axis=1, dtype=jnp.int32)[:, :num_keys]
