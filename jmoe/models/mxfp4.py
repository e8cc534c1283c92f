"""MXFP4: 4-bit floats (1 sign, 2 exponent, 1 mantissa bit) in blocks of 32 with a common power of
two.

Source: OCP Microscaling Formats 1.0; the layout on disk is that of gpt-oss.
"""

import jax.numpy as jnp
import numpy as np

BLOCK = 32  # values under one scale
SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
# Both values of a byte, the low four bits first.
_PAIRS = np.stack([VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], axis=1)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 [rows, columns] from uint8 blocks [rows, columns / 2] and scales [rows, columns /
    32].

    value * 2^(scale - 127); exact in bfloat16 within its range.
    """
    rows = blocks.shape[0]
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - SCALE_BIAS)
    values = _PAIRS[blocks].reshape(rows, -1, BLOCK) * powers[:, :, None]
    # a bfloat16; the lower half is zero
    upper = values.reshape(rows, -1).view(np.uint32) >> np.uint32(16)
    return upper.astype(np.uint16).view(jnp.bfloat16)
