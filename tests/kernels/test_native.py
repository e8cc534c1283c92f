"""Native operations against numpy in float64 and against the XLA forms they stand for; and how
they are built.
"""

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.inference.kv_cache import KVCache, write_keys_and_values
from jmoe.layers.norm import Norm
from jmoe.layers.router import top_k_indices
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.offload.slots import HostSlots
from kernels_pallas import native
from kernels_pallas.compressed import SCALES, compress, decompressed_or_plain_weight, stored_fields
from kernels_pallas.formats import FORMATS, INT8_TAKING, Format
from kernels_pallas.matmul import dot
from kernels_pallas.multiplications import count_op_multiplications
from kernels_pallas.native.library import (
    INSTRUCTION_SETS,
    build,
    instruction_set,
    usable_instruction_sets,
)
from kernels_pallas.paged_attention.xla import attend_by_block
from tests.arrays import assert_close
from tests.processes import without_home

ROOT = Path(__file__).resolve().parents[2]
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    try:
        return native.load()
    except native.NotBuiltError as error:
        pytest.skip(f"no native operations here: {error}")


def drawn(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any
) -> tuple[jax.Array, np.ndarray]:
    """A random array in `dtype` and the same values in float64."""
    x = jnp.asarray(rng.normal(size=shape), dtype)
    return x, np.asarray(x.astype(jnp.float32), np.float64)


def close(got: jax.Array, want: np.ndarray, inner: int) -> None:
    """Equal but for sums of `inner` products in float32."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=3e-7 * inner)


# Products


@dtypes
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 32])
def test_products_of_few_rows(rows: int, transposed: bool, dtype: Any) -> None:
    """Columns that fill registers, a part of them, and a few more; wide enough for several tasks,
    or very wide.

    130 inputs make slices of 64, 64, 2 and none.
    """
    rng = np.random.default_rng(rows)
    for inner, columns in ((40, 7), (33, 64 + 16 + 3), (512, 1500), (130, 600), (70, 2500)):
        x, x64 = drawn(rng, (rows, inner), dtype)
        w, w64 = drawn(rng, (columns, inner) if transposed else (inner, columns), dtype)
        close(
            native.matmul(x, w, transposed=transposed),
            x64 @ (w64.T if transposed else w64),
            inner,
        )


@dtypes
@pytest.mark.parametrize("rows", [33, 300])
def test_products_of_many_rows(rows: int, dtype: Any) -> None:
    """Strips that are not full, inputs that are widened in parts, more rows than a task takes. A
    row's bits depend neither on its place nor on how many rows there are.
    """
    rng = np.random.default_rng(rows)
    for inner, columns in ((40, 16), (33, 112), (1100, 64), (2500, 48)):
        (x, x64), (w, w64) = drawn(rng, (rows, inner), dtype), drawn(rng, (inner, columns), dtype)
        y = native.matmul(x, w)
        close(y, x64 @ w64, inner)
        again = native.matmul(jnp.concatenate([x[5:33], x[:5], x[5:7]]), w)
        assert np.array_equal(again[28:33], y[:5]) and np.array_equal(again[:28], y[5:33])


def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit for bit, whatever the number of rows."""
    rng = np.random.default_rng(0)
    for dtype, (inner, columns) in itertools.product(
        (jnp.float32, jnp.bfloat16), ((200, 700), (130, 2500))
    ):
        x, w = drawn(rng, (32, inner), dtype)[0], drawn(rng, (inner, columns), dtype)[0]
        alone = np.concatenate([native.matmul(x[t : t + 1], w) for t in range(32)])
        for rows in (2, 3, 4, 7, 8, 32):
            assert np.array_equal(native.matmul(x[:rows], w), alone[:rows])


@dtypes
@pytest.mark.parametrize("inner", [1, 3, 50])
def test_the_weights_may_have_another_dtype(inner: int, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    other = jnp.bfloat16 if dtype == jnp.float32 else jnp.float32
    (x, x64), (w, w64) = drawn(rng, (3, inner), dtype), drawn(rng, (inner, 20), other)
    close(native.matmul(x, w), x64 @ w64, inner)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="must be float32 or bfloat16"):
        native.matmul(jnp.ones((2, 4), jnp.int32), jnp.ones((4, 4), jnp.int32)).block_until_ready()


def test_dot_takes_them_in_their_scope_alone() -> None:
    def programs(rows: int, active: int, dtype: Any = jnp.float32, columns: int = 16) -> str:
        def f(x: jax.Array, w: jax.Array) -> jax.Array:
            with native.allow_native_inference(active):
                return dot(x, w)

        operands = jnp.ones((rows, 8), dtype), jnp.ones((8, columns), dtype)
        return jax.jit(f).lower(*operands).as_text()

    assert "jmoe_matmul" in programs(3, 3) and "jmoe_matmul" in programs(3, native.MAX_ROWS)
    assert "jmoe_matmul" not in programs(3, 0) and "jmoe_matmul" not in programs(
        3, native.MAX_ROWS + 1
    )
    many = native.MAX_ROWS + 1
    faster = native.has_wide_vectors() and not native.multiplies_many_rows()
    assert ("jmoe_matmul" in programs(many, many, jnp.bfloat16)) == faster
    assert "jmoe_matmul" not in programs(many, many, jnp.bfloat16, columns=24)
    assert "jmoe_matmul" not in programs(many, many) + programs(many, 0, jnp.bfloat16)
    assert not native.uses_native_inference()


# What is around them


