"""Weights of 8 bits with one scale per column of the result.

Legend: D inner, F outer dimension, E groups.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def quantize(w_EDF: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return (weights in `dtype`, float32 scale_EF), so that w_EDF is about weights * scale_EF[:,
    None].

    The scale maps each column's largest magnitude to the largest value of `dtype` (127 or 448).
    Raises ValueError if dtype is not int8 or float8_e4m3fn.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in LARGEST:
        raise ValueError(f"dtype = {dtype.name}: must be int8 or float8_e4m3fn")
    w32_EDF = w_EDF.astype(jnp.float32)
    most_EF = jnp.abs(w32_EDF).max(axis=1)
    scale_EF = jnp.where(most_EF > 0, most_EF, 1.0) / LARGEST[dtype]
    scaled_EDF = w32_EDF / scale_EF[:, None]
    return (jnp.rint(scaled_EDF) if dtype == jnp.int8 else scaled_EDF).astype(dtype), scale_EF
