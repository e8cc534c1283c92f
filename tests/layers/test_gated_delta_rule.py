"""The gated delta rule: the chunked form against the recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers.gated_delta_rule import (
    DeltaTokens,
    chunked_delta_rule,
    delta_rule_step,
    recurrent_delta_rule,
)


def tokens_of(rows: int, length: int) -> DeltaTokens:
    """Random tokens of two key heads and six value heads."""
    key = iter(jax.random.split(jax.random.key(0), 5))
    q, k = (jax.random.normal(next(key), (rows, length, 2, 8)) for _ in range(2))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    v = jax.random.normal(next(key), (rows, length, 6, 5))
    decay = -jax.nn.softplus(2 * jax.random.normal(next(key), (rows, length, 6)))
    return DeltaTokens(q, k, v, decay, jax.nn.sigmoid(jax.random.normal(next(key), decay.shape)))


@pytest.mark.parametrize(("length", "chunk"), [(130, 64), (64, 64), (33, 8), (7, 64)])
def test_chunked_form_and_steps_are_the_recurrence(length: int, chunk: int) -> None:
    tokens = tokens_of(2, length)
    state = jax.random.normal(jax.random.key(1), (2, 6, 8, 5))
    expected = jax.jit(recurrent_delta_rule)(tokens, state)
    ours = jax.jit(lambda t, s: chunked_delta_rule(t, s, chunk=chunk))(tokens, state)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    first = jax.tree.map(lambda x: x[:, :1], tokens)
    out, _ = delta_rule_step(first, state)
    np.testing.assert_allclose(out, expected[0][:, :1], atol=2e-6)


def test_equal_keys_do_not_lose_precision() -> None:
    """A text that repeats one token: a power series of the triangular system would overflow."""
    k = jnp.broadcast_to(jnp.ones(4) / 2, (1, 128, 1, 4))
    v, ones = jax.random.normal(jax.random.key(6), (1, 128, 1, 4)), jnp.ones((1, 128, 1))
    tokens = DeltaTokens(k, k, v, -1e-3 * ones, ones)
    state = jnp.zeros((1, 1, 4, 4))
    ours = jax.jit(chunked_delta_rule)(tokens, state)
    expected = jax.jit(recurrent_delta_rule)(tokens, state)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