@dtypes
def test_rms_norm(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for shape in ((3, 40), (2, 1, 4, 64), (1, 7)):
        norm = Norm(shape[-1], "rmsnorm", 1e-6)
        norm.scale[...] = drawn(rng, shape[-1:], jnp.float32)[0]
        x, _ = drawn(rng, shape, dtype)
        want = norm(x, dtype)
        with native.allow_native_inference(1):
            got = norm(x, dtype)
        assert got.dtype == want.dtype == dtype
        assert_close(got, want, 1e-6 if dtype == jnp.float32 else 1e-2)


def test_top_k_breaks_ties_as_the_other_form() -> None:
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.integers(0, 6, (16, 40)) / 8, jnp.float32)
    want = top_k_indices(scores, 7)
    with native.allow_native_inference(16):
        got = top_k_indices(scores, 7)
    assert np.array_equal(got, want)


@dtypes
# the last: in blocks, where bfloat16 is multiplied in pairs
@pytest.mark.parametrize("tokens", [1, 3, 90])
@pytest.mark.parametrize(
    ("sinks", "window"),
    [
        (False, None),
        (True, 5),
        pytest.param(False, 5, marks=pytest.mark.slow),
        pytest.param(True, None, marks=pytest.mark.slow),
    ],
)
# groups of 3, 1, 6 and 9 heads; only 32 is a multiple of every vector
@pytest.mark.parametrize(("h", "d"), [(6, 24), (2, 32), (12, 32), (18, 32)])
def test_attention_writes_the_cache_and_reads_it(
    dtype: Any, tokens: int, sinks: bool, window: int | None, h: int, d: int
) -> None:
    """Blocks out of order, a row of padding, keys and values of other sizes; a NaN behind the last
    position stays there. Neither the blocks of a table nor other tokens change a bit.
    """
    rng = np.random.default_rng(0)
    g, e, s = 2, 16, 256
    blocks = jnp.asarray([[6, 1], [0, 4], [3, 3]], jnp.int32)
    stored = (
        (lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16))
        if dtype == jnp.bfloat16
        else (lambda x: x)
    )
    k_cache, v_cache = (rng.normal(size=(7, g, s // 2, n)) for n in (d, e))
    for x in (k_cache, v_cache):
        x[1], x[4], x[0, :, 90:] = np.nan, np.nan, np.nan
    cache = KVCache(stored(jnp.asarray(k_cache, dtype)), stored(jnp.asarray(v_cache, dtype)))
    q, k, v = (drawn(rng, (3, tokens, n, dim), dtype)[0] for n, dim in ((h, d), (g, d), (g, e)))
    to_its_end = np.append(np.arange(tokens - 1), s if tokens > 1 else 0)
    positions = jnp.asarray([100 + np.arange(tokens), to_its_end, np.full(tokens, s)], jnp.int32)
    options: dict[str, Any] = {
        "scale": 0.2,
        "window": None if window is None else jnp.int32(window),
        "sinks_H": drawn(rng, (h,), jnp.float32)[0] if sinks else None,
    }
    written = write_keys_and_values(cache, blocks, positions, k, v)
    want = attend_by_block(q, written.k_NGLd, written.v_NGLe, blocks, positions, **options)
    attention = jax.jit(
        lambda new, caches, blocks, positions: native.cached_attention(
            new, caches, blocks, positions, **options
        )
    )
    got, *caches = attention((q, k, v), (cache.k_NGLd, cache.v_NGLe), blocks, positions)
    real = np.asarray(positions < s)[..., None, None]
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    assert_close(jnp.where(real, got, 0), jnp.where(real, want, 0), tolerance)
    assert not np.asarray(got.astype(jnp.float32))[np.asarray(positions == s)].any()
    same = partial(np.array_equal, equal_nan=dtype == jnp.float32)
    assert all(map(same, caches, jax.tree.leaves(written)))
    # the same rows, one block after the other
    orderly = jnp.asarray([[0, 1], [2, 3], [4, 5]], jnp.int32)
    moved = [x[blocks.reshape(-1)] for x in (cache.k_NGLd, cache.v_NGLe)]
    other, *caches = attention((q, k, v), moved, orderly, positions)
    assert same(got, other)
    assert all(map(same, caches, (x[blocks.reshape(-1)] for x in jax.tree.leaves(written))))
    if tokens <= native.MAX_ROWS:
        last = [x[:1, -1:] for x in (q, k, v)]
        alone, *_ = attention(
            last, (written.k_NGLd, written.v_NGLe), blocks[:1], positions[:1, -1:]
        )
        assert same(alone[0, 0], got[0, -1])


@dtypes
@pytest.mark.parametrize(
    ("heads", "latent", "rope", "tokens"),
    # several tasks of heads; sizes that fill no vector; many tokens; a position in the third part
    [(16, 32, 16, 1), (72, 32, 16, 3), (6, 12, 8, 5), (20, 48, 16, 70)],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_to_latents(
    dtype: Any, heads: int, latent: int, rope: int, tokens: int, sinks: bool
) -> None:
    """One array whose first numbers are the values, with NaN behind the last position; each token
    gives the same bits without the others of its step.
    """
    rng = np.random.default_rng(0)
    s, d = 1280, latent + rope
    blocks_PW = jnp.asarray(rng.permutation(3 * s // 128).reshape(3, -1), jnp.int32)
    content = rng.normal(size=(3 * s // 128, 1, 128, d)).astype(np.float32)
    positions = np.full((3, tokens), s, np.int32)
    for p, first in enumerate((1100, 40)):  # the third row is padding
        positions[p] = first + np.arange(tokens)
        content[blocks_PW[p, first // 128], :, first % 128 :] = np.nan
        content[blocks_PW[p, first // 128 + 1 :]] = np.nan
    places = jnp.asarray(positions)
    k_cache = jnp.asarray(content, dtype)
    k_cache = k_cache if dtype == jnp.float32 else jax.lax.bitcast_convert_type(k_cache, jnp.uint16)
    q, k = (drawn(rng, (3, tokens, n, d), dtype)[0] for n in (heads, 1))
    options: dict[str, Any] = {
        "scale": 0.2,
        "sinks_H": drawn(rng, (heads,), jnp.float32)[0] if sinks else None,
    }
    attention = jax.jit(
        lambda cache, q, k, blocks, positions: native.cached_attention(
            (q, k, k[..., :latent]), (cache, None), blocks, positions, **options
        )
    )
    written = write_keys_and_values(KVCache(k_cache), blocks_PW, places, k, k[..., :latent])
    operands = q, written.k_NGLd, written.v_NGLe, blocks_PW, places
    want = attend_by_block(*operands, **options)[..., :latent]
    got, cache, no_values = attention(k_cache, q, k, blocks_PW, places)
    assert no_values is None
    np.testing.assert_array_equal(cache, written.k_NGLd)
    real = (positions < s)[..., None, None]
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    assert_close(jnp.where(real, got, 0), jnp.where(real, want, 0), tolerance)
    assert not np.asarray(got.astype(jnp.float32))[positions == s].any()
    if tokens <= native.MAX_ROWS:
        alone = attention(cache, q[:1, -1:], k[:1, -1:], blocks_PW[:1], places[:1, -1:])[0]
        np.testing.assert_array_equal(alone[0, 0], got[0, -1])


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_head(dtype: Any, rows: int, transposed: bool) -> None:
    """As many products of one shape in one call, of sizes that fill no vector too."""
    rng = np.random.default_rng(0)
    for inner, columns in ((64, 48), (9, 7)):
        x, wide_x = drawn(rng, (3, rows, inner), dtype)
        shape = (3, columns, inner) if transposed else (3, inner, columns)
        w, wide_w = drawn(rng, shape, dtype)
        want = wide_x @ (wide_w.swapaxes(1, 2) if transposed else wide_w)
        with native.allow_native_inference(rows):
            program = jax.jit(lambda x, w: dot(x, w, b_transposed=transposed))
            assert "jmoe_matmul" in program.lower(x, w).as_text()
            close(program(x, w), want, inner)


# Experts in slots


def slots_of(
    dtype: Any,
    activation: str,
    biases: Any,
    sizes: tuple[int, int, int],
    kind: Format | None = None,
    *,
    int8_activations: bool = False,
) -> tuple[list[HostSlots], np.ndarray]:
    """The same random experts in slots with and without native operations, and the table of
    their slots.
    """
    rng = np.random.default_rng(1)
    d, f, experts = sizes
    bits = lambda kind: np.dtype(np.uint16) if kind == jnp.bfloat16 else np.dtype(np.float32)  # noqa: E731
    u = f if activation == "gelu" else 2 * f
    fields: dict[str, Any] = {}
    for name, shape in (("w_up", (d, u)), ("w_down", (f, d))):
        fields |= {name: (shape, bits(dtype))} if kind is None else stored_fields(kind, name, shape)
    if biases is not None:
        fields |= {"b_up": ((u,), bits(biases)), "b_down": ((d,), bits(biases))}
    both = [
        HostSlots(experts + 3, fields, native=True, int8_activations=int8_activations),
        HostSlots(experts + 3, fields),
    ]
    table_E = rng.permutation(experts + 3)[:experts].astype(np.int32)
    for slot in table_E.tolist():
        record: dict[str, np.ndarray] = {}
        for name, shape in (("w_up", (d, u)), ("w_down", (f, d)), ("b_up", (u,)), ("b_down", (d,))):
            values = rng.normal(size=shape) * 0.2
            if kind is not None and name.startswith("w_"):
                record[name], record[name + SCALES] = compress(values, kind)
            elif name in fields:
                stored = fields[name][1]
                record[name] = values.astype(
                    jnp.bfloat16 if stored == np.uint16 else np.float32
                ).view(stored)
        for slots in both:
            slots.write(slot, record)
    return both, table_E


@dtypes
@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_compressed_experts_in_slots(dtype: Any, kind: Format) -> None:
    """As widened by XLA; columns that fill no register, and shared out by slices."""
    for sizes in ((32, 64 + 32, 3), (256, 544, 3)):
        (fast, plain), table_E = slots_of(dtype, "swiglu", jnp.float32, sizes, kind)
        for tokens in (1, 9):
            rng = np.random.default_rng(tokens)
            idx = np.stack([rng.permutation(3)[:2] for _ in range(tokens)]).astype(np.int32)
            h = drawn(rng, (tokens, sizes[0]), dtype)[0]
            weights = jnp.asarray(rng.random((tokens, 2)), jnp.float32)
            got, want = (
                slots.add_expert_outputs(
                    ExpertInputs(h, jnp.asarray(idx), weights, jnp.zeros((tokens, sizes[0]))),
                    table_E,
                    "swiglu",
                )
                for slots in (fast, plain)
            )
            assert_close(got, want, 3e-6 if dtype == jnp.float32 else 2e-2)


def rounded(x: np.ndarray) -> np.ndarray:
    """Each block of 32 along the last dimension as whole numbers -127..127 times a scale."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    peaks = np.abs(blocks).max(axis=-1, keepdims=True)
    steps = np.where(peaks > 0, np.float32(127) / np.where(peaks > 0, peaks, 1), 0)
    whole = np.rint(blocks * steps.astype(np.float32))
    return (whole * (peaks / np.float32(127))).reshape(x.shape)


def reference_of_rounded(
    slots: HostSlots,
    table_E: np.ndarray,
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    dtype: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """SwiGLU experts in float64 of (rounded inputs, exact ones); activations have the dtype."""
    h, idx, weights = inputs
    outputs = []
    for of_inputs in (rounded, lambda x: x):
        y = np.zeros(h.shape)
        for expert, slot in enumerate(table_E.tolist()):
            stored = slots.slot_views(slot)
            w_up, w_down = (
                np.asarray(decompressed_or_plain_weight(stored, name, jnp.float32), np.float64)
                for name in ("w_up", "w_down")
            )
            up = np.asarray(jnp.asarray(of_inputs(h) @ w_up, dtype), np.float64)
            gate, other = np.split(up, 2, axis=1)
            a = np.asarray(jnp.asarray(gate / (1 + np.exp(-gate)) * other, dtype), np.float64)
            out = np.asarray(jnp.asarray(of_inputs(a) @ w_down, dtype), np.float64)
            y += out * np.where(idx == expert, weights, 0).sum(axis=1, keepdims=True)
        outputs.append(y)
    return outputs[0], outputs[1]


TAKING = [FORMATS[name] for name in INT8_TAKING]


@dtypes
@pytest.mark.parametrize("kind", TAKING, ids=INT8_TAKING)
def test_activations_in_8_bits(dtype: Any, kind: Format) -> None:
    """The products of rounded inputs are exact; rounding alone changes an expert's output, by less
    than 2 % of its norm. 1 to 33 tokens; columns beside registers, several slices, many tasks.
    """
    for sizes, counts in (((32, 32, 3), (1, 2, 3, 5, 33)), ((288, 544, 3), (1, 7))):
        (fast, plain), table_E = slots_of(dtype, "swiglu", None, sizes, kind, int8_activations=True)
        for tokens in counts:
            rng = np.random.default_rng(tokens)
            idx = np.stack([rng.permutation(4)[:2] for _ in range(tokens)]).astype(np.int32)
            h, h64 = drawn(rng, (tokens, sizes[0]), dtype)
            weights = rng.random((tokens, 2)).astype(np.float32)
            assert fast.native is not None and fast.native.should_compute_experts(
                tokens, sizes[0], dtype
            )
            routed = ExpertInputs(
                h, jnp.asarray(idx), jnp.asarray(weights), jnp.zeros((tokens, sizes[0]))
            )
            got = np.asarray(fast.add_expert_outputs(routed, table_E, "swiglu"))
            want, exact = reference_of_rounded(plain, table_E, (h64, idx, weights), dtype)
            # a sum that lies between two steps may be rounded either way before the second product
            assert_close(got, want, 3e-3 if dtype == jnp.float32 else 2e-2)
            error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
            assert 1e-3 < error < 2e-2, error


@pytest.mark.parametrize("kind", TAKING, ids=INT8_TAKING)
def test_inputs_that_are_no_numbers_stay_visible_in_8_bits(kind: Format) -> None:
    """And those of zeros, or too small for a scale, give zeros: their neighbours keep theirs."""
    (fast, _), table_E = slots_of(
        jnp.float32, "swiglu", None, (64, 64, 2), kind, int8_activations=True
    )
    h = np.ones((5, 64), np.float32)
    h[0, 40], h[1, 3], h[2], h[3] = np.nan, np.inf, 0, 1e-38
    zeros = jnp.zeros((5, 64))
    routed = ExpertInputs(jnp.asarray(h), jnp.zeros((5, 1), jnp.int32), jnp.ones((5, 1)), zeros)
    got = np.asarray(fast.add_expert_outputs(routed, table_E, "swiglu"))
    assert not np.isfinite(got[:2]).all(axis=1).any()
    assert not got[2].any() and np.abs(got[3]).max() < 1e-30
    assert np.isfinite(got[4]).all() and got[4].any()


@pytest.mark.parametrize("kind", TAKING, ids=INT8_TAKING)
def test_the_largest_numbers_of_both_sides(kind: Format) -> None:
    """Sums of 16 bits hold them: weights at either end of their range, inputs of one magnitude."""
    d = f = 64
    (fast, plain), table_E = slots_of(
        jnp.float32, "gelu", None, (d, f, 1), kind, int8_activations=True
    )
    rng = np.random.default_rng(0)
    ends = {"mxfp4": (0x77, 0xFF), "int4": (0x00, 0xFF), "int8": (-128, 127)}[kind.name]
    record: dict[str, np.ndarray] = {}
    for name in ("w_up", "w_down"):
        for n, (shape, stored) in stored_fields(kind, name, (d, f)).items():
            drawn_ends = rng.choice(np.asarray(ends), shape).astype(np.int64)
            scale = {"mxfp4": 120, "int4": 0x3C00, "int8": 0x3A00}[kind.name]
            full = np.full(shape, scale) if n.endswith(SCALES) else drawn_ends
            record[n] = full.astype(stored)
    # all of one column at one end, with signs of the inputs that add up
    record["w_up"][:, 0] = np.asarray(ends[0]).astype(record["w_up"].dtype)
    record["w_up"][:, 1] = np.asarray(ends[1]).astype(record["w_up"].dtype)
    for slots in (fast, plain):
        slots.write(int(table_E[0]), record)
    h = np.where(rng.random((3, d)) < 0.5, -1, 1).astype(np.float32)
    h[1], h[2] = 1, -1
    one_T1 = jnp.ones((3, 1))
    first_T1 = jnp.zeros((3, 1), jnp.int32)
    got, want = (
        np.asarray(
            slots.add_expert_outputs(
                ExpertInputs(jnp.asarray(h), first_T1, one_T1, jnp.zeros((3, d))), table_E, "gelu"
            )
        )
        for slots in (fast, plain)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())


def test_all_values_of_8_bits() -> None:
    """Every float of 8 bits that is a number, the tiny ones and both zeros too, as widened by
    XLA.
    """
    d, f, kind = 256, 128, FORMATS["fp8"]
    fields = {
        n: field
        for name, shape in (("w_up", (d, 2 * f)), ("w_down", (f, d)))
        for n, field in stored_fields(kind, name, shape).items()
    }
    codes = np.asarray([code for code in range(256) if code & 127 != 127], np.uint8)
    record = {
        name: (
            np.full(shape, 0.01, stored)
            if name.endswith(SCALES)
            else np.resize(codes, shape).view(stored)
        )
        for name, (shape, stored) in fields.items()
    }
    both = [HostSlots(1, fields, native=is_native) for is_native in (True, False)]
    h_TD, ones_TK = drawn(np.random.default_rng(0), (2, d), jnp.float32)[0], jnp.ones((2, 1))
    outputs = []
    for slots in both:
        slots.write(0, record)
        tokens = ExpertInputs(h_TD, jnp.zeros((2, 1), jnp.int32), ones_TK, jnp.zeros((2, d)))
        outputs.append(slots.add_expert_outputs(tokens, np.zeros(1, np.int32), "swiglu"))
    assert_close(*outputs, 3e-6)


@dtypes
@pytest.mark.parametrize(
    ("activation", "biases"),
    [("swiglu", None), ("swiglu", jnp.bfloat16), ("gelu", jnp.float32), ("clamped_swiglu", None)],
)
def test_experts_in_slots(dtype: Any, activation: str, biases: Any) -> None:
    """As XLA computes them, for one token and many, with choices of nobody, and sizes beside
    registers.
    """
    for sizes in ((24, 17, 5), (256, 300, 3)):  # the larger ones are shared out by slices
        (fast, plain), table_E = slots_of(dtype, activation, biases, sizes)
        d, _, experts = sizes
        for tokens in (1, 9):
            rng = np.random.default_rng(tokens)
            idx = np.stack([rng.permutation(experts + 1)[:2] for _ in range(tokens)]).astype(
                np.int32
            )
            h = drawn(rng, (tokens, d), dtype)[0]
            weights = jnp.asarray(rng.random((tokens, 2)), jnp.float32)
            y = rng.normal(size=(tokens, d)).astype(np.float32)
            got, want = (
                slots.add_expert_outputs(
                    ExpertInputs(h, jnp.asarray(idx), weights, jnp.asarray(y)), table_E, activation
                )
                for slots in (fast, plain)
            )
            assert_close(got, want, 3e-6 if dtype == jnp.float32 else 2e-2)


@dtypes
@pytest.mark.parametrize(
    ("kind", "activation", "biases"),
    [
        *((kind, "swiglu", None) for kind in (*FORMATS.values(), None)),
        (FORMATS["int4"], "clamped_swiglu", jnp.float32),
        (None, "clamped_swiglu", jnp.float32),
        (None, "gelu", None),
    ],
    ids=[*FORMATS, "plain", "int4 clamped", "plain clamped", "plain gelu"],
)
def test_experts_of_many_tokens(
    kind: Format | None, activation: str, biases: Any, dtype: Any
) -> None:
    """As XLA computes them: strips that are not full, matrices widened in parts, more rows than
    a task takes.
    """
    sizes = [((96, 96, 3), 40), ((1088, 32, 3), 33), ((32, 96, 3), 300)] + [((80, 48, 3), 40)] * (
        kind is None
    )
    for (d, f, experts), tokens in sizes:
        (fast, plain), table_E = slots_of(dtype, activation, biases, (d, f, experts), kind)
        assert fast.native is not None
        assert fast.native.should_compute_experts(tokens, d, dtype) == native.has_wide_vectors()
        rng = np.random.default_rng(tokens)
        idx = np.stack([rng.permutation(experts + 1)[:2] for _ in range(tokens)]).astype(np.int32)
        # most tokens choose one expert, some none
        idx[:, 0] = np.where(rng.random(tokens) < 0.95, 0, experts)
        idx[:, 1] = np.where(idx[:, 1] == 0, 1, idx[:, 1])
        h = drawn(rng, (tokens, d), dtype)[0]
        weights = jnp.asarray(rng.random((tokens, 2)), jnp.float32)
        y = rng.normal(size=(tokens, d)).astype(np.float32)
        got, want = (
            slots.add_expert_outputs(
                ExpertInputs(h, jnp.asarray(idx), weights, jnp.asarray(y)), table_E, activation
            )
            for slots in (fast, plain)
        )
        assert_close(got, want, 3e-6 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize(
    ("kind", "int8_activations"),
    [*((kind, False) for kind in (*FORMATS.values(), None)), *((kind, True) for kind in TAKING)],
    ids=[*FORMATS, "bfloat16", *(f"{name} int8" for name in INT8_TAKING)],
)
def test_a_token_does_not_depend_on_the_others(kind: Format | None, int8_activations: bool) -> None:
    """Bit for bit: neither on tokens at the same experts nor on how many experts are in use, be
    they few or many.
    """
    (slots, _), table_E = slots_of(
        jnp.bfloat16, "swiglu", None, (256, 288, 6), kind, int8_activations=int8_activations
    )
    rng = np.random.default_rng(0)
    idx = np.stack([rng.permutation(6)[:3] for _ in range(90)]).astype(np.int32)
    h = drawn(rng, (90, 256), jnp.bfloat16)[0]
    weights = jnp.asarray(rng.random((90, 3)), jnp.float32)

    def run(some: slice) -> np.ndarray:
        y = jnp.zeros((h[some].shape[0], 256))
        return np.asarray(
            slots.add_expert_outputs(
                ExpertInputs(h[some], jnp.asarray(idx[some]), weights[some], y), table_E, "swiglu"
            )
        )

    alone = np.concatenate([run(slice(t, t + 1)) for t in range(20)])
    assert np.array_equal(run(slice(0, 20)), alone) and np.array_equal(run(slice(3, 9)), alone[3:9])
    if native.has_wide_vectors() or int8_activations:
        together = run(slice(0, 90))
        assert np.array_equal(run(slice(0, 33)), together[:33]) and np.array_equal(
            run(slice(37, 77)), together[37:77]
        )


def test_many_threads_may_call_at_once() -> None:
    """The operations' own threads work for one at a time; the others go on alone."""
    rng = np.random.default_rng(0)
    w, w64 = drawn(rng, (256, 2000), jnp.float32)
    xs = [drawn(rng, (2, 256), jnp.float32) for _ in range(40)]
    multiply = jax.jit(native.matmul)
    with ThreadPoolExecutor(8) as threads:
        for (_, x64), y in zip(xs, threads.map(lambda pair: multiply(pair[0], w), xs), strict=True):
            close(y, x64 @ w64, 256)


# Slots that programs find


class Host:
    """A table of two layers of four experts, and what was asked of its host; `bring` gives slots
    to what lacks them.
    """

    def __init__(self, wait_limit_s: float = 60.0) -> None:
        self.slot_of = np.full(8, -1, np.int32)
        self.asked: list[tuple[int, list[int]]] = []
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.finder = native.SlotFinder(self.slot_of, 4, self.bring, wait_limit_s)

    def bring(self, layer: int, experts: np.ndarray) -> None:
        self.asked.append((layer, experts.tolist()))
        assert self.may_answer.wait(60)
        if self.error is not None:
            raise self.error
        for record in 4 * layer + experts:
            if self.slot_of[record] < 0:
                self.slot_of[record] = self.slot_of.max() + 1

    def find(self, *choices: list[list[int]], first: int = 0) -> list[list[int]]:
        """What one program finds for the choices of layers, one after the other."""

        @jax.jit
        def program(chosen: list[jax.Array], where: jax.Array) -> list[jax.Array]:
            tables: list[jax.Array] = []
            for layer, idx_TK in enumerate(chosen):
                # a layer's choice hangs on the one before
                after = idx_TK if not tables else idx_TK + 0 * tables[-1][0]
                tables.append(native.find_slots(after, where, layer, 4))
            return tables

        found = program(
            [jnp.asarray(c, jnp.int32) for c in choices], self.finder.find_slots_operand(first)
        )
        return [np.asarray(table).tolist() for table in found]


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.may_answer.set()
    host.finder.close()


def test_programs_find_slots(host: Host) -> None:
    """What has a slot is not asked for; what lacks one is, with what the layer needs beside it."""
    host.slot_of[:] = [3, -1, 5, -1, -1, -1, 9, -1]
    assert host.find([[0, 2], [4, 0]]) == [[3, 0, 5, 0]]  # 4: no expert
    assert host.asked == [] and host.finder.chosen.tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert host.find([[1, 0]], [[2, 3]]) == [[3, 10, 5, 0], [0, 0, 9, 11]]
    assert host.asked == [(0, [0, 1]), (1, [2, 3])]
    assert host.find([[2, 0]], first=1) == [[12, 0, 9, 11]]
    assert host.asked[2:] == [(1, [0, 2])]
    assert host.finder.chosen.tolist() == [1, 1, 1, 0, 1, 0, 1, 1]


def test_experts_that_cannot_be_brought(host: Host) -> None:
    """End the program, and those after it, with an error; what needs nothing runs."""
    host.slot_of[0] = 1
    host.error = OSError("the disk is gone")
    for _ in range(2):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="find_slots: experts could not be brought"
        ):
            host.find([[0, 1]])
    assert host.asked == [(0, [0, 1])] and host.find([[0]]) == [[1, 0, 0, 0]]


def test_a_host_that_does_not_answer() -> None:
    host = Host(wait_limit_s=0.2)
    host.may_answer.clear()
    with pytest.raises(jax.errors.JaxRuntimeError, match="the host has not brought experts within"):
        host.find([[1]])
    host.may_answer.set()
    host.finder.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="the experts' places are closed"):
        host.find([[1]])


def test_closing_ends_a_program_that_waits(host: Host) -> None:
    host.may_answer.clear()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(host.find, [[1]])
        while not host.asked:
            time.sleep(0.001)
        # waits for its thread, which is to answer
        closing = threading.Thread(target=host.finder.close)
        closing.start()
        with pytest.raises(jax.errors.JaxRuntimeError, match="the experts' places are closed"):
            waiting.result(60)
        host.may_answer.set()
        closing.join(60)
        assert not closing.is_alive()


def test_layers_that_are_not_there(host: Host) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="find_slots: no such layer"):
        host.find([[1]], first=2)


# How they are built


def run_module(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "kernels_pallas.native"]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=300
    )


def fast_compiler(folder: Path) -> Path:
    """One that does not optimise."""
    fast = folder / "c++"
    fast.write_text(f'#!/bin/sh\nexec {shutil.which(os.environ.get("CXX", "c++"))} "$@" -O0\n')
    fast.chmod(0o755)
    return fast


@pytest.mark.slow
def test_without_a_home_folder_it_is_built_for_the_process(tmp_path: Path) -> None:
    load = (
        "from kernels_pallas.native import load, multiplies_many_rows as ask; print(load()); ask()"
    )
    environment = {
        "CXX": str(fast_compiler(tmp_path)),
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
    }
    done = without_home(["-c", load], environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/jmoe-native-")
    assert not list(tmp_path.glob("jmoe-native-*"))
    done = without_home(["-m", "kernels_pallas.native"], environment)
    assert (
        done.returncode == 1
        and "there is no home folder: set HOME or XDG_CACHE_HOME" in done.stderr
    )


@pytest.mark.slow
def test_it_is_built_once(tmp_path: Path) -> None:
    """By whoever comes first, of several at once; a later start takes what is there."""
    fast = fast_compiler(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(lambda _: run_module(tmp_path, CXX=str(fast)), range(2)))
    assert [d.returncode for d in done] == [0, 0], done
    (made,) = (tmp_path / "jmoe" / "native").glob("*.so")
    assert [d.stdout.strip() for d in done] == [str(made)] * 2
    before = made.stat().st_mtime_ns
    assert (
        run_module(tmp_path, CXX=str(fast)).stdout.strip() == str(made)
        and made.stat().st_mtime_ns == before
    )


@pytest.mark.parametrize(
    "damage",
    [
        # whoever maps it dies at the first page that is missing
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: bytes(len(content)),
        lambda content: content[:60_000] + bytes([content[60_000] ^ 1]) + content[60_001:],
    ],
    ids=["half", "empty", "zeros", "a bit"],
)
def test_a_damaged_library_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    whole = build()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kernels_pallas.native.library._built", [])
    kept = tmp_path / "jmoe" / "native" / whole.name
    kept.parent.mkdir(parents=True)
    shutil.copyfile(whole, kept)
    assert native.is_built()
    kept.write_bytes(damage(whole.read_bytes()))
    assert not native.is_built()
    monkeypatch.setattr(
        "kernels_pallas.native.library._compile", lambda _, path: shutil.copyfile(whole, path)
    )
    assert build() == kept and kept.read_bytes() == whole.read_bytes() and native.is_built()


def build_in_background(
    monkeypatch: pytest.MonkeyPatch, cache: Path, compiler: Path
) -> subprocess.Popen[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("kernels_pallas.native.library._building", building := [])
    monkeypatch.setattr("kernels_pallas.native.library._built", [])
    assert not native.is_built()
    native.build_in_background()
    native.build_in_background()
    (process,) = building
    return process


def wait_for_background() -> None:
    """Until the log has the outcome."""
    for thread in threading.enumerate():
        if thread.name == "native-build":
            thread.join(300)


def test_it_is_built_in_the_background(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By one process, which others need not wait for; the log says when the library is there."""
    compiler = tmp_path / "c++"  # makes an empty file of what it is asked for, once it may
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nwhile [ ! -e {tmp_path}/may-go-on ]; do sleep'
        ' 0.05; done\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    process = build_in_background(monkeypatch, tmp_path, compiler)
    assert process.poll() is None and not native.is_built()
    with caplog.at_level("INFO"):
        limit_s = time.monotonic() + 60
        while os.sched_getscheduler(process.pid) != os.SCHED_IDLE:  # it takes no processor time
            assert process.poll() is None and time.monotonic() < limit_s
            time.sleep(0.05)
        (tmp_path / "may-go-on").touch()
        wait_for_background()
    assert native.is_built() and caplog.messages == [
        "the native operations are built: the next start takes them"
    ]


def test_a_build_in_the_background_that_fails_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that fails would else be tried at every start without a word."""
    bad = tmp_path / "bad-compiler"
    bad.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 1\n")
    bad.chmod(0o755)
    build_in_background(monkeypatch, tmp_path, bad)
    wait_for_background()
    (said,) = caplog.messages
    assert said.startswith("no native operations at the next start") and said.endswith(
        "no space left"
    ), said


def test_what_a_killed_build_has_left_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each would leave megabytes: its process is gone with the code that would remove them."""
    folder, started = tmp_path / "jmoe" / "native", tmp_path / "started"
    slow = tmp_path / "slow-compiler"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n: > {started}\nsleep 1\nexit 1\n')
    slow.chmod(0o755)
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "CXX": str(slow),
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "kernels_pallas.native"], env=environment
    ) as process:
        while not started.exists():
            time.sleep(0.05)
        process.kill()
    assert [path.name for path in folder.iterdir() if path.is_dir()]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(slow))
    with pytest.raises(native.NotBuiltError, match="slow-compiler failed"):
        build()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_why_it_cannot_be_built(tmp_path: Path) -> None:
    bad = tmp_path / "bad-compiler"
    bad.write_text("#!/bin/sh\necho 'no such option: -march=native' >&2\nexit 1\n")
    bad.chmod(0o755)
    (tmp_path / "file").touch()
    cases: list[tuple[Callable[[], subprocess.CompletedProcess[str]], str]] = [
        (lambda: run_module(tmp_path, CXX="/nowhere/c++"), "$CXX = '/nowhere/c++' is not there"),
        (lambda: run_module(tmp_path, CXX=str(bad)), "no such option: -march=native"),
        (lambda: run_module(tmp_path / "file"), "Not a directory"),
    ]
    for run, words in cases:
        done = run()
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, (
            done
        )
    assert not list((tmp_path / "jmoe" / "native").glob("*.so"))


def test_a_library_is_of_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = build()
    assert library.is_file() and build() == library
    monkeypatch.setattr("kernels_pallas.native.library.FLAGS", ("-O0",))
    monkeypatch.setattr(
        "kernels_pallas.native.library._compile", lambda compiler, path: path.touch()
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build().name != library.name


# The instruction sets they are built for


def processor(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setattr(
        "kernels_pallas.native.library._processor_features",
        lambda: f"model name : one\nflags : {flags}",
    )


def test_an_instruction_set_that_the_processor_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library built for it would end the process at its first instruction."""
    processor(monkeypatch, "fpu ssse3 sse4_2 popcnt avx2 fma f16c bmi2 avx512f")
    assert usable_instruction_sets() == ("native", "sse4", "avx2")
    monkeypatch.setenv("JMOE_NATIVE_ISA", "avx512")
    words = r"JMOE_NATIVE_ISA = 'avx512': must be one of native, sse4, avx2"
    with pytest.raises(ValueError, match=words):
        instruction_set()
    with pytest.raises(ValueError, match=words):
        native.is_built()
    monkeypatch.setenv("JMOE_NATIVE_ISA", "AVX2")
    with pytest.raises(ValueError, match="JMOE_NATIVE_ISA = 'AVX2': must be one of"):
        instruction_set()
    monkeypatch.setenv("JMOE_NATIVE_ISA", "")
    assert instruction_set() == "native"


def test_a_given_library_is_not_taken_for_another_instruction_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of a bundle is built for everything its processor has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kernels_pallas.native.library._built", [tmp_path / "given.so"])
    monkeypatch.delenv("JMOE_NATIVE_ISA", raising=False)
    assert native.is_built()
    monkeypatch.setenv("JMOE_NATIVE_ISA", usable_instruction_sets()[1])
    assert not native.is_built()


def test_each_instruction_set_is_a_library_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Built with its flags alone, so that a forced one takes nothing else that the processor
    has.
    """
    every = {flag for needed, _ in INSTRUCTION_SETS.values() for flag in needed}
    processor(monkeypatch, " ".join(every))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "c++"  # writes the options that it is given
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nall="$*"\nwhile [ "$1" != -o ]; do shift; done\n'
        'echo "$all" > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    made: dict[Path, str] = {}
    for name, (_, flags) in INSTRUCTION_SETS.items():
        monkeypatch.setenv("JMOE_NATIVE_ISA", name)
        path = build()
        options = path.read_bytes().split(b"\n")[0].decode().split()
        assert [option for option in options if option.startswith("-m")] == list(flags)
        made[path] = name
    assert len(made) == len(INSTRUCTION_SETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in usable_instruction_sets() if name != "native"])
def test_every_operation_for_each_instruction_set(name: str) -> None:
    """The tests of this file, with a library built for it. The first run builds it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    chosen = (
        "products or row or norm or top_k or attention or experts or values or token or 8_bits"
        " or largest or keys or latents or size or nan"
    )
    environment = {**os.environ, "JMOE_NATIVE_ISA": name, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [
            *command,
            "-k",
            chosen,
            __file__,
            str(Path(__file__).with_name("test_native_fp8_cache.py")),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout, done.stdout[-300:]


@pytest.mark.parametrize("gather", [False, True])
def test_multiplications_of_a_training_step(gather: bool) -> None:
    """Of 6 rows in 2 groups, SwiGLU, and of 2 rows of 5 positions with 4 query heads on 2 key
    heads.
    """
    t, d, f, rows = 3, 16, 32, jnp.zeros(6, jnp.int32) if gather else None
    x, sizes = jnp.zeros((t if gather else 6, d)), jnp.full(2, 3, jnp.int32)
    weights = jnp.zeros((2, d, 2 * f)), jnp.zeros((2, f, d)), None, None
    grouped = native.GroupedRows(x, rows, sizes)
    attended = jnp.zeros((2, 5, 4, 16)), jnp.zeros((2, 5, 2, 16)), jnp.zeros((2, 5, 2, 32))

    def all_of_them(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        y, h = native.grouped_mlp(grouped, weights)
        results = native.causal_attention(q, k, v, 1.0)
        back = native.grouped_mlp_gradient(grouped, weights, h, y)
        return (
            back,
            native.causal_attention_gradient((q, k, v), results, results[0], 1.0),
            native.top_k_indices(x, 2),
        )

    found: dict[str, int] = {}
    for eqn in jax.make_jaxpr(all_of_them)(*attended).eqns:
        if eqn.primitive.name == "ffi_call":
            inputs: Any = [var.aval for var in eqn.invars]
            found[eqn.params["target_name"]] = count_op_multiplications(
                eqn.params["target_name"], [a.shape for a in inputs]
            )
    assert found == {
        "jmoe_grouped_mlp": 6 * 16 * 3 * 32,
        "jmoe_grouped_mlp_gradient": 2 * 6 * 16 * 3 * 32,
        "jmoe_causal_attention": 2 * 4 * 15 * (16 + 32),
        "jmoe_causal_attention_gradient": 2 * 4 * 15 * (3 * 16 + 2 * 32),
        "jmoe_top_k": 0,
    }
