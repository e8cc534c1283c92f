"""The grouped matmul and its weight gradient on Hopper: wgmma products fed by bulk asynchronous
copies (TMA).

Each multiprocessor runs one persistent block of three warpgroups: one only copies, two only
multiply. Copies run up to STAGES steps ahead, across the end of a tile, so that the tensor cores do
not wait while a finished tile is stored. A tile is `ROWS` rows of one group; rows of a neighbouring
group inside it are multiplied but not stored. A tile's first row is rounded down to a multiple of
8, the height of a swizzled block of shared memory.

Rows named by index (`src_N`) are copied one by one, each into a 128-byte line of shared memory,
swizzled by its place among 8 lines. The products need those 8 lines as one block, so each
multiplying warpgroup moves the lines of its 64 rows into such blocks while the tensor cores compute
the previous step.

Weights of 8 bits are copied without conversion; each multiplying warpgroup converts its columns in
shared memory while the tensor cores compute the previous step. Their scales, one per column,
multiply the finished sums. Weights compressed in blocks of inputs (`Compressed`) are converted in
the same way, with their scales copied beside them. The two 4-bit values of a byte belong to an even
and an odd input, so x is split into its even and odd columns beforehand and each half has its own
product.

Legend: N rows sorted by group, D inner, F outer dimension, E groups, M tiles or slots; T tokens; H
halves of x (even, odd columns); wg: a warpgroup, 128 threads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.compressed import e2m1, format_of
from kernels_pallas.formats import FP8, MXFP4, Format
from kernels_pallas.token_permute.mosaic_gpu import gather_rows

ALIGN = 8
ROWS = 128
INNER = 64  # inner dimension of one step: 128 bytes, one swizzled line
STAGES = 4
GATHERED_STAGES = 3  # one fewer: the moved rows need shared memory too
BAND = 16  # consecutive row tiles that use the same column tile of the weights
NUM_SMS = 132  # of an H100 SXM or an H200
COPYING_REGISTERS, MULTIPLYING_REGISTERS = 40, 232
DTYPES = (jnp.bfloat16, jnp.float16)
NARROW_DTYPES = (jnp.int8, jnp.float8_e4m3fn)
STORED = 64  # columns that a warpgroup stores at a time
TILING: Any = plgpu.TilingTransform  # abstract, as JAX annotates it
SWIZZLE: Any = plgpu.SwizzleTransform
TILED = TILING((8, 64)), SWIZZLE(128)
TILED_NARROW = TILING((8, 64)), SWIZZLE(64)
BY_ROW = TILING((1, 64)), SWIZZLE(128)


def _columns(num_columns: int) -> int:
    """Return the columns of one multiplying warpgroup; a tile has twice as many."""
    for columns in (128, 64):
        if num_columns % (2 * columns) == 0:
            return columns
    raise NotImplementedError(f"{num_columns} columns: not a multiple of 128")


def _check(operands: tuple[jax.Array, ...], inner: int, multiple: int) -> None:
    dtype = operands[0].dtype
    if dtype not in DTYPES or any(a.dtype != dtype for a in operands):
        raise NotImplementedError(
            f"dtypes {[str(a.dtype) for a in operands]}: only bfloat16 or float16, all the same"
        )
    if inner % multiple:
        raise NotImplementedError(f"inner dimension {inner}: not a multiple of {multiple}")


def _whole_rows(x_ND: jax.Array) -> jax.Array:
    """Return x with zero rows appended if a tile would reach past its end."""
    num_rows = x_ND.shape[0]
    wanted = max(ROWS, pl.cdiv(num_rows, ALIGN) * ALIGN)
    return x_ND if wanted == num_rows else jnp.pad(x_ND, ((0, wanted - num_rows), (0, 0)))


def _bounds(group_sizes_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each group's (first row, end row, first row rounded down to a multiple of ALIGN)."""
    ends_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    starts_E = ends_E - group_sizes_E.astype(jnp.int32)
    return starts_E, ends_E, starts_E // ALIGN * ALIGN


