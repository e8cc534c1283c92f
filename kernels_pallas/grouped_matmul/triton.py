"""The grouped matmul and its weight gradient in Triton, for GPUs whose kernels are not written for
Hopper (`mosaic_gpu.py`), and for shapes that those do not support.

A program computes one tile of the result. A tile of the product has rows of one group only; the
product reads rows where they lie, by index too, and nothing is padded in memory.

Legend: N rows sorted by group, D inner, F outer dimension, E groups, M tiles of rows; T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.grouped_matmul.fp8_inputs import RoundedInputs, round_inputs
from kernels_pallas.grouped_matmul.operands import PLAIN, Epilogue, WeightSlots
from kernels_pallas.grouped_matmul.triton_weights import (
    CompressedTiles,
    DenseTiles,
    Fp8Tiles,
    check_format,
    check_fp8_products,
)
from kernels_pallas.token_permute.triton import gather_rows
from kernels_pallas.triton import (
    BlockSizes,
    Ref,
    check_dtypes,
    choose_blocks,
    dot,
    index_range,
    launch,
    load,
    store,
    tile_in_bands,
)

MIN_ROWS = 16  # of a tile: the tensor cores' smallest
FEW_ROWS = 32  # of a tile whose rows take little shared memory beside the weights
FP8_STAGES = 3  # of steps of 128 inputs
PROGRAMS = 256  # fewer leave multiprocessors of a large GPU idle: tiles have half the columns


def grouped_matmul(  # noqa: PLR0913  as `reference.py`, and how it runs
    x_ND: jax.Array,
    w: jax.Array,
    group_sizes_E: jax.Array,
    *,
    transpose_rhs: bool = False,
    src_N: jax.Array | None = None,
    scale_EF: jax.Array | None = None,
    slots: WeightSlots | None = None,
    epilogue: Epilogue = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """Return [N, F] in x's dtype; see `grouped_matmul.api`. Rows beyond the groups hold arbitrary
    values.

    src_N: row n is x[src_N[n]], where x is [T, D]. scale_EF: factors of the columns of int8
    weights. Raises NotImplementedError for other dtypes, and for formats of compressed weights that
    `triton_weights` does not decode.
    """
    check_operands(x_ND, w, scale_EF, slots, transpose_rhs)
    num_rows = (x_ND if src_N is None else src_N).shape[0]
    num_tokens, dtype = x_ND.shape[0], x_ND.dtype
    blocks = _blocks_for_rows(choose_blocks(x_ND.dtype), num_rows // group_sizes_E.shape[0])
    tiles_3M = row_tiles(group_sizes_E, num_rows, blocks.rows)
    if slots is not None:
        tiles_3M = tiles_3M.at[0].set(slots.slot_E.astype(jnp.int32)[tiles_3M[0]])
    num_m = tiles_3M.shape[1]
    rows: jax.Array | RoundedInputs = x_ND
    if slots is not None and slots.fp8_inputs:
        rows = round_inputs(x_ND)
    product = make_product(rows, w, slots, epilogue, blocks, num_m, transpose_rhs, scale_EF)
    source = [] if src_N is None else [src_N.astype(jnp.int32)]
    num_arrays, num_n = len(product.arrays), product.num_n

    def grouped_matmul_kernel(tiles: Ref, *refs: Ref) -> None:
        arrays, src, out = refs[:num_arrays], refs[num_arrays:-1], refs[-1]
        m, n = tile_in_bands(pl.program_id(0), num_m, num_n)
        group, start, end = tiles[0, m], tiles[1, m], tiles[2, m]

        @pl.when(start < end)
        def compute_tile() -> None:
            rows = index_range(start, blocks.rows)
            is_row, read = rows < end, rows
            if src:  # an empty row is some token, as in `gather_rows`
                read = jnp.minimum(load(src[0].at[rows], is_row), num_tokens - 1)
            product.compute_tile(arrays, out, group, n, TileRows(read, rows, is_row))

    out = jax.ShapeDtypeStruct((num_rows, product.num_columns), dtype)
    operands = (tiles_3M, *product.arrays, *source)
    settings, grid = product.blocks, (num_m * num_n,)
    return launch(grouped_matmul_kernel, out, grid, operands, blocks=settings, interpret=interpret)


class TileRows(NamedTuple):
    """The rows of a tile: those of x that it reads, those of the result that it writes, and which
    of them are in use.
    """

    read: jax.Array
    written: jax.Array
    is_row: jax.Array


@dataclass(frozen=True)
class Product:
    """The products of tiles of rows with one matrix each, and what happens to their sums.

    num_columns: of the result. operations: on the sums and the rows `terms`, [M, columns of w].
    """

    reader: DenseTiles | CompressedTiles | Fp8Tiles
    blocks: BlockSizes
    num_columns: int
    epilogue: Epilogue
    operations: Sequence[Callable[..., jax.Array]]
    terms: Sequence[jax.Array]

    @property
    def num_n(self) -> int:
        """Number of tiles side by side."""
        return pl.cdiv(self.num_columns, self.blocks.columns)

    @property
    def arrays(self) -> list[jax.Array]:
        """The kernel's inputs: x, the weights, what describes them, and the terms."""
        return [*self.reader.operands(), *self.terms]

    def compute_tile(
        self, refs: Sequence[Ref], out: Ref, slot: jax.Array, n: jax.Array, rows: TileRows
    ) -> None:
        """Write the rows of a tile, columns of tile n, of the product with matrix `slot`.

        refs: to `arrays`.
        """
        num_terms, parts = len(self.terms), 2 if self.epilogue.gated else 1
        stored, terms = [*refs[: len(refs) - num_terms]], refs[len(refs) - num_terms :]
        columns = index_range(n * self.blocks.columns, self.blocks.columns)
        is_column = columns < self.num_columns
        multiply: Callable[..., jax.Array] = self.reader.multiply

        def add_products(k: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            x_blocks = self.reader.read_rows(stored, k, rows.read, rows.is_row)
            for part, done in enumerate(sums):
                at = columns + part * self.num_columns
                w_blocks = self.reader.read_weights(stored, k, slot, at, is_column)
                for x_block, w_block in zip(x_blocks, w_blocks, strict=True):
                    done = done + multiply(x_block, w_block)
                sums[part] = done
            return sums

        sums = [jnp.zeros((self.blocks.rows, self.blocks.columns), jnp.float32)] * parts
        sums = lax.fori_loop(0, self.reader.num_steps, add_products, sums)
        for part in range(parts):
            for operation, term in zip(self.operations, terms, strict=True):
                of_columns = load(term.at[slot, columns + part * self.num_columns], is_column)
                sums[part] = operation(sums[part], of_columns.astype(jnp.float32)[None])
        y = sums[0] if self.epilogue.activate is None else self.epilogue.activate(*sums)
        to = out.at[rows.written[:, None], columns[None]]
        store(to, y, rows.is_row[:, None] & is_column[None])


def make_product(
    x: jax.Array | RoundedInputs,
    w: jax.Array,
    slots: WeightSlots | None,
    epilogue: Epilogue,
    blocks: BlockSizes,
    num_tiles: int,
    transpose_rhs: bool = False,
    scale_EF: jax.Array | None = None,
) -> Product:
    """Return the products of `num_tiles` tiles of `blocks.rows` rows each."""
    parts = 2 if epilogue.gated else 1
    outputs_first = transpose_rhs or (slots is not None and slots.fp8_inputs)
    num_columns = w.shape[1 if outputs_first else 2] // parts
    is_idle = num_tiles * pl.cdiv(num_columns, blocks.columns) < PROGRAMS
    if parts == 2 or (is_idle and blocks.rows <= FEW_ROWS):
        blocks = replace(blocks, columns=blocks.columns // 2)
    reader = _choose_reader(x, w, slots, transpose_rhs, blocks)
    if isinstance(reader, Fp8Tiles):  # a stage has 128 inputs
        blocks = replace(blocks, num_stages=min(blocks.num_stages, FP8_STAGES))
    by_column = [(jnp.multiply, scale_EF), (jnp.add, epilogue.bias_EF)]
    operations = [operation for operation, term in by_column if term is not None]
    terms = [term for _, term in by_column if term is not None]
    return Product(reader, blocks, num_columns, epilogue, operations, terms)


def check_operands(
    x_ND: jax.Array,
    w: jax.Array,
    scale_EF: jax.Array | None,
    slots: WeightSlots | None,
    transpose_rhs: bool,
) -> None:
    """Raise NotImplementedError for weights that the kernel cannot read."""
    if slots is not None and slots.scales is not None:
        check_dtypes(x_ND)
        check_format(w, slots.scales)
        if slots.fp8_inputs:
            check_fp8_products(w, slots.scales)
        if transpose_rhs:
            raise NotImplementedError("compressed weights, transposed")
        return
    if scale_EF is None:
        check_dtypes(x_ND, w)
        return
    check_dtypes(x_ND)
    if w.dtype != jnp.int8:
        raise NotImplementedError(f"weights {w.dtype}: not int8")


def _choose_reader(
    x: jax.Array | RoundedInputs,
    w: jax.Array,
    slots: WeightSlots | None,
    transpose_rhs: bool,
    blocks: BlockSizes,
) -> DenseTiles | CompressedTiles | Fp8Tiles:
    """Return the reader of these weights. A step of many rows has `blocks.inner` inputs; of few
    rows, whose pairs take little memory, as many bytes.
    """
    if isinstance(x, RoundedInputs):
        assert slots is not None and slots.scales is not None
        return Fp8Tiles(x.values_ND, w, slots.scales, x.scales_NB)
    if slots is None or slots.scales is None:
        return DenseTiles(x, w, blocks.inner, transpose_rhs)
    if slots.fp8_inputs:
        return Fp8Tiles(x, w, slots.scales)
    reader = CompressedTiles(x, w, slots.scales, blocks.inner)
    is_low = blocks.rows <= FEW_ROWS
    return reader if is_low else replace(reader, step=blocks.inner // reader.kind.per_byte)


def _blocks_for_rows(blocks: BlockSizes, rows_per_group: int) -> BlockSizes:
    """Return blocks whose tiles are no higher than a group of average size needs."""
    needed = pl.next_power_of_2(max(MIN_ROWS, rows_per_group))
    if needed >= blocks.rows:
        return blocks
    return replace(blocks, rows=needed, num_warps=4)


def row_tiles(group_sizes_E: jax.Array, num_rows: int, height: int) -> jax.Array:
    """Return int32 [3, M]: each tile's group, and the first and the end of its rows, at most
    `height`; both are 0 for tiles that the group sizes leave over.
    """
    num_groups = group_sizes_E.shape[0]
    ends_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    sizes_E = group_sizes_E.astype(jnp.int32)
    tiles_E = (sizes_E + (height - 1)) // height
    tile_ends_E = jnp.cumsum(tiles_E, dtype=jnp.int32)
    at_M = jnp.arange(max(1, min(num_rows, num_rows // height + num_groups)), dtype=jnp.int32)
    group_M = (at_M[:, None] >= tile_ends_E).sum(axis=-1, dtype=jnp.int32)
    is_used_M = group_M < num_groups
    group_M = jnp.minimum(group_M, num_groups - 1)
    first_M = (ends_E - sizes_E)[group_M] + (at_M - (tile_ends_E - tiles_E)[group_M]) * height
    end_M = jnp.minimum(first_M + height, ends_E[group_M])
    return jnp.stack([group_M, *(jnp.where(is_used_M, row_M, 0) for row_M in (first_M, end_M))])


def weight_gradient(
    x_ND: jax.Array,
    dy_NF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    src_N: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return [E, D, F] in x's dtype: x^T dy over each group's rows.

    src_N: as in `grouped_matmul`; here the gathered rows are written to memory first, because rows
    whose index is loaded in the same step are not copied ahead.
    """
    check_dtypes(x_ND, dy_NF)
    if src_N is not None:
        x_ND = gather_rows(x_ND, src_N, interpret=interpret)
    blocks = choose_blocks(x_ND.dtype)
    num_groups, d, num_columns = group_sizes_E.shape[0], x_ND.shape[1], dy_NF.shape[1]
    num_m, num_n = pl.cdiv(d, blocks.rows), pl.cdiv(num_columns, blocks.columns)
    ends_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    bounds_2E = jnp.stack([ends_E - group_sizes_E.astype(jnp.int32), ends_E])

    def weight_gradient_kernel(bounds: Ref, x: Ref, dy: Ref, out: Ref) -> None:
        group = pl.program_id(0) // (num_m * num_n)
        m, n = tile_in_bands(pl.program_id(0) - group * (num_m * num_n), num_m, num_n)
        start, end = bounds[0, group], bounds[1, group]
        inputs = index_range(m * blocks.rows, blocks.rows)
        columns = index_range(n * blocks.columns, blocks.columns)
        is_input, is_column = inputs < d, columns < num_columns

        def add_products(k: jax.Array, sums: jax.Array) -> jax.Array:
            rows = index_range(start + k * blocks.inner, blocks.inner)
            is_row = rows < end  # rows beyond the group may hold NaN
            x_KR = load(x.at[rows[:, None], inputs[None]], is_row[:, None] & is_input[None])
            dy_KC = load(dy.at[rows[:, None], columns[None]], is_row[:, None] & is_column[None])
            return sums + dot(x_KR, dy_KC, (0, 0))

        sums = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
        num_steps = (end - start + (blocks.inner - 1)) // blocks.inner
        sums = lax.fori_loop(0, num_steps, add_products, sums)
        to = out.at[group, inputs[:, None], columns[None]]
        store(to, sums, is_input[:, None] & is_column[None])

    out = jax.ShapeDtypeStruct((num_groups, d, num_columns), x_ND.dtype)
    operands = (bounds_2E, x_ND, dy_NF)
    grid = (num_groups * num_m * num_n,)
    return launch(weight_gradient_kernel, out, grid, operands, blocks=blocks, interpret=interpret)
