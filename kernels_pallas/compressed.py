"""Weights of 4 or 8 bits in blocks that share a scale: storage, compression, and conversion back.

`compress` is called by deploy's compress command and by an engine that compresses experts while
loading; programs convert weights back with `opened` and `widen`. A matrix [K, N] is stored as
values and scales. Values are bytes [K, N], or [K / 2, N] for 4-bit values, where a byte holds input
2 i in its low bits and input 2 i + 1 in its high bits. There is one scale per output for each block
of 32 inputs (fp8: 128):

- `mxfp4` (OCP Microscaling Formats 1.0; 4.25 bits per weight): E2M1 values, scales 2^(s - 127)
  stored as bytes s.
- `int4` (4.5 bits, rounding as llama.cpp's q4_0): (value - 8) times a bfloat16 scale.
- `int8` (8.5 bits, rounding as llama.cpp's q8_0): value times a bfloat16 scale.
- `fp8` (8.25 bits): E4M3 values times a float32 scale. As in DeepSeek-V3, 128 x 128 weights share a
  scale, which is stored once per output.

Legend: K inputs, N outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 32
SCALES = "_scales"  # suffix of the name of a matrix's scales
_BIAS = 127


@dataclass(frozen=True)
class Format:
    """A format of compressed weights: its name, values per byte, dtypes of values and scales.

    scales: uint16 for bfloat16 scales, which are stored as their bits. block: inputs per scale;
    only in fp8 may the last block be shorter.
    """

    name: str
    per_byte: int
    values: np.dtype[Any]
    scales: np.dtype[Any]
    block: int = BLOCK

    def fields(
        self, name: str, shape: tuple[int, ...]
    ) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return {name: (shape, dtype)} of the arrays that store a matrix [K, N]."""
        inputs, outputs = shape
        return {
            name: ((inputs // self.per_byte, outputs), self.values),
            name + SCALES: ((-(-inputs // self.block), outputs), self.scales),
        }


MXFP4 = Format("mxfp4", 2, np.dtype(np.uint8), np.dtype(np.uint8))
INT4 = Format("int4", 2, np.dtype(np.uint8), np.dtype(np.uint16))
INT8 = Format("int8", 1, np.dtype(np.int8), np.dtype(np.uint16))
FP8 = Format("fp8", 1, np.dtype(np.uint8), np.dtype(np.float32), 128)
FORMATS = {format_.name: format_ for format_ in (MXFP4, INT4, INT8, FP8)}
_LARGEST_E4M3 = 448.0


def format_of(values: Any, scales: Any) -> Format:
    """Return the format with these dtypes of values and scales; bfloat16 scales may be given as
    bfloat16 or uint16.
    """
    kept = np.dtype(np.uint16) if scales == jnp.bfloat16 else np.dtype(scales)
    return next(f for f in FORMATS.values() if (f.values, f.scales) == (np.dtype(values), kept))


def compress(w_KN: np.ndarray, kind: Format) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, scales) of a float matrix. Each value is rounded to the nearest that its
    block's scale allows.

    mxfp4: a block's largest magnitude is in [4, 8) times the scale and clipped to 6; weights that
    came from mxfp4 are reproduced exactly. int4, int8, fp8: the scale maps a block's largest
    magnitude to -8, 127 or 448. An fp8 block that a power-of-two scale represents exactly gets that
    scale, so most weights that came from mxfp4 are reproduced exactly if their scales are within a
    factor 2^14.
    """
    if kind is FP8:
        return _compress_fp8(np.asarray(w_KN, np.float32))
    blocks = np.asarray(w_KN, np.float32).reshape(-1, BLOCK, w_KN.shape[1])
    if kind is MXFP4:
        _, exponents = np.frexp(np.abs(blocks).max(axis=1))
        scales = np.clip(exponents - 3 + _BIAS, 0, 254).astype(np.uint8)
        scaled = blocks * np.ldexp(np.float32(1), _BIAS - scales.astype(np.int32))[:, None]
        codes = _e2m1_codes(np.abs(scaled)) | (np.signbit(scaled).view(np.uint8) << 3)
        return _pairs(codes, w_KN.shape), scales
    if kind is INT4:
        peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
        scales, wide = _bfloat16(peak / -8)
        codes = np.clip(np.rint(blocks / np.where(wide == 0, 1, wide)) + 8, 0, 15).astype(np.uint8)
        return _pairs(codes, w_KN.shape), scales[:, 0]
    scales, wide = _bfloat16(np.abs(blocks).max(axis=1, keepdims=True) / 127)
    values = np.clip(np.rint(blocks / np.where(wide == 0, 1, wide)), -127, 127).astype(np.int8)
    return values.reshape(w_KN.shape), scales[:, 0]


def _compress_fp8(w_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fitted = _of_blocks(np.maximum, np.abs(w_KN)) / np.float32(_LARGEST_E4M3)
    mantissas, exponents = np.frexp(fitted)
    # the smallest power of two that is not below `fitted`
    power = np.where(fitted == 0, 0, np.ldexp(np.float32(1), exponents - (mantissas == 0.5)))
    codes, wide = _e4m3(w_KN, power)
    is_exact = _of_blocks(np.logical_and, wide == w_KN)
    scales = np.where(is_exact, power, fitted)
    if not is_exact.all():
        codes, _ = _e4m3(w_KN, scales)
    return codes.view(np.uint8), np.repeat(scales, FP8.block, axis=1)[:, : w_KN.shape[1]]


def _of_blocks(reduce: np.ufunc, x_KN: np.ndarray) -> np.ndarray:
    """Return one number per 128 x 128 block, reduced with `reduce`."""
    for axis in (0, 1):
        x_KN = reduce.reduceat(x_KN, np.arange(0, x_KN.shape[axis], FP8.block), axis=axis)
    return x_KN


def _e4m3(w_KN: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (E4M3 values, their float32 value times the block's scale). scales: one per 128 x 128
    block.
    """
    by_weight = np.kron(
        np.where(scales == 0, 1, scales), np.ones((FP8.block, FP8.block), np.float32)
    )
    by_weight = by_weight[: w_KN.shape[0], : w_KN.shape[1]]
    codes = (w_KN / by_weight).astype(jnp.float8_e4m3fn)
    return codes, codes.astype(np.float32) * by_weight


def _e2m1_codes(x: np.ndarray) -> np.ndarray:
    """Return E2M1 codes of the nearest magnitudes, which are 1/2 apart below 2, 1 apart up to 4 and
    2 apart up to 6.

    A tie goes to the even code, as the specification demands.
    """
    upper = np.where(x < 4, np.rint(x) + 2, np.fmin(np.rint(x / 2) + 4, 7))
    return np.where(x < 2, np.rint(2 * x), upper).astype(np.uint8)


def _bfloat16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x rounded to bfloat16, as (uint16 bits, float32 values)."""
    narrow = x.astype(jnp.bfloat16)
    return narrow.view(np.uint16), narrow.astype(np.float32)


def _pairs(codes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    codes = codes.reshape(shape)
    return codes[0::2] | (codes[1::2] << 4)


def widen(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Return the matrix [K, N] in `dtype`. The dtypes of values and scales determine the format."""
    kind = format_of(values.dtype, scales.dtype)
    if kind is FP8:
        wide = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
        return (wide * jnp.repeat(scales, kind.block, axis=0)[: wide.shape[0]]).astype(dtype)
    if kind.per_byte == 2:
        low, high = values & 15, values >> 4
        codes = jnp.stack([low, high], axis=1).reshape(-1, values.shape[1])
    else:
        codes = values
    if kind is MXFP4:
        factors = lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
        wide = e2m1(codes)
    else:
        factors = floats(scales).astype(jnp.float32)
        wide = codes.astype(jnp.float32) - (8.0 if kind is INT4 else 0.0)
    blocks = wide.reshape(-1, BLOCK, values.shape[1]) * factors[:, None]
    return blocks.reshape(wide.shape).astype(dtype)


def e2m1(codes: jax.Array) -> jax.Array:
    """Return the float32 values of E2M1 codes: 1 sign bit, 2 exponent bits, 1 mantissa bit."""
    code = codes.astype(jnp.uint32)
    sign, exponent, mantissa = (code >> 3) << 31, (code >> 1) & 3, code & 1
    normal = ((exponent + (_BIAS - 1)) << 23) | (mantissa << 22)
    half = mantissa * jnp.uint32(0x3F000000)  # 0.5, or 0
    return lax.bitcast_convert_type(sign | jnp.where(exponent == 0, half, normal), jnp.float32)


def opened(arrays: Mapping[str, jax.Array], name: str, dtype: Any) -> jax.Array:
    """Return one expert's array `name` from its stored arrays: a compressed matrix is converted to
    `dtype`, uint16 bits become bfloat16, any other array is returned unchanged.
    """
    stored = arrays[name]
    if name + SCALES in arrays:
        return widen(stored, arrays[name + SCALES], dtype)
    return floats(stored)


@overload
def floats(x: jax.Array) -> jax.Array: ...
@overload
def floats(x: jax.Array | None) -> jax.Array | None: ...
def floats(x: jax.Array | None) -> jax.Array | None:
    """Return x; uint16 is reinterpreted as bfloat16."""
    return (
        lax.bitcast_convert_type(x, jnp.bfloat16) if x is not None and x.dtype == jnp.uint16 else x
    )
