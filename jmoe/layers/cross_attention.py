"""Attention of a decoder's tokens to an encoder's output.

Legend: B batch, S tokens of the decoder, M tokens of the encoder, H query heads, G key/value heads,
D hidden.
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe.config import ModelConfig
from jmoe.layers.attention import full_attention
from jmoe.layers.experts import affine, normal_parameter
from kernels_pallas.saved import mark_saved


class CrossAttention(nnx.Module):
    """Maps a decoder's tokens [B, S, D] and an encoder's output [B, M, D] to float32 [B, S, D]:
    every token attends to the encoder's whole text. Queries and keys have no positions, as in T5.

    out_std: standard deviation of the initial output projection.
    """

    def __init__(self, config: ModelConfig, out_std: float, *, rngs: nnx.Rngs) -> None:
        self.config = config
        d, dh, std = config.hidden_size, config.dim_per_head, config.initializer_range
        q, kv = config.num_attention_heads * dh, config.num_key_value_heads * dh
        has_bias = config.attention_bias or config.qkv_bias
        self.w_q = normal_parameter(rngs, (d, q), std)
        self.w_kv = normal_parameter(rngs, (d, 2 * kv), std)
        self.w_out = normal_parameter(rngs, (q, d), out_std)
        self.b_q = nnx.Param(jnp.zeros(q)) if has_bias else None
        self.b_kv = nnx.Param(jnp.zeros(2 * kv)) if has_bias else None
        self.b_out = nnx.Param(jnp.zeros(d)) if config.attention_bias else None

    def __call__(self, x_BSD: jax.Array, encoded_BMD: jax.Array) -> jax.Array:
        q = mark_saved(affine(x_BSD, self.w_q, self.b_q).astype(x_BSD.dtype), "qkv")
        kv = mark_saved(affine(encoded_BMD, self.w_kv, self.b_kv).astype(x_BSD.dtype), "qkv")
        q_BSHd, k_BMGd, v_BMGd = (
            y.reshape(*y.shape[:-1], -1, self.config.dim_per_head)
            for y in (q, *jnp.split(kv, 2, axis=-1))
        )
        heads = full_attention(q_BSHd, k_BMGd, v_BMGd, scale=self.config.attention_scale)
        return affine(heads.reshape(*heads.shape[:-2], -1), self.w_out, self.b_out)
