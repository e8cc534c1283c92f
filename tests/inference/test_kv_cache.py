"""Keys and values written piece by piece into blocks, and attention over them, against contiguous
rows and the plain form of attention.
"""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.inference.kv_cache import (
    BLOCK,
    KVCache,
    copy_cache_blocks,
    tables_of_consecutive_blocks,
    write_and_attend,
    write_by_scatter,
    write_keys_and_values,
)
from jmoe.layers.attention import CacheInputs
from jmoe.run.ahead_of_time import lower_for_device
from kernels_pallas.paged_attention.xla import attend_by_block
from kernels_pallas.saved import bfloat16_as_uint16
from tests.inference import contiguous_cache

G, D, E, HEADS = 2, 4, 3, 4
WIDTH = 3  # blocks of a table
LENGTH = WIDTH * BLOCK
NUM_BLOCKS = 11  # two belong to nobody
# out of order, and the first row's first two blocks are the third row's too
TABLES = np.array([[4, 9, 0], [10, 2, 7], [4, 9, 5]], np.int32)


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


def stored(x: np.ndarray) -> jax.Array:
    """Return keys or values as the cache stores them."""
    return bfloat16_as_uint16(jnp.asarray(x))


def filled(dtype: jnp.dtype) -> list[np.ndarray]:
    """Return random keys and values in contiguous rows; rows that share blocks agree there."""
    rng = np.random.default_rng(7)
    both = [rng.standard_normal((3, G, LENGTH, dim)).astype(dtype) for dim in (D, E)]
    for x in both:
        x[2, :, : 2 * BLOCK] = x[0, :, : 2 * BLOCK]
    return both


def in_blocks(both: list[np.ndarray]) -> KVCache:
    return KVCache(*(stored(contiguous_cache.as_blocks(x, TABLES, NUM_BLOCKS)) for x in both))


def rows_of(cache: KVCache, dtype: jnp.dtype) -> list[np.ndarray]:
    return [
        contiguous_cache.as_rows(np.asarray(x).view(dtype), TABLES) for x in jax.tree.leaves(cache)
    ]


STEPS = [
    ([(0, 300, 1), (1, 17, 1), (2, LENGTH - 1, 1)], 1),
    ([(1, 5, 9), (0, 0, 0), (2, 260, 16)], 16),  # a row of padding alone writes nothing
    ([(1, BLOCK - 3, 16), (2, 2 * BLOCK, 7)], 16),  # over the end of a block, and from its start
    # padding reaches past the end
    ([(1, LENGTH - 7, 7), (2, LENGTH - 16, 16), (0, LENGTH - 1, 1)], 16),
    ([(1, 127, 130), (2, 256, 128), (0, 257, 3)], 130),  # three blocks, one, and a part
    ([(1, 0, LENGTH)], LENGTH),
]


@pytest.mark.parametrize("write", [write_keys_and_values, write_by_scatter])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "width"), STEPS)
def test_write(
    rows: list[tuple[int, int, int]], width: int, dtype: Any, write: Callable[..., KVCache]
) -> None:
    """Blocks that no written position is in, and the other positions of a block, stay the same."""
    dtype = jnp.dtype(dtype)
    expected = filled(dtype)
    cache = in_blocks(expected)
    for seed in range(2):  # the second time over what is there
        rows_P, positions_PC, k, v = step(rows, width, dtype, seed)
        cache = jax.jit(write)(cache, TABLES[rows_P], positions_PC, k, v)
        expected = [
            contiguous_cache.write(x, rows_P, positions_PC, new)
            for x, new in zip(expected, (k, v), strict=True)
        ]
    for x, y in zip(rows_of(cache, dtype), expected, strict=True):
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))
    for x in jax.tree.leaves(cache):
        free = np.asarray(x).view(dtype)[[1, 3, 6, 8]].astype(np.float32)
        assert np.isnan(free).all(), "nobody's blocks are not written"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (1, False), (140, True)])
