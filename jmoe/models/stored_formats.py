"""Compressed matrices of Hugging Face checkpoints: their tensors, and how to decompress them.

Each `StoredFormat` reads one layout:
- `fp8` (DeepSeek-V3, Qwen3's FP8 releases): `W` E4M3 [N, K]; `W_scale_inv` [N / 128, K / 128] in
  float32 or bfloat16, or with `scale_fmt: ue8m0` powers of two in float32 or E8M0. Fused experts of
  transformers 5 have a leading E on both: `W` E4M3 [E, N, K].
- compressed-tensors `pack-quantized` (Kimi-K2): `W_packed` int32, [N, K / 8] for 4-bit or [N, K /
  4] for 8-bit integers with an offset, the lowest bits first; `W_scale` [N, K / G]; `W_shape` [2].
- compressed-tensors `int-quantized`: `W` int8 [N, K]; `W_scale` [N, K / G].
- compressed-tensors `mxfp4-pack-quantized`: `W_packed` uint8 [N, K / 2], the lower four bits first;
  `W_scale` uint8 [N, K / 32].
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

from jmoe.config import check
from jmoe.models.mxfp4 import decode_mxfp4
from jmoe.models.safetensors_io import StoredTensor
from jmoe.types import Json, JsonObject
from kernels_pallas.formats import FP8, INT4, INT8, MXFP4, Format

Stored = Mapping[str, StoredTensor]
# (tensor, first row, end row) -> a copy of these rows, [n, elements of a row]
ReadRows = Callable[[StoredTensor, int, int], np.ndarray]
COMPRESSION_FIELDS = ("quantization_config", "expert_dtype")  # of a `config.json`
SCALE_DTYPES = ("BF16", "F16", "F32")
# compressed-tensors' formats that `format_of_matrix` reads: (type, numbers of bits) of the weights
_COMPRESSED_TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "pack-quantized": ("int", (4, 8)),
    "int-quantized": ("int", (8,)),
    "mxfp4-pack-quantized": ("float", (4,)),
}
# supported values of a compressed-tensors configuration's fields
_WEIGHT_FIELDS: dict[str, tuple[Json, ...]] = {
    "symmetric": (True,),
    "dynamic": (False, None),
    # "static" and "weight" are synonyms, and store columns in their original order
    "actorder": (None, False, "static", "weight"),
    "zp_dtype": (None,),
    "block_structure": (None,),
    "strategy": ("group", "channel"),
}
# Fields by which a compressed-tensors model changes more than its weights, with the values that
# disable each.
_OTHER_CHANGES: dict[str, tuple[Json, ...]] = {
    "transform_config": (None, {}, {"config_groups": {}}),
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None, {}),
    "kv_cache_scheme": (None, {}),
}


class StoredFormat(ABC):
    """A compressed layout of a matrix [N, K] in one or several tensors."""

    suffixes: ClassVar[tuple[str, ...]]  # appended to the matrix's name for each tensor
    may_stack: ClassVar[bool] = False  # whether the tensors may hold the matrices of all experts

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
        return values.T, np.repeat(scales, repeats, axis=1).T.view(kind.scales)


class Fp8Blocks(StoredFormat):
    """E4M3 values; each block of 128 x 128 shares a scale."""

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


class _Integers(StoredFormat):
    """Integers; each row, or each group of inputs in a row, shares a scale.

    Stays compressed in memory if the scales are bfloat16 and the number of inputs that share a
    scale is a multiple of 32.
    """

    bits: int

    def memory_format(self, stored: Stored, name: str) -> Format | None:
        scales, num_inputs = stored[name + "_scale"], self.num_inputs(stored, name)
        group, kind = num_inputs // scales.shape[1], INT4 if self.bits == 4 else INT8
        fits = num_inputs % kind.block == 0 and group % kind.block == 0 and scales.dtype == "BF16"
        return kind if fits else None

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


def format_of_matrix(stored: Stored, name: str, shape: tuple[int, ...]) -> StoredFormat | None:
    """Return the compressed format in which a matrix is stored.

    None if it is stored as a single tensor of plain numbers, or is missing.
    """
    if name in stored and all(part in stored for part in Fp4Experts().tensor_names(name)):
        return Fp4Experts()
    if name in stored:
        return {"F8_E4M3": Fp8Blocks(), "I8": Int8Values()}.get(stored[name].dtype)
    packed = stored.get(name + "_packed")
    if packed is None:
        return None
    if packed.dtype == "U8":
        return PackedMxfp4()
    is_wider = len(packed.shape) == len(shape) == 2 and packed.shape[1] == -(-shape[1] // 4)
    return PackedIntegers(8 if is_wider else 4)


def decompress_rows(
    form: StoredFormat, read: ReadRows, stored: Stored, name: str, span: tuple[int, int], step: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first row, end row, float32 rows) of rows `span` of a matrix, `step` rows at a
    time.
    """
    for first in range(*span, step):
        last = min(first + step, span[1])
        yield first, last, form.decompress(*form.read_compressed(read, stored, name, first, last))


