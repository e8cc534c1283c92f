"""Codes of E4M3 by integer operations, against the conversions of ml_dtypes."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.cached_values import decode_e4m3, encode_e4m3


def test_every_code_is_decoded() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(decode_e4m3)(codes), expected)


def test_values_are_rounded_to_the_nearest_code() -> None:
    """Of all magnitudes, halfway between two codes, beyond the largest, and not finite."""
    rng, numbers = np.random.default_rng(0), np.arange(127, dtype=np.uint8)
    numbers = numbers.view(jnp.float8_e4m3fn).astype(np.float32)
    halfway = (numbers[:-1] + numbers[1:]) / 2
    draws = [rng.normal(0, scale, 5000) for scale in (1e-4, 1e-2, 1, 30, 200)]
    x = np.concatenate([*draws, halfway, -halfway, numbers, [448, 464, 1e9, -1e9, 0.0, -0.0]])
    x = x.astype(np.float32)
    expected = np.clip(x, -448, 448).astype(jnp.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(jax.jit(encode_e4m3)(x), expected)
    narrow = jnp.asarray(x, jnp.bfloat16)
    expected = np.clip(np.asarray(narrow), -448, 448).astype(jnp.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(jax.jit(encode_e4m3)(narrow), expected)
    # NaN, so that a request whose keys are not finite ends with an error
    lost = np.asarray(encode_e4m3(jnp.array([np.nan, np.inf, -np.inf]))).view(jnp.float8_e4m3fn)
    assert np.isnan(lost.astype(np.float32)).all()
