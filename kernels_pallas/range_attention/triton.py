"""Attention to ranges of keys in Triton: FlashAttention-2 (Dao, 2023) with a range for each query.

A program computes one tile of queries, or in the gradient of keys and values one tile of keys. It
visits the tiles of the other side between the first and the last that any of its rows sees, so that
a row of many short documents costs what they cost alone. Three kernels, without atomic additions:
the output, the gradient of the queries, and the gradients of keys and values, whose programs add
over the query heads of their group.

Legend: as `api.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.implementations import nvidia_compute_capability
from kernels_pallas.paged_attention.triton import split_dimensions
from kernels_pallas.range_attention.ranges import KeyRanges
from kernels_pallas.triton import (
    SMALL_MEMORY,
    BlockSizes,
    Ref,
    check_dtypes,
    dot,
    index_range,
    launch_with_results,
    load,
    store,
)

_NONE = -1e30  # the score of masked keys: finite, as differences of -inf would be NaN
_LEAST = 1e-30  # the sum of a query without keys


def range_attention(
    q_BSHd: jax.Array,
    k_BCGd: jax.Array,
    v_BCGe: jax.Array,
    ranges: KeyRanges,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (o, lse); see `api.py`."""
    check_dtypes(q_BSHd, k_BCGd, v_BCGe)
    b, s, h, _ = q_BSHd.shape
    blocks = _choose_blocks(q_BSHd, v_BCGe)
    outs = [
        jax.ShapeDtypeStruct((b, s, h, v_BCGe.shape[-1]), q_BSHd.dtype),
        jax.ShapeDtypeStruct((b, h, s), jnp.float32),
    ]
    grid = b * h, pl.cdiv(s, blocks.rows)
    operands = [*ranges, q_BSHd, k_BCGd, v_BCGe]
    o, lse = launch_with_results(
        _Forward(blocks, scale), outs, grid, operands, blocks=blocks, interpret=interpret
    )
    return o, lse


