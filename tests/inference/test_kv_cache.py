"""Keys and values written piece by piece, and attention over them, against the plain forms of
both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.inference.kv_cache import BLOCK, KVCache, attend, write_and_attend, write_keys_and_values

G, D, E = 2, 4, 3
LENGTH = 2 * BLOCK


def step(
    rows: list[tuple[int, int, int]], width: int, dtype: jnp.dtype, seed: int
) -> tuple[np.ndarray, ...]:
    """(rows_P, positions_PC, k_PCGd, v_PCGe) of (row, first position, number of tokens), padded
    to `width`.
    """
    rng = np.random.default_rng(seed)
    positions_PC = np.full((len(rows), width), LENGTH, np.int32)
    for p, (_, start, count) in enumerate(rows):
        positions_PC[p, :count] = np.arange(start, start + count)
    draw = lambda dim: rng.standard_normal((len(rows), width, G, dim)).astype(dtype)  # noqa: E731
    return np.array([row for row, _, _ in rows], np.int32), positions_PC, draw(D), draw(E)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        ([(0, 0, 1), (2, 17, 1), (1, LENGTH - 1, 1)], 1),
        ([(1, 5, 9), (0, 0, 0), (2, 0, 16)], 16),  # a row of padding alone writes nothing
        # padding reaches past the end
        ([(0, LENGTH - 7, 7), (1, LENGTH - 16, 16), (2, LENGTH - 1, 1)], 16),
    ],
)
def test_write(rows: list[tuple[int, int, int]], width: int, dtype: jnp.dtype) -> None:
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    cache = KVCache(*(jnp.zeros((3, G, LENGTH, dim), stored) for dim in (D, E)))
    expected = [np.zeros((3, G, LENGTH, dim), dtype) for dim in (D, E)]
    for seed in range(2):  # the second time over what is there
        rows_P, positions_PC, k, v = step(rows, width, jnp.dtype(dtype), seed)
        cache = jax.jit(write_keys_and_values)(cache, rows_P, positions_PC, k, v)
        for all_, new in zip(expected, (k, v), strict=True):
            for p, (row, start, count) in enumerate(rows):
                all_[row, :, start : start + count] = new[p, :count].swapaxes(0, 1)
    got = [np.asarray(x).view(dtype) for x in (cache.k_BGSd, cache.v_BGSe)]
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_single_tokens_at_once(window: int | None, sinks: bool) -> None:
    """One scatter and one product over a bounded context: what the loops over rows and blocks
    make of it.
    """
    rng, heads = np.random.default_rng(1), 4
    filled = [rng.standard_normal((3, G, LENGTH, dim)).astype(np.float32) for dim in (D, E)]
    for x in filled:
        x[:, :, 120:] = np.nan  # left behind by other requests
    rows_P, positions_PC, k, v = step(
        [(2, 90, 1), (0, 0, 1), (1, 3, 0)], 1, jnp.dtype(jnp.float32), 0
    )
    q = rng.standard_normal((3, 1, heads, D)).astype(np.float32)
    options: dict[str, Any] = {"scale": 0.5, "window": None if window is None else np.int32(window)}
    options["sinks_H"] = rng.standard_normal(heads).astype(np.float32) if sinks else None
    new, at = tuple(map(jnp.asarray, (q, k, v))), (jnp.asarray(rows_P), jnp.asarray(positions_PC))
    caches = [KVCache(*map(jnp.asarray, filled)) for _ in range(2)]
    one = write_and_attend(new, caches[0], *at, context=BLOCK, **options)
    other = write_and_attend(new, caches[1], *at, **options)
    np.testing.assert_allclose(one[0][:2], other[0][:2], atol=2e-6)
    assert np.isfinite(one[0][:2]).all()
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_attend(window: int | None, sinks: bool) -> None:
    """A chunk longer than a block of queries, beside a short one and one of padding."""
    rng, heads, width = np.random.default_rng(0), 4, BLOCK + 30
    k, v = (rng.standard_normal((3, G, LENGTH, dim)).astype(np.float32) for dim in (D, E))
    rows = [(2, 90, width), (0, 0, 5), (1, 0, 0)]
    rows_P, positions_PC, _, _ = step(rows, width, jnp.dtype(jnp.float32), 0)
    q = rng.standard_normal((3, width, heads, D)).astype(np.float32)
    sinks_H = rng.standard_normal(heads).astype(np.float32) if sinks else None
    seen = None if window is None else np.int32(window)
    cache = KVCache(jnp.asarray(k), jnp.asarray(v))
    got = attend(
        jnp.asarray(q), cache, rows_P, positions_PC, scale=0.5, window=seen, sinks_H=sinks_H
    )
    assert np.isfinite(got).all()
    for p, (row, start, count) in enumerate(rows):
        for c in range(count):
            first = 0 if window is None else max(0, start + c - window + 1)
            for h in range(heads):
                g = h * G // heads
                score = 0.5 * k[row, g, first : start + c + 1] @ q[p, c, h]
                weight = np.exp(score - score.max())
                total = weight.sum() + (
                    np.exp(sinks_H[h] - score.max()) if sinks_H is not None else 0
                )
                expected = weight @ v[row, g, first : start + c + 1] / total
                np.testing.assert_allclose(got[p, c, h], expected, atol=2e-5)
