"""The grouped matmul and its weight gradient on Hopper: wgmma products fed by bulk asynchronous
copies (TMA).

Each multiprocessor runs one persistent block of three warpgroups: one only copies, two only
multiply (`mosaic_pipeline`). A tile is `ROWS` rows of one group; rows of a neighbouring group
inside it are multiplied but not stored. A tile's first row is rounded down to a multiple of 8, the
height of a swizzled block of shared memory. What a step copies and multiplies depends on the
operands (`mosaic_forms`): rows in order or by index, weights in x's dtype, of 8 bits, or
compressed.

Legend: N rows sorted by group, D inner, F outer dimension, E groups, M tiles or slots; T tokens;
wg: a warpgroup, 128 threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.mosaic_forms import (
    INNER,
    STAGES,
    STORED,
    TILED,
    DenseForm,
    KernelRefs,
    TileShape,
    Warpgroup,
    check_operands,
    choose_form,
    load_row_unaligned,
    warpgroup_columns_for,
)
from kernels_pallas.grouped_matmul.mosaic_pipeline import (
    ALIGN,
    ROWS,
    Pipeline,
    Place,
    group_bounds,
    pad_to_whole_tiles,
    pipelined_kernel,
    row_tiles,
    snake_tile,
)
from kernels_pallas.grouped_matmul.operands import PLAIN, Epilogue, WeightSlots
from kernels_pallas.hopper import ALL_SMS, Launch, Ref
from kernels_pallas.token_permute.mosaic_gpu import gather_rows


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
    launch: Launch = ALL_SMS,
) -> jax.Array:
    """Return [N, F] in x's dtype; see `grouped_matmul.api`. Rows beyond the groups hold arbitrary
    values.

    src_N: row n is x[src_N[n]], where x is [T, D]. scale_EF: factors of the columns of int8 or
    float8_e4m3fn weights. Raises NotImplementedError for dtypes and sizes that the kernel does not
    support.
    """
    if slots is not None and slots.fp8_inputs:
        # the tensor cores read E4M3 along the inputs alone, and slots are stored along the outputs
        raise NotImplementedError("inputs in fp8")
    form = choose_form(
        x_ND,
        w,
        transpose_rhs=transpose_rhs,
        gated=epilogue.gated,
        src_N=src_N,
        by_column=scale_EF is not None,
        scales=None if slots is None else slots.scales,
    )
    num_rows = (x_ND if src_N is None else src_N).shape[0]
    count, tiles_4M = row_tiles(group_sizes_E, form.num_rows)
    if slots is not None:
        tiles_4M = tiles_4M.at[0].set(slots.slot_E.astype(jnp.int32)[tiles_4M[0]])
    by_column = [(jnp.multiply, scale_EF), (jnp.add, epilogue.bias_EF)]
    operations = [operation for operation, a in by_column if a is not None]
    terms = [a.astype(jnp.float32) for _, a in by_column if a is not None]
    kernel = _matmul_kernel(form, operations, epilogue.activate, launch)
    return kernel(count, tiles_4M, form.x_HND, form.w, *form.operands(), *terms)[:num_rows]


def _matmul_kernel(
    form: DenseForm,
    operations: Sequence[Callable[..., jax.Array]],
    activate: Callable[..., jax.Array] | None,
    launch: Launch,
) -> Callable[..., jax.Array]:
    """Return the kernel of a form. Its inputs: number of tiles, tiles, x, weights, the form's
    operands, and an array [E, F] for each of `operations`, which apply to the sums.
    """
    tile, num_operands = form.tile, len(form.operands())

    def grouped_matmul_kernel(count: Ref, tiles: Ref, x: Ref, w: Ref, *others: Ref) -> None:
        operands, others = others[:num_operands], others[num_operands:]
        terms, others = others[: len(operations)], others[len(operations) :]
        out, x_smem, w_smem, out_smem, *buffers, full, empty = others
        refs = KernelRefs(tiles, x, w, operands, out, x_smem, w_smem, out_smem, buffers)
        wg = tile.warpgroup(lax.axis_index("wg"))

        def steps_and_place_of(i: jax.Array) -> tuple[int, Place]:
            return form.num_steps, snake_tile(launch.piece_index(i), count[0], tile.tiles_across)

        def copy_step(place: Place, k: jax.Array, stage: jax.Array, barrier: Ref) -> None:
            form.start_copies(refs, place, k, stage, barrier)

        def multiply_step(accs: Sequence[Ref], _: Place, k: jax.Array, stage: jax.Array) -> None:
            form.start_products(refs, wg, accs, k, stage)

        def finish_columns(sums: list[jax.Array], group: jax.Array, first: jax.Array) -> jax.Array:
            """Return STORED columns of the result, from column `first`: the sums of each part with
            `operations` and the activation applied.
            """
            sums = _apply_by_column(list(zip(operations, terms)), tile, sums, group, first)
            return (sums[0] if activate is None else activate(*sums)).astype(out.dtype)

        def store_sums(sums: list[jax.Array], place: Place) -> None:
            _store_tile(refs, tile, wg, place, sums, finish_columns)

        sums_shapes = [tile.sums_shape] * tile.parts
        num_products = tile.parts * form.num_products_per_part
        num_tiles = launch.num_pieces(count[0] * tile.tiles_across)
        Pipeline(
            num_tiles,
            steps_and_place_of,
            copy_step,
            multiply_step,
            store_sums,
            sums_shapes,
            num_products,
        ).run(wg.number, full, empty)

    out_type = jax.ShapeDtypeStruct(
        (form.num_rows, tile.num_columns // tile.parts), form.x_HND.dtype
    )
    return pipelined_kernel(
        grouped_matmul_kernel,
        out_type,
        form.scratch(),
        launch,
        copies_per_step=form.copies_per_step,
        num_stages=form.num_stages,
    )


def _apply_by_column(
    terms: Sequence[tuple[Callable[..., jax.Array], Ref]],
    tile: TileShape,
    sums: list[jax.Array],
    group: jax.Array,
    first: jax.Array,
) -> list[jax.Array]:
    """Return the sums of each part, STORED columns from column `first`, with each operation applied
    to them and its row [F] of the group.
    """
    done = []
    for part, summed in enumerate(sums):
        at = tile.column_slice(part, first, STORED)
        for operation, ref in terms:
            row = load_row_unaligned(ref.at[group, at], plgpu.Layout.WGMMA.reduce(0))
            summed = operation(summed, lax.broadcast_in_dim(row, summed.shape, (1,)))
        done.append(summed)
    return done


def _store_tile(
    refs: KernelRefs,
    tile: TileShape,
    wg: Warpgroup,
    place: Place,
    sums: list[jax.Array],
    finish_columns: Callable[[list[jax.Array], jax.Array, jax.Array], jax.Array],
) -> None:
    """Store the rows of a tile that belong to its group, STORED columns at a time."""
    (m, n), (height, columns) = place, tile.sums_shape
    first = refs.tiles[1, m] + wg.top
    start, end = (jnp.clip(refs.tiles[i, m] - first, 0, height) for i in (2, 3))
    for c in range(0, columns, STORED):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        column = n * tile.tile_columns + wg.left + c
        some = [a[:, c : c + STORED] for a in sums]
        refs.out_smem[wg.number] = finish_columns(some, refs.tiles[0, m], column)
        plgpu.commit_smem()
        at, size = start, end - start
        # a copy's size is fixed: copies of 128, 64, .. 1 rows make up any size
        length = height
        while length:

            @pl.when((size & length) != 0)
            def _(at: jax.Array = at, length: int = length, column: jax.Array = column) -> None:
                to = refs.out.at[pl.ds(first + at, length), pl.ds(column, STORED)]
                plgpu.copy_smem_to_gmem(
                    refs.out_smem.at[wg.number, pl.ds(at, length)], to, commit_group=False
                )

            at = at + (size & length)
            length //= 2
        plgpu.commit_smem_to_gmem_group()


def weight_gradient(
    x_ND: jax.Array,
    dy_NF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    src_N: jax.Array | None = None,
    launch: Launch = ALL_SMS,
) -> jax.Array:
    """Return [E, D, F] in x's dtype: x^T dy over each group's rows.

    src_N: as in `grouped_matmul`; here the gathered rows are written to memory first.
    """
    if src_N is not None:
        x_ND = gather_rows(x_ND, src_N, launch=launch)
    (_, d), num_columns, num_groups = x_ND.shape, dy_NF.shape[1], group_sizes_E.shape[0]
    check_operands((x_ND, dy_NF), d, ROWS)
    columns = warpgroup_columns_for(num_columns)
    x_ND, dy_NF = pad_to_whole_tiles(x_ND), pad_to_whole_tiles(dy_NF)
    tiles = _GradientTiles(
        num_groups, x_ND.shape[0], d // ROWS, num_columns // (2 * columns), columns
    )
    bounds_3E = jnp.stack(group_bounds(group_sizes_E))
    scratch = [
        plgpu.SMEM((STAGES, INNER, ROWS), x_ND.dtype, transforms=TILED),
        plgpu.SMEM((STAGES, INNER, 2 * columns), x_ND.dtype, transforms=TILED),
        plgpu.SMEM((2, ROWS, STORED), x_ND.dtype, transforms=TILED),
        plgpu.Barrier(num_arrivals=2),
    ]
    out_type = jax.ShapeDtypeStruct((num_groups, d, num_columns), x_ND.dtype)
    body = _gradient_body(tiles, launch)
    kernel = pipelined_kernel(body, out_type, scratch, launch, copies_per_step=2, num_stages=STAGES)
    return kernel(bounds_3E, x_ND, dy_NF)


@dataclass(frozen=True)
class _GradientTiles:
    """The tiles of a weight gradient [E, D, F]: `num_m` x `num_n` for each group, of ROWS x 2
    `columns`, where each multiplying warpgroup has `columns` columns.
    """

    num_groups: int
    num_rows: int
    num_m: int
    num_n: int
    columns: int

    def __len__(self) -> int:
        return self.num_groups * self.num_m * self.num_n

    def steps_and_place(self, index: jax.Array, bounds: Ref) -> tuple[jax.Array, Place]:
        """Return (number of steps, (group, m, n)) of a tile. bounds: from `group_bounds`."""
        group = index // (self.num_m * self.num_n)
        m, n = snake_tile(index - group * (self.num_m * self.num_n), self.num_m, self.num_n)
        start, end, aligned = bounds[0, group], bounds[1, group], bounds[2, group]
        num_steps = jnp.where(end > start, (end - aligned + (INNER - 1)) // INNER, 0)
        return num_steps, (group, m, n)

    def step_rows(
        self, group: jax.Array, k: jax.Array, bounds: Ref
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (first row that step k copies, start and end of the group's rows among its
        INNER).
        """
        first = bounds[2, group] + k * INNER
        start = jnp.maximum(first, bounds[0, group])
        end = jnp.minimum(first + INNER, bounds[1, group])
        first = jnp.minimum(first, self.num_rows - INNER)
        return pl.multiple_of(first, ALIGN), start - first, end - first


