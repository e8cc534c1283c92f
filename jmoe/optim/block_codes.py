"""Optimizer moments in 8 bits: codes of a nonlinear table, and a float32 scale for each block.

The tables are those of 8-bit Adam (arXiv 2110.02861, "dynamic quantization"): each has the values
of seven decades, with twice as many in a decade as in the one below it. A block is a part of a row.

Legend: B blocks of a row, C columns.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

BLOCK = 256  # elements that share a scale, where the length of a row is a multiple
DECADES = 7
_ROUNDING = "scan_unrolled"  # a binary search of eight lookups, which XLA fuses


@cache
def code_values(*, signed: bool) -> NDArray[np.float32]:
    """Return the values of the 256 codes, ascending: from -1 (signed) or 0 to 1.

    A decade is divided evenly, and has the middle of each part as a value.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = np.linspace(0.1, 1.0, parts + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - DECADES)
        values += [*middles, *(-middles if signed else [])]
    return np.sort(np.asarray(values, np.float64)).astype(np.float32)


def decode(codes: jax.Array, scales: jax.Array, *, signed: bool) -> jax.Array:
    """Return the float32 values [..., C] of codes [..., C] with scales [..., B]."""
    values = jnp.asarray(code_values(signed=signed))[codes]
    split = values.reshape(*scales.shape, -1)
    return (split * scales[..., None]).reshape(codes.shape)


def encode(values: jax.Array, num_blocks: int, *, signed: bool) -> tuple[jax.Array, jax.Array]:
    """Return (codes [..., C], scales [..., B]) of float32 values [..., C].

    A scale is the largest magnitude of its block; each value becomes the code nearest to it. A
    second moment (not `signed`) that is not 0 becomes no code of 0, because it is a divisor.
    """
    table = code_values(signed=signed)
    middles = (table[:-1] + table[1:]) / 2
    if not signed:
        middles[0] = 0.0
    split = values.reshape(*values.shape[:-1], num_blocks, -1)
    scales = jnp.abs(split).max(-1)
    relative = split / jnp.where(scales > 0, scales, 1)[..., None]
    codes = jnp.searchsorted(jnp.asarray(middles), relative, method=_ROUNDING)
    return codes.astype(jnp.uint8).reshape(values.shape), scales
