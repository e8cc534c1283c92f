"""Compressed weights against a reader that knows only the formats' definitions."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.compressed import (
    SCALES,
    compress,
    decompress,
    decompressed_or_plain_weight,
    stored_fields,
)
from kernels_pallas.formats import FORMATS, MXFP4, Format

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
formats = pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)


def read(values: np.ndarray, scales: np.ndarray, kind: Format) -> np.ndarray:
    """float64 [K, N], a number at a time."""
    inputs = values.shape[0] * kind.per_byte
    out = np.empty((inputs, values.shape[1]))
    for k, n in np.ndindex(out.shape):
        code = int(values[k // kind.per_byte, n])
        code = (code >> 4 * (k % 2)) & 15 if kind.per_byte == 2 else code
        scale = scales[k // (128 if kind.name == "fp8" else 32), n]
        if kind.name == "fp8":
            out[k, n] = float(np.uint8(code).view(ml_dtypes.float8_e4m3fn)) * float(scale)
        elif kind.name == "mxfp4":
            out[k, n] = E2M1[code] * 2.0 ** (int(scale) - 127)
        else:
            out[k, n] = (code - 8 * (kind.name == "int4")) * float(scale.view(ml_dtypes.bfloat16))
    return out


def weights(seed: int = 0, shape: tuple[int, int] = (256, 5)) -> np.ndarray:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) * np.exp(rng.normal(size=shape[1]) * 3)
    w[:128, 0] = 0  # a block without a scale
    return w.astype(np.float32)


@formats
def test_what_is_kept_and_what_it_means(kind: Format) -> None:
    w = weights()
    values, scales = compress(w, kind)
    fields = stored_fields(kind, "w", w.shape)
    assert fields == {"w": (values.shape, values.dtype), "w" + SCALES: (scales.shape, scales.dtype)}
    bits = 8 * (values.nbytes + scales.nbytes) / w.size
    assert bits == {"mxfp4": 4.25, "int4": 4.5, "int8": 8.5, "fp8": 8.25}[kind.name]
    wide = read(values, scales, kind)
    assert np.array_equal(
        decompress(jnp.asarray(values), jnp.asarray(scales), jnp.float32), wide.astype(np.float32)
    )
    arrays = {"w": jnp.asarray(values), "w" + SCALES: jnp.asarray(scales)}
    assert np.array_equal(
        decompressed_or_plain_weight(arrays, "w", jnp.bfloat16), wide.astype(ml_dtypes.bfloat16)
    )
    peak = (
        np.abs(w.reshape(-1, kind.block, 5))
        .max(axis=1, keepdims=True)
        .repeat(kind.block, axis=1)
        .reshape(w.shape)
    )
    if kind.name == "fp8":
        peak[:] = peak.max(axis=1, keepdims=True)  # blocks of 128 outputs
    # mxfp4: half a step of the top binade, or what is cut above 6 of 8; int4: half a step, or 7 for
    # 8; bfloat16 scales
    limit = {"mxfp4": 0.25, "int4": 1 / 8 + 0.01, "int8": 0.5 / 127 + 0.005, "fp8": 1 / 28}[
        kind.name
    ]
    assert (np.abs(wide - w) <= limit * peak + 1e-30).all()
    assert not wide[:128, 0].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@formats
@pytest.mark.parametrize("damaged", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none(kind: Format, damaged: float) -> None:
    """A damaged weight must not become a number that looks right; no other block has it."""
    w_KN = weights(shape=(256, 256))
    w_KN[37, 200] = damaged
    values, scales = (jnp.asarray(part) for part in compress(w_KN, kind))
    got = np.asarray(decompress(values, scales, np.float32))
    assert not np.isfinite(got[37, 200])
    assert np.isfinite(got[128:]).all() and np.isfinite(got[:, :128]).all()


def test_mxfp4_stays_what_it_is() -> None:
    """Bit for bit in value, whatever scales other software chose."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (64, 40), dtype=np.uint8)
    codes[:32, 0] &= 0b1001  # nothing above a half
    values, scales = codes[0::2] | codes[1::2] << 4, rng.integers(100, 150, (2, 40), dtype=np.uint8)
    wide = read(values, scales, MXFP4)
    assert np.array_equal(read(*compress(wide.astype(np.float32), MXFP4), MXFP4), wide)


