"""Masked tokens: which tokens of a sequence an encoder predicts, and what it sees in their places.

Legend: B sequences, S positions of a sequence, P predicted tokens of a sequence.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmoe.config.masking import MaskingConfig

_MULTIPLIER = 2654435761  # Knuth's, of multiplicative hashing


class MaskedRows(NamedTuple):
    """Sequences with masked tokens.

    inputs_BS: int32, what the model sees. targets_BS: int32, the text. weights_BS: float32, S / P
    for a token to predict, else 0; their mean over a sequence is 1.
    """

    inputs_BS: jax.Array
    targets_BS: jax.Array
    weights_BS: jax.Array


def sequence_keys(tokens_BS: jax.Array, key: jax.Array) -> jax.Array:
    """Return PRNG keys [B] of sequences, from `key` and each sequence's own tokens."""
    length = tokens_BS.shape[-1]
    factors_S = (2 * jnp.arange(length, dtype=jnp.uint32) + 1) * jnp.uint32(_MULTIPLIER)
    hashes_B = (tokens_BS.astype(jnp.uint32) * factors_S).sum(axis=-1)
    return jax.vmap(partial(jax.random.fold_in, key))(hashes_B)


def mask_rows(
    tokens_BS: jax.Array, key: jax.Array, config: MaskingConfig, vocab_size: int
) -> MaskedRows:
    """Return the sequences with P tokens of each chosen to be predicted.

    The choice depends on `key` and on the sequence's own tokens, not on its place in the batch or
    on a device. vocab_size: of the model, whose last id stands for masked tokens.
    """
    length = tokens_BS.shape[-1]
    draw = jax.vmap(lambda own: jax.random.uniform(own, (3, length)))
    order_BS, change_BS, other_BS = jnp.moveaxis(draw(sequence_keys(tokens_BS, key)), 1, 0)
    num_predicted = config.num_predicted(length)
    chosen_BP = jnp.argsort(order_BS, axis=-1)[:, :num_predicted]
    is_chosen_BS = jax.vmap(lambda at: jnp.zeros(length, jnp.bool_).at[at].set(True))(chosen_BP)
    random_BS = (other_BS * (vocab_size - 1)).astype(jnp.int32)
    replaced_BS = jnp.where(change_BS < config.as_mask + config.as_random, random_BS, tokens_BS)
    replaced_BS = jnp.where(change_BS < config.as_mask, vocab_size - 1, replaced_BS)
    return MaskedRows(
        jnp.where(is_chosen_BS, replaced_BS, tokens_BS),
        tokens_BS,
        jnp.where(is_chosen_BS, length / num_predicted, 0.0).astype(jnp.float32),
    )
