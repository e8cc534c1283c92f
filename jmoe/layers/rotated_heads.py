"""Queries, keys and values of a training step from the fused projection, by a kernel."""

import jax

from jmoe.config import ModelConfig, RopeScaling
from jmoe.layers.norm import Norm
from jmoe.layers.rotary import cosines_and_sines


def norm_and_rotate(
    config: ModelConfig,
    norms: tuple[Norm | None, Norm | None],
    scaling: RopeScaling | None,
    qkv_BSX: jax.Array,
    positions: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (queries [B, S, H, d], keys [B, S, G, d], values [B, S, G, d]) in the projection's
    dtype: queries and keys after their norm and rotation.

    norms: of queries and of keys. scaling: of the rotary positions. positions: [S] or [B, S].
    interpret: runs the kernel without a GPU. Raises NotImplementedError for options that the kernel
    lacks.
    """
    from kernels_pallas import (
        rotated_heads as kernel,  # not at the top: needs Pallas' Triton backend
    )

    d, (q_norm, k_norm) = config.dim_per_head, norms
    if config.position != "rope":
        raise NotImplementedError("no rotary positions")
    if config.rotary_dim != d or config.rope_interleave:
        raise NotImplementedError("rotary positions of a part of a head, or interleaved")
    if config.qk_norm.startswith("rotated"):
        raise NotImplementedError("norms of queries and keys after their rotation")
    if config.clip_qkv is not None:
        raise NotImplementedError("clipped queries, keys and values")
    if any(norm is not None and (norm.axes or norm.bias is not None) for norm in norms):
        raise NotImplementedError("norms over the heads of several devices")
    scales = kernel.Scales(*(None if norm is None else norm.factors for norm in norms))
    angles = cosines_and_sines(positions, d, config.rope_theta, scaling)
    by_position = (x.reshape(-1, d // 2) for x in angles)
    groups = config.num_key_value_heads
    eps = 0.0 if q_norm is None else q_norm.eps
    assert k_norm is None or k_norm.eps == eps
    layout = kernel.HeadLayout(config.num_attention_heads, groups, eps, interpret)
    flat_TX = qkv_BSX.reshape(-1, qkv_BSX.shape[-1])
    heads = kernel.rotated_heads(flat_TX, scales, kernel.Angles(*by_position), layout)
    q, k, v = (x.reshape(*qkv_BSX.shape[:-1], *x.shape[1:]) for x in heads)
    return q, k, v
