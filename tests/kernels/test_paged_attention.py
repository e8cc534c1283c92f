"""Attention over a cache in blocks: the Triton kernel in Pallas' interpreter and XLA's forms, against
plain softmax attention.

Legend: as `kernels_pallas/paged_attention/api.py`.
"""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.run.ahead_of_time import lower_for_device
from kernels_pallas import implementations
from kernels_pallas.cached_values import encode
from kernels_pallas.implementations import trace_for_device
from kernels_pallas.paged_attention import paged_attention, reads_in_place, reference, triton, xla
from kernels_pallas.paged_attention.triton import split_dimensions
from tests.arrays import assert_close

L, W, N = 32, 5, 12  # positions of a block, blocks of a table and of the cache
LENGTH = L * W
TOLERANCE = {jnp.bfloat16: 1e-2, jnp.float16: 2e-3, jnp.float32: 2e-6}
# (G, H, d, e): one head a group, several, sizes that no block divides, more rows than a tile
HEADS = [(4, 4, 16, 16), (2, 12, 24, 40), (1, 80, 16, 16)]
LATENTS = (1, 8, 48, 32)  # of which the first 32 dimensions are the value


def draw(
    heads: tuple[int, int, int, int],
    positions: list[list[int]],
    dtype: Any,
    *,
    latents: bool = False,
) -> tuple[Any, ...]:
    """Return (q, k, v, blocks, positions); NaN is where no row may read."""
    (g, h, d, e), rng = heads, np.random.default_rng(0)
    at = np.array(positions, np.int32)
    blocks = np.stack([rng.permutation(N)[:W] for _ in at]).astype(np.int32)
    dims = [d] if latents else [d, e]
    cached = [np.full((N, g, L, dim), np.nan, np.float32) for dim in dims]
    for row, table in zip(at, blocks, strict=True):
        end = max([0, *(row[row < LENGTH] + 1)])
        for x in cached:
            for i in range(end):
                x[table[i // L], :, i % L] = rng.standard_normal((g, x.shape[3]))
    arrays = [jnp.asarray(x, dtype) for x in cached]
    if dtype == jnp.bfloat16:
        arrays = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in arrays]
    q = jnp.asarray(rng.standard_normal((*at.shape, h, d)), dtype)
    return q, arrays[0], None if latents else arrays[1], jnp.asarray(blocks), jnp.asarray(at)


def run(module: Any, operands: tuple[Any, ...], **options: Any) -> np.ndarray:
    """Return a form's output in float32, 0 for padding."""
    sizes = {"scale": 0.3, "value_dim": operands[0].shape[3]} | options
    out = jax.jit(lambda *x: module.paged_attention(*x, **sizes))(*operands)
    assert out.dtype == operands[0].dtype
    real = np.asarray(operands[4] < LENGTH)[..., None, None]
    result = np.where(real, np.asarray(out, np.float32), 0)
    assert np.isfinite(result).all()
    return result


# the first position, both sides of a block's end, the last position, and a row of padding
ONE = [[0], [L - 1], [L], [LENGTH - 1], [LENGTH]]
SEVERAL = [[90, 91, 92, 93], [L - 2, L - 1, L, LENGTH], [0, 1, LENGTH, LENGTH], [LENGTH] * 4]
EVERY_OPTION: list[tuple[int | None, bool]] = [(None, False), (1, False), (40, True)]


@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize(("window", "sinks"), EVERY_OPTION)
@pytest.mark.parametrize("positions", [ONE, SEVERAL])
def test_kernel(
    positions: list[list[int]], window: int | None, sinks: bool, num_splits: int
) -> None:
    heads = HEADS[1]
    operands = draw(heads, positions, jnp.float32)
    options: dict[str, Any] = {
        "value_dim": heads[3],
        "window": window,
        "sinks_H": jnp.asarray(np.random.default_rng(1).normal(size=heads[1]), jnp.bfloat16)
        if sinks
        else None,
    }
    expected = run(reference, operands, **options)
    kernel = run(triton, operands, num_splits=num_splits, interpret=True, **options)
    assert_close(kernel, expected, TOLERANCE[jnp.float32])
    assert_close(run(xla, operands, **options), expected, TOLERANCE[jnp.float32])


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(HEADS[0], jnp.bfloat16), (HEADS[0], jnp.float16), (HEADS[1], jnp.bfloat16)]
    + [(HEADS[2], jnp.bfloat16), (HEADS[2], jnp.float32)],
)
def test_kernel_by_heads_and_dtype(heads: tuple[int, int, int, int], dtype: Any) -> None:
    operands = draw(heads, SEVERAL, dtype)
    options = {"value_dim": heads[3], "window": jnp.int32(50)}
    expected = run(reference, operands, **options)
    kernel = run(triton, operands, num_splits=2, interpret=True, **options)
    assert_close(kernel, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("heads", "num_splits", "dtype"),
    [(LATENTS, None, jnp.bfloat16), (LATENTS, 1, jnp.float32), ((1, 8, 40, 24), 4, jnp.float32)],
)
def test_latents(heads: tuple[int, int, int, int], num_splits: int | None, dtype: Any) -> None:
    """A key's first dimensions are its value; with pieces of the keys that the values share or not."""
    operands = draw(heads, ONE, dtype, latents=True)
    expected = run(reference, operands, value_dim=heads[3])
    kernel = run(triton, operands, value_dim=heads[3], num_splits=num_splits, interpret=True)
    assert_close(kernel, expected, TOLERANCE[dtype])
    both = run(xla, operands, value_dim=heads[3], context=LENGTH)
    assert_close(both, expected, TOLERANCE[dtype])


