"""Attention to a cache of latents, in its absorbed and its expanded form, against the same layer's
attention to the whole sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.lib.published import published_config
from jmoe.config import ModelConfig, YarnConfig
from jmoe.inference.cached_layers import CachedAttention, CachePlaces
from jmoe.inference.kv_cache import BLOCK, KVCache, empty_caches
from jmoe.layers.latent_attention import LatentAttention
from jmoe.models.huggingface import model_config
from kernels_pallas.native import allow_native_inference
from tests.arrays import assert_close
from tests.tiny_engines import needs_compiler

SIZES = {
    "vocab_size": 8,
    "hidden_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "num_experts": 0,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = YarnConfig(factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "YaRN": {"rope_scaling": YARN},
    "query latents, biases": {
        "q_lora_rank": 14,
        "attention_bias": True,
        "rope_interleave": True,
    },
}
# (first position, tokens) of each step: a chunk that is expanded, one that is not, single tokens
CHUNKS = [(0, 120), (120, 13), *((at, 1) for at in range(133, 136))]
NUM_BLOCKS, NUM_TOKENS = 4, 136
BLOCKS = np.array([[2, 0]], np.int32)  # of the sequence


def layer_of(**options: Any) -> LatentAttention:
    layer = LatentAttention(ModelConfig(**(SIZES | options)), 0.3, rngs=nnx.Rngs(0))
    for name in ("b_q_a", "b_kv_a", "b_out"):
        if (bias := getattr(layer, name)) is not None:
            bias[...] = jax.random.normal(jax.random.key(1), bias.shape)
    return layer


def run_chunks(
    layer: LatentAttention, x_SD: jax.Array, context: Callable[[int], int | None], *, native: bool
) -> jax.Array:
    """Return the layer's output [S, D] for `CHUNKS`, one after the other over one cache."""
    (cache,) = empty_caches(layer.config, NUM_BLOCKS, x_SD.dtype)
    nan = jnp.nan if x_SD.dtype == jnp.float32 else 0xFFFF  # left behind by other requests
    cache = jax.tree.map(lambda x: jnp.full_like(x, nan), cache)

    @partial(jax.jit, static_argnums=4)
    def step(
        cache: KVCache, x_1CD: jax.Array, blocks: jax.Array, positions: jax.Array, bound: int | None
    ) -> tuple[jax.Array, KVCache]:
        with allow_native_inference(positions.size * native):
            attention = CachedAttention(cache, CachePlaces(blocks, positions, None, bound))
            return attention(layer, x_1CD)[0], attention.cache

    out = []
    for start, count in CHUNKS:
        width = max(2, count) if context(count) is None else count
        positions = np.full((1, width), BLOCKS.size * BLOCK, np.int32)
        positions[0, :count] = np.arange(start, start + count)
        x_1CD = jnp.pad(x_SD[start : start + count], ((0, width - count), (0, 0)))[None]
        y_CD, cache = step(cache, x_1CD, BLOCKS, positions, context(count))
        out.append(y_CD[:count])
    return jnp.concatenate(out)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_cache_gives_what_the_whole_sequence_gives(
    options: dict[str, Any], native: bool
) -> None:
    if native:
        needs_compiler()
    layer = layer_of(**options)
    x_SD = jax.random.normal(jax.random.key(2), (NUM_TOKENS, SIZES["hidden_size"]))
    want = layer(x_SD[None])[0]
    layer.split_w_kv_b()
    assert_close(layer(x_SD[None])[0], want, 1e-5)
    assert not layer.uses_absorbed_form(120) and layer.uses_absorbed_form(13)
    got = run_chunks(layer, x_SD, lambda count: None, native=native)
    assert_close(got, want, 1e-5)
    if not native:  # single tokens as on an accelerator
        at_once = lambda count: 2 * BLOCK if count == 1 else None  # noqa: E731
        assert_close(run_chunks(layer, x_SD, at_once, native=False), want, 1e-5)


@pytest.mark.parametrize("native", [False, True])
def test_in_bfloat16(native: bool) -> None:
    """With latents, queries and sums rounded."""
    if native:
        needs_compiler()
    layer = layer_of(**OPTIONS["query latents, biases"])
    x_SD = jax.random.normal(jax.random.key(2), (NUM_TOKENS, SIZES["hidden_size"])).astype(
        jnp.bfloat16
    )
    want = layer(x_SD[None].astype(jnp.float32))[0]
    layer.split_w_kv_b()
    assert_close(run_chunks(layer, x_SD, lambda count: None, native=native), want, 2e-2)


def test_bytes_of_a_token() -> None:
    """70 KB for DeepSeek-V3, where keys and values of all heads would take 5.0 MB."""
    fields = published_config("deepseek-lite", 61) | {
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
    }
    config = model_config(fields | {"num_key_value_heads": 128})
    tokens = 64 * BLOCK
    caches = jax.eval_shape(lambda: empty_caches(config, 64, jnp.dtype(jnp.bfloat16)))
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))
    assert num_bytes == tokens * 61 * (512 + 64) * 2 == tokens * 70_272


def test_which_form_takes_fewer_operations() -> None:
    """DeepSeek's sizes: the count of `uses_absorbed_form` against the shapes of the products
    themselves.
    """
    config = model_config(published_config("deepseek-lite", 2))
    layer = nnx.eval_shape(lambda: LatentAttention(config, 0.1, rngs=nnx.Rngs(0)))
    r, rope, n, v = 512, 64, 128, 128
    for chunk in (1, 32, 170, 171, 512, 2048):
        context = 1 << 20  # so many cached tokens that the chunk's own weigh nothing
        absorbed = (
            chunk * n * r + chunk * context * (r + rope) + chunk * context * r + chunk * r * v
        )
        expanded = context * r * (n + v) + chunk * context * (n + rope) + chunk * context * v
        assert layer.uses_absorbed_form(chunk) == (absorbed <= expanded)
