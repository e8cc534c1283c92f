"""The kernel that norms, rotates and writes a step's queries, keys and values, in Pallas'
interpreter, against `Attention`'s own form and the scatter.
"""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import ModelConfig
from jmoe.config.positions import LongRopeConfig, YarnConfig
from jmoe.inference.kv_cache import KVCache, write_and_attend, write_by_scatter
from jmoe.layers.attention import Attention, CacheInputs
from jmoe.layers.experts import affine
from jmoe.run.ahead_of_time import lower_for_device
from kernels_pallas.cached_values import encode
from kernels_pallas.paged_attention import triton
from kernels_pallas.paged_attention.rotated_triton import rotate_write_and_attend
from kernels_pallas.rotary_write import Rotary, rotate_and_write
from kernels_pallas.saved import bfloat16_as_uint16
from tests.arrays import assert_close

BLOCK, BLOCKS, HEADS, GROUPS, SIZE = 128, 5, 6, 2, 16
TABLES = np.array([[4, 1], [2, 3], [0, 0]], np.int32)
# two tokens a row: in two blocks, one of them padding, both padding
POSITIONS = np.array([[127, 128], [3, 256], [256, 256]], np.int32)
YARN = YarnConfig(32.0, 64)
LONG = LongRopeConfig(tuple(map(float, range(1, 9))), (2.0,) * 8, 64, 4.0, is_long=True)
OLMOE: dict[str, Any] = {"qk_norm": "full", "clip_qkv": 1.0}


def attention_of(**changes: Any) -> Attention:
    config = ModelConfig(
        hidden_size=32,
        num_attention_heads=HEADS,
        head_dim=SIZE,
        initializer_range=0.5,
        **{"num_key_value_heads": GROUPS, **changes},
    )
    attention = Attention(config, 0.5, rngs=nnx.Rngs(0))
    for seed, norm in enumerate((attention.q_norm, attention.k_norm)):
        if norm is not None:
            scale = np.random.default_rng(seed).uniform(0.5, 2, norm.scale[...].shape)
            norm.scale[...] = jnp.asarray(scale, jnp.float32)
    if attention.b_qkv is not None:
        bias = np.random.default_rng(7).normal(size=attention.b_qkv[...].shape)
        attention.b_qkv[...] = jnp.asarray(bias, jnp.float32)
    return attention


def stored_cache(dtype: Any) -> KVCache:
    draws = np.random.default_rng(9).normal(size=(2, BLOCKS, GROUPS, BLOCK, SIZE))
    return KVCache(*(bfloat16_as_uint16(jnp.asarray(x, dtype)) for x in draws))


