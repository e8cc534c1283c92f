"""Gathered rows, and sums of gathered rows, on Hopper: bulk asynchronous copies with several rows
in flight.

Each multiprocessor runs one persistent block. The rows of a step are copied into one of STAGES
buffers in shared memory while previous steps are written out. A row is copied as a box [D / LINE,
LINE], since no side of a box may exceed 256 elements.

Legend: T tokens, K choices per token, M rows, D hidden, B rows (or tokens) of one step, C columns
of one step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_SMS = 132  # of an H100 SXM or an H200
STAGES = 4
STEP_BYTES = 32 * 1024
SUM_BYTES = 160 * 1024  # shared memory of all stages and of two buffers of sums
MAX_COPIES = 32  # copies of a step, which the kernel unrolls
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def _lines(x: jax.Array) -> jax.Array:
    """Return [M, D] as [M, D / LINE, LINE]. Raises NotImplementedError for other dtypes and
    sizes.
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


def _steps(total: int, num_sms: int) -> jax.Array:
    """Return how many of `total` steps this block runs: numbers sm, sm + num_sms, sm + 2 num_sms,
    ...
    """
    return (total - lax.axis_index("sm") + (num_sms - 1)) // num_sms


def _pipeline(
    num_steps: jax.Array, load: Callable[..., None], finish: Callable[..., None], full: Any
) -> None:
    """Run `num_steps` steps: load(i, stage) runs STAGES - 1 steps ahead of finish(i, stage), which
    stores.
    """
    lax.fori_loop(0, jnp.minimum(num_steps, STAGES - 1), lambda i, _: load(i, i), None)

    def step(i: jax.Array, carry: None) -> None:
        stage = lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(full.at[stage])
        finish(i, stage)
        # the previous step's store has read its buffer, which the next load overwrites
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        ahead = i + (STAGES - 1)

        @pl.when(ahead < num_steps)
        def _() -> None:
            load(ahead, lax.rem(ahead, jnp.int32(STAGES)))

    lax.fori_loop(0, num_steps, step, None)
    plgpu.wait_smem_to_gmem(0)


def _launch(
    body: Callable[..., None],
    out_type: jax.ShapeDtypeStruct,
    scratch: list[Any],
    num_sms: int,
    interpret: Any,
) -> Callable[..., jax.Array]:
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_sms,),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(),
        **({} if interpret is None else {"interpret": interpret}),
    )


