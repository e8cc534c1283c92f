"""Llama 4's attention: layers that attend within chunks, with rotary positions, and layers of full
attention without positions, whose queries grow with their position.

Legend: B batch, S sequence, H heads, d dimension of a head.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import NO_WINDOW, ModelConfig

# the static window of a layer in training, the operand of a program in inference
Window = int | np.int32 | jax.Array | None


def chunk_numbers(
    positions: jax.Array, documents_BS: jax.Array | None, shape: tuple[int, int], size: int
) -> jax.Array:
    """Return int32 [B, S], equal for the tokens of one chunk of one document, which alone see each
    other.

    positions: [S] or [B, S], of each token in its document. documents_BS: the document of each
    token; None if a sequence is one. shape: (B, S). size: tokens of a chunk.
    """
    chunk = jnp.broadcast_to(positions.astype(jnp.int32) // size, shape)
    if documents_BS is None:
        return chunk
    return documents_BS * (-(-shape[1] // size)) + chunk


def unscaled_rms_norm(x_BSHd: jax.Array, eps: float) -> jax.Array:
    """Return each head divided by the root of its mean square, computed in float32."""
    x = x_BSHd.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x.astype(x_BSHd.dtype)


def queries_without_positions(
    q_BSHd: jax.Array, positions: jax.Array, config: ModelConfig
) -> jax.Array:
    """Return the queries of a layer of full attention: q times
    1 + attn_scale log(1 + floor((position + 1) / floor_scale)), arXiv:2501.19399.
    """
    if config.attn_scale == 0:
        return q_BSHd
    steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / config.floor_scale)
    factor = 1.0 + config.attn_scale * jnp.log1p(steps)
    return (q_BSHd.astype(jnp.float32) * factor[..., None, None]).astype(q_BSHd.dtype)


def select_by_window(
    window: Window,
    full: tuple[jax.Array, jax.Array],
    chunked: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return `full` in a layer of full attention, whose window is `NO_WINDOW`, and `chunked` in one
    of chunks.
    """
    assert window is not None, "a model with chunks has a window in every layer"
    if isinstance(window, jax.Array):
        is_full = window == NO_WINDOW
        return jnp.where(is_full, full[0], chunked[0]), jnp.where(is_full, full[1], chunked[1])
    return full if window == NO_WINDOW else chunked