def values(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        (OLMOE, jnp.bfloat16),
        ({"qk_norm": "head", "clip_qkv": 1.0}, jnp.float32),
        ({"rope_scaling": YARN}, jnp.bfloat16),
        ({"rope_scaling": LONG}, jnp.float32),
        ({"position": "learned"}, jnp.float32),
        ({**OLMOE, "qkv_bias": True}, jnp.float32),
        ({"qkv_bias": True}, jnp.bfloat16),
    ],
)
def test_norms_rotation_and_write(changes: dict[str, Any], dtype: Any) -> None:
    """Queries, written keys and values; every other place of the cache keeps its bits."""
    attention = attention_of(**changes)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 32)), dtype)

    @jax.jit
    def both(cache: KVCache) -> Any:
        qkv, places = attention._project_qkv(x), (jnp.asarray(TABLES), jnp.asarray(POSITIONS))
        unbiased = qkv if attention.b_qkv is None else affine(x, attention.w_qkv)
        operands = unbiased, cache.k_NGLd, cache.v_NGLe, *places
        ours = attention._rotate_and_write(*operands, dtype=dtype, interpret=True)
        q, k, v = attention._normed_and_rotated(qkv, places[1])
        return ours, (q, write_by_scatter(cache, *places, k, v))

    cache = stored_cache(dtype)
    (q, *written), (expected, scattered) = both(cache)
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    real = POSITIONS < 2 * BLOCK
    assert q.dtype == expected.dtype and np.isfinite(np.asarray(q, np.float32)).all()
    assert_close(q[real], expected[real], tolerance)
    for before, after, by_xla in zip(
        jax.tree.leaves(cache), written, jax.tree.leaves(scattered), strict=True
    ):
        untouched = np.ones(after.shape, bool)
        for block, place in ((4, 127), (1, 0), (2, 3)):
            untouched[block, :, place] = False
        assert np.array_equal(np.asarray(after)[untouched], np.asarray(before)[untouched])
        assert not np.array_equal(after, before)
        assert_close(values(after, dtype), values(by_xla, dtype), tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_cache_in_fp8(dtype: Any) -> None:
    """The kernel writes the codes that the scatter writes, but where sums round otherwise."""
    attention = attention_of(**OLMOE)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 32)), dtype)
    cache = KVCache(*(encode(x, jnp.uint8) for x in jax.tree.leaves(stored_cache(jnp.float32))))

    @jax.jit
    def both(cache: KVCache) -> Any:
        qkv, places = attention._project_qkv(x), (jnp.asarray(TABLES), jnp.asarray(POSITIONS))
        operands = qkv, cache.k_NGLd, cache.v_NGLe, *places
        _, *written = attention._rotate_and_write(*operands, dtype=dtype, interpret=True)
        _, k, v = attention._normed_and_rotated(qkv, places[1])
        return written, write_by_scatter(cache, *places, k, v)

    written, scattered = both(cache)
    for before, after, by_xla in zip(
        *map(jax.tree.leaves, (cache, written, scattered)), strict=True
    ):
        assert after.dtype == jnp.uint8 and not np.array_equal(after, before)
        assert (np.asarray(after) != np.asarray(by_xla)).mean() < 1e-4
        values = [np.asarray(a).view(jnp.float8_e4m3fn).astype(np.float32) for a in (after, by_xla)]
        assert_close(*values, 0.07)  # a code is at most 1/8 from the next


@pytest.mark.parametrize(
    ("changes", "dtype", "options"),
    [
        (OLMOE, jnp.bfloat16, {"num_splits": 4}),
        ({"qk_norm": "head", "qkv_bias": True}, jnp.float32, {"num_splits": 1}),
        ({"rope_scaling": YARN}, jnp.float32, {"num_splits": 4, "window": 40, "sinks": True}),
        ({"position": "learned"}, jnp.float32, {"num_splits": 1, "window": 1}),
        ({}, jnp.uint8, {"num_splits": 2}),
    ],
)
def test_attention_that_rotates_and_writes(
    changes: dict[str, Any], dtype: Any, options: dict[str, Any]
) -> None:
    """One kernel gives the sums and the cache of the two kernels one after the other; the cache
    holds NaN from the tokens' own positions on.
    """
    attention, is_fp8 = attention_of(**changes), dtype == jnp.uint8
    dtype = jnp.float32 if is_fp8 else dtype
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 1, 32)), dtype)
    tables, at = np.array([[4, 1], [2, 3], [0, 0], [0, 0]]), np.array([[127], [200], [0], [256]])
    draws = np.random.default_rng(9).normal(size=(2, BLOCKS, GROUPS, BLOCK, SIZE))
    for block, place in ((4, 127), (3, 72), (0, 0)):
        draws[:, block, :, place:] = np.nan
    wide = [jnp.asarray(x, dtype) for x in draws]
    cache = [encode(x, jnp.uint8) if is_fp8 else bfloat16_as_uint16(x) for x in wide]
    if options.pop("sinks", False):
        options["sinks_H"] = jnp.asarray(np.random.default_rng(3).normal(size=HEADS), jnp.float32)
    splits, masks = options.pop("num_splits"), {"scale": 0.25, **options}

    @jax.jit
    def both(*cache: jax.Array) -> Any:
        qkv = affine(x, attention.w_qkv)
        qkv = qkv if attention.b_qkv is not None else qkv.astype(dtype)
        places = jnp.asarray(tables, jnp.int32), jnp.asarray(at, jnp.int32)
        how: dict[str, Any] = {"num_splits": splits, "interpret": True}
        operands = qkv, *cache, *places
        ours = attention._rotate_write_and_attend(*operands, dtype=dtype, **masks, **how)
        q, *written = attention._rotate_and_write(*operands, dtype=dtype, interpret=True)
        return ours, (
            triton.paged_attention(q, *written, *places, value_dim=SIZE, **masks, **how),
            *written,
        )

    (out, *ours), (expected, *written) = both(*cache)
    real = at[:, 0] < 2 * BLOCK
    assert out.dtype == dtype and np.isfinite(np.asarray(out, np.float32)).all()
    assert_close(out[real], expected[real], 1e-2 if dtype == jnp.bfloat16 else 1e-5)
    for one, other in zip(ours, written, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_attention_of_several_tokens_a_row_rotates_apart() -> None:
    k = jnp.zeros((BLOCKS, GROUPS, BLOCK, SIZE))
    qkv = jnp.zeros((3, 2, (HEADS + 2 * GROUPS) * SIZE))
    with pytest.raises(NotImplementedError, match="2 tokens a row"):
        rotate_write_and_attend(qkv, (k, k), TABLES, POSITIONS, Rotary(None), scale=1.0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"partial_rotary_factor": 0.5}, "of a part of a head"),
        ({"rope_interleave": True}, "interleaved"),
        ({"qk_norm": "rotated_head"}, "norms of queries and keys after their rotation"),
        ({**OLMOE, "num_key_value_heads": 1}, "clipping after a norm over a single head"),
    ],
)
def test_what_it_does_not_rotate_is_left_to_xla(changes: dict[str, Any], match: str) -> None:
    attention, cache = attention_of(**changes), stored_cache(jnp.float32)
    qkv = jnp.zeros((3, 2, (HEADS + 2 * GROUPS) * SIZE))
    with pytest.raises(NotImplementedError, match=match):
        attention._rotate_and_write(qkv, cache.k_NGLd, cache.v_NGLe, TABLES, POSITIONS)


