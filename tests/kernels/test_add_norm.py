"""Residual sum, norm and logits of few tokens, in Pallas' interpreter, against float64 in numpy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.add_norm import MAX_HIDDEN, MAX_TOKENS, RouterWeights, add_and_norm
from kernels_pallas.expert_choices import WeightedOutputs
from tests.arrays import assert_close

HIDDEN, EXPERTS, EPS = 300, 20, 1e-3  # neither a power of two nor a multiple of a tile


def draw(dtype: Any, tokens: int = 3) -> tuple[Any, ...]:
    """Return (x, y, scale, bias, router's kernel, its bias)."""
    rng = np.random.default_rng(0)
    shapes = [(tokens, HIDDEN)] * 2 + [(HIDDEN,)] * 2 + [(HIDDEN, EXPERTS), (EXPERTS,)]
    x, y, *weights = (rng.normal(size=shape) for shape in shapes)
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(y, jnp.float32),
        *(jnp.asarray(w, dtype) for w in weights),
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("with_biases", [False, True])
def test_sum_norm_and_logits(dtype: Any, with_biases: bool) -> None:
    x, y, scale, bias, kernel, router_bias = draw(dtype)
    router = RouterWeights(kernel, router_bias if with_biases else None)
    options: dict[str, Any] = {"bias_D": bias if with_biases else None, "router": router}
    total, normed, logits = add_and_norm(x, y, scale, EPS, **options, interpret=True)
    assert total.dtype == normed.dtype == dtype and logits is not None
    wide = [np.asarray(a, np.float64) for a in (x, y, scale, bias, kernel, router_bias)]
    added = wide[1] + (wide[3] if with_biases else 0)
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
    assert_close(total, wide[0] + added, tolerance)
    # from the kernel's own sum and norm, so that their rounding is not counted again
    of_sum = np.asarray(total, np.float64)
    expected = of_sum / np.sqrt((of_sum**2).mean(axis=1, keepdims=True) + EPS) * wide[2]
    assert_close(normed, expected, 1e-2 if dtype == jnp.bfloat16 else 1e-5)
    of_normed = np.asarray(normed, np.float64) @ wide[4] + (wide[5] if with_biases else 0)
    assert logits.dtype == jnp.float32
    # XLA:CPU, which runs the interpreter, may leave out the norm's rounding before the product
    assert_close(logits, of_normed, 1e-2 if dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.parametrize("with_y", [False, True])
def test_outputs_of_experts_are_added_up(with_y: bool) -> None:
    """What a choice without an expert left in memory is not read."""
    x, y, scale, bias, *_ = draw(jnp.float32)
    rng, choices, experts = np.random.default_rng(2), 3, 5
    rows = rng.normal(size=(3, choices, HIDDEN))
    rows[1, 2] = np.nan
    idx = np.array([[0, 4, 2], [1, 0, experts], [3, 2, 1]], np.int32)
    weights = jnp.asarray(rng.uniform(size=idx.shape), jnp.float32)
    outputs = WeightedOutputs(
        jnp.asarray(rows, jnp.float32), weights, jnp.asarray(idx), y if with_y else None, experts
    )
    total, *_ = add_and_norm(x, outputs, scale, EPS, bias_D=bias, interpret=True)
    expected = np.nan_to_num(np.asarray(weights)[:, :, None] * rows).sum(axis=1)
    expected += np.asarray(y) if with_y else 0
    assert_close(outputs.sum(), expected, 1e-6)
    assert_close(total, np.asarray(x) + expected + np.asarray(bias), 1e-5)


def test_without_a_router_there_are_no_logits() -> None:
    x, y, scale, *_ = draw(jnp.float32)
    total, normed, logits = add_and_norm(x, y, scale, EPS, interpret=True)
    assert logits is None
    assert_close(total, np.asarray(x) + np.asarray(y), 1e-6)
    assert normed.shape == x.shape


@pytest.mark.parametrize("shape", [(MAX_TOKENS + 1, 16), (1, MAX_HIDDEN + 1)])
def test_sizes_that_are_left_to_xla(shape: tuple[int, int]) -> None:
    x = jnp.zeros(shape)
    with pytest.raises(NotImplementedError, match=f"{shape[0]} tokens of {shape[1]}: more than"):
        add_and_norm(x, x, x[0], EPS)


def test_dtypes_that_are_left_to_xla() -> None:
    with pytest.raises(NotImplementedError, match="dtypes int32"):
        add_and_norm(jnp.zeros((1, 16), jnp.int32), jnp.zeros((1, 16)), jnp.zeros(16), EPS)
