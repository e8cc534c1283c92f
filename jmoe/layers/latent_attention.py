"""Multi-head latent attention: queries, keys and values from low-rank latents (DeepSeek-V2,
arXiv:2405.04434).

Two forms of attention give the same result. The expanded form makes every head's keys and values
from the latents. The absorbed form attends to the latents themselves, as one key/value head that
all query heads share: q (w_uk c) = (q w_uk) c, and sum(p w_uv c) = w_uv sum(p c).

Legend: B batch, S sequence, D hidden, H heads, d = nope + rope dimensions of a query or key head, n
its dimensions without a position, rope its rotated dimensions, v dimensions of a value head, r
latent rank, l = r + rope, L cached positions of a block.
"""

from collections.abc import Callable

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe.config import ModelConfig
from jmoe.layers.attention import Attention, CacheInputs
from jmoe.layers.chunked_attention import Window
from jmoe.layers.experts import affine, normal_parameter
from jmoe.layers.norm import Norm
from jmoe.layers.rotary import apply_rotary
from kernels_pallas.matmul import dot
from kernels_pallas.saved import mark_saved

LATENT_NORM_EPS = 1e-6  # of the latents' norms, whatever norm_eps is (DeepSeek-V3)


class LatentAttention(Attention):
    """Causal self-attention [B, S, D] -> float32 [B, S, D] with low-rank keys and values.

    q = norm(x w_q_a) w_q_b, or x w_q if q_lora_rank is None. [c, k_rope] = x w_kv_a; [k_nope, v] =
    norm(c) w_kv_b per head; the rotated k_rope is shared by all heads. The softmax's scale is
    d^-0.5, times YaRN's magnitude squared.

    `split_w_kv_b` prepares a layer for inference.
    """

    w_uk: nnx.Param  # this and the next from `split_w_kv_b` on
    w_uv: nnx.Param

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
        self.w_kv_b: nnx.Param | None = normal_parameter(
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
        """Factor of the scores before the softmax: 1 / sqrt(d), times YaRN's `score_scale`."""
        scaling = self.config.rope_scaling
        return self.config.dim_per_head**-0.5 * (1.0 if scaling is None else scaling.score_scale)

    def queries(
        self, x_BSD: jax.Array, positions: jax.Array, length: int | None = None
    ) -> jax.Array:
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
        return jnp.concatenate([nope, self._rotated(rope, positions, length)], axis=-1)

    def latents(
        self, x_BSD: jax.Array, positions: jax.Array, length: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (normed latent [B, S, r], rotated shared key [B, S, 1, rope])."""
        dtype = x_BSD.dtype
        latent = affine(x_BSD, self.w_kv_a, self.b_kv_a)
        split = latent.shape[-1] - self.config.qk_rope_head_dim
        c, k_rope = jnp.split(mark_saved(latent.astype(dtype), "qkv"), [split], axis=-1)
        return self.kv_a_norm(c, dtype), self._rotated(k_rope[:, :, None], positions, length)

    def keys_and_values(
        self, c_BSr: jax.Array, k_rope: jax.Array, *, are_saved: bool = True
    ) -> tuple[jax.Array, jax.Array]:
        """Return (keys [B, S, H, d], values [B, S, H, v]) from the two results of `latents`.

        are_saved: mark them as residuals; False if the backward pass should expand them again.
        """
        config, dtype = self.config, c_BSr.dtype
        if self.w_kv_b is not None:
            kv = affine(c_BSr, self.w_kv_b).astype(dtype)
            kv = mark_saved(kv, "qkv") if are_saved else kv
            kv = kv.reshape(*kv.shape[:-1], config.num_attention_heads, -1)
            k_nope, v = jnp.split(kv, [config.qk_nope_head_dim], axis=-1)
        else:
            k_nope, v = self._up_projected(c_BSr, self.w_uk), self._up_projected(c_BSr, self.w_uv)
        shared = jnp.broadcast_to(k_rope, (*k_nope.shape[:-1], k_rope.shape[-1]))
        return jnp.concatenate([k_nope, shared], axis=-1), v

    def _up_projected(self, c_BSr: jax.Array, w_Hvr: nnx.Param) -> jax.Array:
        """Return every head's keys without positions [B, S, H, n], or values [B, S, H, v]."""
        w = w_Hvr[...].astype(c_BSr.dtype)
        y = dot(c_BSr, w.reshape(-1, w.shape[-1]), b_transposed=True)
        return y.astype(c_BSr.dtype).reshape(*c_BSr.shape[:-1], *w.shape[:-1])

    def split_w_kv_b(self) -> None:
        """Replace `w_kv_b` by its halves for keys, `w_uk` [H, n, r], and for values, `w_uv` [H, v,
        r]: the layouts that products by head read without copying them in every step.
        """
        assert self.w_kv_b is not None
        w_rHx = self.w_kv_b[...].reshape(self.w_kv_b.shape[0], self.config.num_attention_heads, -1)
        w_Hxr, n = w_rHx.transpose(1, 2, 0), self.config.qk_nope_head_dim
        self.w_kv_b = None
        self.w_uk, self.w_uv = nnx.Param(w_Hxr[:, :n]), nnx.Param(w_Hxr[:, n:])

    def _rotated(
        self, x_BSHd: jax.Array, positions: jax.Array, length: int | None = None
    ) -> jax.Array:
        config = self.config
        scaling, interleave = self.rope_scaling_at(length), config.rope_interleave
        return apply_rotary(
            x_BSHd, positions, config.rope_theta, scaling=scaling, interleave=interleave
        )

    def project(
        self,
        x_BSD: jax.Array,
        positions: jax.Array,
        length: int | None = None,
        window: Window = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        """Return (queries [B, S, H, d], keys [B, S, H, d], values [B, S, H, v], None for no gate).

        positions: [S] or [B, S], the positions to which queries and keys are rotated.
        length: tokens of a sequence, on which frequencies may depend; None: as configured.
        """
        k, v = self.keys_and_values(*self.latents(x_BSD, positions, length))
        return self.queries(x_BSD, positions, length), k, v, None

    def attend_to_cache(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        attend: Callable[[CacheInputs], jax.Array],
        *,
        window: Window = None,
        with_output_bias: bool = True,
    ) -> jax.Array:
        """Return float32 [B, S, D]: the tokens' attention to a cache of latents, which holds l
        numbers a token.

        Single tokens use the absorbed form, long chunks of a prompt the expanded one, as in
        DeepSeek's, vLLM's and SGLang's code; `uses_absorbed_form` chooses. Needs `split_w_kv_b`.
        """
        c_BSr, k_rope = self.latents(x_BSD, positions_BS)
        c_BS1r = c_BSr[:, :, None]
        k_BS1l, q_BSHd = (
            jnp.concatenate([c_BS1r, k_rope], axis=-1),
            self.queries(x_BSD, positions_BS),
        )
        if not self.uses_absorbed_form(x_BSD.shape[1]):
            heads = attend(CacheInputs(q_BSHd, k_BS1l, c_BS1r, self._expand))
            return self.output(heads, with_bias=with_output_bias)
        q_nope, q_rope = jnp.split(q_BSHd, [self.config.qk_nope_head_dim], axis=-1)
        q_BSHl = jnp.concatenate([_product_by_head(q_nope, self.w_uk), q_rope], axis=-1)
        o_BSHr = attend(CacheInputs(q_BSHl, k_BS1l, c_BS1r))
        heads = _product_by_head(o_BSHr, self.w_uv, transposed=True)
        return self.output(heads, with_bias=with_output_bias)

    def uses_absorbed_form(self, num_tokens: int) -> bool:
        """Return whether chunks of `num_tokens` attend to a cache in the absorbed form: whether it
        takes fewer multiplications for each cached token.

        A head takes num_tokens (r + rope + r) in the absorbed form; num_tokens (d + v) in the
        expanded one, and r (n + v) to expand the token. With DeepSeek's sizes, chunks of at least
        171 tokens are expanded.
        """
        config = self.config
        assert config.kv_lora_rank is not None
        r, n, rope, v = (
            config.kv_lora_rank,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        return num_tokens * (r + rope + r) <= num_tokens * (n + rope + v) + r * (n + v)

    def _expand(self, cached_B1Ll: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return every head's keys [B, H, L, d] and values [B, H, L, v] of cached latents."""
        assert self.config.kv_lora_rank is not None
        c_BLr, k_rope = jnp.split(cached_B1Ll[:, 0], [self.config.kv_lora_rank], axis=-1)
        k_BLHd, v_BLHv = self.keys_and_values(c_BLr, k_rope[:, :, None])
        return k_BLHd.swapaxes(1, 2), v_BLHv.swapaxes(1, 2)


def _product_by_head(x_BSHk: jax.Array, w_H: nnx.Param, *, transposed: bool = False) -> jax.Array:
    """Return each head's x w_H, or x w_H^T, [B, S, H, ...], in x's dtype."""
    b, s, h, k = x_BSHk.shape
    x_HTk = x_BSHk.reshape(b * s, h, k).swapaxes(0, 1)
    y_HTn = dot(x_HTk, w_H[...].astype(x_BSHk.dtype), b_transposed=transposed)
    return y_HTn.astype(x_BSHk.dtype).swapaxes(0, 1).reshape(b, s, h, -1)
