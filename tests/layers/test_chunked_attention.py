"""Llama 4's attention against plain NumPy: chunks, layers without positions, their temperature.

Legend: B batch, S sequence.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe.config import NO_WINDOW, ModelConfig
from jmoe.layers.attention import Attention
from jmoe.layers.chunked_attention import chunk_numbers, select_by_window
from jmoe.layers.documents import Documents

S, CHUNK = 12, 5
CONFIG = ModelConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    layer_types=("chunked_attention", "full_attention"),
    attention_chunk_size=CHUNK,
    attn_scale=0.5,
    floor_scale=3,
    qk_norm="rotated_l2",
    rope_interleave=True,
    rope_theta=50.0,
)


def by_hand(
    module: Attention, x_BSD: np.ndarray, seen_BSS: np.ndarray, positions_BS: np.ndarray, full: bool
) -> np.ndarray:
    """Return the module's output in float64, after the formulas of Llama 4."""
    w = np.asarray(module.w_qkv[...], np.float64)
    q, k, v = np.split(x_BSD @ w, [32, 48], axis=-1)
    q, k, v = (y.reshape(*y.shape[:2], -1, 8) for y in (q, k, v))
    if full:
        factor = 1 + 0.5 * np.log1p(np.floor((positions_BS + 1) / 3))
        q = q * factor[:, :, None, None]
    else:
        angle = positions_BS[:, :, None] * 50.0 ** -(np.arange(0, 8, 2) / 8)
        turn = np.exp(1j * angle)[:, :, None]
        for y in (q, k):
            rotated = (y[..., 0::2] + 1j * y[..., 1::2]) * turn
            y[..., 0::2], y[..., 1::2] = rotated.real, rotated.imag
            y /= np.sqrt((y**2).mean(axis=-1, keepdims=True) + module.config.norm_eps)
    k, v = (np.repeat(y, 2, axis=2) for y in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8)
    scores = np.where(seen_BSS[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("bhqk,bkhd->bqhd", p / p.sum(axis=-1, keepdims=True), v)
    result: np.ndarray = out.reshape(*x_BSD.shape[:2], -1) @ np.asarray(module.w_out[...])
    return result


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [CHUNK, NO_WINDOW])
def test_layers_in_training(window: int, packed: bool) -> None:
    """Chunks begin anew with every document of a row."""
    module = Attention(CONFIG, 0.5, rngs=nnx.Rngs(0))
    module.w_qkv[...] = module.w_qkv[...] * 40
    x_BSD = np.random.default_rng(0).normal(size=(2, S, 32))
    number_BS = np.array([[1] * 7 + [2] * 5, [1] * 12]) if packed else np.ones((2, S), int)
    positions_BS = np.array([[np.sum(row[:i] == row[i]) for i in range(S)] for row in number_BS])
    rows = np.arange(S)
    seen_BSS = (rows[:, None] >= rows) & (number_BS[:, :, None] == number_BS[:, None])
    if window == CHUNK:
        chunk = positions_BS // CHUNK
        seen_BSS &= chunk[:, :, None] == chunk[:, None]
    documents = None
    if packed:
        all_BS = jnp.ones((2, S), bool)
        documents = Documents(all_BS, all_BS, jnp.asarray(number_BS, jnp.int32))
    found_BSD = module(jnp.asarray(x_BSD, jnp.float32), window, documents)
    expected = by_hand(module, x_BSD, seen_BSS, positions_BS, window == NO_WINDOW)
    np.testing.assert_allclose(found_BSD, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def test_a_traced_window_selects_like_a_static_one() -> None:
    """Programs of inference are compiled once for layers of both kinds."""
    full, chunked = (jnp.zeros(3), jnp.ones(3)), (jnp.full(3, 2.0), jnp.full(3, 3.0))
    traced = jax.jit(select_by_window)
    for window in (CHUNK, NO_WINDOW):
        for static in (window, np.int32(window)):
            expected: Any = select_by_window(static, full, chunked)
            np.testing.assert_array_equal(traced(jnp.int32(window), full, chunked), expected)


def test_chunks_of_documents_have_numbers_of_their_own() -> None:
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2, 3]])
    numbers = chunk_numbers(positions, jnp.asarray([[1, 1, 1, 2, 2, 2, 2]]), (1, 7), 2)
    assert len(set(np.asarray(numbers)[0, [0, 2, 3, 5]].tolist())) == 4
    np.testing.assert_array_equal(numbers[0, [0, 3, 5]], numbers[0, [1, 4, 6]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": None}, "attention_chunk_size = None: is needed by layer_types"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0: must be greater than 0"),
        ({"attention_chunk_size": NO_WINDOW}, "attention_chunk_size = 1073741824: must be at most"),
        ({"attn_scale": -0.1}, "attn_scale = -0.1: must not be negative"),
        ({"sliding_window": 4}, "sliding_window = 4: is not supported beside chunked_attention"),
        ({"layer_types": ()}, "attention_chunk_size = 5: must be None without chunked_attention"),
        (
            {"layer_types": (), "attention_chunk_size": None},
            "attn_scale = 0.5: must be 0.0 without chunked_attention",
        ),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    values = {**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__}, **changes}
    with pytest.raises(ValueError, match=message):
        ModelConfig(**values)
