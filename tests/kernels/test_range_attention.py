"""Attention to ranges of keys: the Triton kernel, in Pallas' interpreter, against the reference."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.implementations import trace_for_device
from kernels_pallas.range_attention import (
    KeyRanges,
    check_supported,
    range_attention,
    range_attention_gradient,
    reference,
)
from tests.arrays import assert_close

B, S = 2, 150
TOLERANCE = {jnp.bfloat16: 1e-2, jnp.float32: 2e-6}


def draw(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def documents(window: int | None = None) -> KeyRanges:
    """Causal ranges of a row of one document, and of a row of several, one of which is a token."""
    lengths = ([S], [70, 1, 40, 39])
    starts = np.stack([np.repeat(np.cumsum([0, *row[:-1]]), row) for row in lengths])
    at = np.arange(S)
    first = starts if window is None else np.maximum(starts, at - window + 1)
    return KeyRanges(jnp.asarray(first, jnp.int32), jnp.asarray([at + 1] * B, jnp.int32))


def earlier_keys() -> KeyRanges:
    """Of 90 keys that lie before most queries: none for the first and the last ones of a row."""
    at = np.arange(S)
    first = np.stack([np.minimum(at // 2, 90), np.where(at < 100, 0, 90)])
    end = np.stack([np.clip(at - 20, 0, 90), np.full(S, 90)])
    return KeyRanges(jnp.asarray(first, jnp.int32), jnp.asarray(end, jnp.int32))


def test_queries_that_see_a_key() -> None:
    for ranges, keys in ((documents(), S), (documents(7), S), (earlier_keys(), 90)):
        first, end = ranges.query_ranges(keys)
        seen_BCS = np.swapaxes(ranges.seen(keys), 1, 2)
        at = np.arange(S)
        of_keys = (at >= first[..., None]) & (at < end[..., None])
        np.testing.assert_array_equal(of_keys, seen_BCS)


CASES = [
    (documents(), S, (4, 2), (8, 8), jnp.float32),
    (documents(7), S, (4, 4), (24, 8), jnp.float32),
    (documents(), S, (4, 1), (72, 16), jnp.bfloat16),
    (earlier_keys(), 90, (2, 1), (16, 16), jnp.float32),
    (documents(40), S, (2, 2), (144, 128), jnp.bfloat16),
]


@pytest.mark.parametrize(
    ("ranges", "keys", "heads", "sizes", "dtype"),
    CASES,
    ids=["documents", "window", "wide tiles", "earlier keys", "large heads"],
)
def test_values_and_gradients(
    ranges: KeyRanges, keys: int, heads: tuple[int, int], sizes: tuple[int, int], dtype: Any
) -> None:
    """Groups of heads, heads that are no power of 2, rows that no tile divides, queries that see no
    key, tiles of both sizes.
    """
    (h, g), (d, e) = heads, sizes
    shapes = (B, S, h, d), (B, keys, g, d), (B, keys, g, e), (B, S, h, e)
    q, k, v, do = (draw(n, shape, dtype) for n, shape in enumerate(shapes))
    options: dict[str, Any] = {"scale": d**-0.5}

    @jax.jit
    def ours(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        results = range_attention(q, k, v, ranges, interpret=True, **options)
        gradients = range_attention_gradient(
            (q, k, v), results, do, ranges, interpret=True, **options
        )
        return *results, *gradients

    def expected(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return reference.range_attention(q, k, v, ranges, **options)

    as_float32 = [x.astype(jnp.float32) for x in (q, k, v, do)]
    (o, lse), vjp = jax.vjp(expected, *as_float32[:3])
    o_ours, lse_ours, *gradients = ours(q, k, v, do)
    assert o_ours.dtype == dtype and lse_ours.dtype == jnp.float32
    assert_close(o_ours, o, TOLERANCE[dtype])
    sees = np.asarray(ranges.first_BS < ranges.end_BS)[:, None].repeat(h, axis=1)
    np.testing.assert_allclose(lse_ours[sees], lse[sees], rtol=1e-5, atol=2e-2)
    assert (np.asarray(lse_ours)[~sees] <= -1e30).all()
    assert not np.asarray(o_ours, np.float32).swapaxes(1, 2)[~sees].any()
    wanted = vjp((as_float32[3], jnp.zeros_like(lse)))
    for mine, theirs, x in zip(gradients, wanted, (q, k, v), strict=True):
        assert mine.dtype == x.dtype
        assert_close(mine, theirs, TOLERANCE[dtype])


def gpu(capability: str) -> Any:
    return SimpleNamespace(platform="gpu", compute_capability=capability)


@pytest.mark.parametrize(
    ("capability", "size", "dtype", "words"),
    [
        ("7.5", 64, jnp.bfloat16, "compute capability 8.0 or above"),
        ("9.0", 320, jnp.bfloat16, "heads of 320: more than 256"),
        ("9.0", 64, jnp.float64, "not one of bfloat16, float16, float32"),
        ("9.0", 256, jnp.bfloat16, ""),
        ("12.0", 192, jnp.float32, ""),
    ],
)
def test_what_has_a_kernel(capability: str, size: int, dtype: Any, words: str) -> None:
    x = SimpleNamespace(shape=(1, 8, 2, size), dtype=jnp.dtype(dtype))
    check: Any = partial(check_supported, *[x] * 3)
    with trace_for_device(gpu(capability)):
        if words:
            with pytest.raises(NotImplementedError, match=words):
                check()
        else:
            check()
