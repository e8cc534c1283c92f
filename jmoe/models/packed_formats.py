"""Compressed matrices that AutoGPTQ, AutoAWQ and NVIDIA's ModelOpt write.

Most have no exact form in memory, and are decompressed while they are read. `X` is the name of a
layer, whose matrix is `X.weight`; all matrices are those of `stored_formats.py`, [N, K].
- GPTQ (`gptq`): `X.qweight` int32 [K / p, N], p integers of 4 or 8 bits a word along K, the lowest
  bits first; `X.qzeros` int32 [K / G, N / p], one less than the zero points; `X.scales` [K / G, N];
  `X.g_idx` int32 [K], the group of each input. The weight is (integer - zero) * scale.
- AWQ (`awq`, version gemm): `X.qweight` int32 [K, N / 8], `X.qzeros` int32 [K / G, N / 8], both 4
  bits in the order of `AWQ_ORDER`; `X.scales` [K / G, N]. The weight is (integer - zero) * scale.
- NVFP4 of ModelOpt: `X.weight` uint8 [N, K / 2], E2M1, the lower four bits first; `X.weight_scale`
  E4M3 [N, K / 16]; `X.weight_scale_2` float32, of one element. The weight is the product of all.
- NVFP4 of compressed-tensors (`nvfp4-pack-quantized`): `weight_packed`, `weight_scale` as above;
  `weight_global_scale` float32, by which the product of the others is divided.

Legend:
N outputs, the rows of a matrix
K inputs
G inputs that share a scale
"""

import jax.numpy as jnp
import numpy as np

from jmoe.models.safetensors_io import StoredTensor, TensorReader
from jmoe.models.stored_formats import SCALE_DTYPES, ReadRows, Stored, StoredFormat
from kernels_pallas.formats import INT4, INT8, Format

WORD = 32  # bits
# the column, among the eight of a word, that each four bits hold, the lowest first
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUPS = (16, 32, 64, 128, 256, 512, 1024)
NVFP4_BLOCK = 16


