"""Blocked attention against a plain softmax over the whole score matrix.

Legend: B batch, S sequence, H query heads, G key/value heads, d head dimension.
"""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe.config import ModelConfig
from jmoe.layers.attention import (
    Attention,
    FlashKernel,
    blocked_attention,
    causal_attention,
    flash_attention,
    full_attention,
)
from jmoe.layers.rotated_heads import norm_and_rotate
from jmoe.models.block import SAVED
from kernels_pallas import implementations
from kernels_pallas.implementations import trace_for_device
from tests.arrays import assert_near

B, d = 2, 16


def plain(q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGd: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v with every key and value head repeated for its query heads."""
    repeats = q_BSHd.shape[2] // k_BSGd.shape[2]
    k_BSHd, v_BSHd = jnp.repeat(k_BSGd, repeats, axis=2), jnp.repeat(v_BSGd, repeats, axis=2)
    s_BHQC = jnp.einsum("bqhd,bchd->bhqc", q_BSHd, k_BSHd) / np.sqrt(np.float32(q_BSHd.shape[-1]))
    s_BHQC = jnp.where(jnp.tril(jnp.ones(s_BHQC.shape[2:], bool)), s_BHQC, -jnp.inf)
    return jnp.einsum("bhqc,bchd->bqhd", jax.nn.softmax(s_BHQC), v_BSHd)


def plain_with_everything(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    v_BSGd: jax.Array,
    sinks_H: jax.Array,
    *,
    scale: float,
    window: int,
) -> jax.Array:
    """The same with a window, and with a key that has a logit per head and no value."""
    length, repeats = q_BSHd.shape[1], q_BSHd.shape[2] // k_BSGd.shape[2]
    k_BSHd, v_BSHd = jnp.repeat(k_BSGd, repeats, axis=2), jnp.repeat(v_BSGd, repeats, axis=2)
    s_BHQC = jnp.einsum("bqhd,bchd->bhqc", q_BSHd, k_BSHd) * np.float32(scale)
    distance = np.arange(length)[:, None] - np.arange(length)
    s_BHQC = jnp.where((distance >= 0) & (distance < window), s_BHQC, -jnp.inf)
    sinks = jnp.broadcast_to(sinks_H[:, None, None], (*s_BHQC.shape[:3], 1))
    a_BHQC = jax.nn.softmax(jnp.concatenate([s_BHQC, sinks], axis=-1))[..., :-1]
    return jnp.einsum("bhqc,bchd->bqhd", a_BHQC, v_BSHd)


def operands(
    length: int, heads: int, groups: int, dtype: Any, scale: float = 1.0
) -> list[jax.Array]:
    """[q, k, v, gradient of the output]."""
    rng = np.random.default_rng(length)
    draw = lambda n: jnp.asarray(scale * rng.normal(size=(B, length, n, d)), dtype)  # noqa: E731
    return [draw(heads), draw(groups), draw(groups), draw(heads)]


def run(f: Any, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> list[jax.Array]:
    """[output, dq, dk, dv]."""

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> list[jax.Array]:
        o, vjp = jax.vjp(f, q, k, v)
        return [o, *vjp(g)]

    result: list[jax.Array] = both(q, k, v, g)
    return result


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 100, 128, 300])
def test_float32(length: int, heads: int, groups: int) -> None:
    arrays = operands(length, heads, groups, jnp.float32)
    for a, b in zip(run(blocked_attention, *arrays), run(plain, *arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(0.1, float(jnp.abs(b).max())))


@pytest.mark.parametrize("window", [1, 7, 150, 1000])
@pytest.mark.parametrize("length", [5, 300])
def test_sinks_windows_scale_and_wider_values(length: int, window: int) -> None:
    """Values and all gradients, with a window that cuts inside a block, across blocks, or
    nothing.
    """
    q, k, _, _ = operands(length, 4, 2, jnp.float32)
    rng = np.random.default_rng(1)
    v, g = (jnp.asarray(rng.normal(size=(B, length, n, d + 5)), jnp.float32) for n in (2, 4))
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)

    @jax.jit
    def ours(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> Any:
        o, vjp = jax.vjp(
            lambda *x: causal_attention(*x[:3], scale=0.3, sinks_H=x[3], window=window),
            q,
            k,
            v,
            sinks,
        )
        return [o, *vjp(g)]

    @jax.jit
    def expected(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> Any:
        o, vjp = jax.vjp(
            lambda *x: plain_with_everything(*x, scale=0.3, window=window), q, k, v, sinks
        )
        return [o, *vjp(g)]

    for a, b in zip(ours(q, k, v, sinks), expected(q, k, v, sinks), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(0.1, float(jnp.abs(b).max())))


def test_a_high_sink_takes_all_weight() -> None:
    q, k, v, _ = operands(20, 4, 2, jnp.float32)
    o = causal_attention(q, k, v, sinks_H=jnp.array([200.0, -200.0, 0.0, 200.0]))
    assert (o[:, :, [0, 3]] == 0).all()
    np.testing.assert_allclose(o[:, :, 1], causal_attention(q, k, v)[:, :, 1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("length", [100, 300])
def test_bfloat16(length: int) -> None:
    arrays = operands(length, 4, 2, jnp.bfloat16)
    ours = run(blocked_attention, *arrays)
    expected = run(plain, *(a.astype(jnp.float32) for a in arrays))
    assert {a.dtype for a in ours} == {jnp.dtype(jnp.bfloat16)}
    assert_near(ours, expected, 2e-2)


@pytest.mark.parametrize("window", [7, 150, 1000])
def test_sinks_windows_and_wider_values_in_bfloat16(window: int) -> None:
    """Values and all gradients against float32."""
    q, k, _, _ = operands(300, 4, 2, jnp.bfloat16)
    rng = np.random.default_rng(1)
    v, g = (jnp.asarray(rng.normal(size=(B, 300, n, d + 5)), jnp.bfloat16) for n in (2, 4))
    sinks = jnp.asarray(rng.normal(size=4) + 2, jnp.float32)

    def with_gradients(attend: Any, *arrays: jax.Array) -> Any:
        o, vjp = jax.vjp(partial(attend, scale=0.3, window=window), *arrays)
        return [o, *vjp(g.astype(o.dtype))]

    ours = jax.jit(
        partial(with_gradients, lambda *x, **form: causal_attention(*x[:3], sinks_H=x[3], **form))
    )(q, k, v, sinks)
    expected = jax.jit(partial(with_gradients, plain_with_everything))(
        *(x.astype(jnp.float32) for x in (q, k, v)), sinks
    )
    assert [a.dtype for a in ours] == [*[jnp.bfloat16] * 4, jnp.float32]
    assert_near(ours, expected, 2e-2)


@pytest.mark.parametrize(("dtype", "share"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_without_a_mask(dtype: Any, share: float) -> None:
    """Values and all gradients of what image models take, with grouped heads, against float32."""
    arrays = operands(50, 4, 2, dtype)

    def plain_unmasked(q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGd: jax.Array) -> jax.Array:
        k_BSHd, v_BSHd = (jnp.repeat(x, 2, axis=2) for x in (k_BSGd, v_BSGd))
        s_BHQC = jnp.einsum("bqhd,bchd->bhqc", q_BSHd, k_BSHd) * np.float32(0.3)
        return jnp.einsum("bhqc,bchd->bqhd", jax.nn.softmax(s_BHQC), v_BSHd)

    with jax.numpy_dtype_promotion("standard"):  # JAX's function needs it in bfloat16
        ours = run(partial(full_attention, scale=0.3), *arrays)
    expected = run(plain_unmasked, *(a.astype(jnp.float32) for a in arrays))
    assert {a.dtype for a in ours} == {jnp.dtype(dtype)}
    assert_near(ours, expected, share)


def test_large_scores_do_not_overflow() -> None:
    # scores in the thousands: exp of one alone is infinite
    arrays = operands(300, 4, 2, jnp.float32, scale=30.0)
    for a, b in zip(run(blocked_attention, *arrays), run(plain, *arrays), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * float(jnp.abs(b).max()))


def test_no_block_above_the_diagonal_is_computed() -> None:
    """300 rows in blocks of 128: 3 products of scores, 1 + 2 + 3 blocks wide, where a whole
    matrix has 9.
    """
    q, k, v, _ = operands(384, 4, 2, jnp.float32)
    shapes = str(jax.make_jaxpr(blocked_attention)(q, k, v))
    assert "[2,2,2,128,384]" in shapes and "[2,2,2,128,128]" in shapes
    assert "384,384" not in shapes


def test_causal_attention_is_blocked_attention_on_cpu() -> None:
    q, k, v, _ = operands(40, 4, 2, jnp.float32)
    np.testing.assert_array_equal(
        jax.jit(causal_attention)(q, k, v), jax.jit(blocked_attention)(q, k, v)
    )


@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_layer_is_causal_and_takes_every_option(qk_norm: Any) -> None:
    config = ModelConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        qk_norm=qk_norm,
        attention_bias=True,
    )
    layer = Attention(config, 0.02, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, 150, 24)), jnp.float32)
    call = jax.jit(lambda x: nnx.merge(graph, state)(x))
    y, changed = call(x), call(x.at[:, 140].add(1.0))
    assert y.shape == x.shape and y.dtype == jnp.float32
    np.testing.assert_array_equal(y[:, :140], changed[:, :140])
    assert (y[:, 140:] != changed[:, 140:]).any(axis=(0, 2)).all()


def gpu(capability: str) -> Any:
    """A GPU that is only described."""
    return SimpleNamespace(platform="gpu", compute_capability=capability)


def stand_in(scale: float, window: int | None) -> FlashKernel:
    """The mathematics of cuDNN's kernel on whole score matrices in float32: its gradient takes
    probabilities from the log-sums that it is given, and the output's products from that output.
    """

    def scores(q_BSHd: jax.Array, k_BSGd: jax.Array) -> jax.Array:
        k_BSHd = jnp.repeat(k_BSGd, q_BSHd.shape[2] // k_BSGd.shape[2], axis=2)
        distance = np.arange(q_BSHd.shape[1])[:, None] - np.arange(q_BSHd.shape[1])
        seen = (distance >= 0) & (distance < (window or distance.size))
        s_BHQC = jnp.einsum("bqhd,bchd->bhqc", q_BSHd, k_BSHd) * np.float32(scale)
        return jnp.where(seen, s_BHQC, -jnp.inf)

    def forward(q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGe: jax.Array) -> Any:
        s_BHQC = scores(q_BSHd, k_BSGd)
        v_BSHe = jnp.repeat(v_BSGe, q_BSHd.shape[2] // v_BSGe.shape[2], axis=2)
        o_BSHe = jnp.einsum("bhqc,bchd->bqhd", jax.nn.softmax(s_BHQC), v_BSHe)
        return o_BSHe, jax.nn.logsumexp(s_BHQC, axis=-1)

    def gradient(operands: Any, results: Any, do_BSHe: jax.Array) -> Any:
        (q_BSHd, k_BSGd, v_BSGe), (o_BSHe, lse_BHS) = operands, results
        repeats = q_BSHd.shape[2] // k_BSGd.shape[2]
        k_BSHd, v_BSHe = (jnp.repeat(x, repeats, axis=2) for x in (k_BSGd, v_BSGe))
        p_BHQC = jnp.exp(scores(q_BSHd, k_BSGd) - lse_BHS[..., None])
        delta_BHQ1 = (do_BSHe * o_BSHe).sum(axis=-1).transpose(0, 2, 1)[..., None]
        dp_BHQC = jnp.einsum("bqhe,bche->bhqc", do_BSHe, v_BSHe)
        ds_BHQC = p_BHQC * (dp_BHQC - delta_BHQ1) * np.float32(scale)
        summed = lambda x: x.reshape(*x.shape[:2], -1, repeats, x.shape[3]).sum(axis=3)  # noqa: E731
        return (
            jnp.einsum("bhqc,bchd->bqhd", ds_BHQC, k_BSHd),
            summed(jnp.einsum("bhqc,bqhd->bchd", ds_BHQC, q_BSHd)),
            summed(jnp.einsum("bhqc,bqhe->bche", p_BHQC, do_BSHe)),
        )

    return FlashKernel(forward, gradient)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("value_dim", [d, d - 5])
def test_flash_kernel_with_sinks_windows_and_smaller_values(
    window: int | None, has_sinks: bool, value_dim: int
) -> None:
    """Values and all gradients of what runs around cuDNN's kernel, in float32. A sink that takes
    half of the weight changes each of them.
    """
    length = 40
    q, k, _, _ = operands(length, 4, 2, jnp.float32)
    rng = np.random.default_rng(1)
    v, g = (jnp.asarray(rng.normal(size=(B, length, n, value_dim)), jnp.float32) for n in (2, 4))
    sinks = jnp.asarray(rng.normal(size=4) + 2, jnp.float32)
    kernel = stand_in(0.3, window)

    @jax.jit
    def ours(*arrays: jax.Array) -> Any:
        attend = lambda q, k, v, sinks: flash_attention(  # noqa: E731
            q, k, v, sinks if has_sinks else None, kernel
        )
        o, vjp = jax.vjp(attend, *arrays)
        return [o, *vjp(g)]

    @jax.jit
    def expected(*arrays: jax.Array) -> Any:
        attend = lambda q, k, v, sinks: plain_with_everything(  # noqa: E731
            q,
            k,
            v,
            sinks if has_sinks else jnp.full(4, -jnp.inf),
            scale=0.3,
            window=window or length,
        )
        o, vjp = jax.vjp(attend, *arrays)
        return [o, *vjp(g)]

    for a, b in zip(ours(q, k, v, sinks), expected(q, k, v, sinks), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(0.1, float(jnp.abs(b).max())))


def test_flash_kernel_with_sinks_of_any_size() -> None:
    """No overflow where a sink takes all of the weight or none of it."""
    q, k, v, g = operands(20, 4, 2, jnp.float32)
    sinks = jnp.array([200.0, -200.0, 0.0, 200.0])

    @jax.jit
    def both(*arrays: jax.Array) -> Any:
        o, vjp = jax.vjp(lambda *x: flash_attention(*x, stand_in(0.25, None)), *arrays)
        return o, *vjp(g)

    o, *gradients = both(q, k, v, sinks)
    assert (o[:, :, [0, 3]] == 0).all()
    assert all(np.isfinite(x).all() for x in gradients)


GPU_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 8},
    "sinks and window": {"sinks_H": jnp.zeros(4), "window": 8},
    "sinks": {"sinks_H": jnp.zeros(4)},
}


@pytest.mark.parametrize("case", GPU_CASES)
def test_the_kernel_of_a_gpu_runs_once_a_layer(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its results are saved for the backward pass, which computes what was before it again."""
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        o_BSHd = causal_attention(*(jnp.sin(x) for x in (q, k, v)), **GPU_CASES[case])
        return jnp.square(o_BSHd.astype(jnp.float32)).sum()

    *qkv, _ = operands(32, 4, 2, jnp.bfloat16)
    gradients = jax.grad(jax.checkpoint(loss, policy=policy, prevent_cse=False), (0, 1, 2))
    with trace_for_device(gpu("9.0")), caplog.at_level(logging.WARNING):
        text = str(jax.make_jaxpr(gradients)(*qkv))
    assert text.count(" sin ") == 6
    assert text.count("=__cudnn$fmhaSoftmax\n") == 1
    assert text.count("=__cudnn$fmhaSoftmaxBackward\n") == 1
    assert not caplog.records


@pytest.mark.parametrize("case", GPU_CASES)
def test_cudnn_where_programs_are_compiled_for_a_gpu_that_is_not_here(case: str) -> None:
    """A step compiled ahead of time had blocks in plain XLA, which is not what runs on that GPU."""
    q = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.bfloat16)
    traced = lambda: str(jax.make_jaxpr(partial(causal_attention, **GPU_CASES[case]))(q, q, q))  # noqa: E731
    with trace_for_device(gpu("8.9")):
        assert traced().count("__cudnn$fmhaSoftmax") == 1
    assert "__cudnn" not in traced()


