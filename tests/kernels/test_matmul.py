"""Matrix products against numpy in float64: values and gradients, 2-D and batched, float32 and
bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.matmul import dot, matmul, matmul_by_parts, transposed
from tests.arrays import assert_close

M, K, N = 24, 40, 16
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


def rounded(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any
) -> tuple[jax.Array, np.ndarray]:
    """A random array in `dtype` and the same values in float64."""
    x = jnp.asarray(rng.normal(size=shape), dtype)
    return x, np.asarray(x.astype(jnp.float32), np.float64)


def flip(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


@dtypes
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_dot_values(dtype: Any, batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    a, a64 = rounded(rng, (*batch, M, K), dtype)
    b, b64 = rounded(rng, (*batch, K, N), dtype)
    bt, bt64 = rounded(rng, (*batch, N, K), dtype)
    plain = jax.jit(dot)(a, b)
    flipped = jax.jit(lambda a, b: dot(a, b, b_transposed=True))(a, bt)
    # accumulated and returned in float32, also for bfloat16
    assert plain.dtype == flipped.dtype == jnp.float32
    assert_close(plain, a64 @ b64, 1e-6)
    assert_close(flipped, a64 @ flip(bt64), 1e-6)


@dtypes
@pytest.mark.parametrize("shape", [(M, K), (3, M, K), (1, 1), (7, 1, K)])
def test_transposed_is_exact(dtype: Any, shape: tuple[int, ...]) -> None:
    x, _ = rounded(np.random.default_rng(1), shape, dtype)
    y = jax.jit(transposed)(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x.swapaxes(-1, -2))


@pytest.mark.parametrize("batch", [(), (4,)])
def test_bfloat16_products_of_a_transpose(batch: tuple[int, ...]) -> None:
    """The form of every weight gradient: the transpose and the product in one program, batched
    too.
    """
    rng = np.random.default_rng(2)
    x, x64 = rounded(rng, (*batch, M, K), jnp.bfloat16)
    g, g64 = rounded(rng, (*batch, M, N), jnp.bfloat16)
    assert_close(jax.jit(lambda x, g: dot(transposed(x), g))(x, g), flip(x64) @ g64, 1e-6)


@dtypes
@pytest.mark.parametrize("leading", [(M,), (2, 3), (2, 2, 3)])
def test_matmul_values_and_gradients(dtype: Any, leading: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    x, x64 = rounded(rng, (*leading, K), dtype)
    w, w64 = rounded(rng, (K, N), dtype)
    g, g64 = rounded(rng, (*leading, N), dtype)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y, vjp = jax.vjp(matmul, x, w)
        return y, *vjp(g.astype(jnp.float32))

    y, dx, dw = run(x, w, g)
    assert y.dtype == jnp.float32 and dx.dtype == dw.dtype == dtype
    rtol = 1e-6 if dtype == jnp.float32 else 4e-3  # a bfloat16 gradient is rounded once, to 8 bits
    assert_close(y, x64 @ w64, 1e-6)
    assert_close(dx, g64 @ w64.T, rtol)
    assert_close(dw, x64.reshape(-1, K).T @ g64.reshape(-1, N), rtol)


@dtypes
def test_matmul_in_a_scan_under_remat(dtype: Any) -> None:
    """Where layers use it: stacked weights, scanned and recomputed."""
    rng = np.random.default_rng(4)
    w, w64 = rounded(rng, (3, K, K), dtype)
    x, x64 = rounded(rng, (M, K), dtype)

    def loss(w: jax.Array) -> jax.Array:
        step = jax.checkpoint(
            lambda x, w: (matmul(x, w).astype(dtype) * jnp.asarray(0.125, dtype), None)
        )
        return jax.lax.scan(step, x, w)[0].astype(jnp.float32).sum()

    dw = jax.jit(jax.grad(loss))(w)
    xs = [x64, x64 @ w64[0] / 8, x64 @ w64[0] @ w64[1] / 64]
    g = np.ones((M, K))
    expected: list[np.ndarray] = []
    for i in (2, 1, 0):
        expected.insert(0, xs[i].T @ g / 8)
        g = g @ w64[i].T / 8
    assert_close(dw, np.stack(expected), 1e-5 if dtype == jnp.float32 else 3e-2)


def test_products_by_parts_are_float32_products() -> None:
    """Values and the weight's gradient to the last digits of float32, which one bfloat16 part would
    miss by 2^-9, and x's gradient to those of bfloat16.
    """
    rng = np.random.default_rng(0)
    x, x64 = rounded(rng, (M, K), jnp.bfloat16)
    w, w64 = rounded(rng, (K, N), jnp.float32)
    g, g64 = rounded(rng, (M, N), jnp.float32)
    y, pull = jax.vjp(jax.jit(matmul_by_parts), x, w)
    dx, dw = pull(g)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert_close(y, x64 @ w64, 3e-7)
    assert_close(dw, flip(x64) @ g64, 3e-7)
    np.testing.assert_allclose(np.asarray(dx, np.float64), g64 @ flip(w64), rtol=2**-8, atol=2**-14)