@pytest.mark.parametrize(
    ("rows", "width"),
    [([(0, 270, 1), (1, 17, 1), (2, 1, 0)], 1), ([(1, 120, 20), (0, 256, 5), (2, 0, 0)], 20)],
)
def test_blocks_are_contiguous_rows_bit_for_bit(
    rows: list[tuple[int, int, int]], width: int, sinks: bool, window: int | None, dtype: Any
) -> None:
    dtype, rng = jnp.dtype(dtype), np.random.default_rng(1)
    rows_P, positions_PC, k, v = step(rows, width, dtype, 0)
    q = jnp.asarray(rng.standard_normal((len(rows), width, HEADS, D)).astype(dtype))
    options: dict[str, Any] = {
        "scale": 0.5,
        "window": None if window is None else jnp.int32(window),
        "sinks_H": jnp.asarray(rng.standard_normal(HEADS), jnp.float32) if sinks else None,
    }
    both = filled(dtype)
    new = CacheInputs(q, jnp.asarray(k), jnp.asarray(v))
    got, cache = jax.jit(partial(write_and_attend, scale=options.pop("scale")))(
        new, in_blocks(both), TABLES[rows_P], positions_PC, **options
    )
    written = [
        contiguous_cache.write(x, rows_P, positions_PC, new)
        for x, new in zip(both, (k, v), strict=True)
    ]
    for x, y in zip(rows_of(cache, dtype), written, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
    want = contiguous_cache.attend(
        q, tuple(map(jnp.asarray, written)), rows_P, positions_PC, scale=0.5, **options
    )
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_single_tokens_at_once(window: int | None, sinks: bool) -> None:
    """One scatter and one product over a bounded context: what the loops over rows and blocks
    make of it.
    """
    rng = np.random.default_rng(1)
    both = filled(jnp.dtype(np.float32))
    for x in both:
        x[:, :, 200:] = np.nan  # left behind by other requests
    rows_P, positions_PC, k, v = step(
        [(0, 190, 1), (1, 0, 1), (2, 3, 0)], 1, jnp.dtype(jnp.float32), 0
    )
    q = rng.standard_normal((3, 1, HEADS, D)).astype(np.float32)
    options: dict[str, Any] = {"scale": 0.5, "window": None if window is None else np.int32(window)}
    options["sinks_H"] = rng.standard_normal(HEADS).astype(np.float32) if sinks else None
    new, at = (
        CacheInputs(*map(jnp.asarray, (q, k, v))),
        tuple(map(jnp.asarray, (TABLES[rows_P], positions_PC))),
    )
    one = write_and_attend(new, in_blocks(both), *at, context=2 * BLOCK, **options)
    other = write_and_attend(new, in_blocks(both), *at, **options)
    np.testing.assert_allclose(one[0][:2], other[0][:2], atol=2e-6)
    assert np.isfinite(one[0][:2]).all()
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_copies_of_contexts_are_no_larger_than_the_cache() -> None:
    """One row may have all blocks: then contexts as long as its own are not copied for every row."""
    rows, context = 8, 8 * BLOCK
    cache = KVCache(*(jnp.zeros((10, HEADS, BLOCK, D)) for _ in range(2)))
    blocks_PW = np.zeros((rows, context // BLOCK), np.int32)
    blocks_PW[0] = np.arange(8)
    blocks_PW[1:, 0] = 9
    new = CacheInputs(*(jnp.ones((rows, 1, HEADS, D)) for _ in range(3)))
    positions_P1 = np.array([[context - 1]] + [[row] for row in range(1, rows)], np.int32)
    one_token = partial(write_and_attend, scale=0.5, context=context)
    compiled = jax.jit(one_token, donate_argnums=1).lower(new, cache, blocks_PW, positions_P1)
    memory = compiled.compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 2 * cache.k_NGLd.nbytes


@pytest.mark.parametrize("rows", [1, 64])
def test_a_gpu_copies_no_context(rows: int) -> None:
    """Its program writes by one scatter an array and attends by kernels; it gathers from tables
    alone.
    """
    device: Any = SimpleNamespace(platform="gpu", compute_capability="9.0")
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    cache = KVCache(*[of(jnp.uint16, 600, 8, BLOCK, 64)] * 2)
    new = CacheInputs(of(jnp.bfloat16, rows, 1, 16, 64), *[of(jnp.bfloat16, rows, 1, 8, 64)] * 2)
    places = of(jnp.int32, rows, 300), of(jnp.int32, rows, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton backend
        program = jax.jit(partial(write_and_attend, scale=0.5))
        _, lowered = lower_for_device(device, program, new, cache, *places)
    text = lowered.as_text()
    assert text.count("@__gpu$xla.gpu.triton") == (2 if rows == 1 else 1)
    assert text.count('"stablehlo.scatter"') == 2
    gathered = [line for line in text.splitlines() if '"stablehlo.gather"' in line]
    assert len(gathered) == 1 and f"tensor<{rows}x300xi32>" in gathered[0]


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_attend(window: int | None, sinks: bool) -> None:
    """A chunk longer than a block of queries, beside a short one and one of padding."""
    rng, width = np.random.default_rng(0), BLOCK + 30
    k, v = filled(jnp.dtype(np.float32))
    rows = [(2, 90, width), (0, 0, 5), (1, 0, 0)]
    rows_P, positions_PC, _, _ = step(rows, width, jnp.dtype(jnp.float32), 0)
    q = rng.standard_normal((3, width, HEADS, D)).astype(np.float32)
    sinks_H = rng.standard_normal(HEADS).astype(np.float32) if sinks else None
    seen = None if window is None else np.int32(window)
    cache = in_blocks([k, v])
    got = attend_by_block(
        jnp.asarray(q),
        cache.k_NGLd,
        cache.v_NGLe,
        TABLES[rows_P],
        positions_PC,
        scale=0.5,
        window=seen,
        sinks_H=sinks_H,
    )
    assert np.isfinite(got).all()
    for p, (row, start, count) in enumerate(rows):
        for c in range(count):
            first = 0 if window is None else max(0, start + c - window + 1)
            for h in range(HEADS):
                g = h * G // HEADS
                score = 0.5 * k[row, g, first : start + c + 1] @ q[p, c, h]
                weight = np.exp(score - score.max())
                total = weight.sum() + (
                    np.exp(sinks_H[h] - score.max()) if sinks_H is not None else 0
                )
                expected = weight @ v[row, g, first : start + c + 1] / total
                np.testing.assert_allclose(got[p, c, h], expected, atol=2e-5)


def test_copies_happen_in_order() -> None:
    """The second copies what the first has copied, and those after `count` do not happen."""
    rng = np.random.default_rng(0)
    both = [rng.standard_normal((5, G, BLOCK, dim)).astype(np.float32) for dim in (D, E)]
    numbers = np.array([1, 2, 0], np.int32), np.array([2, 3, 4], np.int32), np.int32(2)
    copied = copy_cache_blocks(KVCache(*map(jnp.asarray, both)), *numbers)
    for x, y in zip(jax.tree.leaves(copied), both, strict=True):
        np.testing.assert_array_equal(x, y[[0, 1, 1, 1, 4]])


def test_tables_of_rows_of_their_own() -> None:
    assert tables_of_consecutive_blocks(2, BLOCK + 1).tolist() == [[0, 1], [2, 3]]
