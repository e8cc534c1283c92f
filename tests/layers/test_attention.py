"""Blocked attention against a plain softmax over the whole score matrix, and rotary positions against complex numbers.

Legend: B batch, S sequence, H query heads, G key/value heads, d head dimension.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe.config import ModelConfig
from jmoe.layers.attention import Attention, blocked_attention, causal_attention, rotary

B, d = 2, 16


def plain(q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGd: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v with every key and value head repeated for its query heads."""
    repeats = q_BSHd.shape[2] // k_BSGd.shape[2]
    k_BSHd, v_BSHd = jnp.repeat(k_BSGd, repeats, axis=2), jnp.repeat(v_BSGd, repeats, axis=2)
    s_BHQC = jnp.einsum("bqhd,bchd->bhqc", q_BSHd, k_BSHd) / np.sqrt(np.float32(q_BSHd.shape[-1]))
    s_BHQC = jnp.where(jnp.tril(jnp.ones(s_BHQC.shape[2:], bool)), s_BHQC, -jnp.inf)
    return jnp.einsum("bhqc,bchd->bqhd", jax.nn.softmax(s_BHQC), v_BSHd)


def operands(length: int, heads: int, groups: int, dtype: Any, scale: float = 1.0) -> list[jax.Array]:
    """[q, k, v, gradient of the output]."""
    rng = np.random.default_rng(length)
    draw = lambda n: jnp.asarray(scale * rng.normal(size=(B, length, n, d)), dtype)  # noqa: E731
    return [draw(heads), draw(groups), draw(groups), draw(heads)]


def run(f: Any, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> list[jax.Array]:
    """[output, dq, dk, dv]."""

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> list[jax.Array]:
        o, vjp = jax.vjp(f, q, k, v)
        return [o, *vjp(g)]

    result: list[jax.Array] = both(q, k, v, g)
    return result


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 100, 128, 300])
def test_float32(length: int, heads: int, groups: int) -> None:
    arrays = operands(length, heads, groups, jnp.float32)
    for a, b in zip(run(blocked_attention, *arrays), run(plain, *arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(0.1, float(jnp.abs(b).max())))


@pytest.mark.parametrize("length", [100, 300])
def test_bfloat16(length: int) -> None:
    arrays = operands(length, 4, 2, jnp.bfloat16)
    ours = run(blocked_attention, *arrays)
    expected = run(plain, *(a.astype(jnp.float32) for a in arrays))
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        a32, b32 = np.asarray(a, np.float32), np.asarray(b)
        assert np.linalg.norm(a32 - b32) < 2e-2 * np.linalg.norm(b32)


def test_large_scores_do_not_overflow() -> None:
    arrays = operands(300, 4, 2, jnp.float32, scale=30.0)  # scores in the thousands: exp of one alone is infinite
    for a, b in zip(run(blocked_attention, *arrays), run(plain, *arrays), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * float(jnp.abs(b).max()))


def test_no_block_above_the_diagonal_is_computed() -> None:
    """300 rows in blocks of 128: 3 products of scores, 1 + 2 + 3 blocks wide, where a whole matrix has 9."""
    q, k, v, _ = operands(384, 4, 2, jnp.float32)
    shapes = str(jax.make_jaxpr(blocked_attention)(q, k, v))
    assert "[2,2,2,128,384]" in shapes and "[2,2,2,128,128]" in shapes
    assert "384,384" not in shapes


def test_causal_attention_is_blocked_attention_on_cpu() -> None:
    q, k, v, _ = operands(40, 4, 2, jnp.float32)
    np.testing.assert_array_equal(jax.jit(causal_attention)(q, k, v), jax.jit(blocked_attention)(q, k, v))


def test_rotary_is_a_complex_rotation() -> None:
    theta, positions = 10_000.0, np.array([0, 1, 5, 77, 1000])
    x = np.random.default_rng(0).normal(size=(B, positions.size, 3, d))
    turn = np.exp(1j * positions[:, None, None] * theta ** (-2 * np.arange(d // 2) / d))
    rotated = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
    expected = np.concatenate([rotated.real, rotated.imag], axis=-1)
    ours = rotary(jnp.asarray(x, jnp.float32), jnp.asarray(positions), theta)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-4)  # an angle of 1000 has 6e-5 of rounding in float32
    np.testing.assert_allclose(ours[:, :2], expected[:, :2], rtol=1e-5, atol=1e-6)
    assert rotary(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions), theta).dtype == jnp.bfloat16


def test_rotary_scores_depend_on_the_distance_only() -> None:
    q, k = (jnp.asarray(np.random.default_rng(s).normal(size=(1, 1, 1, d)), jnp.float32) for s in (1, 2))
    at = lambda x, position: rotary(x, jnp.array([position]), 100.0)  # noqa: E731
    near, far = (float((at(q, p + 3) * at(k, p)).sum()) for p in (0, 40))
    assert near == pytest.approx(far, rel=1e-4)
    assert near != pytest.approx(float((at(q, 4) * at(k, 0)).sum()), rel=1e-2)


@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_layer_is_causal_and_takes_every_option(qk_norm: Any) -> None:
    config = ModelConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        qk_norm=qk_norm,
        attention_bias=True,
    )
    layer = Attention(config, 0.02, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, 150, 24)), jnp.float32)
    call = jax.jit(lambda x: nnx.merge(graph, state)(x))
    y, changed = call(x), call(x.at[:, 140].add(1.0))
    assert y.shape == x.shape and y.dtype == jnp.float32
    np.testing.assert_array_equal(y[:, :140], changed[:, :140])
    assert (y[:, 140:] != changed[:, 140:]).any(axis=(0, 2)).all()