def announced_format(fields: JsonObject) -> StoredFormat | None:
    """Return the format in which a `config.json` says that its experts' matrices are stored.

    None for plain numbers, and for gpt-oss's MXFP4, whose tensors hold all experts.
    """
    if fields.get("expert_dtype") == "fp4":
        return Fp4Experts()
    quantization = fields.get("quantization_config") or {}
    match quantization.get("quant_method"), quantization.get("format"):
        case "fp8", _:
            return Fp8Blocks()
        case "compressed-tensors", "pack-quantized":
            bits = [group["weights"]["num_bits"] for group in _config_groups(quantization)]
            return PackedIntegers(bits[0])
        case "compressed-tensors", "int-quantized":
            return Int8Values()
        case "compressed-tensors", "mxfp4-pack-quantized":
            return PackedMxfp4()
    return None


def announced_group(fields: JsonObject, num_inputs: int) -> int:
    """Return how many of a row's inputs share a scale of integers, by the `config.json`."""
    quantization = fields.get("quantization_config") or {}
    for group in _config_groups(quantization):
        return (group.get("weights") or {}).get("group_size") or num_inputs
    return num_inputs


def _config_groups(quantization: JsonObject) -> list[JsonObject]:
    return list((quantization.get("config_groups") or {}).values())


def check_quantization(fields: Json, kind: str, expert_dtype: Json = None) -> None:
    """Raise ValueError if jmoe cannot read a `quantization_config` or `expert_dtype`.

    Supported are the formats of this file, and gpt-oss's MXFP4.
    """
    check(expert_dtype in (None, "fp4", "fp8"), "expert_dtype", expert_dtype, "must be fp4 or fp8")
    fields = fields if isinstance(fields, dict) or not fields else {"quant_method": fields}
    if expert_dtype is not None:
        goes = (fields or {}).get("quant_method", "fp8") == "fp8" and kind != "gpt_oss"
        check(
            goes,
            "expert_dtype",
            expert_dtype,
            "needs quantization_config.quant_method = 'fp8', or none",
        )
    if not fields:
        return
    method = fields.get("quant_method")
    known = ("mxfp4",) if kind == "gpt_oss" else ("fp8", "compressed-tensors")
    prefix = "quantization_config."
    check(method in known, prefix + "quant_method", method, f"must be {' or '.join(known)}")
    if method == "fp8":
        size, number = fields.get("weight_block_size"), fields.get("fmt", "e4m3")
        check(
            size == [FP8.block] * 2,
            prefix + "weight_block_size",
            size,
            f"must be [{FP8.block}, {FP8.block}]",
        )
        names = "e4m3", "float8_e4m3fn"  # of one format; MiniMax-M2 has the second
        check(number in names, prefix + "fmt", number, "must be e4m3 or float8_e4m3fn")
        scales = fields.get("scale_fmt")
        check(
            scales in (None, "float", "ue8m0"),
            prefix + "scale_fmt",
            scales,
            "must be ue8m0 or float, or none",
        )
        experts = fields.get("expert_dtype", "fp8")
        check(experts == "fp8", prefix + "expert_dtype", experts, "must be fp8")
    if method == "compressed-tensors":
        _check_compressed_tensors(fields, prefix)


def _check_compressed_tensors(fields: JsonObject, prefix: str) -> None:
    chosen, known = fields.get("format"), ", ".join(_COMPRESSED_TENSORS)
    check(chosen in _COMPRESSED_TENSORS, prefix + "format", chosen, f"must be {known}")
    kind, usable = _COMPRESSED_TENSORS[str(chosen)]
    for field, harmless in _OTHER_CHANGES.items():
        value = fields.get(field)
        is_dense = (
            field == "sparsity_config"
            and isinstance(value, dict)
            and value.get("format") == "dense"
        )
        check(
            value in harmless or is_dense, prefix + field, value, "is not supported: must be null"
        )
    groups = fields.get("config_groups")
    check(isinstance(groups, dict), prefix + "config_groups", groups, "must be a table")
    assert isinstance(groups, dict)
    for name, group in groups.items():
        weights, at = (group or {}).get("weights") or {}, f"{prefix}config_groups.{name}.weights."
        own = (group or {}).get("format") or chosen
        check(
            own == chosen,
            f"{prefix}config_groups.{name}.format",
            own,
            f"must be format = {chosen!r}, or none",
        )
        bits, number = weights.get("num_bits"), weights.get("type", "int")
        known = f"must be {' or '.join(map(str, usable))} with format = {chosen!r}"
        check(bits in usable, at + "num_bits", bits, known)
        check(number == kind, at + "type", number, f"must be {kind!r}")
        for field, allowed in _WEIGHT_FIELDS.items():
            value = weights.get(field, allowed[0])
            check(value in allowed, at + field, value, f"must be {' or '.join(map(str, allowed))}")
