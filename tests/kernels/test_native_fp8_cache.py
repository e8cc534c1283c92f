"""Native attention over keys and values in FP8: what it writes has XLA's bits, and what it reads
gives XLA's results.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.inference.kv_cache import KVCache, write_keys_and_values
from kernels_pallas import native
from kernels_pallas.cached_values import encode_e4m3
from kernels_pallas.paged_attention.xla import attend_by_block
from tests.tiny_engines import needs_compiler

NAN = 0x7F  # E4M3's


@pytest.fixture(autouse=True)
def _library() -> None:
    needs_compiler()


def every_number(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers of all sizes: between two of FP8, halfway, beyond 448, below its smallest."""
    sizes = rng.choice([2.0**-11, 2.0**-9, 2.0**-7, 1.0, 30.0, 448.0, 460.0, 1e6], shape)
    steps = rng.integers(-16, 17, shape) / 16
    return (sizes * steps).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sinks_and_window", [False, True])
@pytest.mark.parametrize(("tokens", "h"), [(1, 6), (3, 6), (90, 6), (1, 10), (3, 10)])
def test_keys_and_values(dtype: Any, tokens: int, h: int, sinks_and_window: bool) -> None:
    """Groups of three and of five heads; sizes that fill no vector; a row of padding; NaN behind the last position stays there."""
    rng = np.random.default_rng(tokens)
    g, d, e, s = 2, 22, 16, 256
    blocks = jnp.asarray([[6, 1], [0, 4], [3, 3]], jnp.int32)
    content = [rng.integers(0, NAN, (7, g, s // 2, n)).astype(np.uint8) // 2 for n in (d, e)]
    for x in content:
        x[1], x[4], x[0, :, 90:] = NAN, NAN, NAN
    cache = KVCache(*map(jnp.asarray, content))
    q, k, v = (
        jnp.asarray(rng.normal(size=(3, tokens, n, dim)), dtype)
        for n, dim in ((h, d), (g, d), (g, e))
    )
    to_its_end = np.append(np.arange(tokens - 1), s if tokens > 1 else 0)
    positions = jnp.asarray([100 + np.arange(tokens), to_its_end, np.full(tokens, s)], jnp.int32)
    options: dict[str, Any] = {"scale": 0.2}
    if sinks_and_window:
        options |= {"window": jnp.int32(5), "sinks_H": jnp.asarray(rng.normal(size=h), jnp.float32)}
    written = write_keys_and_values(cache, blocks, positions, k, v)
    want = attend_by_block(q, written.k_NGLd, written.v_NGLe, blocks, positions, **options)
    got, *caches = jax.jit(
        lambda caches: native.cached_attention((q, k, v), caches, blocks, positions, **options)
    )((cache.k_NGLd, cache.v_NGLe))
    for ours, theirs in zip(caches, (written.k_NGLd, written.v_NGLe), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    real = np.asarray(positions < s)[..., None, None]
    ours, theirs = (np.where(real, np.asarray(x.astype(jnp.float32)), 0) for x in (got, want))
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max())
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("heads", "tokens"), [(16, 1), (6, 5), (20, 70)])
def test_latents(dtype: Any, heads: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    s, latent, rope = 640, 32, 16
    blocks = jnp.asarray(rng.permutation(2 * s // 128).reshape(2, -1), jnp.int32)
    content = rng.integers(0, 80, (2 * s // 128, 1, 128, latent + rope)).astype(np.uint8)
    cache = jnp.asarray(content)
    positions = jnp.asarray([510 + np.arange(tokens), np.full(tokens, s)], jnp.int32)
    q, k = (jnp.asarray(rng.normal(size=(2, tokens, n, latent + rope)), dtype) for n in (heads, 1))
    written = write_keys_and_values(KVCache(cache), blocks, positions, k, k[..., :latent])
    want = attend_by_block(q, written.k_NGLd, None, blocks, positions, scale=0.2)[..., :latent]
    got, ours, _ = jax.jit(
        lambda cache: native.cached_attention(
            (q, k, k[..., :latent]), (cache, None), blocks, positions, scale=0.2
        )
    )(cache)
    np.testing.assert_array_equal(ours, written.k_NGLd)
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    found, expected = (np.asarray(x.astype(jnp.float32))[0] for x in (got, want))
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_numbers_of_every_size_are_written_as_xla_rounds_them(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    k = jnp.asarray(every_number(rng, (1, 128, 2, 64)), dtype)
    k = k.at[0, 3, 0, :3].set(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf], dtype))
    positions = jnp.arange(128, dtype=jnp.int32)[None]
    cache = jnp.zeros((1, 2, 128, 64), jnp.uint8)
    blocks = jnp.zeros((1, 1), jnp.int32)
    _, ours, values = jax.jit(
        lambda a, b: native.cached_attention((k, k, k), (a, b), blocks, positions, scale=0.1)
    )(cache, cache + 0)
    expected = np.asarray(encode_e4m3(k))[0].swapaxes(0, 1)
    np.testing.assert_array_equal(ours[0], expected)
    np.testing.assert_array_equal(values[0], expected)
    assert len(np.unique(expected)) > 100


def test_nan_in_the_cache_reaches_the_result() -> None:
    """A request whose keys are not finite ends with an error, as in XLA's form."""
    q = jnp.ones((1, 1, 2, 16), jnp.float32)
    cache = jnp.zeros((1, 1, 128, 16), jnp.uint8).at[0, 0, 3, 0].set(NAN)
    got, *_ = native.cached_attention(
        (q, q[:, :, :1], q[:, :, :1]),
        (cache, jnp.zeros_like(cache)),
        jnp.zeros((1, 1), jnp.int32),
        jnp.full((1, 1), 9, jnp.int32),
        scale=1.0,
    )
    assert np.isnan(np.asarray(got)).all()
