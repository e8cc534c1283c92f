"""Gathered rows, and sums of gathered rows, on Hopper: bulk asynchronous copies with several rows
in flight.

Each multiprocessor runs one persistent block. The rows of a step are copied into one of STAGES
buffers in shared memory while previous steps are written out. A row is copied as a box [D / LINE,
LINE], since no side of a box may exceed 256 elements.

Legend: T tokens, K choices per token, M rows, D hidden, B rows (or tokens) of one step, C columns
of one step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper import ALL_SMS, Launch, Ref, Slice

STAGES = 4
STEP_BYTES = 32 * 1024
SUM_BYTES = 160 * 1024  # shared memory of all stages and of two buffers of sums
MAX_COPIES = 32  # copies of a step, which the kernel unrolls
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def _rows_as_lines(x: jax.Array) -> jax.Array:
    """Return x [M, D] as [M, D / LINE, LINE]. Raises NotImplementedError for dtypes and sizes that
    the kernels do not support.
    """
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"dtype {x.dtype}: not one of bfloat16, float16, float32")
    line = next((n for n in (256, 128) if x.shape[1] % n == 0), None)
    if line is None:
        raise NotImplementedError(f"hidden size {x.shape[1]}: not a multiple of 128")
    return x.reshape(x.shape[0], -1, line)


def _step_size(total: int, most: int) -> int:
    """Return the largest power of two that divides `total` and is at most `most`."""
    return min(total & -total, 1 << (max(1, most).bit_length() - 1))


def _run_pipeline(
    num_steps: jax.Array,
    start_copies: Callable[[jax.Array, jax.Array], None],
    store_step: Callable[[jax.Array, jax.Array], None],
    full: Ref,
) -> None:
    """Run `num_steps` steps: wait for step i's copies, then store its result.

    start_copies(i, stage) runs STAGES - 1 steps ahead of store_step(i, stage). full: the barriers
    of copies that have arrived, one for each stage.
    """
    lax.fori_loop(0, jnp.minimum(num_steps, STAGES - 1), lambda i, _: start_copies(i, i), None)

    def run_step(i: jax.Array, carry: None) -> None:
        stage = lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(full.at[stage])
        store_step(i, stage)
        # the previous step's store has read its buffer, which the next load overwrites
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        ahead = i + (STAGES - 1)

        @pl.when(ahead < num_steps)
        def _() -> None:
            start_copies(ahead, lax.rem(ahead, jnp.int32(STAGES)))

    lax.fori_loop(0, num_steps, run_step, None)
    plgpu.wait_smem_to_gmem(0)


def gather_rows(
    x_TD: jax.Array,
    src_M: jax.Array,
    scale_M: jax.Array | None = None,
    *,
    launch: Launch = ALL_SMS,
) -> jax.Array:
    """Return x_TD[src_M] [M, D], times scale_M if given; the last row of x where src_M == T.

    launch: the multiprocessors that run the kernel. Raises NotImplementedError as `_rows_as_lines`
    does.
    """
    num_rows, d = src_M.shape[0], x_TD.shape[1]
    x = _rows_as_lines(x_TD)
    line = x.shape[1:]
    size = _step_size(num_rows, min(MAX_COPIES, STEP_BYTES // (d * x_TD.dtype.itemsize)))
    src_M = jnp.minimum(src_M, x_TD.shape[0] - 1).astype(jnp.int32)
    scale = () if scale_M is None else (scale_M.astype(jnp.float32),)

    def gather_rows_kernel(x: Ref, src: Ref, *refs: Ref) -> None:
        *scales, out, rows_smem, full = refs

        def start_copies(i: jax.Array, stage: jax.Array) -> None:
            row = launch.piece_index(i) * size
            tokens = [src[row + b] for b in range(size)]
            for b, token in enumerate(tokens):
                plgpu.copy_gmem_to_smem(x.at[token], rows_smem.at[stage, b], full.at[stage])

        def store_step(i: jax.Array, stage: jax.Array) -> None:
            row = launch.piece_index(i) * size
            if scales:
                for b in range(size):
                    scaled = rows_smem[stage, b].astype(jnp.float32) * scales[0][row + b]
                    rows_smem[stage, b] = scaled.astype(x.dtype)
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows_smem.at[stage], out.at[pl.ds(row, size)])

        _run_pipeline(launch.num_pieces(num_rows // size), start_copies, store_step, full)

    scratch = [
        plgpu.SMEM((STAGES, size, *line), x_TD.dtype),
        plgpu.Barrier(num_arrivals=size, num_barriers=STAGES),
    ]
    out_type = jax.ShapeDtypeStruct((num_rows, *line), x_TD.dtype)
    kernel = launch.make_kernel(gather_rows_kernel, out_type, scratch)
    return kernel(x, src_M, *scale).reshape(num_rows, d)


@dataclass(frozen=True)
class _SumSteps:
    """The steps of `gather_sum`: each sums the rows of `size` tokens, `height` lines of `line`
    elements of each row. parts: steps that the lines of a row take.
    """

    k: int
    line: int
    height: int
    parts: int
    size: int

    def first_token_and_lines(self, index: jax.Array) -> tuple[jax.Array, Slice]:
        """Return the first token of step `index` and its range of lines."""
        block = index // self.parts
        lines = pl.ds((index - block * self.parts) * self.height, self.height)
        return block * self.size, lines

    def token_sum(
        self, rows: Ref, stage: jax.Array, weights: Ref, token: jax.Array, b: int
    ) -> jax.Array:
        """Return the weighted sum of the rows of token `token` + b, the b-th of a step.

        rows: the stages' rows in shared memory. weights: of all choices; 0 if dropped.
        """
        total = jnp.zeros((self.height, self.line), jnp.float32)
        for n in range(b * self.k, (b + 1) * self.k):
            weight = weights[token * self.k + n]
            row = rows[stage, n].astype(jnp.float32) * weight
            kept = lax.broadcast(weight != 0.0, row.shape)  # a dropped row may hold NaN
            total = total + jnp.where(kept, row, jnp.zeros_like(row))
        return total


def _choose_sum_steps(num_tokens: int, k: int, lines: tuple[int, int], itemsize: int) -> _SumSteps:
    """Return steps of as many tokens, or lines of one token, as fit into shared memory. lines:
    (number, elements) of a row's lines. Raises NotImplementedError for more than MAX_COPIES
    choices.
    """
    if k > MAX_COPIES:
        raise NotImplementedError(f"{k} choices a token: at most {MAX_COPIES}")
    num_lines, line = lines
    fits = SUM_BYTES // (line * (STAGES * k * itemsize + 2 * 4))
    fitting = [n for n in range(1, num_lines + 1) if num_lines % n == 0 and n <= max(1, fits)]
    height = max(fitting)
    whole = height == num_lines
    size = _step_size(num_tokens, min(MAX_COPIES // k, fits // height)) if whole else 1
    return _SumSteps(k, line, height, num_lines // height, size)


def _rows_and_weights(
    row_TK: jax.Array, weights_TK: jax.Array | None, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Return the row and float32 weight of each choice, [T K]; a dropped choice has some row and
    weight 0.
    """
    row_N = row_TK.reshape(-1).astype(jnp.int32)
    kept_N = row_N < num_rows
    weight_N = (
        jnp.ones(row_N.size, jnp.float32)
        if weights_TK is None
        else weights_TK.reshape(-1).astype(jnp.float32)
    )
    weight_N = jnp.where(kept_N, weight_N, 0.0)
    return jnp.minimum(row_N, num_rows - 1), weight_N


