"""Gathered rows, and sums of gathered rows, in Triton.

A program copies, or sums, some columns of a few rows.

Legend: T tokens, K choices per token, M rows, D hidden.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.triton import BlockSizes, Ref, check_dtypes, index_range, launch, load, store

COLUMNS = 512
GATHERED = BlockSizes(rows=16, columns=COLUMNS, num_warps=4, num_stages=1)
SUMMED = BlockSizes(rows=4, columns=COLUMNS, num_warps=4, num_stages=1)


def gather_rows(
    x_TD: jax.Array,
    src_M: jax.Array,
    scale_M: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return x_TD[src_M] [M, D], times scale_M if given; the last row of x where src_M == T."""
    check_dtypes(x_TD)
    blocks, num_rows, (num_tokens, d) = GATHERED, src_M.shape[0], x_TD.shape

    def gather_rows_kernel(x: Ref, src: Ref, *refs: Ref) -> None:
        *scales, out = refs
        rows = index_range(pl.program_id(0) * blocks.rows, blocks.rows)
        columns = index_range(pl.program_id(1) * blocks.columns, blocks.columns)
        is_row, is_column = rows < num_rows, columns < d
        is_mine = is_row[:, None] & is_column[None]
        token = jnp.minimum(load(src.at[rows], is_row), num_tokens - 1)
        row = load(x.at[token[:, None], columns[None]], is_mine)
        if scales:
            row = row.astype(jnp.float32) * load(scales[0].at[rows], is_row)[:, None]
        store(out.at[rows[:, None], columns[None]], row, is_mine)

    optional = () if scale_M is None else (scale_M.astype(jnp.float32),)
    out = jax.ShapeDtypeStruct((num_rows, d), x_TD.dtype)
    grid = pl.cdiv(num_rows, blocks.rows), pl.cdiv(d, blocks.columns)
    operands = (x_TD, src_M.astype(jnp.int32), *optional)
    return launch(gather_rows_kernel, out, grid, operands, blocks=blocks, interpret=interpret)


def gather_sum(
    y_MD: jax.Array,
    row_TK: jax.Array,
    weights_TK: jax.Array | None = None,
    *,
    complete: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Return float32 [T, D], the (weighted) sum over k of rows y_MD[row_TK[t, k]]; a row of M adds
    0.

    complete: promises that no row is M; this implementation does not use it.
    """
    del complete
    check_dtypes(y_MD)
    blocks, (num_tokens, num_choices), (num_rows, d) = SUMMED, row_TK.shape, y_MD.shape

    def gather_sum_kernel(y: Ref, row: Ref, *refs: Ref) -> None:
        *weights, out = refs
        tokens = index_range(pl.program_id(0) * blocks.rows, blocks.rows)
        columns = index_range(pl.program_id(1) * blocks.columns, blocks.columns)
        is_token, is_column = tokens < num_tokens, columns < d

        def add_choice(k: jax.Array, sums: jax.Array) -> jax.Array:
            at = jnp.where(is_token, load(row.at[tokens, k], is_token), num_rows)
            mask = (at < num_rows)[:, None] & is_column[None]  # a dropped row may hold NaN
            some = load(y.at[at[:, None], columns[None]], mask).astype(jnp.float32)
            if weights:
                some = some * load(weights[0].at[tokens, k], is_token)[:, None]
            return sums + some

        sums = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
        sums = lax.fori_loop(0, num_choices, add_choice, sums)
        store(out.at[tokens[:, None], columns[None]], sums, is_token[:, None] & is_column[None])

    optional = () if weights_TK is None else (weights_TK.astype(jnp.float32),)
    out = jax.ShapeDtypeStruct((num_tokens, d), jnp.float32)
    grid = pl.cdiv(num_tokens, blocks.rows), pl.cdiv(d, blocks.columns)
    operands = (y_MD, row_TK.astype(jnp.int32), *optional)
    return launch(gather_sum_kernel, out, grid, operands, blocks=blocks, interpret=interpret)
