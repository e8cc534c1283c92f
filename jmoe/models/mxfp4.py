"""Decode MXFP4 in host memory: blocks of 32 4-bit floats (E2M1) under a power-of-two scale.

Source: OCP Microscaling Formats 1.0.
"""

import jax.numpy as jnp
import numpy as np

from kernels_pallas.formats import MXFP4

SCALE_BIAS = 127
_BYTES = np.arange(256, dtype=np.uint8)
# the two float32 values of every byte, the low four bits first, as the bits of one number
_PAIRS = (
    np.stack([_BYTES & 15, _BYTES >> 4], axis=1)
    .view(jnp.float4_e2m1fn)
    .astype(np.float32)
    .view(np.uint64)[:, 0]
)


def decode_mxfp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return float32 [rows, columns]: value * 2^(scale - 127).

    packed: uint8 [rows, columns / 2], two values a byte.
    scales: uint8 [rows, columns / 32].
    """
    rows = packed.shape[0]
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - SCALE_BIAS)
    values = np.take(_PAIRS, packed).view(np.float32).reshape(rows, -1, MXFP4.block)
    return (values * powers[:, :, None]).reshape(rows, -1)


def decode_mxfp4_bfloat16(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return `decode_mxfp4` in bfloat16, which is exact within bfloat16's range."""
    # the upper half of each float32 is the bfloat16; the lower half is zero
    upper = decode_mxfp4(blocks, scales).view(np.uint32) >> np.uint32(16)
    return upper.astype(np.uint16).view(jnp.bfloat16)
