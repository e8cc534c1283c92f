"""The chunked cross-entropy against `jax.nn.log_softmax` of all logits at once.

Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers import loss
from jmoe.layers.loss import HeadWeight, cross_entropy, tokens_per_chunk
from tests.arrays import assert_near

T, D, V = 96, 12, 50


def plain(
    x_TD: jax.Array, head: HeadWeight, labels_T: jax.Array, weights_T: jax.Array
) -> jax.Array:
    bias_V = 0.0 if head.bias_V is None else head.bias_V
    log_p_TV = jax.nn.log_softmax(x_TD @ head.w_DV + bias_V)
    return -(jnp.take_along_axis(log_p_TV, labels_T[:, None], axis=1)[:, 0] * weights_T).sum()


def operands(
    dtype: Any, num_tokens: int = T, scale: float = 1.0, *, bias: bool = False
) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(scale * rng.normal(size=s), dtype) for s in ((num_tokens, D), (D, V)))
    # some tokens count for nothing
    weights = rng.uniform(size=num_tokens) * (rng.uniform(size=num_tokens) > 0.2)
    labels = rng.integers(0, V, num_tokens)
    head = HeadWeight(w, jnp.asarray(rng.normal(size=V), jnp.float32) if bias else None)
    return x, head, jnp.asarray(labels, jnp.int32), jnp.asarray(weights, jnp.float32)


def gradients(f: Any, *arrays: Any) -> tuple[jax.Array, tuple[jax.Array, HeadWeight]]:
    # a fresh function: the chunk size is read while tracing
    scaled = lambda x, head, labels, weights: 0.5 * f(x, head, labels, weights)  # noqa: E731
    result: tuple[jax.Array, tuple[jax.Array, HeadWeight]] = jax.jit(
        jax.value_and_grad(scaled, (0, 1))
    )(*arrays)
    return result


# 7: the largest divisor within it is 6; 37 is a prime
@pytest.mark.parametrize(("num_tokens", "in_chunk"), [(T, 1), (T, 7), (T, 32), (T, 1000), (37, 10)])
@pytest.mark.parametrize("bias", [False, True])
def test_float32(
    num_tokens: int, in_chunk: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", in_chunk * V)
    arrays = operands(jnp.float32, num_tokens, bias=bias)
    value, grads = gradients(cross_entropy, *arrays)
    expected, egrads = gradients(plain, *arrays)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(
        0.5 * jax.jit(lambda *a: cross_entropy(*a))(*arrays), expected, rtol=1e-6
    )
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(egrads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))
    assert not grads[0][arrays[3] == 0].any()


@pytest.mark.parametrize("in_chunk", [32, 1000])
def test_bfloat16(in_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", in_chunk * V)
    x, head, labels, weights = operands(jnp.bfloat16)
    value, grads = gradients(cross_entropy, x, head, labels, weights)
    expected, egrads = gradients(
        plain, *jax.tree.map(lambda a: a.astype(jnp.float32), (x, head)), labels, weights
    )
    # the operands are exact, so are the float32 logits
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    assert_near(grads, egrads, 1e-2)


def test_a_chunk_divides_the_tokens() -> None:
    assert tokens_per_chunk(96, 50, 40 * 50) == 32
    assert tokens_per_chunk(96, 10, loss.CHUNK_LOGITS) == 96
    assert tokens_per_chunk(97, 50, 40 * 50) == 1  # a prime
    assert tokens_per_chunk(8, 50, 5) == 1


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_chunks_are_those_of_the_platform_compiled_for(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"cpu": 8, "cuda": 48}
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 8 * V)
    monkeypatch.setattr(loss, "DEVICE_CHUNK_LOGITS", 48 * V)
    lowered = jax.jit(jax.grad(cross_entropy, (0, 1))).trace(*operands(jnp.float32))
    text = lowered.lower(lowering_platforms=(platform,)).as_text()
    assert {size for size in (*sizes.values(), T) if f"tensor<{size}x{V}xf32>" in text} == {
        sizes[platform]
    }
    with_teacher = jax.jit(
        jax.grad(
            lambda x, head, *rest: sum(loss.distillation_losses(x, head, *rest, (x, head), 2.0))
        )
    )
    text = (
        with_teacher.trace(*operands(jnp.float32)).lower(lowering_platforms=(platform,)).as_text()
    )
    assert {size for size in (*sizes.values(), T) if f"tensor<{size}x{V}xf32>" in text} == {
        sizes[platform]
    }


def test_the_plan_counts_a_chunk() -> None:
    assert loss.logits_bytes(8192, 50304, 2, on_cpu=False) == 6 * 8192 * 50304
    assert loss.logits_bytes(8192, 50304, 2, on_cpu=True) == 6 * 64 * 50304


def test_large_logits_do_not_overflow() -> None:
    arrays = operands(jnp.float32, scale=20.0)
    value, grads = gradients(cross_entropy, *arrays)
    expected, egrads = gradients(plain, *arrays)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(egrads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * float(jnp.abs(b).max()))


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 8 * V)
    text = jax.jit(jax.grad(cross_entropy, (0, 1))).lower(*operands(jnp.float32)).as_text()
    assert f"tensor<8x{V}xf32>" in text
    assert f"tensor<{T}x{V}xf32>" not in text and f"tensor<12x8x{V}xf32>" not in text