def gather_rows(
    x_TD: jax.Array,
    src_M: jax.Array,
    scale_M: jax.Array | None = None,
    *,
    num_sms: int = NUM_SMS,
    interpret: Any = None,
) -> jax.Array:
    """Return x_TD[src_M] [M, D], times scale_M if given; the last row of x where src_M == T."""
    num_rows, d = src_M.shape[0], x_TD.shape[1]
    x = _lines(x_TD)
    line = x.shape[1:]
    size = _step_size(num_rows, min(MAX_COPIES, STEP_BYTES // (d * x_TD.dtype.itemsize)))
    src_M = jnp.minimum(src_M, x_TD.shape[0] - 1).astype(jnp.int32)
    scale = () if scale_M is None else (scale_M.astype(jnp.float32),)

    def gather_rows_kernel(x, src, *refs):  # type: ignore[no-untyped-def]
        *scales, out, rows_smem, full = refs

        def first(i: jax.Array) -> jax.Array:
            return (lax.axis_index("sm") + i * num_sms) * size

        def load(i: jax.Array, stage: jax.Array) -> None:
            row = first(i)
            tokens = [src[row + b] for b in range(size)]
            for b, token in enumerate(tokens):
                plgpu.copy_gmem_to_smem(x.at[token], rows_smem.at[stage, b], full.at[stage])

        def finish(i: jax.Array, stage: jax.Array) -> None:
            row = first(i)
            if scales:
                for b in range(size):
                    scaled = rows_smem[stage, b].astype(jnp.float32) * scales[0][row + b]
                    rows_smem[stage, b] = scaled.astype(x.dtype)
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows_smem.at[stage], out.at[pl.ds(row, size)])

        _pipeline(_steps(num_rows // size, num_sms), load, finish, full)

    scratch = [
        plgpu.SMEM((STAGES, size, *line), x_TD.dtype),
        plgpu.Barrier(num_arrivals=size, num_barriers=STAGES),
    ]
    out_type = jax.ShapeDtypeStruct((num_rows, *line), x_TD.dtype)
    return _launch(gather_rows_kernel, out_type, scratch, num_sms, interpret)(
        x, src_M, *scale
    ).reshape(num_rows, d)


def gather_sum(
    y_MD: jax.Array,
    slot_TK: jax.Array,
    weights_TK: jax.Array | None = None,
    *,
    complete: bool = False,
    num_sms: int = NUM_SMS,
    interpret: Any = None,
) -> jax.Array:
    """Return float32 [T, D], the (weighted) sum over k of rows y_MD[slot_TK[t, k]]; a slot of M
    adds 0.

    complete: promises that no slot is M; this implementation does not use it.
    """
    del complete
    (num_tokens, k), (num_rows, d) = slot_TK.shape, y_MD.shape
    y = _lines(y_MD)
    lines, line = y.shape[1:]
    if k > MAX_COPIES:
        raise NotImplementedError(f"{k} choices a token: at most {MAX_COPIES}")
    fits = SUM_BYTES // (line * (STAGES * k * y_MD.dtype.itemsize + 2 * 4))
    height = max(n for n in range(1, lines + 1) if lines % n == 0 and n <= max(1, fits))
    size = _step_size(num_tokens, min(MAX_COPIES // k, fits // height)) if height == lines else 1
    parts = lines // height
    slot_N = slot_TK.reshape(-1).astype(jnp.int32)
    kept_N = slot_N < num_rows
    weight_N = (
        jnp.ones(slot_N.size, jnp.float32)
        if weights_TK is None
        else weights_TK.reshape(-1).astype(jnp.float32)
    )
    weight_N = jnp.where(kept_N, weight_N, 0.0)
    slot_N = jnp.minimum(slot_N, num_rows - 1)

    def gather_sum_kernel(y, slots, weights, out, rows_smem, out_smem, full):  # type: ignore[no-untyped-def]
        def place(i: jax.Array) -> tuple[jax.Array, Any]:
            """Return the first token of step i and its range of lines."""
            index = lax.axis_index("sm") + i * num_sms
            block = index // parts
            return block * size, pl.ds((index - block * parts) * height, height)

        def load(i: jax.Array, stage: jax.Array) -> None:
            token, some = place(i)
            rows = [slots[token * k + n] for n in range(size * k)]
            for n, row in enumerate(rows):
                plgpu.copy_gmem_to_smem(y.at[row, some], rows_smem.at[stage, n], full.at[stage])

        def finish(i: jax.Array, stage: jax.Array) -> None:
            token, some = place(i)
            buffer = lax.rem(i, jnp.int32(2))
            for b in range(size):
                total = jnp.zeros((height, line), jnp.float32)
                for n in range(b * k, (b + 1) * k):
                    weight = weights[token * k + n]
                    row = rows_smem[stage, n].astype(jnp.float32) * weight
                    kept = lax.broadcast(weight != 0.0, row.shape)  # a dropped row may hold NaN
                    total = total + jnp.where(kept, row, jnp.zeros_like(row))
                out_smem[buffer, b] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[buffer], out.at[pl.ds(token, size), some])

        _pipeline(_steps(num_tokens // size * parts, num_sms), load, finish, full)

    scratch = [
        plgpu.SMEM((STAGES, size * k, height, line), y_MD.dtype),
        plgpu.SMEM((2, size, height, line), jnp.float32),
        plgpu.Barrier(num_arrivals=size * k, num_barriers=STAGES),
    ]
    out_type = jax.ShapeDtypeStruct((num_tokens, lines, line), jnp.float32)
    return _launch(gather_sum_kernel, out_type, scratch, num_sms, interpret)(
        y, slot_N, weight_N
    ).reshape(num_tokens, d)
