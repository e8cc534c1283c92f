"""The forms of the grouped matmul on Hopper: what one step of the pipeline copies and multiplies.

`DenseForm` is the whole mechanism; every other form overrides the part in which it differs:

- `GatheredRowsForm`: rows named by index are copied one by one, each into a 128-byte line of shared
  memory, swizzled by its place among 8 lines. The products need those 8 lines as one block, so each
  multiplying warpgroup moves the lines of its 64 rows into such blocks while the tensor cores
  compute the previous step.
- `QuantizedWeightsForm`: weights of 8 bits are copied without conversion; each multiplying
  warpgroup converts its columns in shared memory while the tensor cores compute the previous step.
- `CompressedWeightsForm`: weights in blocks of inputs (`kernels_pallas.compressed`) are converted
  in the same way, with their scales copied beside them. The two 4-bit values of a byte belong to an
  even and an odd input, so x is split into its even and odd columns beforehand and each half has
  its own product.

Gated weights have two parts, gate and up, whose columns are summed side by side in one warpgroup;
`DenseForm` and `GatheredRowsForm` take them. `choose_form` names the form of some operands.

Legend: N rows sorted by group, D inner, F outer dimension, E groups, M slots; T tokens; H halves of
x (even, odd columns); wg: a warpgroup, 128 threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kernels_pallas.compressed import decode_e2m1, format_of
from kernels_pallas.formats import FP8, MXFP4, Format
from kernels_pallas.grouped_matmul.mosaic_pipeline import ALIGN, ROWS, Place, pad_to_whole_tiles
from kernels_pallas.hopper import Ref, Scratch, Slice

INNER = 64  # inner dimension of one step: 128 bytes, one swizzled line
STAGES = 4
FEWER_STAGES = 3  # of forms that need more shared memory
DTYPES = (jnp.bfloat16, jnp.float16)
NARROW_DTYPES = (jnp.int8, jnp.float8_e4m3fn)
STORED = 64  # columns that a warpgroup stores, or converts, at a time
TILING: Any = plgpu.TilingTransform  # abstract, as JAX annotates it
SWIZZLE: Any = plgpu.SwizzleTransform
Transforms: TypeAlias = tuple[Any, ...]
TILED: Transforms = (TILING((8, 64)), SWIZZLE(128))
TILED_NARROW: Transforms = (TILING((8, 64)), SWIZZLE(64))
BY_ROW: Transforms = (TILING((1, 64)), SWIZZLE(128))
NARROW_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


class Warpgroup(NamedTuple):
    """A multiplying warpgroup: its number, and the first row and column of a tile that it sums."""

    number: jax.Array
    top: jax.Array | int
    left: jax.Array | int


@dataclass(frozen=True)
class TileShape:
    """The columns of a kernel: `num_columns` of the weights, of which the result has those of one
    part; a tile is ROWS rows and `tile_columns` columns of the result.

    by_rows: a warpgroup computes half of the rows of all columns, so that it has gate and up of one
    column; otherwise it computes all rows of half of the columns.
    """

    num_columns: int
    tile_columns: int
    parts: int = 1
    by_rows: bool = False

    @property
    def tiles_across(self) -> int:
        """Number of tiles side by side."""
        return self.num_columns // self.parts // self.tile_columns

    @property
    def sums_shape(self) -> tuple[int, int]:
        """Rows and columns that a warpgroup sums for each part."""
        if self.by_rows:
            return ROWS // 2, self.tile_columns
        return ROWS, self.tile_columns // 2

    def warpgroup(self, number: jax.Array) -> Warpgroup:
        """Return a warpgroup's place in a tile."""
        height, columns = self.sums_shape
        by_rows = self.by_rows
        return Warpgroup(number, *((number * height, 0) if by_rows else (0, number * columns)))

    def column_slice(self, part: int, first: jax.Array, num: int) -> Slice:
        """Return the slice of the weights' columns that begins at column `first` of a part and has
        `num` columns.
        """
        return pl.ds(part * (self.num_columns // self.parts) + first, num)


class KernelRefs(NamedTuple):
    """The references of a kernel. operands, buffers: inputs and shared memory that only some forms
    have, as `DenseForm.operands` and `DenseForm.buffers` list them.
    """

    tiles: Ref  # [4, number of tiles], from `row_tiles`
    x: Ref  # [H, N or T, D]
    w: Ref
    operands: Sequence[Ref]
    out: Ref
    x_smem: Ref
    w_smem: Ref
    out_smem: Ref
    buffers: Sequence[Ref]


@dataclass(frozen=True)
class DenseForm:
    """The form of a product of rows in order with weights in x's dtype: what a step of the kernel
    copies and multiplies.
    """

    x_HND: jax.Array
    w: jax.Array
    tile: TileShape
    transpose_rhs: bool = False
    num_stages: int = STAGES
    x_transforms: Transforms = field(default=TILED, kw_only=True)
    w_transforms: Transforms = field(default=TILED, kw_only=True)

    @property
    def num_products_per_part(self) -> int:
        """H, the number of products of a part in a step."""
        return self.x_HND.shape[0]

    @property
    def num_rows(self) -> int:
        """N, with the rows that complete the last tile."""
        return self.x_HND.shape[1]

    @property
    def num_steps(self) -> int:
        """Number of steps of a tile."""
        return self.x_HND.shape[2] // INNER

    @property
    def copies_per_step(self) -> int:
        """Number of copies that a step waits for: of x, and of each part of the weights."""
        return self.num_products_per_part + self.tile.parts

    def operands(self) -> list[jax.Array]:
        """Return the kernel's inputs besides x and the weights."""
        return []

    def buffers(self) -> list[Scratch]:
        """Return the shared memory that this form needs besides that of all forms."""
        return []

    def scratch(self) -> list[Scratch]:
        """Return the kernel's shared memory: the stages of x and of the weights, the columns to be
        stored, and this form's buffers.
        """
        dtype, tile = self.x_HND.dtype, self.tile
        x_shape = (self.num_stages, self.num_products_per_part, ROWS, INNER)
        w_shape = (self.num_stages, tile.parts, *self._weights_block(tile.tile_columns))
        return [
            plgpu.SMEM(x_shape, dtype, transforms=self.x_transforms),
            plgpu.SMEM(w_shape, self.w.dtype, transforms=self.w_transforms),
            plgpu.SMEM((2, tile.sums_shape[0], STORED), dtype, transforms=BY_ROW),
            *self.buffers(),
        ]

    def _weights_block(self, columns: int) -> tuple[int, int]:
        return (columns, INNER) if self.transpose_rhs else (INNER, columns)

    def start_copies(
        self, refs: KernelRefs, place: Place, k: jax.Array, stage: jax.Array, barrier: Ref
    ) -> None:
        """Start the copies of x and of the weights for step k of tile (m, n) into buffer `stage`;
        they arrive at `barrier`.
        """
        m, n = place
        inside = pl.ds(k * INNER, INNER)
        self.start_row_copies(refs, m, inside, stage, barrier)
        for part in range(self.tile.parts):
            tile_columns = self.tile.tile_columns
            across = self.tile.column_slice(part, n * tile_columns, tile_columns)
            block = (across, inside) if self.transpose_rhs else (inside, across)
            plgpu.copy_gmem_to_smem(
                refs.w.at[refs.tiles[0, m], *block], refs.w_smem.at[stage, part], barrier
            )

    def start_row_copies(
        self, refs: KernelRefs, m: jax.Array, inside: Slice, stage: jax.Array, barrier: Ref
    ) -> None:
        """Start the copies of the rows of x of row tile m, columns `inside`, into buffer `stage`;
        they arrive at `barrier`.
        """
        rows = pl.ds(pl.multiple_of(refs.tiles[1, m], ALIGN), ROWS)
        for half in range(self.num_products_per_part):
            plgpu.copy_gmem_to_smem(
                refs.x.at[half, rows, inside], refs.x_smem.at[stage, half], barrier
            )

    def start_products(
        self, refs: KernelRefs, wg: Warpgroup, accs: Sequence[Ref], k: jax.Array, stage: jax.Array
    ) -> None:
        """Start the products of step k, from buffer `stage`; they are added to `accs`, one
        accumulator for each part.
        """
        x = self.rows_operand(refs, wg, k, stage)
        for part, acc in enumerate(accs):
            block = self.weights_operand(refs, wg, part, k, stage)
            plgpu.wgmma(acc, x, block.transpose((1, 0)) if self.transpose_rhs else block)

    def rows_operand(self, refs: KernelRefs, wg: Warpgroup, k: jax.Array, stage: jax.Array) -> Ref:
        """Return the warpgroup's rows of a step as an operand of a product."""
        return refs.x_smem.at[stage, 0, pl.ds(wg.top, self.tile.sums_shape[0])]

    def weights_operand(
        self, refs: KernelRefs, wg: Warpgroup, part: int, k: jax.Array, stage: jax.Array
    ) -> Ref:
        """Return the warpgroup's columns of a step as an operand of a product."""
        block = refs.w_smem.at[stage, part]
        mine = pl.ds(wg.left, self.tile.sums_shape[1])
        return block.at[mine] if self.transpose_rhs else block.at[:, mine]


@dataclass(frozen=True)
class GatheredRowsForm(DenseForm):
    """Rows of x by index: row n is x[src_N[n]], where x is [T, D]."""

    src_N: jax.Array = field(kw_only=True)

    @property
    def num_rows(self) -> int:
        """N, with the rows that complete the last tile."""
        return self.src_N.shape[0]

    @property
    def copies_per_step(self) -> int:
        """Number of copies that a step waits for, one for each row of x."""
        return ROWS + self.tile.parts

    def operands(self) -> list[jax.Array]:
        """Return the kernel's input besides x and the weights: the row of x for each row."""
        return [self.src_N]

    def buffers(self) -> list[Scratch]:
        """Return two buffers per warpgroup for its rows, moved into blocks."""
        shape = (2, 2, self.tile.sums_shape[0], INNER)
        return [plgpu.SMEM(shape, self.x_HND.dtype, transforms=TILED)]

    def start_row_copies(
        self, refs: KernelRefs, m: jax.Array, inside: Slice, stage: jax.Array, barrier: Ref
    ) -> None:
        """Start one copy for each row of the tile; each of the four warps starts a quarter of the
        copies.
        """
        (src,) = refs.operands

        @plgpu.warp_map
        def start_warp_copies(warp: jax.Array) -> None:
            at = warp * (ROWS // 4)
            tokens = [src[refs.tiles[1, m] + at + b] for b in range(ROWS // 4)]
            for b, token in enumerate(tokens):
                to = refs.x_smem.at[stage, 0, pl.ds(at + b, 1)]
                plgpu.copy_gmem_to_smem(refs.x.at[0, pl.ds(token, 1), inside], to, barrier)

    def rows_operand(self, refs: KernelRefs, wg: Warpgroup, k: jax.Array, stage: jax.Array) -> Ref:
        """Move the rows into blocks, and return the blocks."""
        rows = super().rows_operand(refs, wg, k, stage)
        block = _step_buffer(refs, wg, k)
        block[...] = plgpu.layout_cast(rows[...], plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        return block


@dataclass(frozen=True)
class QuantizedWeightsForm(DenseForm):
    """Weights of 8 bits; the scales of their columns multiply the finished sums."""

    def buffers(self) -> list[Scratch]:
        """Return two buffers per warpgroup for its columns in x's dtype."""
        shape = (2, 2, *self._weights_block(self.tile.sums_shape[1]))
        return [plgpu.SMEM(shape, self.x_HND.dtype, transforms=TILED)]

    def weights_operand(
        self, refs: KernelRefs, wg: Warpgroup, part: int, k: jax.Array, stage: jax.Array
    ) -> Ref:
        """Convert the warpgroup's columns to x's dtype, and return the converted columns."""
        narrow = super().weights_operand(refs, wg, part, k, stage)
        wide = _step_buffer(refs, wg, k)
        wide[...] = _cast_weights(plgpu.layout_cast(narrow[...], NARROW_LAYOUT), refs.x.dtype)
        plgpu.commit_smem()
        return wide


@dataclass(frozen=True)
class CompressedWeightsForm(DenseForm):
    """Weights [M, D / values per byte, F] of M slots, stored as `kernels_pallas.compressed`
    describes.

    scales: [M, blocks of D, F]; bfloat16 scales may be their uint16 bits.
    """

    kind: Format = field(kw_only=True)
    scales: jax.Array = field(kw_only=True)

    @property
    def blocks_per_step(self) -> int:
        """Number of blocks of inputs in a step, which has `INNER` rows of bytes; 1 if a block is
        longer than a step.
        """
        return max(1, INNER * self.kind.per_byte // self.kind.block)

    @property
    def copies_per_step(self) -> int:
        """Number of copies that a step waits for, one of them of the scales."""
        return super().copies_per_step + 1

    def operands(self) -> list[jax.Array]:
        """Return the scales in the dtype that the kernel reads; mxfp4's exponents as int8."""
        dtype = {MXFP4: jnp.int8, FP8: jnp.float32}.get(self.kind, jnp.bfloat16)
        same = self.scales.dtype == dtype
        return [self.scales if same else lax.bitcast_convert_type(self.scales, dtype)]

    def buffers(self) -> list[Scratch]:
        """Return two buffers per warpgroup for its columns in x's dtype, and the stages of
        scales.
        """
        shape = (2, 2, self.num_products_per_part, *self._weights_block(self.tile.sums_shape[1]))
        (scales,) = jax.eval_shape(self.operands)
        scales_shape = (self.num_stages, self.blocks_per_step, self.tile.tile_columns)
        return [
            plgpu.SMEM(shape, self.x_HND.dtype, transforms=TILED),
            plgpu.SMEM(scales_shape, scales.dtype),
        ]

    def start_copies(
        self, refs: KernelRefs, place: Place, k: jax.Array, stage: jax.Array, barrier: Ref
    ) -> None:
        """Start the copies of step k of tile (m, n), and that of its blocks' scales."""
        super().start_copies(refs, place, k, stage, barrier)
        m, n = place
        (scales,), (_, scales_smem) = refs.operands, refs.buffers
        first_block = k * (INNER * self.kind.per_byte) // self.kind.block
        blocks = pl.ds(first_block, self.blocks_per_step)
        columns = pl.ds(n * self.tile.tile_columns, self.tile.tile_columns)
        plgpu.copy_gmem_to_smem(
            scales.at[refs.tiles[0, m], blocks, columns], scales_smem.at[stage], barrier
        )

    def start_products(
        self, refs: KernelRefs, wg: Warpgroup, accs: Sequence[Ref], k: jax.Array, stage: jax.Array
    ) -> None:
        """Convert the columns to x's dtype, and start a product for each half of x."""
        mine = pl.ds(wg.left, self.tile.sums_shape[1])
        values = plgpu.layout_cast(refs.w_smem.at[stage, 0].at[:, mine][...], NARROW_LAYOUT)
        wide = _step_buffer(refs, wg, k)
        scales = refs.buffers[1].at[stage, :, mine]
        for half, weights in enumerate(self._decoded_weights(values, scales)):
            wide[half] = weights.astype(refs.x.dtype)
        plgpu.commit_smem()
        for half in range(self.num_products_per_part):
            plgpu.wgmma(accs[0], refs.x_smem.at[stage, half], wide.at[half])

    def _decoded_weights(self, values: jax.Array, scales: Ref) -> list[jax.Array]:
        """Return the float32 weights [INNER, STORED] of a step's bytes: one array, or for 4-bit
        values the even and the odd inputs.

        scales: the step's scales in shared memory.
        """
        factors = self._weight_scales(scales)
        if self.kind is FP8:
            return [values.astype(jnp.float16).astype(jnp.float32) * factors]
        if self.kind.per_byte == 1:
            return [values.astype(jnp.float32) * factors]
        codes = values.astype(jnp.int32)
        value = decode_e2m1 if self.kind is MXFP4 else lambda code: code.astype(jnp.float32) - 8.0
        return [value(half) * factors for half in (codes & 15, (codes >> 4) & 15)]

    def _weight_scales(self, scales: Ref) -> jax.Array:
        """Return the float32 scale of each weight."""
        rows = []
        for b in range(self.blocks_per_step):
            row = load_row_unaligned(scales.at[b], NARROW_LAYOUT.reduce(0))
            if self.kind is MXFP4:
                row = lax.bitcast_convert_type((row.astype(jnp.int32) & 255) << 23, jnp.float32)
            spread = lax.broadcast_in_dim(row.astype(jnp.float32), (INNER, STORED), (1,))
            rows.append(plgpu.layout_cast(spread, NARROW_LAYOUT))
        at = plgpu.broadcasted_iota(jnp.int32, (INNER, STORED), 0, layout=NARROW_LAYOUT)
        factors = rows[-1]
        for b in reversed(range(self.blocks_per_step - 1)):
            factors = jnp.where(at < (b + 1) * (INNER // self.blocks_per_step), rows[b], factors)
        return factors


def _step_buffer(refs: KernelRefs, wg: Warpgroup, k: jax.Array) -> Ref:
    """Return the warpgroup's buffer of step k; that of step k - 1 is being multiplied."""
    return refs.buffers[0].at[wg.number, lax.rem(k, 2)]


def _cast_weights(w: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return 8-bit weights in x's dtype. Hopper converts float8 to float16 only, so bfloat16 takes
    another step.
    """
    if w.dtype == jnp.float8_e4m3fn:
        w = w.astype(jnp.float16)
        return w if dtype == jnp.float16 else w.astype(jnp.float32).astype(dtype)
    return w.astype(dtype)


def load_row_unaligned(ref: Ref, layout: Any) -> jax.Array:
    """Load `ref` in `layout`, without the optimized path, which demands an aligned start."""
    load: Any = plgpu.load
    # required before JAX 0.11, deprecated since
    index = (None,) if jax.__version_info__ < (0, 11) else ()
    value: jax.Array = load(ref, *index, layout=layout, optimized=False)
    return value


def warpgroup_columns_for(num_columns: int) -> int:
    """Return the number of columns that one multiplying warpgroup computes; a tile has
    twice as many.

    Raises NotImplementedError if tiles do not cover `num_columns`.
    """
    for columns in (128, 64):
        if num_columns % (2 * columns) == 0:
            return columns
    raise NotImplementedError(f"{num_columns} columns: not a multiple of 128")


def check_operands(operands: tuple[jax.Array, ...], inner: int, multiple: int) -> None:
    """Raise NotImplementedError for dtypes and inner dimensions that no kernel supports."""
    dtype = operands[0].dtype
    if dtype not in DTYPES or any(a.dtype != dtype for a in operands):
        raise NotImplementedError(
            f"dtypes {[str(a.dtype) for a in operands]}: only bfloat16 or float16, all the same"
        )
    if inner % multiple:
        raise NotImplementedError(f"inner dimension {inner}: not a multiple of {multiple}")


def choose_form(
    x_ND: jax.Array,
    w: jax.Array,
    *,
    transpose_rhs: bool,
    gated: bool,
    src_N: jax.Array | None,
    by_column: bool,
    scales: jax.Array | None,
) -> DenseForm:
    """Return the form of these operands. Raises NotImplementedError for those that no form
    supports.

    by_column: weights of 8 bits have a scale for each column. scales: of compressed weights.
    """
    num_columns = w.shape[1 if transpose_rhs else 2]
    narrow = by_column or scales is not None
    if gated and (num_columns % 256 or transpose_rhs or narrow):
        why = f"{num_columns} gated columns, {transpose_rhs=}, weights {w.dtype}"
        raise NotImplementedError(
            f"{why}: must be a multiple of 256, not transposed, without scales"
        )
    if src_N is not None and narrow:
        raise NotImplementedError(
            f"rows by index with weights {w.dtype}: only weights without scales"
        )
    if scales is not None:
        return _compressed_form(x_ND, w, scales, transpose_rhs)
    if by_column and w.dtype not in NARROW_DTYPES:
        raise NotImplementedError(
            f"dtype {w.dtype} of weights with scales: only int8 or float8_e4m3fn"
        )
    check_operands((x_ND,) if by_column else (x_ND, w), x_ND.shape[1], INNER)
    tile = TileShape(
        num_columns,
        tile_columns=128 if gated else 2 * warpgroup_columns_for(num_columns),
        parts=2 if gated else 1,
        by_rows=gated or src_N is not None,
    )
    if src_N is None:
        x_HND = pad_to_whole_tiles(x_ND)[None]
        if by_column:
            return QuantizedWeightsForm(x_HND, w, tile, transpose_rhs, w_transforms=TILED_NARROW)
        return DenseForm(x_HND, w, tile, transpose_rhs)
    src_N = jnp.minimum(src_N, x_ND.shape[0] - 1).astype(jnp.int32)
    src_N = pad_to_whole_tiles(src_N[:, None])[:, 0]
    return GatheredRowsForm(
        x_ND[None], w, tile, transpose_rhs, FEWER_STAGES, x_transforms=BY_ROW, src_N=src_N
    )


def _compressed_form(
    x_ND: jax.Array, w: jax.Array, scales: jax.Array, transpose_rhs: bool
) -> CompressedWeightsForm:
    """Return the form of compressed weights; their bytes are float8_e4m3fn or int8 to the kernel.
    Raises NotImplementedError if no kernel reads them.
    """
    kind = format_of(w.dtype, scales.dtype)
    if not kind.mosaic_gpu:
        raise NotImplementedError(f"weights in the format {kind.name}")
    if transpose_rhs:
        raise NotImplementedError("compressed weights, transposed")
    w = lax.bitcast_convert_type(w, jnp.float8_e4m3fn if kind is FP8 else jnp.int8)
    check_operands((x_ND,), x_ND.shape[1], INNER * kind.per_byte)
    tile = TileShape(w.shape[2], tile_columns=128)
    if tile.num_columns % tile.tile_columns:
        raise NotImplementedError(
            f"{tile.num_columns} columns: not a multiple of {tile.tile_columns}"
        )
    x_ND = pad_to_whole_tiles(x_ND)
    if kind.per_byte == 2:  # a byte holds an even and an odd input: split x's columns likewise
        x_HND = x_ND.reshape(*x_ND.shape[:1], -1, 2).transpose(2, 0, 1)
    else:
        x_HND = x_ND[None]
    num_stages = FEWER_STAGES if kind.per_byte == 2 else STAGES
    return CompressedWeightsForm(
        x_HND, w, tile, num_stages=num_stages, w_transforms=TILED_NARROW, kind=kind, scales=scales
    )