def _row_tiles(group_sizes_E: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return (number of tiles [1], tiles [4, M]): each tile's group, first row, and the start and
    end of the group's rows in it.
    """
    num_groups = group_sizes_E.shape[0]
    starts_E, ends_E, aligned_E = _bounds(group_sizes_E)
    tiles_E = jnp.where(group_sizes_E > 0, pl.cdiv(ends_E - aligned_E, jnp.int32(ROWS)), 0)
    tile_ends_E = jnp.cumsum(tiles_E, dtype=jnp.int32)
    at_M = jnp.arange((num_rows + (ALIGN - 1) * num_groups) // ROWS + num_groups, dtype=jnp.int32)
    group_M = (at_M[:, None] >= tile_ends_E).sum(axis=-1, dtype=jnp.int32)
    group_M = jnp.minimum(group_M, num_groups - 1)
    first_M = aligned_E[group_M] + (at_M - (tile_ends_E - tiles_E)[group_M]) * ROWS
    from_M = jnp.maximum(first_M, starts_E[group_M])
    to_M = jnp.minimum(first_M + ROWS, ends_E[group_M])
    first_M = jnp.minimum(first_M, num_rows - ROWS)
    return tile_ends_E[-1:], jnp.stack([group_M, first_M, from_M, to_M])


def _snake(index: jax.Array, num_m: jax.Array | int, num_n: int) -> tuple[jax.Array, jax.Array]:
    """Return tile (m, n) of an index that runs down BAND rows of tiles, then to the next column."""
    band = index // (BAND * num_n)
    height = jnp.minimum(BAND, num_m - band * BAND)
    within = index - band * (BAND * num_n)
    n = within // height
    return band * BAND + within - n * height, n


def _copying(
    num_mine: jax.Array,
    steps_of: Callable[[jax.Array], Any],
    copy: Callable[..., None],
    full: Any,
    empty: Any,
) -> None:
    """Run the copying warpgroup: copy all steps of all tiles of this block, as far ahead as there
    are stages.
    """
    num_stages = full.shape[0]
    plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

    def tile(i: jax.Array, done: jax.Array) -> jax.Array:
        num_steps, where = steps_of(i)

        def step(k: jax.Array, done: jax.Array) -> jax.Array:
            stage = lax.rem(done, jnp.int32(num_stages))

            @pl.when(done >= num_stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[stage])

            copy(where, k, stage, full.at[stage])
            return done + 1

        return lax.fori_loop(0, num_steps, step, done)

    lax.fori_loop(0, num_mine, tile, jnp.int32(0))


def _multiplying(
    num_mine: jax.Array,
    steps_of: Callable[[jax.Array], Any],
    multiply: Callable[..., None],
    store: Callable[..., None],
    sums_shapes: list[tuple[int, int]],
    num_products: int,
    full: Any,
    empty: Any,
) -> None:
    """Run a multiplying warpgroup: wait for a step, multiply it, and release the previous step's
    buffer.

    multiply: starts `num_products` products, into sums of `sums_shapes`.
    """
    plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
    num_stages = full.shape[0]

    def tile(i: jax.Array, done: jax.Array) -> jax.Array:
        num_steps, where = steps_of(i)

        def accumulate(*accs: Any) -> list[jax.Array]:
            def step(k: jax.Array, done: jax.Array) -> jax.Array:
                stage = lax.rem(done, jnp.int32(num_stages))
                plgpu.barrier_wait(full.at[stage])
                multiply(accs, where, k, stage)
                plgpu.wgmma_wait(num_products)

                @pl.when(k > 0)
                def _() -> None:
                    plgpu.barrier_arrive(
                        empty.at[lax.rem(done + (num_stages - 1), jnp.int32(num_stages))]
                    )

                return done + 1

            lax.fori_loop(0, num_steps, step, done)
            return [acc[...] for acc in accs]

        accumulators = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in sums_shapes]
        sums = pl.run_scoped(accumulate, *accumulators)
        done = done + num_steps

        @pl.when(num_steps > 0)
        def _() -> None:
            plgpu.barrier_arrive(empty.at[lax.rem(done + (num_stages - 1), jnp.int32(num_stages))])

        store(sums, where)
        return done

    lax.fori_loop(0, num_mine, tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class Launch:
    """How a kernel runs: the number of multiprocessors and, without a GPU, the interpreter's
    parameters.
    """

    num_sms: int = NUM_SMS
    interpret: Any = None


def _launch(
    body: Callable[..., None],
    out_type: jax.ShapeDtypeStruct,
    scratch: list[Any],
    launch: Launch,
    num_copies: int = 2,
    num_stages: int = STAGES,
) -> Callable[..., jax.Array]:
    # full: all copies of a step arrived; empty: both multiplying warpgroups released it
    barriers = [plgpu.Barrier(num_arrivals=n, num_barriers=num_stages) for n in (num_copies, 2)]
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[*scratch, *barriers],
        grid=(launch.num_sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(),
        **({} if launch.interpret is None else {"interpret": launch.interpret}),
    )


def _mine(total: jax.Array | int, num_sms: int) -> jax.Array:
    """Return how many of `total` tiles this block computes: numbers sm, sm + num_sms, sm + 2
    num_sms, ...
    """
    return (total - lax.axis_index("sm") + (num_sms - 1)) // num_sms


def _widened(w: jax.Array, dtype: Any) -> jax.Array:
    """Return 8-bit weights in x's dtype. Hopper converts float8 to float16 only, so bfloat16 takes
    another step.
    """
    if w.dtype == jnp.float8_e4m3fn:
        w = w.astype(jnp.float16)
        return w if dtype == jnp.float16 else w.astype(jnp.float32).astype(dtype)
    return w.astype(dtype)


NARROW_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


@dataclass(frozen=True)
class Compressed:
    """Weights [M, D / values per byte, F] of M slots, stored as `kernels_pallas.compressed`
    describes.

    scales: [M, blocks of D, F]; bfloat16 scales may be their uint16 bits.
    """

    form: Format
    scales: jax.Array

    @property
    def blocks(self) -> int:
        """Number of blocks of inputs in a step, which has `INNER` rows of bytes; 1 if a block is
        longer than a step.
        """
        return max(1, INNER * self.form.per_byte // self.form.block)

    def first_block(self, k: jax.Array) -> jax.Array:
        """Return the block in which step k begins."""
        return k * (INNER * self.form.per_byte) // self.form.block

    def widened(self, values: jax.Array, scales: Any) -> list[jax.Array]:
        """Return the float32 weights [INNER, STORED] of a step's bytes: one array, or for 4-bit
        values the even and the odd inputs.

        scales: the reference to the step's scales in shared memory.
        """
        factors = self._factors(scales)
        if self.form is FP8:
            return [values.astype(jnp.float16).astype(jnp.float32) * factors]
        if self.form.per_byte == 1:
            return [values.astype(jnp.float32) * factors]
        codes = values.astype(jnp.int32)
        value = e2m1 if self.form is MXFP4 else lambda code: code.astype(jnp.float32) - 8.0
        return [value(half) * factors for half in (codes & 15, (codes >> 4) & 15)]

    def _factors(self, scales: Any) -> jax.Array:
        rows = []
        for b in range(self.blocks):
            row = _loaded(scales.at[b], NARROW_LAYOUT.reduce(0))
            if self.form is MXFP4:
                row = lax.bitcast_convert_type((row.astype(jnp.int32) & 255) << 23, jnp.float32)
            spread = lax.broadcast_in_dim(row.astype(jnp.float32), (INNER, STORED), (1,))
            rows.append(plgpu.layout_cast(spread, NARROW_LAYOUT))
        at = plgpu.broadcasted_iota(jnp.int32, (INNER, STORED), 0, layout=NARROW_LAYOUT)
        factors = rows[-1]
        for b in reversed(range(self.blocks - 1)):
            factors = jnp.where(at < (b + 1) * (INNER // self.blocks), rows[b], factors)
        return factors


@dataclass(frozen=True)
class Slots:
    """The location of the matrices: group e uses matrix (and bias) slot_E[e] of w, which may have
    any number of them.

    scales: of compressed matrices, see `Compressed`.
    """

    slot_E: jax.Array
    scales: jax.Array | None = None


@dataclass(frozen=True)
class Epilogue:
    """The operation on the float32 sums before they are stored.

    bias_EF: added to the columns. activate: applied to the sums; with `gated` called as
    activate(gate, up) on the two halves of the columns, which gives [N, F / 2].
    """

    bias_EF: jax.Array | None = None
    activate: Callable[..., jax.Array] | None = None
    gated: bool = False


def _loaded(ref: Any, layout: Any) -> jax.Array:
    """Load `ref` in `layout`, without the optimized path, which demands an aligned start."""
    load: Any = plgpu.load
    # required before JAX 0.11, deprecated since
    index = (None,) if jax.__version_info__ < (0, 11) else ()
    value: jax.Array = load(ref, *index, layout=layout, optimized=False)
    return value


def _bytes_of(w: jax.Array, compressed: Compressed, transpose_rhs: bool) -> jax.Array:
    """Return compressed weights in the 8-bit dtype that the kernel reads: float8_e4m3fn, else
    int8.
    """
    if transpose_rhs:
        raise NotImplementedError("compressed weights, transposed")
    return lax.bitcast_convert_type(w, jnp.float8_e4m3fn if compressed.form is FP8 else jnp.int8)


def _floats_of(compressed: Compressed) -> jax.Array:
    """Return the scales in the dtype that the kernel reads; mxfp4's exponents as int8."""
    scales = compressed.scales
    kind = {MXFP4: jnp.int8, FP8: jnp.float32}.get(compressed.form, jnp.bfloat16)
    return scales if scales.dtype == kind else lax.bitcast_convert_type(scales, kind)


def grouped_matmul(  # noqa: PLR0913  as `reference.py`, and how it runs
    x_ND: jax.Array,
    w: jax.Array,
    group_sizes_E: jax.Array,
    *,
    transpose_rhs: bool = False,
    src_N: jax.Array | None = None,
    scale_EF: jax.Array | None = None,
    slots: Slots | None = None,
    epilogue: Epilogue = Epilogue(),
    launch: Launch = Launch(),
) -> jax.Array:
    """Return [N, F] in x's dtype; see `grouped_matmul.api`. Rows beyond the groups hold arbitrary
    values.

    src_N: row n is x[src_N[n]], where x is [T, D]. scale_EF: factors of the columns of int8 or
    float8_e4m3fn weights. Raises NotImplementedError for dtypes and sizes that the kernel does not
    support.
    """
    bias_EF, activate, gated = epilogue.bias_EF, epilogue.activate, epilogue.gated
    num_rows, inner = (x_ND if src_N is None else src_N).shape[0], x_ND.shape[1]
    num_columns, parts = w.shape[1 if transpose_rhs else 2], 2 if gated else 1
    scales = None if slots is None else slots.scales
    compressed = None if scales is None else Compressed(format_of(w.dtype, scales.dtype), scales)
    gathered, halves = src_N is not None, compressed.form.per_byte if compressed else 1
    narrow = scale_EF is not None or compressed is not None
    if compressed is not None:
        if not compressed.form.mosaic_gpu:
            raise NotImplementedError(f"weights in the format {compressed.form.name}")
        w = _bytes_of(w, compressed, transpose_rhs)
    elif narrow and w.dtype not in NARROW_DTYPES:
        raise NotImplementedError(
            f"dtype {w.dtype} of weights with scales: only int8 or float8_e4m3fn"
        )
    _check((x_ND,) if narrow else (x_ND, w), inner, INNER * halves)
    if gated and (num_columns % 256 or transpose_rhs or narrow):
        why = f"{num_columns} gated columns, {transpose_rhs=}, weights {w.dtype}"
        raise NotImplementedError(
            f"{why}: must be a multiple of 256, not transposed, without scales"
        )
    if gathered and narrow:
        raise NotImplementedError(
            f"rows by index with weights {w.dtype}: only weights without scales"
        )
    # A warpgroup computes all rows of half of a tile's columns, or half of the rows of all columns.
    # The latter has gate and up of one column in the same warpgroup.
    by_rows = gated or gathered
    tile_columns = 128 if gated or compressed else 2 * _columns(num_columns)  # of the result
    if num_columns % tile_columns:
        raise NotImplementedError(f"{num_columns} columns: not a multiple of {tile_columns}")
    height, columns = (ROWS // 2, tile_columns) if by_rows else (ROWS, tile_columns // 2)
    num_stages = GATHERED_STAGES if gathered or halves == 2 else STAGES
    num_n, num_steps = num_columns // parts // tile_columns, inner // (INNER * halves)
    by_index: list[jax.Array] = []
    if src_N is None:
        x_ND = _whole_rows(x_ND)
        whole_rows = x_ND.shape[0]
    else:
        src_N = jnp.minimum(src_N, x_ND.shape[0] - 1).astype(jnp.int32)
        by_index.append(_whole_rows(src_N[:, None])[:, 0])
        whole_rows = by_index[0].shape[0]
    if halves == 2:  # a byte holds an even and an odd input: split x's columns likewise
        x_HND = x_ND.reshape(*x_ND.shape[:1], -1, 2).transpose(2, 0, 1)
    else:
        x_HND = x_ND[None]
    count, tiles_4M = _row_tiles(group_sizes_E, whole_rows)
    if slots is not None:
        tiles_4M = tiles_4M.at[0].set(slots.slot_E.astype(jnp.int32)[tiles_4M[0]])
    by_block = [] if compressed is None else [_floats_of(compressed)]
    by_column = [a.astype(jnp.float32) for a in (scale_EF, bias_EF) if a is not None]

    def grouped_matmul_kernel(count, tiles, x, w, *refs):  # type: ignore[no-untyped-def]
        src, refs = list(refs[: len(by_index)]), refs[len(by_index) :]
        blocks, refs = list(refs[: len(by_block)]), refs[len(by_block) :]
        factors_and_terms, refs = list(refs[: len(by_column)]), refs[len(by_column) :]
        scale = factors_and_terms.pop(0) if scale_EF is not None else None
        bias = factors_and_terms.pop() if bias_EF is not None else None
        out, x_smem, w_smem, out_smem, *own_smem, full, empty = refs
        scales_smem = [own_smem.pop()] if compressed is not None else []
        wg = lax.axis_index("wg")
        top, left = (wg * height, 0) if by_rows else (0, wg * columns)
        num_mine = _mine(count[0] * num_n, launch.num_sms)

        def steps_of(i: jax.Array) -> Any:
            m, n = _snake(lax.axis_index("sm") + i * launch.num_sms, count[0], num_n)
            return num_steps, (m, n)

        def copy(where: Any, k: jax.Array, stage: jax.Array, barrier: Any) -> None:
            m, n = where
            inside = pl.ds(k * INNER, INNER)
            if gathered:

                @plgpu.warp_map
                def copy_rows(warp: jax.Array) -> None:
                    at = warp * (ROWS // 4)
                    tokens = [src[0][tiles[1, m] + at + b] for b in range(ROWS // 4)]
                    for b, token in enumerate(tokens):
                        to = x_smem.at[stage, 0, pl.ds(at + b, 1)]
                        plgpu.copy_gmem_to_smem(x.at[0, pl.ds(token, 1), inside], to, barrier)

            else:
                rows = pl.ds(pl.multiple_of(tiles[1, m], ALIGN), ROWS)
                for half in range(halves):
                    plgpu.copy_gmem_to_smem(
                        x.at[half, rows, inside], x_smem.at[stage, half], barrier
                    )
            for part in range(parts):
                across = pl.ds(part * (num_columns // parts) + n * tile_columns, tile_columns)
                block = (across, inside) if transpose_rhs else (inside, across)
                plgpu.copy_gmem_to_smem(w.at[tiles[0, m], *block], w_smem.at[stage, part], barrier)
            if compressed is not None:
                of_step = (
                    pl.ds(compressed.first_block(k), compressed.blocks),
                    pl.ds(n * tile_columns, tile_columns),
                )
                plgpu.copy_gmem_to_smem(
                    blocks[0].at[tiles[0, m], *of_step], scales_smem[0].at[stage], barrier
                )

        def multiply(accs: Any, where: Any, k: jax.Array, stage: jax.Array) -> None:
            mine = pl.ds(left, columns)
            x_mine = x_smem.at[stage, 0, pl.ds(top, height)]
            if gathered:
                block = own_smem[0].at[wg, lax.rem(k, 2)]  # the other one is being multiplied
                block[...] = plgpu.layout_cast(x_mine[...], plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                x_mine = block
            for part, acc in enumerate(accs):
                block = w_smem.at[stage, part]
                block = block.at[mine] if transpose_rhs else block.at[:, mine]
                if narrow:
                    wide = own_smem[0].at[wg, lax.rem(k, 2)]  # the other one is being multiplied
                    wide[...] = _widened(
                        plgpu.layout_cast(block[...], plgpu.Layout.WGMMA_UPCAST_2X), x.dtype
                    )
                    plgpu.commit_smem()
                    block = wide
                plgpu.wgmma(acc, x_mine, block.transpose((1, 0)) if transpose_rhs else block)

        def multiply_compressed(
            form: Compressed, accs: Any, where: Any, k: jax.Array, stage: jax.Array
        ) -> None:
            mine = pl.ds(left, columns)
            values = plgpu.layout_cast(w_smem.at[stage, 0].at[:, mine][...], NARROW_LAYOUT)
            wide = own_smem[0].at[wg, lax.rem(k, 2)]  # the other one is being multiplied
            for half, weights in enumerate(form.widened(values, scales_smem[0].at[stage, :, mine])):
                wide[half] = weights.astype(x.dtype)
            plgpu.commit_smem()
            for half in range(halves):
                plgpu.wgmma(accs[0], x_smem.at[stage, half], wide.at[half])

        def finished(sums: list[jax.Array], group: jax.Array, first: jax.Array) -> jax.Array:
            """Return STORED columns of the result, from column `first`, in the dtype in which they
            are stored.
            """
            for part in range(parts):
                at = pl.ds(part * (num_columns // parts) + first, STORED)
                for ref, apply in ((scale, jnp.multiply), (bias, jnp.add)):
                    if ref is not None:
                        row = _loaded(ref.at[group, at], plgpu.Layout.WGMMA.reduce(0))
                        sums[part] = apply(
                            sums[part], lax.broadcast_in_dim(row, sums[part].shape, (1,))
                        )
            return (sums[0] if activate is None else activate(*sums)).astype(out.dtype)

        def store(sums: list[jax.Array], where: Any) -> None:
            m, n = where
            first = tiles[1, m] + top
            start, end = (jnp.clip(tiles[i, m] - first, 0, height) for i in (2, 3))
            for c in range(0, columns, STORED):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                column = n * tile_columns + left + c
                out_smem[wg] = finished([a[:, c : c + STORED] for a in sums], tiles[0, m], column)
                plgpu.commit_smem()
                at, size = start, end - start
                # a copy's size is fixed: copies of 128, 64, .. 1 rows make up any size
                length = height
                while length:

                    @pl.when((size & length) != 0)
                    def _(
                        at: jax.Array = at, length: int = length, column: jax.Array = column
                    ) -> None:
                        to = out.at[pl.ds(first + at, length), pl.ds(column, STORED)]
                        plgpu.copy_smem_to_gmem(
                            out_smem.at[wg, pl.ds(at, length)], to, commit_group=False
                        )

                    at = at + (size & length)
                    length //= 2
                plgpu.commit_smem_to_gmem_group()

        @pl.when(wg == 2)
        def copying() -> None:
            _copying(num_mine, steps_of, copy, full, empty)

        @pl.when(wg < 2)
        def multiplying() -> None:
            products = parts * halves
            step = multiply if compressed is None else partial(multiply_compressed, compressed)
            _multiplying(
                num_mine, steps_of, step, store, [(height, columns)] * parts, products, full, empty
            )

    def block(columns: int) -> tuple[int, int]:
        return (columns, INNER) if transpose_rhs else (INNER, columns)

    scratch = [
        plgpu.SMEM(
            (num_stages, halves, ROWS, INNER), x_ND.dtype, transforms=BY_ROW if gathered else TILED
        ),
        plgpu.SMEM(
            (num_stages, parts, *block(tile_columns)),
            w.dtype,
            transforms=TILED_NARROW if narrow else TILED,
        ),
        plgpu.SMEM((2, height, STORED), x_ND.dtype, transforms=BY_ROW),
    ]
    if compressed is not None:
        scratch.append(plgpu.SMEM((2, 2, halves, *block(columns)), x_ND.dtype, transforms=TILED))
        scratch.append(plgpu.SMEM((num_stages, compressed.blocks, tile_columns), by_block[0].dtype))
    elif narrow:
        scratch.append(plgpu.SMEM((2, 2, *block(columns)), x_ND.dtype, transforms=TILED))
    if gathered:
        scratch.append(plgpu.SMEM((2, 2, height, INNER), x_ND.dtype, transforms=TILED))
    out_type = jax.ShapeDtypeStruct((whole_rows, num_columns // parts), x_ND.dtype)
    num_copies = (ROWS if gathered else halves) + parts + len(by_block)
    kernel = _launch(grouped_matmul_kernel, out_type, scratch, launch, num_copies, num_stages)
    return kernel(count, tiles_4M, x_HND, w, *by_index, *by_block, *by_column)[:num_rows]


def weight_gradient(
    x_ND: jax.Array,
    dy_NF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    src_N: jax.Array | None = None,
    launch: Launch = Launch(),
) -> jax.Array:
    """Return [E, D, F] in x's dtype: x^T dy over each group's rows.

    src_N: as in `grouped_matmul`; here the gathered rows are written to memory first.
    """
    if src_N is not None:
        x_ND = gather_rows(x_ND, src_N, num_sms=launch.num_sms, interpret=launch.interpret)
    (_, d), num_columns, num_groups = x_ND.shape, dy_NF.shape[1], group_sizes_E.shape[0]
    _check((x_ND, dy_NF), d, ROWS)
    columns = _columns(num_columns)
    num_m, num_n = d // ROWS, num_columns // (2 * columns)
    x_ND, dy_NF = _whole_rows(x_ND), _whole_rows(dy_NF)
    num_rows = x_ND.shape[0]
    bounds_3E = jnp.stack(_bounds(group_sizes_E))

    def weight_gradient_kernel(bounds, x, dy, out, *refs):  # type: ignore[no-untyped-def]
        x_smem, dy_smem, out_smem, masked, full, empty = refs
        wg = lax.axis_index("wg")
        num_mine = _mine(num_groups * num_m * num_n, launch.num_sms)

        def steps_of(i: jax.Array) -> Any:
            index = lax.axis_index("sm") + i * launch.num_sms
            group = index // (num_m * num_n)
            m, n = _snake(index - group * (num_m * num_n), num_m, num_n)
            start, end, aligned = bounds[0, group], bounds[1, group], bounds[2, group]
            num_steps = jnp.where(end > start, (end - aligned + (INNER - 1)) // INNER, 0)
            return num_steps, (group, m, n)

        def rows_of(group: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Return (first row that step k copies, start and end of the group's rows among its
            64).
            """
            first = bounds[2, group] + k * INNER
            start = jnp.maximum(first, bounds[0, group])
            end = jnp.minimum(first + INNER, bounds[1, group])
            first = jnp.minimum(first, num_rows - INNER)
            return pl.multiple_of(first, ALIGN), start - first, end - first

        def copy(where: Any, k: jax.Array, stage: jax.Array, barrier: Any) -> None:
            group, m, n = where
            rows = pl.ds(rows_of(group, k)[0], INNER)
            plgpu.copy_gmem_to_smem(x.at[rows, pl.ds(m * ROWS, ROWS)], x_smem.at[stage], barrier)
            plgpu.copy_gmem_to_smem(
                dy.at[rows, pl.ds(n * 2 * columns, 2 * columns)], dy_smem.at[stage], barrier
            )

        def multiply(accs: Any, where: Any, k: jax.Array, stage: jax.Array) -> None:
            _, start, end = rows_of(where[0], k)
            mine = pl.ds(wg * columns, columns)

            @pl.when((start > 0) | (end < INNER))
            def mask() -> None:
                # Zero the rows of other groups, and rows of no group, which may hold NaN: each
                # warpgroup zeroes its half of x and of dy.
                halves = (
                    (x_smem.at[stage, :, pl.ds(wg * 64, 64)], 64),
                    (dy_smem.at[stage, :, mine], columns),
                )
                for half, width in halves:
                    at = plgpu.broadcasted_iota(
                        jnp.int32, (INNER, width), 0, layout=plgpu.Layout.WGMMA
                    )
                    half[...] = jnp.where((at >= start) & (at < end), half[...], 0).astype(
                        half.dtype
                    )
                plgpu.commit_smem()
                plgpu.barrier_arrive(masked)
                plgpu.barrier_wait(masked)

            plgpu.wgmma(accs[0], x_smem.at[stage].transpose((1, 0)), dy_smem.at[stage, :, mine])

        def store(sums: list[jax.Array], where: Any) -> None:
            group, m, n = where
            for c in range(0, columns, 64):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[wg] = sums[0][:, c : c + 64].astype(out.dtype)
                plgpu.commit_smem()
                to = pl.ds(n * 2 * columns + wg * columns + c, 64)
                plgpu.copy_smem_to_gmem(out_smem.at[wg], out.at[group, pl.ds(m * ROWS, ROWS), to])

        @pl.when(wg == 2)
        def copying() -> None:
            _copying(num_mine, steps_of, copy, full, empty)

        @pl.when(wg < 2)
        def multiplying() -> None:
            _multiplying(num_mine, steps_of, multiply, store, [(ROWS, columns)], 1, full, empty)

    scratch = [
        plgpu.SMEM((STAGES, INNER, ROWS), x_ND.dtype, transforms=TILED),
        plgpu.SMEM((STAGES, INNER, 2 * columns), x_ND.dtype, transforms=TILED),
        plgpu.SMEM((2, ROWS, 64), x_ND.dtype, transforms=TILED),
        plgpu.Barrier(num_arrivals=2),
    ]
    out_type = jax.ShapeDtypeStruct((num_groups, d, num_columns), x_ND.dtype)
    return _launch(weight_gradient_kernel, out_type, scratch, launch)(bounds_3E, x_ND, dy_NF)
