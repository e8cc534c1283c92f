"""Quantized matrices of GGUF files: blocks of values along the inputs, one row after the other.

MXFP4 stays as it is in memory; Q8_0 and Q4_0 do once their float16 scales may be rounded to
bfloat16; all other types are widened while they are read, by the package gguf.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from jmoe.models.safetensors_io import StoredTensor
from jmoe.models.stored_formats import NOT_FINITE, ReadRows, Stored, StoredFormat
from kernels_pallas.formats import INT4, INT8, MXFP4, Format

# bytes of a block before its values: the scale
_SCALE_BYTES = {"MXFP4": 1, "Q4_0": 2, "Q8_0": 2}


@dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A quantized tensor of a GGUF file: bytes [..., bytes of a row]; quant: its type's name."""

    quant: str = ""


@cache
def block_values_and_bytes(quant: str) -> tuple[int, int]:
    """Return (number of values, number of bytes) of one block of a quantized type.

    Raises ValueError if the package gguf does not know it, or cannot decode it.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType[quant]
        values, num_bytes = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except KeyError as error:
        raise ValueError(
            f"GGUF's type {quant} is not known to the installed package gguf"
        ) from error
    except NotImplementedError as error:
        raise ValueError(f"GGUF's type {quant} is not decoded by the package gguf") from error
    return int(values), int(num_bytes)


class GgufBlocks(StoredFormat):
    """A quantized type of GGUF, by its name."""

    suffixes = ("",)
    may_stack = True
    has_scales_in_values = True

    def __init__(self, quant: str) -> None:
        self.quant = quant
        self.label = f"GGUF's {quant}"  # type: ignore[misc]

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        values, num_bytes = block_values_and_bytes(self.quant)
        return [(("U8",), [(n, k // values * num_bytes)])]

    def memory_format(self, stored: Stored, name: str) -> Format | None:
        return MXFP4 if self.quant == "MXFP4" else None

    def format_with_rounded_scales(self, stored: Stored, name: str) -> Format | None:
        return {"MXFP4": MXFP4, "Q4_0": INT4, "Q8_0": INT8}.get(self.quant)

    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (the rows' bytes, nothing: blocks hold their scales)."""
        rows = read(stored[name], start, end)
        return rows, np.empty((len(rows), 0), np.uint8)

    def decompress(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(over="ignore", invalid="ignore"):  # scales that are no numbers
            wide: np.ndarray = dequantize(values, GGMLQuantizationType[self.quant])
        if self.quant == "MXFP4":  # the package takes 255, which is no exponent, for one
            exponents = values[:, :: block_values_and_bytes(self.quant)[1]]
            wide[np.repeat(exponents == 255, MXFP4.block, axis=1)] = np.nan
        return wide

    def read_in_memory_format(
        self, read: ReadRows, stored: Stored, name: str, shape: tuple[int, ...], kind: Format
    ) -> tuple[np.ndarray, np.ndarray]:
        import jax.numpy as jnp

        rows = read(stored[name], 0, shape[0])
        head = _SCALE_BYTES[self.quant]
        blocks = rows.reshape(shape[0], shape[1] // kind.block, -1)
        values, scales = blocks[:, :, head:], np.ascontiguousarray(blocks[:, :, :head])
        if kind is INT8:
            codes = values.reshape(shape).view(np.int8)
        else:  # the first half of a block is in the lower four bits
            parts = np.concatenate([values & 15, values >> 4], axis=-1).reshape(shape)
            codes = parts[:, 0::2] | parts[:, 1::2] << 4
        exponents = kind is MXFP4
        finite = scales != 255 if exponents else np.isfinite(scales.view(np.float16))
        if not finite.all():
            raise stored[name].error(NOT_FINITE)
        if exponents:
            return codes.T, scales[:, :, 0].T
        rounded = scales.view(np.float16)[:, :, 0].astype(np.float32).astype(jnp.bfloat16)
        return codes.T, rounded.T.view(kind.scales)
