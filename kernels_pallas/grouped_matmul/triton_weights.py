"""Tiles that a step of the grouped matmul in Triton reads: of rows, and of the weights in
the dtype that is multiplied.

`DenseTiles` reads weights as they are, or int8. `Fp8Tiles` reads weights in E4M3 and rows rounded
to E4M3, which are multiplied as they are. `CompressedTiles` reads blocks of 4 or 8 bits
(`kernels_pallas.compressed`) and decodes them in registers. The two 4-bit values of a byte belong
to an even and an odd input. So each half of the inputs has its own product, and rows of 16-bit
values are read as pairs of them.

Legend: N rows, D inner, F outer dimension, M slots, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.cached_values import decode_e4m3
from kernels_pallas.compressed import format_of
from kernels_pallas.formats import FP8, INT4, INT8, MXFP4, Format
from kernels_pallas.fp8_dot import fp8_dot
from kernels_pallas.grouped_matmul.fp8_inputs import E4M3, has_fp8_products, round_group
from kernels_pallas.implementations import target_device
from kernels_pallas.triton import Ref, dot, index_range, load

_HALF_DTYPES = (jnp.bfloat16, jnp.float16)
# E4M3 values, and the float32 factor of each row or column of a step
ScaledBlock: TypeAlias = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class DenseTiles:
    """Reads weights [M, D, F], or [M, F, D] if `transposed`, in x's dtype or int8.

    step: inputs of a step.
    """

    x_TD: jax.Array
    w: jax.Array
    step: int
    transposed: bool = False

    @property
    def num_steps(self) -> int:
        """Number of steps of a tile of the result."""
        return pl.cdiv(self.x_TD.shape[1], self.step)

    @property
    def contracted_dims(self) -> tuple[int, int]:
        """The dimensions of the rows and of the weights that a product sums over."""
        return (1, 1) if self.transposed else (1, 0)

    def operands(self) -> list[jax.Array]:
        """Return the kernel's inputs: x, the weights, and what else describes the weights."""
        return [self.x_TD, self.w]

    def read_rows(
        self, refs: list[Ref], k: jax.Array, read: jax.Array, is_row: jax.Array
    ) -> list[jax.Array]:
        """Return step k of the rows `read` of x, one array for each product.

        refs: to `operands`.
        """
        at, is_inner = self._input_indices(k)
        return [load(refs[0].at[read[:, None], at[None]], is_row[:, None] & is_inner[None])]

    def read_weights(
        self,
        refs: list[Ref],
        k: jax.Array,
        slot: jax.Array,
        columns: jax.Array,
        is_column: jax.Array,
    ) -> list[jax.Array]:
        """Return step k of some columns of a slot in x's dtype, one array for each product."""
        at, is_inner = self._input_indices(k)
        if self.transposed:
            index, mask = (columns[:, None], at[None]), is_column[:, None] & is_inner[None]
        else:
            index, mask = (at[:, None], columns[None]), is_inner[:, None] & is_column[None]
        return [load(refs[1].at[(slot, *index)], mask).astype(self.x_TD.dtype)]

    def multiply(self, x_block: jax.Array, w_block: jax.Array) -> jax.Array:
        """Return the float32 product of a block of rows with one of the weights."""
        return dot(x_block, w_block, self.contracted_dims)

    def _input_indices(self, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (inputs of step k, which of them exist)."""
        at = index_range(k * self.step, self.step)
        return at, at < self.x_TD.shape[1]


@dataclass(frozen=True)
class Fp8Tiles:
    """Reads weights [M, F, D] in E4M3 with scales [M, B, F] of 128 inputs each; a step is 128
    inputs.

    x_TD: E4M3 with scales x_scales_TB; if they are None, wide rows, which every program rounds
    itself.
    """

    x_TD: jax.Array
    w: jax.Array
    scales: jax.Array
    x_scales_TB: jax.Array | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps of a tile of the result."""
        return self.scales.shape[1]

    def operands(self) -> list[jax.Array]:
        """Return the kernel's inputs: x, the weights, their scales, perhaps those of x.

        E4M3 values are bytes to the kernel, which can load them with a mask.
        """
        if self.x_scales_TB is None:
            return [self.x_TD, self.w, self.scales]
        bits = lax.bitcast_convert_type(self.x_TD, jnp.uint8)
        return [bits, self.w, self.scales, self.x_scales_TB]

    def read_rows(
        self, refs: list[Ref], k: jax.Array, read: jax.Array, is_row: jax.Array
    ) -> list[ScaledBlock]:
        """Return step k of the rows `read` of x, with the factor of each row."""
        at, is_inner = self._input_indices(k)
        some = load(refs[0].at[read[:, None], at[None]], is_row[:, None] & is_inner[None])
        if self.x_scales_TB is None:
            return [round_group(some)]
        values = lax.bitcast_convert_type(some, E4M3)
        return [(values, load(refs[3].at[read, k], is_row))]

    def read_weights(
        self,
        refs: list[Ref],
        k: jax.Array,
        slot: jax.Array,
        columns: jax.Array,
        is_column: jax.Array,
    ) -> list[ScaledBlock]:
        """Return step k of some columns of a slot, with the factor of each column."""
        at, is_inner = self._input_indices(k)
        mask = is_column[:, None] & is_inner[None]
        bits = load(refs[1].at[slot, columns[:, None], at[None]], mask)
        values = lax.bitcast_convert_type(bits, E4M3)
        return [(values, load(refs[2].at[slot, k, columns], is_column))]

    def multiply(self, x_block: ScaledBlock, w_block: ScaledBlock) -> jax.Array:
        """Return the float32 product of a block of rows with one of the weights."""
        (x, of_rows), (w, of_columns) = x_block, w_block
        return fp8_dot(x, w) * (of_rows[:, None] * of_columns[None])

    def _input_indices(self, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (inputs of step k, which of them exist)."""
        at = index_range(k * FP8.block, FP8.block)
        return at, at < self.w.shape[2]


@dataclass(frozen=True)
class CompressedTiles:
    """Reads weights [M, D / values per byte, F] with scales [M, blocks of D, F], of which bfloat16
    may be stored as its bits.

    step: bytes of a column in a step, a power of two.
    """

    x_TD: jax.Array
    w: jax.Array
    scales: jax.Array
    step: int
    contracted_dims = (1, 0)

    @property
    def kind(self) -> Format:
        """The format of the weights."""
        return format_of(self.w.dtype, self.scales.dtype)

    @property
    def num_steps(self) -> int:
        """Number of steps of a tile of the result."""
        return pl.cdiv(self.w.shape[1], self.step)

    @property
    def _reads_byte_pairs(self) -> bool:
        return self.kind.per_byte == 2 and self.x_TD.dtype in _HALF_DTYPES

    def operands(self) -> list[jax.Array]:
        """Return the kernel's inputs: x, perhaps as pairs of values in 32 bits; the weights' bytes;
        the scales.
        """
        x = self.x_TD
        if self._reads_byte_pairs:
            x = lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)
        return [x, self.w, self.scales]

    def read_rows(
        self, refs: list[Ref], k: jax.Array, read: jax.Array, is_row: jax.Array
    ) -> list[jax.Array]:
        """Return step k of the rows `read` of x: one array, or the even and the odd inputs."""
        at, is_inner = self._byte_indices_and_mask(k)
        x, mask = refs[0], is_row[:, None] & is_inner[None]
        if self._reads_byte_pairs:
            pairs = load(x.at[read[:, None], at[None]], mask)
            halves = (pairs & 0xFFFF, pairs >> 16)
            return [lax.bitcast_convert_type(h.astype(jnp.uint16), self.x_TD.dtype) for h in halves]
        per_byte = self.kind.per_byte
        return [
            load(x.at[read[:, None], (at * per_byte + half)[None]], mask)
            for half in range(per_byte)
        ]

    def read_weights(
        self,
        refs: list[Ref],
        k: jax.Array,
        slot: jax.Array,
        columns: jax.Array,
        is_column: jax.Array,
    ) -> list[jax.Array]:
        """Return step k of some columns of a slot, decoded to x's dtype: one array, or the even and
        the odd inputs.
        """
        at, is_inner = self._byte_indices_and_mask(k)
        mask = is_inner[:, None] & is_column[None]
        codes = load(refs[1].at[slot, at[:, None], columns[None]], mask).astype(jnp.uint32) & 0xFF
        factors = self._read_factors(refs[2], k, slot, columns, is_column)
        decode = _DECODERS[self.kind.name]
        halves = [codes] if self.kind.per_byte == 1 else [codes & 15, codes >> 4]
        return [(decode(half) * factors).astype(self.x_TD.dtype) for half in halves]

    def multiply(self, x_block: jax.Array, w_block: jax.Array) -> jax.Array:
        """Return the float32 product of a block of rows with one of the weights."""
        return dot(x_block, w_block, self.contracted_dims)

    def _byte_indices_and_mask(self, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (bytes of a column in step k, which of them exist)."""
        at = index_range(k * self.step, self.step)
        return at, at < self.w.shape[1]

    def _read_factors(
        self, scales: Ref, k: jax.Array, slot: jax.Array, columns: jax.Array, is_column: jax.Array
    ) -> jax.Array:
        """Return the float32 factor of each byte of step k, of [step, columns] or [1, columns]."""
        block_bytes = self.kind.block // self.kind.per_byte
        num_blocks = max(1, self.step // block_bytes)
        first = k * self.step // block_bytes
        if num_blocks == 1:
            row = load(scales.at[slot, first, columns], is_column)
            return _scales_to_float32(row, self.kind)[None]
        block = index_range(first, num_blocks)
        mask = (block < self.scales.shape[1])[:, None] & is_column[None]
        rows = load(scales.at[slot, block[:, None], columns[None]], mask)
        shape = num_blocks, block_bytes, columns.shape[0]
        spread = lax.broadcast_in_dim(_scales_to_float32(rows, self.kind), shape, (0, 2))
        return spread.reshape(self.step, columns.shape[0])


def _scales_to_float32(scales: jax.Array, kind: Format) -> jax.Array:
    """Return stored scales as float32: MXFP4 exponents and bfloat16 bits are decoded."""
    if kind is MXFP4:
        return lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    if scales.dtype == jnp.uint16:
        return lax.bitcast_convert_type(scales.astype(jnp.uint32) << 16, jnp.float32)
    return scales.astype(jnp.float32)


# Few operations a weight, because the GPU decodes as many weights as its memory delivers; exact for
# every code. A whole number below 2^23 is the mantissa of a float32 from 2^23 on.


def _small_int_to_float32(code: jax.Array, zero: int) -> jax.Array:
    return lax.bitcast_convert_type(code | 0x4B000000, jnp.float32) - float(2**23 + zero)


def _decode_e2m1(code: jax.Array) -> jax.Array:
    """Return the value of E2M1 codes; exponent and mantissa have their places in a float16, whose
    smallest numbers the conversion reads too.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    half = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
    return half.astype(jnp.float32) * float(2**14)


_DECODERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    MXFP4.name: _decode_e2m1,
    INT4.name: lambda code: _small_int_to_float32(code, 8),
    INT8.name: lambda code: _small_int_to_float32(code ^ 0x80, 128),
    FP8.name: decode_e4m3,
}


def check_format(w: jax.Array, scales: jax.Array) -> None:
    """Raise NotImplementedError if the kernel does not decode these weights."""
    if (kind := format_of(w.dtype, scales.dtype)).name not in _DECODERS:
        raise NotImplementedError(f"weights in the format {kind.name}")


def check_fp8_products(w: jax.Array, scales: jax.Array) -> None:
    """Raise NotImplementedError if the kernel does not multiply these weights by rows in E4M3."""
    if (kind := format_of(w.dtype, scales.dtype)) is not FP8:
        raise NotImplementedError(f"inputs in fp8 with weights in the format {kind.name}")
    if target_device().platform == "gpu" and not has_fp8_products():
        raise NotImplementedError("no FP8 tensor cores")