@pytest.mark.parametrize(
    ("dtype", "dims", "capability", "why"),
    [
        (jnp.float32, (64, 64), "9.0", "float32: not one of bfloat16, float16"),
        (jnp.bfloat16, (192, 128), "8.9", "heads of 192 and 128 on compute capability 8.9"),
        (jnp.bfloat16, (136, 136), "12.0", "heads of 136: not a multiple of 8 up to 128"),
        (jnp.bfloat16, (64, 64), "7.5", "compute capability 7.5: below 8.0"),
        (jnp.bfloat16, (32, 32), "gfx942", "not an NVIDIA GPU"),
    ],
)
def test_a_gpu_without_a_kernel_for_the_case_says_so_once(
    dtype: Any, dims: tuple[int, int], capability: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    implementations.log_once.cache_clear()
    q, v = (jax.ShapeDtypeStruct((1, 16, 2, size), dtype) for size in dims)
    with trace_for_device(gpu(capability)), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert "__cudnn" not in str(jax.make_jaxpr(causal_attention)(q, q, v))
    (record,) = caplog.records
    assert f"attention: cudnn does not support this case ({why}" in record.message
    assert record.message.endswith("; xla is used")


@pytest.mark.parametrize("changes", [{"qk_norm": "full"}, {"clip_qkv": 1.0}], ids=str)
def test_the_kernel_of_norms_and_rotation(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It runs on a GPU, once a pass, where it supports the options; the log says once where not."""
    implementations.log_once.cache_clear()
    options: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, **changes}
    attention = Attention(ModelConfig(hidden_size=32, **options), 0.1, rngs=nnx.Rngs(0))

    def loss(x_BSD: jax.Array) -> jax.Array:
        q, k, v, _ = attention.project(x_BSD, jnp.arange(8))
        return (q * k * v).astype(jnp.float32).sum()

    x_BSD = jax.ShapeDtypeStruct((2, 8, 32), jnp.bfloat16)
    with trace_for_device(gpu("9.0")), caplog.at_level(logging.WARNING):
        texts = [str(jax.make_jaxpr(jax.grad(loss))(x_BSD)) for _ in range(2)]
    is_supported = "clip_qkv" not in changes
    for text in texts:
        assert ("name=rotated_heads_kernel" in text) == is_supported
        assert ("name=rotated_heads_gradients_kernel" in text) == is_supported
    assert [r.message.count("clipped queries") for r in caplog.records] == [1] * (not is_supported)
    implementations.log_once.cache_clear()
    qkv = jnp.ones((1, 8, 96), jnp.float32)
    inputs = attention.config, (attention.q_norm, attention.k_norm), None, qkv, jnp.arange(8)
    if is_supported:
        by_xla = attention._normed_and_rotated(qkv, jnp.arange(8))
        for ours, expected in zip(norm_and_rotate(*inputs, interpret=True), by_xla, strict=True):
            assert_near(ours, expected, 1e-5)


def test_no_block_outside_the_window_is_computed() -> None:
    """512 rows in blocks of 128 under a window of 64: each sees its own block and the one before."""
    q, k, v, _ = operands(512, 4, 2, jnp.float32)
    shapes = str(jax.make_jaxpr(partial(blocked_attention, window=64))(q, k, v))
    assert "[2,2,2,128,256]" in shapes and "[2,2,2,128,384]" not in shapes