def test_heads_and_caches_that_it_does_not_read() -> None:
    rotary, places = Rotary(None), (TABLES, POSITIONS)
    k = jnp.zeros((BLOCKS, GROUPS, BLOCK, 24))
    with pytest.raises(NotImplementedError, match="heads of 24 dimensions"):
        rotate_and_write(jnp.zeros((3, 2, 240)), (k, k), *places, rotary)
    with pytest.raises(NotImplementedError, match="a cache of float32"):
        rotate_and_write(jnp.zeros((3, 2, 240), jnp.bfloat16), (k, k), *places, rotary)


@pytest.mark.parametrize(("tokens", "kernels"), [(1, (1, 2)), (2, (2, 3))])
def test_a_gpu_writes_without_a_scatter(tokens: int, kernels: tuple[int, int]) -> None:
    """Its program of single tokens has one kernel, of several tokens a row two, and no scatter; XLA
    computes no rotated keys beside them.
    """
    device: Any = SimpleNamespace(platform="gpu", compute_capability="8.9")
    attention = attention_of(**OLMOE)
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731

    def step(x: jax.Array, cache: KVCache, blocks_PW: jax.Array, positions_PC: jax.Array) -> Any:
        def attend(new: CacheInputs) -> jax.Array:
            return write_and_attend(new, cache, blocks_PW, positions_PC, scale=0.25)[0]

        return attention.attend_to_cache(x, positions_PC, attend)

    cache = KVCache(*[of(jnp.uint16, BLOCKS, GROUPS, BLOCK, SIZE)] * 2)
    operands = (
        *(of(jnp.bfloat16, 3, tokens, 32), cache),
        *(of(jnp.int32, 3, 2), of(jnp.int32, 3, tokens)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton backend
        _, lowered = lower_for_device(device, jax.jit(partial(step)), *operands)
    text = lowered.as_text()
    assert text.count("@__gpu$xla.gpu.triton") in kernels  # combine_splits only with several splits
    assert "stablehlo.scatter" not in text and "stablehlo.sine" not in text