def gather_sum(
    y_MD: jax.Array,
    row_TK: jax.Array,
    weights_TK: jax.Array | None = None,
    *,
    complete: bool = False,
    launch: Launch = ALL_SMS,
) -> jax.Array:
    """Return float32 [T, D], the (weighted) sum over k of rows y_MD[row_TK[t, k]]; a row of M adds
    0.

    complete: promises that no row is M; this implementation does not use it. launch: the
    multiprocessors that run the kernel. Raises NotImplementedError as `_rows_as_lines` does, and
    for more than MAX_COPIES choices a token.
    """
    del complete
    (num_tokens, k), (num_rows, d) = row_TK.shape, y_MD.shape
    y = _rows_as_lines(y_MD)
    _, num_lines, line = y.shape
    steps = _choose_sum_steps(num_tokens, k, (num_lines, line), y_MD.dtype.itemsize)
    size, height = steps.size, steps.height
    row_N, weight_N = _rows_and_weights(row_TK, weights_TK, num_rows)

    def gather_sum_kernel(y: Ref, rows: Ref, weights: Ref, out: Ref, *refs: Ref) -> None:
        rows_smem, out_smem, full = refs

        def start_copies(i: jax.Array, stage: jax.Array) -> None:
            token, some = steps.first_token_and_lines(launch.piece_index(i))
            copied = [rows[token * k + n] for n in range(size * k)]
            for n, row in enumerate(copied):
                plgpu.copy_gmem_to_smem(y.at[row, some], rows_smem.at[stage, n], full.at[stage])

        def store_step(i: jax.Array, stage: jax.Array) -> None:
            token, some = steps.first_token_and_lines(launch.piece_index(i))
            buffer = lax.rem(i, jnp.int32(2))
            for b in range(size):
                out_smem[buffer, b] = steps.token_sum(rows_smem, stage, weights, token, b)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[buffer], out.at[pl.ds(token, size), some])

        _run_pipeline(
            launch.num_pieces(num_tokens // size * steps.parts), start_copies, store_step, full
        )

    scratch = [
        plgpu.SMEM((STAGES, size * k, height, line), y_MD.dtype),
        plgpu.SMEM((2, size, height, line), jnp.float32),
        plgpu.Barrier(num_arrivals=size * k, num_barriers=STAGES),
    ]
    out_type = jax.ShapeDtypeStruct((num_tokens, num_lines, line), jnp.float32)
    kernel = launch.make_kernel(gather_sum_kernel, out_type, scratch)
    return kernel(y, row_N, weight_N).reshape(num_tokens, d)
