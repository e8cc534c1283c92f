"""How the KV cache stores keys and values: bfloat16 as its bits, FP8 (E4M3) as its bits in uint8,
other dtypes as they are.

FP8 has no scales: a key or value is rounded to the nearest E4M3 number, half to even, and is 448 at
most. The operations are integer ones that every GPU and XLA:CPU compute alike.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas.saved import bfloat16_as_uint16

FP8 = jnp.dtype(jnp.float8_e4m3fn)
_INFINITY, _LARGEST, _SMALLEST_NORMAL = 0x7F800000, 0x43E00000, 0x3C800000  # float32: 448, 2^-6
_NAN = 0x7F
_MAGIC = 2.0**14  # from here on, consecutive float32 numbers differ by 2^-9, E4M3's smallest


def stored_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of a cache's arrays whose values have this dtype."""
    bits = {jnp.dtype(jnp.bfloat16): jnp.uint16, FP8: jnp.uint8}
    return jnp.dtype(bits.get(jnp.dtype(dtype), dtype))


def encode(x: jax.Array, stored: DTypeLike) -> jax.Array:
    """Return keys or values as arrays of dtype `stored` hold them."""
    return encode_e4m3(x) if stored == jnp.uint8 else bfloat16_as_uint16(x)


def decode(stored: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return stored keys or values in `dtype`, which is theirs unless they are FP8."""
    if stored.dtype == jnp.uint8:
        return decode_e4m3(stored).astype(dtype)
    return stored if stored.dtype == dtype else lax.bitcast_convert_type(stored, dtype)


def encode_e4m3(x: jax.Array) -> jax.Array:
    """Return the uint8 codes of the nearest E4M3 numbers: of 448 or -448 beyond them, of NaN for
    what is not finite.
    """
    wide = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(wide, jnp.int32)
    size = bits & 0x7FFFFFFF
    limited = jnp.minimum(size, _LARGEST)
    # 20 bits of the mantissa go, and the exponent's bias falls from 127 to 7
    normal = ((limited + 0x7FFFF + ((limited >> 20) & 1)) >> 20) - (120 << 3)
    small = lax.bitcast_convert_type(limited, jnp.float32) + _MAGIC
    fraction = lax.bitcast_convert_type(small, jnp.int32) & 0xF
    code = jnp.where(limited < _SMALLEST_NORMAL, fraction, normal)
    code = jnp.where(size >= _INFINITY, _NAN, code)
    return (code | ((bits >> 24) & 0x80)).astype(jnp.uint8)


def decode_e4m3(code: jax.Array) -> jax.Array:
    """Return the float32 values of E4M3 codes: as the bits of a float16, whose smallest numbers
    the conversion reads too.
    """
    wide = code.astype(jnp.int32)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    half = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
    return jnp.where((wide & 0x7F) == _NAN, jnp.nan, half.astype(jnp.float32) * float(2**8))
