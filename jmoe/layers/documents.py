"""The documents of a batch whose rows hold several, and padding.

Legend: B batch, S sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def first_tokens(number_BS: jax.Array) -> jax.Array:
    """Return int32 [B, S], the index in its row of the first token of each token's document.

    number_BS: see `Documents`. Each run of padding counts as a document.
    """
    index_S = jnp.arange(number_BS.shape[1], dtype=jnp.int32)
    before_BS = jnp.pad(number_BS[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return lax.cummax(jnp.where(number_BS != before_BS, index_S, 0), axis=1)


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
        return index_S - first_tokens(self.number_BS)

    def token_counts(self) -> dict[str, jax.Array]:
        """Return int32 scalars, as a step's metrics name them: `tokens` that go to experts, and
        `trained_tokens` in the losses.
        """
        return {
            "tokens": self.token_mask_BS.sum(dtype=jnp.int32),
            "trained_tokens": self.in_loss_BS.sum(dtype=jnp.int32),
        }