def test_ties_of_four_bit_floats_go_to_the_even_code() -> None:
    """Between every two magnitudes, and a little to both sides; beyond the largest it is cut."""
    steps = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    below, above = np.nextafter(steps, np.float32(0)), np.nextafter(steps, np.float32(9))
    w = np.zeros((32, 3), np.float32)
    w[:7], w[7:14] = (
        np.stack([steps, below, above], axis=1),
        -np.stack([steps, below, above], axis=1),
    )
    w[14:16] = [[6.0], [7.5]]  # the scale is 1
    wide = read(*compress(w, MXFP4), MXFP4)
    assert (
        wide[:7, 0].tolist() == even
        and (wide[7:14] == -wide[:7]).all()
        and (wide[14:16] == 6).all()
    )
    assert wide[:7, 1].tolist() == E2M1[:7] and wide[:7, 2].tolist() == E2M1[1:8]


def test_eight_bit_floats_of_any_length() -> None:
    """A last block of fewer than 128 inputs, and every E4M3 value."""
    w = weights(2, (150, 4))
    values, scales = compress(w, FORMATS["fp8"])
    assert scales.shape == (2, 4)
    wide = decompress(jnp.asarray(values), jnp.asarray(scales), jnp.float32)
    assert np.array_equal(wide, read(values, scales, FORMATS["fp8"]).astype(np.float32))


def test_eight_bit_floats_in_blocks_of_both_ways() -> None:
    """One scale for 128 inputs and 128 outputs, kept once an output; each block's largest is
    448.
    """
    w = weights(3, (200, 300))
    values, scales = compress(w, FORMATS["fp8"])
    for i in range(2):
        for j in range(3):
            peak = np.abs(w[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]).max()
            np.testing.assert_allclose(scales[i, 128 * j : 128 * (j + 1)], peak / 448, rtol=1e-6)
    largest = np.abs(values.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert largest.max() == largest[:128, :128].max() == largest[128:, 256:].max() == 448


def test_mxfp4_as_eight_bit_floats() -> None:
    """The same numbers, under powers of two, where a block's scales are at most 2^14 apart; else
    the nearest.
    """
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (256, 130), dtype=np.uint8)
    values = codes[0::2] | codes[1::2] << 4
    scales = rng.integers(110, 125, (8, 130), dtype=np.uint8)
    scales[0, 0] = 90  # too far from the others of the first block
    w = read(values, scales, MXFP4).astype(np.float32)
    narrow, factors = compress(w, FORMATS["fp8"])
    wide = read(narrow, factors, FORMATS["fp8"]).astype(np.float32)
    assert np.array_equal(wide[128:], w[128:]) and np.array_equal(wide[:, 128:], w[:, 128:])
    assert not np.array_equal(wide[:128, :128], w[:128, :128])
    assert (np.frexp(factors[1])[0] == 0.5).all() and factors[0, 0] == np.abs(
        w[:128, :128]
    ).max() / np.float32(448)


@formats
def test_rounding_is_to_the_nearest(kind: Format) -> None:
    """Of all that the block's scale allows."""
    rows = 32 if kind.partial_block else kind.block
    w = weights(1, (rows, 3))
    values, scales = compress(w, kind)
    codes = range(16) if kind.per_byte == 2 else range(-127, 128)
    if kind.name == "fp8":
        codes = [code for code in range(256) if code not in (127, 255)]  # those are NaN
    pack = (
        (lambda c: np.full((rows // 2, 3), c * 17, np.uint8))
        if kind.per_byte == 2
        else lambda c: np.full((rows, 3), c, kind.values)
    )
    allowed = np.stack([read(pack(c), scales, kind) for c in codes])
    nearest = np.abs(allowed - w).min(axis=0)
    np.testing.assert_allclose(np.abs(read(values, scales, kind) - w), nearest, rtol=1e-5)
