"""Weights of 4 or 8 bits in blocks that share a scale: compression, and conversion back.

`kernels_pallas/formats.py` lists the formats, and `_CODECS` has the functions of each. `compress`
is called by deploy's compress command and by an engine that compresses experts while loading;
programs convert weights back with `decompressed_or_plain_weight` and `decompress`. A matrix [K, N]
is stored as values and scales. Values are bytes [K, N], or [K / 2, N] for 4-bit values, where a
byte holds input 2 i in its low bits and input 2 i + 1 in its high bits. There is one scale per
output for each block of 32 inputs (fp8: 128):

- `mxfp4` (OCP Microscaling Formats 1.0; 4.25 bits per weight): E2M1 values, scales 2^(s - 127)
  stored as bytes s.
- `int4` (4.5 bits, rounding as llama.cpp's q4_0): (value - 8) times a bfloat16 scale.
- `int8` (8.5 bits, rounding as llama.cpp's q8_0): value times a bfloat16 scale.
- `fp8` (8.25 bits): E4M3 values times a float32 scale. As in DeepSeek-V3, 128 x 128 weights share a
  scale, which is stored once per output.

Legend: K inputs, N outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas.formats import FORMATS, FP8, INT4, INT8, MXFP4, Format

SCALES = "_scales"  # suffix of the name of a matrix's scales
_BIAS = 127
_LARGEST_E4M3 = float(jnp.finfo(jnp.float8_e4m3fn).max)
_E2M1 = jnp.float4_e2m1fn


def stored_fields(
    kind: Format, name: str, shape: tuple[int, ...]
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return {name: (shape, dtype)} of the arrays that store a matrix [K, N]."""
    inputs, outputs = shape
    return {
        name: ((inputs // kind.per_byte, outputs), np.dtype(kind.values)),
        name + SCALES: ((-(-inputs // kind.block), outputs), np.dtype(kind.scales)),
    }


def format_of(values: DTypeLike, scales: DTypeLike) -> Format:
    """Return the format with these dtypes of values and scales; bfloat16 scales may be given as
    bfloat16 or uint16.
    """
    stored = "uint16" if scales == jnp.bfloat16 else np.dtype(scales).name
    pair = np.dtype(values).name, stored
    return next(f for f in FORMATS.values() if (f.values, f.scales) == pair)


def compress(w_KN: np.ndarray, kind: Format) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, scales) of a float matrix. Each value is rounded to the nearest that its
    block's scale allows. A block with a value that is not finite stays not finite.

    mxfp4: a block's largest magnitude is in [4, 8) times the scale and clipped to 6; weights that
    came from mxfp4 are reproduced exactly. int4, int8, fp8: the scale maps a block's largest
    magnitude to -8, 127 or 448. An fp8 block that a power-of-two scale represents exactly gets that
    scale, so most weights that came from mxfp4 are reproduced exactly if their scales are within a
    factor 2^14.
    """
    return _CODECS[kind.name].compress(np.asarray(w_KN, np.float32))


def decompress(values: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the matrix [K, N] in `dtype`. The dtypes of values and scales determine the format."""
    kind = format_of(values.dtype, scales.dtype)
    if kind.per_byte == 2:
        low, high = values & 15, values >> 4
        values = jnp.stack([low, high], axis=1).reshape(-1, values.shape[1])
    wide_KN, factors = _CODECS[kind.name].decode(values, scales)
    if kind.partial_block:
        spread = jnp.repeat(factors, kind.block, axis=0)[: wide_KN.shape[0]]
        return (wide_KN * spread).astype(dtype)
    blocks = wide_KN.reshape(-1, kind.block, wide_KN.shape[1]) * factors[:, None]
    return blocks.reshape(wide_KN.shape).astype(dtype)


@dataclass(frozen=True)
class _Codec:
    """The functions of one format.

    compress: float32 [K, N] -> (values, scales) as stored. decode: (values [K, N], with 4-bit
    values one a byte; scales) -> float32 (values [K, N], factors of the blocks).
    """

    compress: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    decode: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _compress_mxfp4(w_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = _split_into_blocks(w_KN, MXFP4)
    peaks = np.abs(blocks).max(axis=1)
    _, exponents = np.frexp(peaks)
    bounded = np.clip(exponents - 3 + _BIAS, 0, 254)
    scales = np.where(np.isfinite(peaks), bounded, 255).astype(np.uint8)  # 255 is no number
    scaled = blocks * np.ldexp(np.float32(1), _BIAS - scales.astype(np.int32))[:, None]
    # to the nearest code, a tie to the even one, and to 6 beyond the largest
    return _pack_pairs(scaled.astype(_E2M1).view(np.uint8), w_KN.shape), scales


def _decode_mxfp4(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    factors = lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    return decode_e2m1(codes), factors


def _compress_int4(w_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = _split_into_blocks(w_KN, INT4)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scales, wide = _round_to_bfloat16(peak / -8)
    codes = np.clip(np.rint(blocks / np.where(wide == 0, 1, wide)) + 8, 0, 15).astype(np.uint8)
    return _pack_pairs(codes, w_KN.shape), scales[:, 0]


def _decode_int4(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    return codes.astype(jnp.float32) - 8.0, uint16_as_bfloat16(scales).astype(jnp.float32)


def _compress_int8(w_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = _split_into_blocks(w_KN, INT8)
    scales, wide = _round_to_bfloat16(np.abs(blocks).max(axis=1, keepdims=True) / 127)
    values = np.clip(np.rint(blocks / np.where(wide == 0, 1, wide)), -127, 127).astype(np.int8)
    return values.reshape(w_KN.shape), scales[:, 0]


def _decode_int8(values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    return values.astype(jnp.float32), uint16_as_bfloat16(scales).astype(jnp.float32)


def _compress_fp8(w_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fitted = _reduce_blocks(np.maximum, np.abs(w_KN)) / np.float32(_LARGEST_E4M3)
    mantissas, exponents = np.frexp(fitted)
    # the smallest power of two that is not below `fitted`
    power = np.where(fitted == 0, 0, np.ldexp(np.float32(1), exponents - (mantissas == 0.5)))
    codes, wide = _round_to_e4m3(w_KN, power)
    is_exact = _reduce_blocks(np.logical_and, wide == w_KN)
    scales = np.where(is_exact, power, fitted)
    if not is_exact.all():
        codes, _ = _round_to_e4m3(w_KN, scales)
    return codes.view(np.uint8), np.repeat(scales, FP8.block, axis=1)[:, : w_KN.shape[1]]


def _reduce_blocks(reduce: np.ufunc, x_KN: np.ndarray) -> np.ndarray:
    """Return one number per 128 x 128 block, reduced with `reduce`."""
    for axis in (0, 1):
        x_KN = reduce.reduceat(x_KN, np.arange(0, x_KN.shape[axis], FP8.block), axis=axis)
    return x_KN


def _round_to_e4m3(w_KN: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (E4M3 values, their float32 value times the block's scale). scales: one per 128 x 128
    block.
    """
    by_weight = np.kron(
        np.where(scales == 0, 1, scales), np.ones((FP8.block, FP8.block), np.float32)
    )
    by_weight = by_weight[: w_KN.shape[0], : w_KN.shape[1]]
    codes = (w_KN / by_weight).astype(jnp.float8_e4m3fn)
    return codes, codes.astype(np.float32) * by_weight


def _round_to_bfloat16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x rounded to bfloat16, as (uint16 bits, float32 values)."""
    narrow = x.astype(jnp.bfloat16)
    return narrow.view(np.uint16), narrow.astype(np.float32)


def _pack_pairs(codes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    codes = codes.reshape(shape)
    return codes[0::2] | (codes[1::2] << 4)


def _decode_fp8(values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32), scales


def _split_into_blocks(w_KN: np.ndarray, kind: Format) -> np.ndarray:
    return w_KN.reshape(-1, kind.block, w_KN.shape[1])


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """Return the float32 values of E2M1 codes: 1 sign bit, 2 exponent bits, 1 mantissa bit.

    Written in 32-bit operations, which a Mosaic GPU kernel can run too. XLA:CPU takes longer to
    convert from `float4_e2m1fn`.
    """
    code = codes.astype(jnp.uint32)
    sign, exponent, mantissa = (code >> 3) << 31, (code >> 1) & 3, code & 1
    normal = ((exponent + (_BIAS - 1)) << 23) | (mantissa << 22)
    half = mantissa * jnp.uint32(0x3F000000)  # 0.5, or 0
    return lax.bitcast_convert_type(sign | jnp.where(exponent == 0, half, normal), jnp.float32)


def decompressed_or_plain_weight(
    arrays: Mapping[str, jax.Array], name: str, dtype: DTypeLike
) -> jax.Array:
    """Return one expert's array `name` from its stored arrays: a compressed matrix is converted to
    `dtype`, uint16 bits become bfloat16, any other array is returned unchanged.
    """
    stored = arrays[name]
    if name + SCALES in arrays:
        return decompress(stored, arrays[name + SCALES], dtype)
    return uint16_as_bfloat16(stored)


@overload
def uint16_as_bfloat16(x: jax.Array) -> jax.Array: ...
@overload
def uint16_as_bfloat16(x: jax.Array | None) -> jax.Array | None: ...
def uint16_as_bfloat16(x: jax.Array | None) -> jax.Array | None:
    """Return x; uint16 is reinterpreted as bfloat16, None stays None."""
    return (
        lax.bitcast_convert_type(x, jnp.bfloat16) if x is not None and x.dtype == jnp.uint16 else x
    )


_CODECS = {
    MXFP4.name: _Codec(_compress_mxfp4, _decode_mxfp4),
    INT4.name: _Codec(_compress_int4, _decode_int4),
    INT8.name: _Codec(_compress_int8, _decode_int8),
    FP8.name: _Codec(_compress_fp8, _decode_fp8),
}
