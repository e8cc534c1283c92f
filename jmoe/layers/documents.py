"""The documents of a batch whose rows hold several, and padding.

Legend: B batch, S sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Documents(NamedTuple):
    """Which tokens of a batch belong together, which go to experts, and which the routers' losses
    count.

    token_mask_BS: bool, False for tokens that go to no expert (padding).
    in_loss_BS: bool, True for tokens that the routers' losses count.
    number_BS: int32, equal for the tokens of one document, which lie next to each other; 0 for
    tokens of none. A token sees the earlier tokens of its own number, and its position counts from
    the document's first token. None if a row holds one document, at its beginning.
    """

    token_mask_BS: jax.Array
    in_loss_BS: jax.Array
    number_BS: jax.Array | None = None

    def positions(self) -> jax.Array:
        """Return int32 [S] or [B, S], the position of each token in its document."""
        index_S = jnp.arange(self.token_mask_BS.shape[1], dtype=jnp.int32)
        if self.number_BS is None:
            return index_S
        before_BS = jnp.pad(self.number_BS[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        start_BS = lax.cummax(jnp.where(self.number_BS != before_BS, index_S, 0), axis=1)
        return index_S - start_BS

    def token_counts(self) -> dict[str, jax.Array]:
        """Return int32 scalars, as a step's metrics name them: `tokens` that go to experts, and
        `trained_tokens` in the losses.
        """
        return {
            "tokens": self.token_mask_BS.sum(dtype=jnp.int32),
            "trained_tokens": self.in_loss_BS.sum(dtype=jnp.int32),
        }