def test_a_row_has_the_same_bits_whatever_the_others_are() -> None:
    """The other rows' lengths decide nothing."""
    q, *cached, blocks, at = draw(HEADS[0], [[37], [LENGTH - 1]], jnp.bfloat16)
    alone = at.at[1, 0].set(LENGTH)
    outs = [run(triton, (q, *cached, blocks, x), interpret=True)[0] for x in (at, alone)]
    np.testing.assert_array_equal(*outs)


def test_single_tokens_in_blocks_of_many_rows_need_no_splits() -> None:
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731

    def kernels(rows: int) -> int:
        operands = of(jnp.bfloat16, rows, 1, 16, 128), *[of(jnp.uint16, 99, 16, 128, 128)] * 2
        at = of(jnp.int32, rows, 256), of(jnp.int32, rows, 1)
        sizes = {"scale": 1.0, "value_dim": 128}
        f = lambda *x: triton.paged_attention(*x, **sizes)  # noqa: E731
        return str(jax.make_jaxpr(f)(*operands, *at)).count("pallas_call[")

    assert [kernels(rows) for rows in (1, 8, 64)] == [2, 2, 1]


def test_pieces_cover_each_dimension_once() -> None:
    assert split_dimensions(576) == [(0, 512), (512, 64)]
    assert split_dimensions(128) == [(0, 128)]
    assert split_dimensions(40) == [(0, 32), (32, 16)]


def test_what_the_kernel_does_not_read_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """XLA's form runs, and the log says so once."""
    implementations.log_once.cache_clear()
    q, k, v, blocks, at = draw(HEADS[0], ONE, jnp.float32)
    device: Any = SimpleNamespace(platform="gpu", compute_capability="8.9")
    with trace_for_device(device), caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = paged_attention(
                q.astype(jnp.bfloat16),
                *(x.astype(jnp.bfloat16) for x in (k, v)),
                blocks,
                at,
                scale=0.3,
                value_dim=16,
            )
    assert out.shape == q.shape
    (record,) = caplog.records
    assert record.message == (
        "paged_attention: triton does not support this case (a cache of bfloat16 for queries of"
        " bfloat16); xla is used"
    )


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [("gpu", "9.0", True), ("gpu", "8.9", True), ("gpu", "7.5", False), ("cpu", "", False)],
)
def test_where_blocks_are_read_in_place(platform: str, capability: str, expected: bool) -> None:
    with trace_for_device(SimpleNamespace(platform=platform, compute_capability=capability)):  # type: ignore[arg-type]
        assert reads_in_place() == expected


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "12.0"])
def test_kernel_lowers_on_a_machine_without_a_gpu(capability: str) -> None:
    """gpt-oss's heads and DeepSeek's latents, as the engine calls them."""
    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731

    def both(q: Any, k: Any, v: Any, lq: Any, latents: Any, blocks: Any, at: Any, w: Any) -> Any:
        y = paged_attention(q, k, v, blocks, at, scale=1.0, value_dim=64, window=w)
        return y, paged_attention(lq, latents, None, blocks, at, scale=1.0, value_dim=512)

    cached = of(jnp.uint16, 9, 8, 128, 64)
    operands = of(jnp.bfloat16, 2, 1, 64, 64), cached, cached, of(jnp.bfloat16, 2, 1, 16, 576)
    places = of(jnp.uint16, 9, 1, 128, 576), of(jnp.int32, 2, 4), of(jnp.int32, 2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton backend
        results, lowered = lower_for_device(
            device, jax.jit(both), *operands, *places, of(jnp.int32)
        )
    assert [y.shape for y in results] == [(2, 1, 64, 64), (2, 1, 16, 512)]
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("latents", [False, True])
def test_a_cache_in_fp8(dtype: Any, latents: bool) -> None:
    """The kernel and XLA's forms, for single tokens and for chunks."""
    heads = LATENTS if latents else HEADS[1]
    for positions, context in ((ONE, LENGTH), (SEVERAL, None)):
        q, *cached, blocks, at = draw(heads, positions, jnp.float32, latents=latents)
        codes = [None if x is None else encode(x, jnp.uint8) for x in cached]
        operands = (q.astype(dtype), *codes, blocks, at)
        options: dict[str, Any] = {"value_dim": heads[3], "window": jnp.int32(50)}
        expected = run(reference, operands, **options)
        kernel = run(triton, operands, num_splits=2, interpret=True, **options)
        assert_close(kernel, expected, TOLERANCE[dtype])
        assert_close(run(xla, operands, **options), expected, TOLERANCE[dtype])
        if context is not None:
            options["context"] = context
            assert_close(run(xla, operands, **options), expected, TOLERANCE[dtype])
