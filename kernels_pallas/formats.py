"""The compressed formats of weights. Standard library only, so that configurations can name them.

To add a format, add its name to `FormatName` and its row to `FORMATS`, and its codec to
`kernels_pallas/compressed.py`. Options, checks, sizes and records follow. XLA then computes with
it on every platform; the kernels in C++, Mosaic GPU and Triton do so once they decode it (`native`,
`mosaic_gpu`, `_DECODERS` of `kernels_pallas/grouped_matmul/triton_weights.py`).
"""

from dataclasses import dataclass
from typing import Literal, get_args

FormatName = Literal["mxfp4", "int4", "int8", "fp8"]
ExpertDtype = Literal["wide", FormatName]  # of an option; wide: not compressed
# of every dtype that a row of `FORMATS` names
_BITS = {"int8": 8, "uint8": 8, "uint16": 16, "float32": 32}


@dataclass(frozen=True)
class Format:
    """A format of compressed weights.

    per_byte: values in a byte, 1 or 2. values, scales: names of their dtypes in memory; uint16
    holds the bits of bfloat16. No two formats have the same pair, since stored arrays are told
    apart by it. block: inputs that share a scale. partial_block: the last block of a column may be
    shorter. native: the format's number in `kernels_pallas/native/rows.h`, None if C++ does not
    read it. takes_int8: whether C++ also multiplies the values, whole numbers times a scale, by
    activations in 8 bits (`kernels_pallas/native/integers.h`). mosaic_gpu: whether
    `kernels_pallas/grouped_matmul/mosaic_forms.py` reads it.
    """

    name: FormatName
    per_byte: int
    values: str
    scales: str
    block: int
    partial_block: bool = False
    native: int | None = None
    takes_int8: bool = False
    mosaic_gpu: bool = False

    @property
    def bits_per_weight(self) -> float:
        """The bits that one weight takes in memory, its share of the scale included."""
        return 8 / self.per_byte + _BITS[self.scales] / self.block


MXFP4 = Format("mxfp4", 2, "uint8", "uint8", 32, native=1, takes_int8=True, mosaic_gpu=True)
INT4 = Format("int4", 2, "uint8", "uint16", 32, native=2, takes_int8=True, mosaic_gpu=True)
INT8 = Format("int8", 1, "int8", "uint16", 32, native=3, takes_int8=True, mosaic_gpu=True)
FP8 = Format("fp8", 1, "uint8", "float32", 128, partial_block=True, native=4, mosaic_gpu=True)
FORMATS: dict[str, Format] = {format_.name: format_ for format_ in (MXFP4, INT4, INT8, FP8)}
INT8_TAKING: tuple[str, ...] = tuple(name for name, f in FORMATS.items() if f.takes_int8)
EXPERT_DTYPES: tuple[str, ...] = get_args(ExpertDtype)


def describe_bits_per_weight() -> str:
    """Return the formats with their bits per weight, for the help of an option."""
    return ", ".join(f"{f.name} ({f.bits_per_weight:g} bits a weight)" for f in FORMATS.values())