def _gradient_body(tiles: _GradientTiles, launch: Launch) -> Callable[..., None]:
    """Return the body of the weight gradient's kernel."""
    columns = tiles.columns

    def weight_gradient_kernel(bounds: Ref, x: Ref, dy: Ref, out: Ref, *refs: Ref) -> None:
        x_smem, dy_smem, out_smem, masked, full, empty = refs
        wg = lax.axis_index("wg")

        def steps_and_place_of(i: jax.Array) -> tuple[jax.Array, Place]:
            return tiles.steps_and_place(launch.piece_index(i), bounds)

        def copy_step(place: Place, k: jax.Array, stage: jax.Array, barrier: Ref) -> None:
            group, m, n = place
            rows = pl.ds(tiles.step_rows(group, k, bounds)[0], INNER)
            plgpu.copy_gmem_to_smem(x.at[rows, pl.ds(m * ROWS, ROWS)], x_smem.at[stage], barrier)
            plgpu.copy_gmem_to_smem(
                dy.at[rows, pl.ds(n * 2 * columns, 2 * columns)], dy_smem.at[stage], barrier
            )

        def multiply_step(
            accs: Sequence[Ref], place: Place, k: jax.Array, stage: jax.Array
        ) -> None:
            _, start, end = tiles.step_rows(place[0], k, bounds)
            mine = pl.ds(wg * columns, columns)

            @pl.when((start > 0) | (end < INNER))
            def zero_other_rows() -> None:
                x_half = x_smem.at[stage, :, pl.ds(wg * (ROWS // 2), ROWS // 2)]
                _zero_other_rows((x_half, dy_smem.at[stage, :, mine]), start, end)
                plgpu.barrier_arrive(masked)
                plgpu.barrier_wait(masked)

            plgpu.wgmma(accs[0], x_smem.at[stage].transpose((1, 0)), dy_smem.at[stage, :, mine])

        def store_sums(sums: list[jax.Array], place: Place) -> None:
            group, m, n = place
            for c in range(0, columns, STORED):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[wg] = sums[0][:, c : c + STORED].astype(out.dtype)
                plgpu.commit_smem()
                to = pl.ds(n * 2 * columns + wg * columns + c, STORED)
                plgpu.copy_smem_to_gmem(out_smem.at[wg], out.at[group, pl.ds(m * ROWS, ROWS), to])

        num_tiles = launch.num_pieces(len(tiles))
        Pipeline(
            num_tiles, steps_and_place_of, copy_step, multiply_step, store_sums, [(ROWS, columns)]
        ).run(wg, full, empty)

    return weight_gradient_kernel


def _zero_other_rows(halves: Sequence[Ref], start: jax.Array, end: jax.Array) -> None:
    """Zero the rows of other groups, and rows of no group, which may hold NaN, in a warpgroup's
    half of x and of dy.
    """
    for half in halves:
        at = plgpu.broadcasted_iota(jnp.int32, half.shape, 0, layout=plgpu.Layout.WGMMA)
        half[...] = jnp.where((at >= start) & (at < end), half[...], 0).astype(half.dtype)
    plgpu.commit_smem()
