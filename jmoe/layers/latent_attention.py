"""Multi-head latent attention: queries, keys and values from low-rank latents (DeepSeek-V2,
arXiv:2405.04434).

Legend: B batch, S sequence, D hidden, H heads, d = nope + rope dimensions of a query or key head,
nope its dimensions without a position, rope its rotated dimensions, v dimensions of a value head, r
latent rank.
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe.config import ModelConfig
from jmoe.layers.attention import Attention, rotary
from jmoe.layers.experts import affine, normal_parameter
from jmoe.layers.norm import Norm
from kernels_pallas.saved import mark_saved

LATENT_NORM_EPS = 1e-6  # of the latents' norms, whatever norm_eps is (DeepSeek-V3)


class LatentAttention(Attention):
    """Causal self-attention [B, S, D] -> float32 [B, S, D] with low-rank keys and values.

    q = norm(x w_q_a) w_q_b, or x w_q if q_lora_rank is None. [c, k_rope] = x w_kv_a; [k_nope, v] =
    norm(c) w_kv_b per head; the rotated k_rope is shared by all heads. The softmax's scale is
    d^-0.5, times YaRN's magnitude squared.
    """

    def __init__(self, config: ModelConfig, out_std: float, *, rngs: nnx.Rngs) -> None:
        rank = config.kv_lora_rank
        assert rank is not None
        self.config = config
        d, std = config.hidden_size, config.initializer_range
        dh, heads = config.dim_per_head, config.num_attention_heads
        q_rank, latent = config.q_lora_rank, rank + config.qk_rope_head_dim
        self.w_q = normal_parameter(rngs, (d, heads * dh), std) if q_rank is None else None
        self.w_q_a = normal_parameter(rngs, (d, q_rank), std) if q_rank is not None else None
        self.q_a_norm = Norm(q_rank, "rmsnorm", LATENT_NORM_EPS) if q_rank is not None else None
        self.w_q_b = (
            normal_parameter(rngs, (q_rank, heads * dh), std) if q_rank is not None else None
        )
        self.w_kv_a = normal_parameter(rngs, (d, latent), std)
        self.kv_a_norm = Norm(rank, "rmsnorm", LATENT_NORM_EPS)
        self.w_kv_b = normal_parameter(
            rngs, (rank, heads * (config.qk_nope_head_dim + config.v_head_dim)), std
        )
        self.w_out = normal_parameter(rngs, (heads * config.v_head_dim, d), out_std)
        self.sinks = None
        bias = config.attention_bias
        self.b_q_a = nnx.Param(jnp.zeros(q_rank)) if bias and q_rank is not None else None
        self.b_kv_a = nnx.Param(jnp.zeros(latent)) if bias else None
        self.b_out = nnx.Param(jnp.zeros(d)) if bias else None

    @property
    def scale(self) -> float:
        """Factor of the scores before the softmax: 1 / sqrt(d), times YaRN's magnitude squared."""
        yarn = self.config.rope_scaling
        magnitude = (
            yarn.attention_magnitude(yarn.mscale_all_dim)
            if yarn is not None and yarn.mscale_all_dim
            else 1.0
        )
        return self.config.dim_per_head**-0.5 * magnitude * magnitude

    def queries(self, x_BSD: jax.Array, positions: jax.Array) -> jax.Array:
        """Return queries [B, S, H, d], the last rope dimensions rotated to `positions`."""
        config, dtype = self.config, x_BSD.dtype
        if self.w_q is not None:
            q = affine(x_BSD, self.w_q)
        else:
            assert self.w_q_a is not None and self.w_q_b is not None and self.q_a_norm is not None
            latent = affine(x_BSD, self.w_q_a, self.b_q_a)
            q = affine(self.q_a_norm(mark_saved(latent.astype(dtype), "qkv"), dtype), self.w_q_b)
        q = mark_saved(q.astype(dtype), "qkv").reshape(
            *q.shape[:-1], config.num_attention_heads, -1
        )
        nope, rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        return jnp.concatenate([nope, self._rotated(rope, positions)], axis=-1)

    def latents(self, x_BSD: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (normed latent [B, S, r], rotated shared key [B, S, 1, rope]), which are all that
        a KV cache stores.
        """
        dtype = x_BSD.dtype
        latent = affine(x_BSD, self.w_kv_a, self.b_kv_a)
        split = latent.shape[-1] - self.config.qk_rope_head_dim
        c, k_rope = jnp.split(mark_saved(latent.astype(dtype), "qkv"), [split], axis=-1)
        return self.kv_a_norm(c, dtype), self._rotated(k_rope[:, :, None], positions)

    def keys_and_values(self, c_BSr: jax.Array, k_rope: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (keys [B, S, H, d], values [B, S, H, v]) from the two results of `latents`."""
        config, dtype = self.config, c_BSr.dtype
        kv = mark_saved(affine(c_BSr, self.w_kv_b).astype(dtype), "qkv")
        kv = kv.reshape(*kv.shape[:-1], config.num_attention_heads, -1)
        k_nope, v = jnp.split(kv, [config.qk_nope_head_dim], axis=-1)
        shared = jnp.broadcast_to(k_rope, (*k_nope.shape[:-1], k_rope.shape[-1]))
        return jnp.concatenate([k_nope, shared], axis=-1), v

    def _rotated(self, x_BSHd: jax.Array, positions: jax.Array) -> jax.Array:
        config = self.config
        yarn, interleave = config.rope_scaling, config.rope_interleave
        return rotary(x_BSHd, positions, config.rope_theta, yarn=yarn, interleave=interleave)

    def project(
        self, x_BSD: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (queries [B, S, H, d], keys [B, S, H, d], values [B, S, H, v]).

        positions: [S] or [B, S], the positions to which queries and keys are rotated.
        """
        return self.queries(x_BSD, positions), *self.keys_and_values(
            *self.latents(x_BSD, positions)
        )