def range_attention_gradient(
    operands: tuple[jax.Array, jax.Array, jax.Array],
    results: tuple[jax.Array, jax.Array],
    do_BSHe: jax.Array,
    ranges: KeyRanges,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (dq, dk, dv); see `api.py`."""
    (q, k, v), (o, lse_BHS) = operands, results
    check_dtypes(q, k, v, do_BSHe)
    b, s, h, _ = q.shape
    delta_BSH = (do_BSHe.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1)
    delta_BHS, blocks = delta_BSH.swapaxes(1, 2), _choose_gradient_blocks(q, v)
    shared = [q, k, v, do_BSHe, lse_BHS, delta_BHS]
    (dq,) = launch_with_results(
        _QueryGradient(blocks, scale),
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        (b * h, pl.cdiv(s, blocks.rows)),
        [*ranges, *shared],
        blocks=blocks,
        interpret=interpret,
    )
    dk, dv = launch_with_results(
        _KeyGradient(blocks, scale),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        (b * k.shape[2], pl.cdiv(k.shape[1], blocks.columns)),
        [*ranges.query_ranges(k.shape[1]), *shared],
        blocks=blocks,
        interpret=interpret,
    )
    return dq, dk, dv


def _choose_blocks(q_BSHd: jax.Array, v_BCGe: jax.Array) -> BlockSizes:
    """Return the rows of a tile of queries, the `columns` of a tile of keys, and launch settings.

    FlashAttention's sizes for heads of up to 128; half of them for larger heads and on GPUs with
    99 KiB of shared memory; few rows for float32, whose products are unrolled.
    """
    largest = max(q_BSHd.shape[-1], v_BCGe.shape[-1])
    if q_BSHd.dtype == jnp.float32:
        return _float32_blocks(largest)
    if largest > 128 or _has_small_memory():
        return BlockSizes(64, 32, num_warps=4, num_stages=2)
    return BlockSizes(128, 64, num_warps=8, num_stages=2)


def _choose_gradient_blocks(q_BSHd: jax.Array, v_BCGe: jax.Array) -> BlockSizes:
    """Return the sizes of tiles for the gradients, whose programs hold more: see
    `_choose_blocks`.
    """
    largest = max(q_BSHd.shape[-1], v_BCGe.shape[-1])
    if q_BSHd.dtype == jnp.float32:
        return _float32_blocks(largest)
    if largest > 128 or _has_small_memory():
        return BlockSizes(32, 32, num_warps=4, num_stages=1)
    return BlockSizes(64, 64, num_warps=8, num_stages=2)


def _float32_blocks(largest_head: int) -> BlockSizes:
    size = 32 if largest_head <= 128 else 16
    return BlockSizes(size, size, num_warps=4, num_stages=1)


def _has_small_memory() -> bool:
    version = nvidia_compute_capability()
    return version is not None and "{}.{}".format(*version) in SMALL_MEMORY


@dataclass(frozen=True)
class _RangeKernel:
    """Settings of the forward and both backward kernels.

    blocks: rows of a tile of queries, columns of a tile of keys. scale: the factor of scores.
    """

    blocks: BlockSizes
    scale: float

    def scores(self, rows: Sequence[jax.Array], columns: Sequence[jax.Array]) -> jax.Array:
        """Return float32 [rows, columns]: products of two tiles, each in pieces of a head."""
        first, *others = (dot(a, b, (1, 1)) for a, b in zip(rows, columns, strict=True))
        return sum(others, first)


def _load_head(ref: Ref, where: tuple[jax.Array, jax.Array], at: jax.Array) -> list[jax.Array]:
    """Return rows `at` of a head of [B, S, H, d], zeros behind the last row, in pieces whose sizes
    are powers of 2. where: (batch, head).
    """
    (batch, head), (_, length, _, size) = where, ref.shape
    pieces = []
    for piece in split_dimensions(size):
        dim = index_range(*piece)
        mask = (at < length)[:, None] & (dim < size)[None]
        pieces.append(load(ref.at[batch, at[:, None], head, dim[None]], mask))
    return pieces


def _store_head(
    ref: Ref, where: tuple[jax.Array, jax.Array], at: jax.Array, pieces: Sequence[jax.Array]
) -> None:
    """Write what `_load_head` would read."""
    (batch, head), (_, length, _, size) = where, ref.shape
    for value, piece in zip(pieces, split_dimensions(size), strict=True):
        dim = index_range(*piece)
        mask = (at < length)[:, None] & (dim < size)[None]
        store(ref.at[batch, at[:, None], head, dim[None]], value, mask)


def _zeros(num_rows: int, size: int) -> list[jax.Array]:
    """Return float32 sums of a tile's rows, in the pieces of a head of `size`."""
    return [jnp.zeros((num_rows, width), jnp.float32) for _, width in split_dimensions(size)]


def _load_range(first: Ref, end: Ref, batch: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
    """Return (first, end) of rows `at`; an empty range behind the last row."""
    is_row = at < first.shape[1]
    return load(first.at[batch, at], is_row), load(end.at[batch, at], is_row)


def _tiles_of_ranges(
    first: jax.Array, end: jax.Array, size: int, length: int
) -> tuple[jax.Array, jax.Array]:
    """Return (first tile, tile behind the last) of those that any of these ranges meets."""
    is_range = first < end
    begin = jnp.where(is_range, first, length).min() // size
    return begin, (jnp.where(is_range, end, 0).max() + size - 1) // size


class _Forward(_RangeKernel):
    """The output and log-sum-exp of one tile of queries of one head."""

    __name__ = "range_attention_kernel"

    def __call__(self, first: Ref, end: Ref, q: Ref, k: Ref, v: Ref, o: Ref, lse: Ref) -> None:
        (_, s, h, _), (_, c, g, _) = q.shape, k.shape
        rows, keys = self.blocks.rows, self.blocks.columns
        batch, head, at = _query_tile(h, rows)
        of_head, of_group = (batch, head), (batch, head // (h // g))
        low, high = _load_range(first, end, batch, at)
        queries = _load_head(q, of_head, at)

        def add_tile(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, *sums = state
            key = index_range(i * keys, keys)
            seen = (key[None] >= low[:, None]) & (key[None] < high[:, None])
            scores = self.scores(queries, _load_head(k, of_group, key))
            scores = jnp.where(seen, scores * self.scale, _NONE)
            new_top = jnp.maximum(top, scores.max(axis=1))
            kept = jnp.exp(top - new_top)
            weights = jnp.where(seen, jnp.exp(scores - new_top[:, None]), 0.0)
            narrow = weights.astype(v.dtype)
            sums = [
                some * kept[:, None] + dot(narrow, value, (1, 0))
                for some, value in zip(sums, _load_head(v, of_group, key), strict=True)
            ]
            return new_top, total * kept + weights.sum(axis=1), *sums

        zeros = _zeros(rows, v.shape[3])
        state = jnp.full(rows, _NONE, jnp.float32), jnp.zeros(rows, jnp.float32), *zeros
        top, total, *sums = lax.fori_loop(*_tiles_of_ranges(low, high, keys, c), add_tile, state)
        total = jnp.maximum(total, _LEAST)
        _store_head(o, of_head, at, [some / total[:, None] for some in sums])
        store(lse.at[batch, head, at], top + jnp.log(total), at < s)


def _query_tile(num_heads: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (batch, head, rows) of this program. Heads that share keys are neighbours; the last
    tiles of a causal mask, which take longest, run first.
    """
    batch_and_head = pl.program_id(0)
    tile = pl.num_programs(1) - 1 - pl.program_id(1)
    at = index_range(tile * rows, rows)
    return batch_and_head // num_heads, batch_and_head % num_heads, at


class _QueryGradient(_RangeKernel):
    """The gradient of one tile of queries of one head."""

    __name__ = "range_attention_query_gradient_kernel"

    def __call__(self, first: Ref, end: Ref, q: Ref, k: Ref, v: Ref, *refs: Ref) -> None:
        do, lse, delta, dq = refs
        (_, s, h, d), (_, c, g, _), keys = q.shape, k.shape, self.blocks.columns
        batch, head, at = _query_tile(h, self.blocks.rows)
        of_head, of_group = (batch, head), (batch, head // (h // g))
        low, high = _load_range(first, end, batch, at)
        queries, gradients = _load_head(q, of_head, at), _load_head(do, of_head, at)
        of_row = [load(x.at[batch, head, at], at < s)[:, None] for x in (lse, delta)]

        def add_tile(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            key = index_range(i * keys, keys)
            seen = (key[None] >= low[:, None]) & (key[None] < high[:, None])
            key_pieces = _load_head(k, of_group, key)
            scores = jnp.where(seen, self.scores(queries, key_pieces) * self.scale, _NONE)
            weights = jnp.where(seen, jnp.exp(scores - of_row[0]), 0.0)
            dp = self.scores(gradients, _load_head(v, of_group, key))
            ds = (weights * (dp - of_row[1]) * self.scale).astype(k.dtype)
            pairs = zip(sums, key_pieces, strict=True)
            return tuple(some + dot(ds, piece, (1, 0)) for some, piece in pairs)

        zeros = tuple(_zeros(self.blocks.rows, d))
        sums = lax.fori_loop(*_tiles_of_ranges(low, high, keys, c), add_tile, zeros)
        _store_head(dq, of_head, at, sums)


class _KeyGradient(_RangeKernel):
    """The gradients of one tile of keys and values of one group, over all of its query heads.

    first, end: the queries that see each key.
    """

    __name__ = "range_attention_key_gradient_kernel"

    def __call__(self, first: Ref, end: Ref, q: Ref, k: Ref, v: Ref, *refs: Ref) -> None:
        do, lse, delta, dk, dv = refs
        (_, s, h, d), (_, _, g, e), rows = q.shape, v.shape, self.blocks.rows
        batch, group, heads = pl.program_id(0) // g, pl.program_id(0) % g, h // g
        key = index_range(pl.program_id(1) * self.blocks.columns, self.blocks.columns)
        low, high = _load_range(first, end, batch, key)
        keys, values = (_load_head(x, (batch, group), key) for x in (k, v))
        begin, stop = _tiles_of_ranges(low, high, rows, s)
        num_tiles = jnp.maximum(stop - begin, 0)

        def add_tile(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            head = group * heads + i // num_tiles
            at = index_range((begin + i % num_tiles) * rows, rows)
            seen = (at[None] >= low[:, None]) & (at[None] < high[:, None])
            queries, gradients = (_load_head(x, (batch, head), at) for x in (q, do))
            of_row = [load(x.at[batch, head, at], at < s)[None] for x in (lse, delta)]
            scores = jnp.where(seen, self.scores(keys, queries) * self.scale, _NONE)
            weights = jnp.where(seen, jnp.exp(scores - of_row[0]), 0.0)
            dp = self.scores(values, gradients)
            ds = (weights * (dp - of_row[1]) * self.scale).astype(q.dtype)
            narrow = weights.astype(do.dtype)
            added = [dot(ds, piece, (1, 0)) for piece in queries]
            added += [dot(narrow, piece, (1, 0)) for piece in gradients]
            return tuple(some + more for some, more in zip(sums, added, strict=True))

        zeros = _zeros(self.blocks.columns, d), _zeros(self.blocks.columns, e)
        sums = lax.fori_loop(0, heads * num_tiles, add_tile, (*zeros[0], *zeros[1]))
        _store_head(dk, (batch, group), key, sums[: len(zeros[0])])
        _store_head(dv, (batch, group), key, sums[len(zeros[0]) :])
