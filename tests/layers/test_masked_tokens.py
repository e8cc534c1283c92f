"""Which tokens an encoder predicts, and what stands in their places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import MaskingConfig
from jmoe.layers.masked_tokens import mask_rows

VOCAB_SIZE, LENGTH = 1000, 400
MASK = VOCAB_SIZE - 1


@pytest.fixture(scope="module")
def tokens_BS() -> jax.Array:
    drawn = np.random.default_rng(0).integers(0, MASK, (64, LENGTH))
    return jnp.asarray(drawn, jnp.int32)


def test_shares_are_those_of_bert(tokens_BS: jax.Array) -> None:
    inputs, targets, weights = map(
        np.asarray, mask_rows(tokens_BS, jax.random.key(1), MaskingConfig(), VOCAB_SIZE)
    )
    chosen = weights > 0
    assert (targets == np.asarray(tokens_BS)).all()
    assert (inputs[~chosen] == targets[~chosen]).all()
    assert (chosen.sum(axis=1) == 60).all() and np.allclose(weights.mean(axis=1), 1)
    seen, text = inputs[chosen], targets[chosen]
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.03)
    assert (seen == text).mean() == pytest.approx(0.1, abs=0.03)
    assert ((seen != MASK) & (seen != text)).mean() == pytest.approx(0.1, abs=0.03)
    positions = np.nonzero(chosen)[1]
    assert np.abs(np.histogram(positions, 8)[0] / positions.size - 1 / 8).max() < 0.02


def test_a_sequence_is_masked_alike_wherever_it_is(tokens_BS: jax.Array) -> None:
    """And otherwise with another key, and than other sequences."""
    masking, key = MaskingConfig(share=0.5), jax.random.key(1)
    whole = mask_rows(tokens_BS, key, masking, VOCAB_SIZE)
    moved = mask_rows(tokens_BS[10:20][::-1], key, masking, VOCAB_SIZE)
    for one, other in zip(whole, moved, strict=True):
        np.testing.assert_array_equal(one[10:20][::-1], other)
    later = mask_rows(tokens_BS, jax.random.key(2), masking, VOCAB_SIZE)
    same = (np.asarray(whole.weights_BS) > 0) == (np.asarray(later.weights_BS) > 0)
    assert same.mean() == pytest.approx(0.5, abs=0.02)
    rows = np.asarray(whole.weights_BS) > 0
    assert (rows[:-1] == rows[1:]).mean() == pytest.approx(0.5, abs=0.02)


def test_a_short_sequence_has_a_token_to_predict(tokens_BS: jax.Array) -> None:
    few = mask_rows(tokens_BS[:, :2], jax.random.key(0), MaskingConfig(share=0.01), VOCAB_SIZE)
    assert np.asarray(few.weights_BS).sum(axis=1).tolist() == [2.0] * 64
