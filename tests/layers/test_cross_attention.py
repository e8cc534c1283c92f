"""A decoder's attention to an encoder's output, beside a plain one."""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import ModelConfig
from jmoe.layers.cross_attention import CrossAttention
from tests.arrays import assert_close

B, S, M, D = 2, 5, 7, 24
SIZES: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": D,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "initializer_range": 0.5,
}


def layer_of(**options: Any) -> CrossAttention:
    layer = CrossAttention(ModelConfig(**(SIZES | options)), 0.5, rngs=nnx.Rngs(0))
    for number, name in enumerate(("b_q", "b_kv", "b_out")):
        if (bias := getattr(layer, name)) is not None:
            bias[...] = jax.random.normal(jax.random.key(number), bias.shape)
    return layer


def inputs() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(7))
    return jax.random.normal(keys[0], (B, S, D)), jax.random.normal(keys[1], (B, M, D))


def plain(layer: CrossAttention, x: jax.Array, encoded: jax.Array) -> np.ndarray:
    """In float64, head by head."""

    def product(rows: Any, weight: Any, bias: Any) -> np.ndarray:
        y = np.asarray(rows, np.float64) @ np.asarray(weight[...], np.float64)
        return y if bias is None else y + np.asarray(bias[...], np.float64)

    config = layer.config
    dh, groups = config.dim_per_head, config.num_key_value_heads
    q, kv = product(x, layer.w_q, layer.b_q), product(encoded, layer.w_kv, layer.b_kv)
    heads = []
    for head in range(config.num_attention_heads):
        group = head * groups // config.num_attention_heads
        own = q[..., head * dh : (head + 1) * dh]
        keys = kv[..., group * dh : (group + 1) * dh]
        values = kv[..., (groups + group) * dh : (groups + group + 1) * dh]
        scores = np.exp(own @ keys.swapaxes(1, 2) * config.attention_scale)
        heads.append(scores / scores.sum(axis=-1, keepdims=True) @ values)
    return product(np.concatenate(heads, axis=-1), layer.w_out, layer.b_out)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_bias": True},
        {"qkv_bias": True, "attention_multiplier": 0.9},
        {"num_key_value_heads": 4},
    ],
    ids=str,
)
def test_it_is_the_plain_one(options: dict[str, Any]) -> None:
    layer, (x, encoded) = layer_of(**options), inputs()
    expected = plain(layer, x, encoded)
    assert_close(layer(x, encoded), expected, 2e-6)
    with jax.numpy_dtype_promotion("standard"):  # JAX's function needs it in bfloat16
        few = layer(*(y.astype(jnp.bfloat16) for y in (x, encoded)))
    assert few.dtype == jnp.float32
    assert_close(few, expected, 5e-2)


def test_tokens_have_no_positions() -> None:
    layer, (x, encoded) = layer_of(), inputs()
    y = layer(x, encoded)
    assert_close(layer(x, encoded[:, ::-1]), np.asarray(y), 2e-6)
    assert_close(layer(x[:, ::-1], encoded), np.asarray(y[:, ::-1]), 2e-6)
    assert not np.allclose(layer(x, encoded[:, :-1]), y)