def _unpack_words(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return the unsigned integers of `bits` bits in 32-bit words, the lowest bits first, along
    `axis`.
    """
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    parts = np.expand_dims(words.view(np.uint32), axis + 1)
    shape = [1] * parts.ndim
    shape[axis + 1] = len(shifts)
    values = (parts >> shifts.reshape(shape)) & np.uint32(2**bits - 1)
    whole = list(words.shape)
    whole[axis] *= len(shifts)
    return values.reshape(whole).astype(np.uint8)


class _IntegersWithZeroPoints(StoredFormat):
    """Unsigned integers with a zero point for each group of inputs, stored by input.

    Stays compressed in memory if all zero points are the middle of the range, inputs are in order,
    a group is a multiple of 32 inputs and the scales are bfloat16.
    """

    bits: int

    def tensor_names(self, name: str) -> tuple[str, ...]:
        return tuple(name.removesuffix("weight") + suffix for suffix in self.suffixes)

    def rows_per_chunk(self, rows: int, step: int) -> int:
        return rows  # rows are columns of the stored tensors, which are read whole

    def memory_format(self, stored: Stored, name: str) -> Format | None:
        scales = self._tensor_with_suffix(stored, name, "scales")
        return self.format_with_rounded_scales(stored, name) if scales.dtype == "BF16" else None

    def format_with_rounded_scales(self, stored: Stored, name: str) -> Format | None:
        scales, kind = (
            self._tensor_with_suffix(stored, name, "scales"),
            INT4 if self.bits == 4 else INT8,
        )
        num_inputs = self.num_inputs(stored, name)
        if num_inputs % scales.shape[0] or num_inputs // scales.shape[0] % kind.block:
            return None
        return kind if self._is_symmetric(stored, name) else None

    def _tensor_with_suffix(self, stored: Stored, name: str, suffix: str) -> StoredTensor:
        return stored[name.removesuffix("weight") + suffix]

    def num_inputs(self, stored: Stored, name: str) -> int:
        """Return K."""
        raise NotImplementedError

    def read_unsigned_codes(self, read: ReadRows, stored: Stored, name: str) -> np.ndarray:
        """Return the unsigned integers, uint8 [K, N]."""
        raise NotImplementedError

    def read_zero_points(self, read: ReadRows, stored: Stored, name: str) -> np.ndarray:
        """Return the zero points, uint8 [groups, N]."""
        raise NotImplementedError

    def read_input_groups(self, read: ReadRows, stored: Stored, name: str) -> np.ndarray:
        """Return each input's group, [K]."""
        groups, num_inputs = (
            self._tensor_with_suffix(stored, name, "scales").shape[0],
            self.num_inputs(stored, name),
        )
        return np.arange(num_inputs) // -(-num_inputs // groups)

    def _is_symmetric(self, stored: Stored, name: str) -> bool:
        """Return whether all zero points are the middle of the range and inputs are in order.

        A checkpoint whose files are not there is taken to be so.
        """
        if not self._tensor_with_suffix(stored, name, "qzeros").file.is_file():
            return True
        with TensorReader() as reader:
            read = _make_read_rows(reader)
            groups = self.read_input_groups(read, stored, name)
            in_order = np.array_equal(
                groups, _IntegersWithZeroPoints.read_input_groups(self, read, stored, name)
            )
            middle = 2 ** (self.bits - 1)
            return in_order and bool((self.read_zero_points(read, stored, name) == middle).all())

    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (integers less their zero points, int16 [n, K]; their scales, float32 [n, K])."""
        scales = self._tensor_with_suffix(stored, name, "scales")
        groups = self.read_input_groups(read, stored, name)
        if groups.min() < 0 or groups.max() >= scales.shape[0]:
            raise scales.error(f"has {scales.shape[0]} groups, and g_idx names others")
        codes = self.read_unsigned_codes(read, stored, name)[:, start:end].astype(np.int16)
        zeros = self.read_zero_points(read, stored, name)[:, start:end].astype(np.int16)
        by_group = read(scales, 0, scales.shape[0])[:, start:end].astype(np.float32)
        return (codes - zeros[groups]).T, by_group[groups].T

    def decompress(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return values.astype(np.float32) * scales

    def read_in_memory_format(
        self, read: ReadRows, stored: Stored, name: str, shape: tuple[int, ...], kind: Format
    ) -> tuple[np.ndarray, np.ndarray]:
        codes = self.read_unsigned_codes(read, stored, name)
        if kind is INT4:
            values = codes[0::2] | codes[1::2] << 4
        else:
            values = (codes ^ 128).view(np.int8)
        scales = self._tensor_with_suffix(stored, name, "scales")
        by_group = read(scales, 0, scales.shape[0]).astype(jnp.bfloat16)
        repeats = codes.shape[0] // kind.block // scales.shape[0]
        return values, np.repeat(by_group, repeats, axis=0).view(kind.scales)


def _make_read_rows(reader: TensorReader) -> ReadRows:
    def read(tensor: StoredTensor, start: int, end: int) -> np.ndarray:
        parts = [rows.copy() for _, _, rows in reader.read_chunks(tensor, start, end)]
        return np.concatenate(parts)

    return read


def _possible_group_counts(k: int) -> list[int]:
    """Return the numbers of groups that K inputs may have."""
    return [-(-k // group) for group in (k, *GROUPS)]


class Gptq(_IntegersWithZeroPoints):
    """Integers of 4 or 8 bits as AutoGPTQ and GPTQModel write them (format `gptq`)."""

    label = "GPTQ"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        groups, per_word = _possible_group_counts(k), WORD // self.bits
        return [
            (("I32",), [(k // per_word, n)]),
            (("I32",), [(g, n // per_word) for g in groups]),
            (SCALE_DTYPES, [(g, n) for g in groups]),
            (("I32",), [(k,)]),
        ]

    def num_inputs(self, stored: Stored, name: str) -> int:
        return self._tensor_with_suffix(stored, name, "qweight").shape[0] * (WORD // self.bits)

    def read_unsigned_codes(self, read: ReadRows, stored: Stored, name: str) -> np.ndarray:
        words = self._tensor_with_suffix(stored, name, "qweight")
        return _unpack_words(read(words, 0, words.shape[0]), self.bits, axis=0)

    def read_zero_points(self, read: ReadRows, stored: Stored, name: str) -> np.ndarray:
        words = self._tensor_with_suffix(stored, name, "qzeros")
        stored_zeros = _unpack_words(read(words, 0, words.shape[0]), self.bits, axis=1)
        return (stored_zeros + np.uint8(1)) & np.uint8(2**self.bits - 1)

    def read_input_groups(self, read: ReadRows, stored: Stored, name: str) -> np.ndarray:
        groups: np.ndarray = read(self._tensor_with_suffix(stored, name, "g_idx"), 0, 1)[0]
        return groups


class Awq(_IntegersWithZeroPoints):
    """Integers of 4 bits as AutoAWQ writes them (version gemm)."""

    label = "AWQ"
    suffixes = ("qweight", "qzeros", "scales")
    bits = 4

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        groups, words = _possible_group_counts(k), n // 8
        return [
            (("I32",), [(k, words)]),
            (("I32",), [(g, words) for g in groups]),
            (SCALE_DTYPES, [(g, n) for g in groups]),
        ]

    def num_inputs(self, stored: Stored, name: str) -> int:
        return self._tensor_with_suffix(stored, name, "qweight").shape[0]

    def read_unsigned_codes(self, read: ReadRows, stored: Stored, name: str) -> np.ndarray:
        return self._unpack_in_column_order(read, self._tensor_with_suffix(stored, name, "qweight"))

    def read_zero_points(self, read: ReadRows, stored: Stored, name: str) -> np.ndarray:
        return self._unpack_in_column_order(read, self._tensor_with_suffix(stored, name, "qzeros"))

    def _unpack_in_column_order(self, read: ReadRows, words: StoredTensor) -> np.ndarray:
        packed = _unpack_words(read(words, 0, words.shape[0]), self.bits, axis=1)
        by_word = packed.reshape(packed.shape[0], -1, len(AWQ_ORDER))
        values = np.empty_like(by_word)
        values[:, :, list(AWQ_ORDER)] = by_word
        return values.reshape(packed.shape)


class Nvfp4(StoredFormat):
    """E2M1 values in blocks of 16 under E4M3 scales, and one float32 scale for the matrix."""

    label = "NVFP4"
    suffixes = ("", "_scale", "_scale_2")

    def expected_tensors(
        self, n: int, k: int
    ) -> list[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        blocks = k // NVFP4_BLOCK
        return [
            (("U8",), [(n, k // 2)]),
            (("F8_E4M3",), [(n, blocks)]),
            (("F32",), [(), (1,)]),
        ]

    def memory_format(self, stored: Stored, name: str) -> Format | None:
        return None

    def read_compressed(
        self, read: ReadRows, stored: Stored, name: str, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (values uint8 [n, K / 2], the product of both scales, float32 [n, K / 16])."""
        values, scales, whole = (stored[part] for part in self.tensor_names(name))
        by_block = read(scales, start, end).astype(np.float32)
        return read(values, start, end), self.combine_scales(by_block, read(whole, 0, 1)[0, 0])

    def combine_scales(self, by_block: np.ndarray, whole: np.float32) -> np.ndarray:
        return by_block * whole

    def decompress(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        codes = np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)
        numbers: np.ndarray = codes.view(jnp.float4_e2m1fn).astype(np.float32)
        return numbers * np.repeat(scales, NVFP4_BLOCK, axis=1)


class PackedNvfp4(Nvfp4):
    """NVFP4 as compressed-tensors writes it, whose scale for the matrix divides."""

    suffixes = ("_packed", "_scale", "_global_scale")

    def combine_scales(self, by_block: np.ndarray, whole: np.float32) -> np.ndarray:
        return by_block / whole
