"""Causal grouped-query attention with rotary positions.

Legend: B batch, S sequence, H query heads, G key/value heads, R = H / G query heads a group, d head dimension,
Q rows of a query block, C keys it sees.
"""

from functools import partial
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from jmoe.config import ModelConfig
from jmoe.layers.experts import normal
from jmoe.layers.norm import Norm
from kernels_pallas.matmul import dot, matmul, transposed
from kernels_pallas.saved import saved, saved_residual

QUERY_BLOCK = 128


def rotary(x_BSHd: jax.Array, positions_S: jax.Array, theta: float) -> jax.Array:
    """Rotate the pairs (x[i], x[i + d/2]) by position * theta^(-2i/d); float32 inside (RoFormer, HF's half split)."""
    half = x_BSHd.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_S.astype(jnp.float32)[:, None, None] * frequency  # [S, 1, d/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BSHd.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHd.dtype)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(i, min(i + QUERY_BLOCK, length)) for i in range(0, length, QUERY_BLOCK)]


def _rows(x_BGRSd: jax.Array, start: int, end: int) -> jax.Array:
    """Query rows start..end of every head of a group, flattened: [B, G, R*Q, d]."""
    x = x_BGRSd[:, :, :, start:end]
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(q: jax.Array, k: jax.Array, start: int, end: int, scale: float) -> jax.Array:
    """float32 scaled scores [B, G, R, Q, C] of query rows start..end against keys 0..end, masked causally."""
    s = dot(_rows(q, start, end), k[:, :, :end], b_transposed=True) * scale
    s = s.reshape(*s.shape[:2], -1, end - start, end)
    return jnp.where(jnp.arange(start, end)[:, None] >= jnp.arange(end), s, -jnp.inf)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """Causal attention q [B, G, R, S, d], k and v [B, G, S, d] -> [B, G, R, S, d], one query block at a time."""
    return _blocked_fwd(q, k, v, scale)[0]


def _blocked_fwd(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> Any:
    out, lse = [], []
    for start, end in _blocks(q.shape[3]):
        s = _scores(q, k, start, end, scale)
        top = s.max(axis=-1, keepdims=True)
        p = jnp.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        o = dot(p.astype(v.dtype).reshape(*s.shape[:2], -1, end), v[:, :, :end])
        out.append((o.reshape(*s.shape[:-1], -1) / total).astype(q.dtype))
        lse.append(top + jnp.log(total))
    o, lse_all = jnp.concatenate(out, axis=3), jnp.concatenate(lse, axis=3)
    o, lse_all = saved_residual(o, "attention"), saved_residual(lse_all, "attention")
    return o, (q, k, v, o, lse_all)


def _blocked_bwd(scale: float, residuals: Any, do: jax.Array) -> Any:
    q, k, v, o, lse = residuals
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for start, end in _blocks(q.shape[3]):
        p = jnp.exp(_scores(q, k, start, end, scale) - lse[:, :, :, start:end])
        flat = (*p.shape[:2], -1, end)
        do_rows, q_rows = _rows(do, start, end), _rows(q, start, end)
        dp = dot(do_rows, v[:, :, :end], b_transposed=True).reshape(p.shape)
        ds = (p * (dp - delta[:, :, :, start:end]) * scale).astype(q.dtype).reshape(flat)
        dv = dv.at[:, :, :end].add(dot(transposed(p.astype(v.dtype).reshape(flat)), do_rows))
        dk = dk.at[:, :, :end].add(dot(transposed(ds), q_rows))
        dq.append(dot(ds, k[:, :, :end]).astype(q.dtype).reshape(*p.shape[:-1], -1))
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype)


_blocked.defvjp(_blocked_fwd, _blocked_bwd)


def blocked_attention(q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGd: jax.Array) -> jax.Array:
    """Causal attention in plain XLA that skips the blocks above the diagonal and keeps no score matrix."""
    b, s, h, d = q_BSHd.shape
    g = k_BSGd.shape[2]
    q = q_BSHd.reshape(b, s, g, h // g, d).transpose(0, 2, 3, 1, 4)
    o = _blocked(q, k_BSGd.transpose(0, 2, 1, 3), v_BSGd.transpose(0, 2, 1, 3), d**-0.5)
    return o.transpose(0, 3, 1, 2, 4).reshape(b, s, h, d)


def causal_attention(q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGd: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v under a causal mask: cuDNN's flash attention on GPU in bfloat16, else blocked XLA."""
    if jax.default_backend() == "gpu" and q_BSHd.dtype == jnp.bfloat16:  # cuDNN's kernel has no float32
        return jax.nn.dot_product_attention(q_BSHd, k_BSGd, v_BSGd, is_causal=True, implementation="cudnn")
    return blocked_attention(q_BSHd, k_BSGd, v_BSGd)


class Attention(nnx.Module):
    """Causal self-attention [B, S, D] -> float32 [B, S, D] with grouped query heads, optional q/k norm and biases."""

    def __init__(self, config: ModelConfig, out_std: float, *, rngs: nnx.Rngs) -> None:
        self.config = config
        d, dh, std = config.hidden_size, config.dim_per_head, config.initializer_range
        q, kv = config.num_attention_heads * dh, config.num_key_value_heads * dh
        self.w_qkv = normal(rngs, (d, q + 2 * kv), std)
        self.w_out = normal(rngs, (q, d), out_std)
        self.b_qkv = nnx.Param(jnp.zeros(q + 2 * kv)) if config.attention_bias else None
        self.b_out = nnx.Param(jnp.zeros(d)) if config.attention_bias else None
        sizes = {"head": (dh, dh), "full": (q, kv)}.get(config.qk_norm)
        self.q_norm = Norm(sizes[0], "rmsnorm", config.norm_eps) if sizes else None
        self.k_norm = Norm(sizes[1], "rmsnorm", config.norm_eps) if sizes else None

    def _qkv(self, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        config, dtype = self.config, x_BSD.dtype
        dh, heads, groups = config.dim_per_head, config.num_attention_heads, config.num_key_value_heads
        qkv = matmul(x_BSD, self.w_qkv[...].astype(dtype))
        if self.b_qkv is not None:
            qkv = qkv + self.b_qkv[...].astype(jnp.float32)
        q, k, v = jnp.split(saved(qkv.astype(dtype), "qkv"), [heads * dh, (heads + groups) * dh], axis=-1)
        split = lambda y: y.reshape(*y.shape[:-1], -1, dh)  # noqa: E731
        if self.q_norm is not None and self.k_norm is not None:
            if config.qk_norm == "full":
                return split(self.q_norm(q, dtype)), split(self.k_norm(k, dtype)), split(v)
            return self.q_norm(split(q), dtype), self.k_norm(split(k), dtype), split(v)
        return split(q), split(k), split(v)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        q, k, v = self._qkv(x_BSD)
        if self.config.position == "rope":
            positions = jnp.arange(x_BSD.shape[1])
            q, k = rotary(q, positions, self.config.rope_theta), rotary(k, positions, self.config.rope_theta)
        o = causal_attention(q, k, v)
        y = matmul(o.reshape(*o.shape[:-2], -1), self.w_out[...].astype(x_BSD.dtype))
        return y if self.b_out is None else y + self.b_out[...].astype(jnp.float32)
