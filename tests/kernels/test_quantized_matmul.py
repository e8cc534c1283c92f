"""Weights of 8 bits with a scale a column: how near they are, and products with them against the
oracle.

Legend: N rows sorted by group, D inner, F outer dimension, E groups.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import quantize, quantized_grouped_matmul, reference
from kernels_pallas.shapes import ROUTINGS, group_sizes
from tests.arrays import assert_close

N, D, F, E = 300, 24, 40, 5
DTYPES = ("int8", "float8_e4m3fn")
# of a column's largest weight; of the weight itself, 3 bits
WORST = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-4}


def weights(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(w_EDF, quantized, scale_EF); one column is zero."""
    w_EDF = (
        jnp.asarray(np.random.default_rng(0).normal(size=(E, D, F)), jnp.float32).at[1, :, 2].set(0)
    )
    return w_EDF, *quantize(w_EDF, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype: str) -> None:
    w, quantized, scale = weights(dtype)
    assert quantized.dtype == dtype
    assert scale.shape == (E, F)
    back = quantized.astype(jnp.float32) * scale[:, None]
    most = jnp.abs(w).max(axis=1, keepdims=True)
    limit = (
        WORST[dtype] * most
        if dtype == "int8"
        else jnp.maximum(WORST[dtype] * jnp.abs(w), 2**-9 * most)
    )
    assert (jnp.abs(back - w) <= limit * 1.0001).all()
    np.testing.assert_allclose(jnp.abs(back).max(axis=1), most[:, 0], rtol=1e-6)
    assert (back[1, :, 2] == 0).all()


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: str, x_dtype: Any) -> None:
    """On every routing, the even one without slots too, and with a single row."""
    _, w, scale = weights(dtype)
    call = jax.jit(quantized_grouped_matmul)
    for n, routing in [(N, r) for r in ROUTINGS] + [(1, "hot")]:
        x = jnp.asarray(np.random.default_rng(n).normal(size=(n, D)), x_dtype)
        sizes = jnp.asarray(group_sizes(routing, n, E))
        ours = call(x, w, scale, sizes)
        expected = reference.grouped_matmul(x, w, sizes, scale_EF=scale)
        assert ours.dtype == x_dtype
        assert_close(ours, expected, 1e-5 if x_dtype == jnp.float32 else 1e-2)


def test_transposed() -> None:
    _, w, scale = weights("int8")
    x, sizes = jnp.ones((N, D), jnp.float32), jnp.asarray(group_sizes("skewed", N, E))
    plain = jax.jit(quantized_grouped_matmul)(x, w, scale, sizes)
    other = jax.jit(partial(quantized_grouped_matmul, transpose_rhs=True))(
        x, w.swapaxes(1, 2), scale, sizes
    )
    np.testing.assert_allclose(plain, other, rtol=1e-5, atol=1e-5)


def test_wrong_arguments() -> None:
    _, w, scale = weights("int8")
    x, sizes = jnp.ones((N, D)), jnp.asarray(group_sizes("skewed", N, E))
    with pytest.raises(ValueError, match="w float32: must be int8 or float8_e4m3fn"):
        quantized_grouped_matmul(x, w.astype(jnp.float32), scale, sizes)
    with pytest.raises(ValueError, match=r"scale float32 \(5, 24\): must be float32 \(5, 40\)"):
        quantized_grouped_matmul(x, w, scale[:, :D], sizes)
    with pytest.raises(ValueError, match=r"must be \[N, D\], \[E, D, F\] and \[E\]"):
        quantized_grouped_matmul(x, w[0], scale, sizes)
    with pytest.raises(ValueError, match="dtype = int4: must be int8 or float8_e4m3fn"):
        quantize(jnp.ones((E, D, F)), jnp.int4)
