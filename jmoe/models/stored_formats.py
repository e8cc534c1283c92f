"""Compressed matrices of Hugging Face checkpoints: their tensors, and how to decompress them.

`quantization.py` says which format a matrix is stored in; `packed_formats.py` has those that mostly
have no exact form in memory. Each `StoredFormat` reads one layout:
- `fp8` (DeepSeek-V3, Qwen3's FP8 releases): `W` E4M3 [N, K]; `W_scale_inv` [N / 128, K / 128] in
  float32 or bfloat16, or with `scale_fmt: ue8m0` powers of two in float32 or E8M0. Fused experts of
  transformers 5 have a leading E on both: `W` E4M3 [E, N, K].
- compressed-tensors `pack-quantized` (Kimi-K2): `W_packed` int32, [N, K / 8] for 4-bit or [N, K /
  4] for 8-bit integers with an offset, the lowest bits first; `W_scale` [N, K / G]; `W_shape` [2].
- compressed-tensors `int-quantized`: `W` int8 [N, K]; `W_scale` [N, K / G].
- compressed-tensors `mxfp4-pack-quantized`: `W_packed` uint8 [N, K / 2], the lower four bits first;
  `W_scale` uint8 [N, K / 32].
- FP8 by tensor or row (`fp8` without blocks, compressed-tensors `float-quantized`, modelopt `FP8`):
  `W` E4M3 [N, K]; `W_scale` of one element, [N], [N, 1] or by blocks.
- `expert_dtype: fp4` (DeepSeek-V4): `W` int8 [N, K / 2], packed as above; E8M0 scales [N, K / 32],
  named `scale` in place of `weight`.

A scale of shape [N, 1] applies to a whole row. An expert stays compressed in memory only if that is
exact to the bit. Activations are never quantized: tensors such as `input_scale` are ignored.

Legend:
N outputs, the rows of a stored matrix
K inputs
G inputs that share a scale
E experts
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jmoe.models.mxfp4 import decode_mxfp4
from jmoe.models.safetensors_io import StoredTensor
from kernels_pallas.formats import FP8, INT4, INT8, MXFP4, Format

Stored = Mapping[str, StoredTensor]
# (tensor, first row, end row) -> a copy of these rows, [n, elements of a row]
ReadRows = Callable[[StoredTensor, int, int], np.ndarray]
SCALE_DTYPES = ("BF16", "F16", "F32")
NOT_FINITE = "has scales that are NaN or infinite: the file is damaged"


def check_scales_finite(tensor: StoredTensor, rows: np.ndarray) -> None:
    """Raise ValueError naming the tensor if it holds scales and some of `rows` are NaN or infinite.

    Codes of weights are 8-bit or 32-bit integers or E4M3, scales any float, or exponents in 8 bits.
    """
    is_scale = "scale" in tensor.name.rpartition(".")[2]
    if tensor.dtype in SCALE_DTYPES:
        finite = np.isfinite(rows.astype(np.float32)).all()
    elif tensor.dtype == "F8_E8M0" or (tensor.dtype == "U8" and is_scale):
        finite = (rows.view(np.uint8) != 255).all()
    elif tensor.dtype == "F8_E4M3" and is_scale:
        finite = (rows.view(np.uint8) & 127 != 127).all()
    else:
        return
    if not finite:
        raise tensor.error(NOT_FINITE)


class StoredFormat(ABC):
    """A compressed layout of a matrix [N, K] in one or several tensors."""

    label: ClassVar[str]  # its name in messages
    suffixes: ClassVar[tuple[str, ...]]  # appended to the matrix's name for each tensor
    may_stack: ClassVar[bool] = False  # whether the tensors may hold the matrices of all experts
    has_scales_in_values: ClassVar[bool] = False  # whether no tensor of their own holds the scales

    def tensor_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors that store the matrix `name`."""
        return tuple(name + suffix for suffix in self.suffixes)

    def find_tensors(self, stored: Stored, name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
        """Return the tensors of a matrix [N, K], or of the matrices [E, N, K] of all experts.

        Raises ValueError naming the file and the tensor that is missing or has a wrong dtype or
        shape.
        """
        names = self.tensor_names(name)
        parts = [stored[part] for part in names if part in stored]
        for part in names:
            if part not in stored:
                raise parts[0].error(f"needs {part!r}, which is missing")
        if len(shape) not in ((2, 3) if self.may_stack else (2,)):
            raise parts[0].error(
                f"is compressed, which is not supported for a tensor of shape {list(shape)}"
            )
        *experts, n, k = shape
        for tensor, (dtypes, of_one) in zip(parts, self.expected_tensors(n, k), strict=True):
            shapes = [(*experts, *one) for one in of_one]
            if tensor.dtype not in dtypes or tensor.shape not in shapes:
                more = " or with more groups of equal size" if len(shapes) > 1 else ""
                wanted = f"{' or '.join(dtypes)} {list(shapes[0])}{more}"
                raise tensor.error(f"is {tensor.dtype} {list(tensor.shape)}, must be {wanted}")
        return parts

    @abstractmethod
    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        """Return (allowed dtypes, allowed shapes) for each tensor of a matrix [n, k]."""

    @abstractmethod
    def memory_format(self, stored: Stored, name: str) -> Format | None:
        """Return the in-memory format that represents the matrix exactly; None if there is none."""

    def format_with_rounded_scales(self, stored: Stored, name: str) -> Format | None:
        """Return the in-memory format that represents the values exactly, and the scales rounded to
        its dtype; None if there is none.
        """
        return self.memory_format(stored, name)

    def rows_per_chunk(self, rows: int, step: int) -> int:
        """Return how many of the matrix's rows to decompress at once; `step` bounds the memory."""
        return step

    @abstractmethod
    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows start..end, compressed: (values [n, K / values a byte], scales [n, groups]).

        Values are encoded as in the format `memory_format`; scales are as stored.
        """

    @abstractmethod
    def decompress(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the decompressed rows, float32 [n, K], of values and scales that `read_compressed`
        returns.
        """

    def read_in_memory_format(
        self, read: ReadRows, stored: Stored, name: str, shape: tuple[int, ...], kind: Format
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole matrix in the in-memory format `kind`, transposed to [in, out].

        The result is (values [K / values a byte, N], scales [K / block, N]).
        """
        values, scales = self.read_compressed(read, stored, name, 0, shape[0])
        repeats = -(-shape[1] // kind.block) // scales.shape[1]
        if np.dtype(kind.scales) == np.uint16:  # the bits of bfloat16
            scales = scales.astype(jnp.bfloat16)
        return values.T, np.repeat(scales, repeats, axis=1).T.view(kind.scales)


class Fp8Blocks(StoredFormat):
    """E4M3 values; each block of 128 x 128 shares a scale."""

    label = "FP8"
    suffixes = ("", "_scale_inv")
    may_stack = True

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        blocks = -(-n // FP8.block), -(-k // FP8.block)
        return [(("F8_E4M3",), [(n, k)]), ((*SCALE_DTYPES, "F8_E8M0"), [blocks])]

    def memory_format(self, stored: Stored, name: str) -> Format | None:
        return FP8

    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        scales = read(stored[name + "_scale_inv"], start // FP8.block, -(-end // FP8.block)).astype(
            np.float32
        )
        by_row = np.repeat(scales, FP8.block, axis=0)[start % FP8.block :][: end - start]
        return read(stored[name], start, end).view(np.uint8), by_row

    def decompress(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        numbers: np.ndarray = values.view(jnp.float8_e4m3fn).astype(np.float32)
        return numbers * np.repeat(scales, FP8.block, axis=1)[:, : numbers.shape[1]]


class Fp8Scaled(Fp8Blocks):
    """E4M3 values under one scale for the matrix, for each row, or for each block of 128 x 128."""

    suffixes = ("", "_scale")
    may_stack = False

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        blocks = -(-n // FP8.block), -(-k // FP8.block)
        return [(("F8_E4M3",), [(n, k)]), (SCALE_DTYPES, [(n, 1), (n,), (1,), (), blocks])]

    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        values = read(stored[name], start, end).view(np.uint8)
        scale, num_rows = stored[name + "_scale"], stored[name].shape[0]
        if len(scale.shape) == 2 and scale.shape[0] != num_rows:  # by blocks
            blocks = read(scale, start // FP8.block, -(-end // FP8.block)).astype(np.float32)
            rows = np.repeat(blocks, FP8.block, axis=0)[start % FP8.block :]
            return values, rows[: end - start]
        if len(scale.shape) == 2:
            return values, read(scale, start, end).astype(np.float32)
        whole = read(scale, 0, 1).astype(np.float32).reshape(-1, 1)
        by_row = np.broadcast_to(whole, (num_rows, 1))
        return values, by_row[start:end]

    def decompress(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        if scales.shape[1] > 1:
            return super().decompress(values, scales)
        numbers: np.ndarray = values.view(jnp.float8_e4m3fn).astype(np.float32)
        return numbers * scales


class _Integers(StoredFormat):
    """Integers; each row, or each group of inputs in a row, shares a scale.

    Stays compressed in memory if the scales are bfloat16 and the number of inputs that share a
    scale is a multiple of 32.
    """

    bits: int

    def memory_format(self, stored: Stored, name: str) -> Format | None:
        is_exact = stored[name + "_scale"].dtype == "BF16"
        return self.format_with_rounded_scales(stored, name) if is_exact else None

    def format_with_rounded_scales(self, stored: Stored, name: str) -> Format | None:
        scales, num_inputs = stored[name + "_scale"], self.num_inputs(stored, name)
        group, kind = num_inputs // scales.shape[1], INT4 if self.bits == 4 else INT8
        return kind if num_inputs % kind.block == 0 and group % kind.block == 0 else None

    @abstractmethod
    def num_inputs(self, stored: Stored, name: str) -> int:
        """Return K, the number of inputs."""

    def decompress(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        numbers = values.astype(np.float32)
        if self.bits == 4:
            pairs = np.stack([values & 15, values >> 4], axis=-1).reshape(values.shape[0], -1)
            numbers = pairs.astype(np.float32) - 8
        return numbers * np.repeat(
            scales.astype(np.float32), numbers.shape[1] // scales.shape[1], axis=1
        )


def _possible_scale_shapes(n: int, k: int) -> list[tuple[int, ...]]:
    return [(n, groups) for groups in range(1, k + 1) if k % groups == 0]


class PackedIntegers(_Integers):
    """Integers of 4 or 8 bits, packed into 32-bit words."""

    label = "integers"
    suffixes = ("_packed", "_scale", "_shape")

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        words = -(-k * self.bits // 32)
        return [
            (("I32",), [(n, words)]),
            (SCALE_DTYPES, _possible_scale_shapes(n, k)),
            (("I32", "I64"), [(2,)]),
        ]

    def num_inputs(self, stored: Stored, name: str) -> int:
        return stored[name + "_packed"].shape[1] * 32 // self.bits

    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        packed = read(stored[name + "_packed"], start, end).view(np.uint8)
        values = packed if self.bits == 4 else (packed ^ 128).view(np.int8)
        return values, read(stored[name + "_scale"], start, end)


class Int8Values(_Integers):
    """Integers of 8 bits, one a byte."""

    label = "int8"
    suffixes = ("", "_scale")
    bits = 8

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        return [(("I8",), [(n, k)]), (SCALE_DTYPES, _possible_scale_shapes(n, k))]

    def num_inputs(self, stored: Stored, name: str) -> int:
        return stored[name].shape[1]

    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return read(stored[name], start, end), read(stored[name + "_scale"], start, end)


class PackedMxfp4(StoredFormat):
    """E2M1 values, two a byte; each block of 32 inputs shares a power-of-two scale."""

    label = "MXFP4"
    suffixes = ("_packed", "_scale")
    dtypes = ("U8", "U8")  # (values, scales)

    def find_tensors(self, stored: Stored, name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
        if len(shape) == 2 and shape[1] % MXFP4.block:
            raise stored[self.tensor_names(name)[0]].error(
                f"needs inputs of a multiple of {MXFP4.block}, not {shape[1]}"
            )
        return super().find_tensors(stored, name, shape)

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        groups = k // MXFP4.block
        return [((self.dtypes[0],), [(n, k // 2)]), ((self.dtypes[1],), [(n, groups)])]

    def memory_format(self, stored: Stored, name: str) -> Format | None:
        return MXFP4

    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        values, scales = (
            read(stored[part], start, end).view(np.uint8) for part in self.tensor_names(name)
        )
        return values, scales

    def decompress(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return decode_mxfp4(values, scales)


class Fp4Experts(PackedMxfp4):
    """MXFP4 as DeepSeek-V4 stores it: int8 values in `weight`, E8M0 scales in `scale`."""

    dtypes = ("I8", "F8_E8M0")

    def tensor_names(self, name: str) -> tuple[str, ...]:
        return name, name.removesuffix("weight") + "scale"


def decompress_rows(
    form: StoredFormat, read: ReadRows, stored: Stored, name: str, span: tuple[int, int], step: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first row, end row, float32 rows) of rows `span` of a matrix, `step` rows at a
    time.
    """
    step = form.rows_per_chunk(span[1] - span[0], step)
    for first in range(*span, step):
        last = min(first + step, span[1])
        rows = form.decompress(*form.read_compressed(read, stored, name, first, last))
        if form.has_scales_in_values and not np.isfinite(rows).all():
            raise stored[name].error(NOT_FINITE)
        yield first, last, rows
