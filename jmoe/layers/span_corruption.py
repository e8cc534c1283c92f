"""Span corruption: the text that an encoder sees, and the spans that a decoder learns to write.

Legend: B sequences, S positions of a sequence, M positions of the encoder, T positions of the
decoder, K spans, N tokens in spans, U tokens outside spans.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmoe.config import DenoisingConfig
from jmoe.layers.masked_tokens import sequence_keys


class CorruptedRows(NamedTuple):
    """Sequences without some of their spans, int32.

    encoder_inputs_BM: the text with a sentinel in the place of each span. decoder_inputs_BT: each
    span after its sentinel. targets_BT: what follows each token of these, and after the last one
    the sentinel that ends them.
    """

    encoder_inputs_BM: jax.Array
    decoder_inputs_BT: jax.Array
    targets_BT: jax.Array


def corrupt_spans(
    tokens_BS: jax.Array, key: jax.Array, config: DenoisingConfig, vocab_size: int
) -> CorruptedRows:
    """Return the sequences with K spans of each left out.

    All lengths of the spans, and of the text between them, are equally likely (T5's
    `random_spans_noise_mask`); a sequence begins with text and ends with a span. The choice depends
    on `key` and on the sequence's own tokens, not on its place in the batch or on a device.
    vocab_size: of the model, whose last ids are the sentinels.
    """
    corrupt = partial(corrupt_sequence, config=config, vocab_size=vocab_size)
    return CorruptedRows(*jax.vmap(corrupt)(tokens_BS, sequence_keys(tokens_BS, key)))


def corrupt_sequence(
    tokens_S: jax.Array, key: jax.Array, config: DenoisingConfig, vocab_size: int
) -> CorruptedRows:
    """Return a row of `CorruptedRows`."""
    length = tokens_S.size
    num_left_out, num_spans = config.num_tokens(length), config.num_spans(length)
    of_spans, of_text = jax.random.split(key)
    # of each token in a span, and of each token outside, the number of its span: text before span
    # k has number k too
    number_N = _random_segments(of_spans, num_left_out, num_spans)
    number_U = _random_segments(of_text, length - num_left_out, num_spans)
    ends_N, ends_U = (jnp.cumsum(jnp.bincount(n, length=num_spans)) for n in (number_N, number_U))
    index_N, index_U, index_K = map(jnp.arange, (number_N.size, number_U.size, num_spans))
    begins_N = jnp.concatenate([jnp.zeros(1, ends_N.dtype), ends_N[:-1]])
    left_out_N = tokens_S[index_N + ends_U[number_N]]
    text_U = tokens_S[index_U + begins_N[number_U]]
    sentinels = vocab_size - 1 - jnp.arange(num_spans + 1, dtype=tokens_S.dtype)
    parts = config.parts(length)
    encoder_M = jnp.zeros(parts.encoder, tokens_S.dtype)
    encoder_M = encoder_M.at[index_U + number_U].set(text_U)
    encoder_M = encoder_M.at[ends_U + index_K].set(sentinels[:-1])
    written = jnp.zeros(parts.decoder + 1, tokens_S.dtype)
    written = written.at[index_N + number_N + 1].set(left_out_N)
    written = written.at[begins_N + index_K].set(sentinels[:-1]).at[-1].set(sentinels[-1])
    return CorruptedRows(encoder_M, written[:-1], written[1:])


def _random_segments(key: jax.Array, num_items: int, num_segments: int) -> jax.Array:
    """Return int32 [num_items], the segment of each item: successive segments of at least one item
    each, all divisions equally likely.
    """
    order = jnp.argsort(jax.random.uniform(key, (num_items - 1,)))
    begins = jnp.zeros(num_items, jnp.int32).at[1 + order[: num_segments - 1]].set(1)
    return jnp.cumsum(begins)
