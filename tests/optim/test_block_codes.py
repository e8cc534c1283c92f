"""Codes of 8 bits: the nearest value of each block's table, computed independently in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.optim import block_codes
from jmoe.optim.block_codes import code_values

encode = jax.jit(block_codes.encode, static_argnums=1, static_argnames="signed")
decode = jax.jit(block_codes.decode, static_argnames="signed")


def test_tables_are_those_of_the_paper() -> None:
    """Seven decades, each divided evenly, and 0 and 1 (Dettmers et al., section 2.1)."""
    signed, unsigned = code_values(signed=True), code_values(signed=False)
    for table in (signed, unsigned):
        assert table.size == 256 and (np.diff(table) > 0).all() and table[-1] == 1
    positive = signed[signed > 0]
    assert 0 in signed and 0 in unsigned
    np.testing.assert_array_equal(positive[:-1], -signed[signed < 0][::-1])
    for values, top in ((positive, 64), (unsigned[1:], 128)):
        in_decade = [((values > 10.0**-k) & (values < 10.0 ** (1 - k))).sum() for k in range(1, 8)]
        assert in_decade == [top >> k for k in range(7)]
    np.testing.assert_allclose(np.diff(unsigned[-129:-1]), 0.9 / 128, rtol=1e-4)


@pytest.mark.parametrize("signed", [True, False])
def test_each_value_gets_the_nearest_code(signed: bool) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 4, 96)).astype(np.float32) * 10.0 ** rng.integers(-6, 3, (3, 4, 1))
    values = values.astype(np.float32) if signed else np.square(values).astype(np.float32)
    values[0, 0, :32] = 0  # a block of nothing
    values[1, 1, 3] = 0
    codes, scales = encode(jnp.asarray(values), 3, signed=signed)
    assert codes.dtype == jnp.uint8 and codes.shape == values.shape and scales.shape == (3, 4, 3)
    blocks = values.reshape(3, 4, 3, 32)
    np.testing.assert_array_equal(scales, np.abs(blocks).max(-1))
    table = code_values(signed=signed).astype(np.float64)
    largest = np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-30)
    relative = (blocks / largest)[..., None] - table
    error = np.abs(np.asarray(decode(codes, scales, signed=signed)) - values).reshape(blocks.shape)
    least = np.abs(relative).min(-1) * largest
    if not signed:  # nothing above 0 becomes 0
        lifted = (blocks > 0) & (np.abs(relative).argmin(-1) == 0)
        assert (np.asarray(codes).reshape(blocks.shape)[lifted] == 1).all()
        error, least = error[~lifted], least[~lifted]
    np.testing.assert_allclose(error, least, rtol=1e-3, atol=1e-7 * largest.max())
    if not signed:  # the signed table has no -1
        again, same = encode(decode(codes, scales, signed=signed), 3, signed=signed)
        np.testing.assert_array_equal(again, codes)
        np.testing.assert_array_equal(same, scales)


def test_zeros_of_any_code_are_zero() -> None:
    zeros = decode(jnp.zeros((2, 64), jnp.uint8), jnp.zeros((2, 2), jnp.float32), signed=True)
    np.testing.assert_array_equal(zeros, 0)
    codes, scales = encode(jnp.zeros((2, 64)), 2, signed=False)
    np.testing.assert_array_equal(decode(codes, scales, signed=False), 0)
