"""Rotary positions: the frequencies of every form, and the rotation.

Legend: B batch, S sequence, H heads, d the dimensions of a head that are rotated.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import (
    DynamicRopeConfig,
    LinearRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    NtkAlphaRopeConfig,
    RopeScaling,
    YarnConfig,
)


def rotary_frequencies(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Return float32 [dim / 2], the radians per position of each pair of dimensions.

    The classes of `config/positions.py` document the parameters of each form.
    """
    match scaling:
        case LinearRopeConfig():
            frequencies = _plain_frequencies(dim, theta) / scaling.factor
        case Llama3RopeConfig():
            frequencies = _llama3_frequencies(dim, theta, scaling)
        case YarnConfig():
            frequencies = _yarn_frequencies(dim, theta, scaling)
        case DynamicRopeConfig():
            positions = scaling.original_max_position_embeddings
            longer = max(scaling.length, positions) / positions
            growth = scaling.factor * longer - (scaling.factor - 1)
            frequencies = _plain_frequencies(dim, theta * growth ** (dim / (dim - 2)))
        case NtkAlphaRopeConfig():
            frequencies = _plain_frequencies(dim, theta * scaling.alpha ** (dim / (dim - 2)))
        case LongRopeConfig():
            factors = scaling.long_factor if scaling.is_long else scaling.short_factor
            frequencies = _plain_frequencies(dim, theta) / np.asarray(factors)
        case _:
            raise TypeError(f"{type(scaling).__name__} has no frequencies in layers/rotary.py")
    return frequencies.astype(jnp.float32)


def _plain_frequencies(dim: int, theta: float) -> np.ndarray:
    frequencies: np.ndarray = theta ** -(np.arange(0, dim, 2) / dim)
    return frequencies


def _llama3_frequencies(dim: int, theta: float, llama3: Llama3RopeConfig) -> np.ndarray:
    """Return float64 [dim / 2] of Llama 3.1."""
    plain = _plain_frequencies(dim, theta)
    turns = llama3.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1) if low < high else turns >= low
    return plain * kept + plain / llama3.factor * (1 - kept)


def _yarn_frequencies(dim: int, theta: float, yarn: YarnConfig) -> np.ndarray:
    """Return float64 [dim / 2] under YaRN (arXiv:2309.00071)."""

    def pair_index_at(rotations: float) -> float:
        """Return the fractional index of the pair that makes `rotations` full turns within the
        original context.
        """
        positions = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(positions) / (2 * math.log(theta))

    low, high = pair_index_at(yarn.beta_fast), pair_index_at(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    plain = _plain_frequencies(dim, theta)
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    return plain * (1 - slowed) + plain / yarn.factor * slowed


def rotary_frequencies_and_scale(
    dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Return (float32 [dim / 2], the radians per position of each pair; the factor of the rotated
    dimensions) of `apply_rotary`.
    """
    if scaling is not None:
        return rotary_frequencies(dim, theta, scaling), scaling.rotary_scale
    half = dim // 2
    return theta ** (-np.arange(half, dtype=np.float32) / half), 1.0


def cosines_and_sines(
    positions: jax.Array, dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return float32 cosines and sines [..., dim / 2] of the angles by which `apply_rotary` rotates
    the pairs of a head at `positions` [...], times the `rotary_scale` of `scaling`.
    """
    half = dim // 2
    frequency = (
        theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if scaling is None
        else jnp.asarray(rotary_frequencies(dim, theta, scaling))
    )
    angle = positions.astype(jnp.float32)[..., None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None and scaling.rotary_scale != 1.0:
        cos, sin = cos * scaling.rotary_scale, sin * scaling.rotary_scale
    return cos, sin


def apply_rotary(
    x_BSHd: jax.Array,
    positions: jax.Array,
    theta: float,
    *,
    scaling: RopeScaling | None = None,
    interleave: bool = False,
) -> jax.Array:
    """Return x with each pair (x[i], x[i + d/2]) rotated by position * theta^(-2i/d), in x's dtype
    (RoFormer, with the half split of Hugging Face). The rotation is computed in
    float32.

    positions: [S] or [B, S]. scaling: replaces the frequencies and scales the result by its
    `rotary_scale`. interleave: the pairs are (x[2i], x[2i + 1]) (DeepSeek); the result holds the
    first members of all pairs, then the second.
    """
    cos, sin = cosines_and_sines(positions, x_BSHd.shape[-1], theta, scaling)
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for all heads
    x = x_BSHd.astype(jnp.float32)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleave else jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHd.dtype)
