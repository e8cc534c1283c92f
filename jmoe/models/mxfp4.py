"""MXFP4: blocks of 32 4-bit floats (1 sign, 2 exponent, 1 mantissa bit) under a power-of-two scale.

Source: OCP Microscaling Formats 1.0. The layout on disk is gpt-oss's.
"""

import jax.numpy as jnp
import numpy as np

BLOCK = 32  # values that share a scale
SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
# The two values of every byte, the low four bits first.
_PAIRS = np.stack([VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], axis=1)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return bfloat16 [rows, columns]: value * 2^(scale - 127).

    blocks: uint8 [rows, columns / 2], two values a byte.
    scales: uint8 [rows, columns / 32].

    The result is exact within bfloat16's range.
    """
    rows = blocks.shape[0]
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - SCALE_BIAS)
    values = _PAIRS[blocks].reshape(rows, -1, BLOCK) * powers[:, :, None]
    # the upper half of each float32 is the bfloat16; the lower half is zero
    upper = values.reshape(rows, -1).view(np.uint32) >> np.uint32(16)
    return upper.astype(np.uint16).view(jnp.bfloat16)
