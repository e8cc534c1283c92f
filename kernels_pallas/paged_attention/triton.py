"""Attention over a KV cache in blocks, in Triton: flash-decoding (Dao et al., 2023).

The keys that a row of a step attends to are divided among several programs, because one row alone
would leave most of the GPU idle. Each program reads its keys and values where the table says that
they are, and writes its part of the softmax; a second kernel combines the parts. With enough rows
there is one part, and no second kernel.

A query row is one head of one token. Rows of a tile share a key/value head: all heads of its group,
of one or several tokens.

Legend: as `api.py`; R query heads a group, H / G.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.cached_values import FP8, decode, stored_dtype
from kernels_pallas.triton import (
    BlockSizes,
    Ref,
    check_dtypes,
    dot,
    index_range,
    launch,
    launch_with_results,
    load,
    store,
)

MIN_ROWS, MAX_ROWS = 16, 64  # of a tile of queries; the tensor cores' smallest is 16
MAX_KEYS = 128  # of a tile of keys
TILE_BYTES, QUERY_BYTES = 40 * 1024, 16 * 1024  # of a tile's keys and values, and of its queries
PROGRAMS = 512  # enough for every multiprocessor of a large GPU to have several
MAX_SPLITS = 128
COLUMNS = 64  # of the values that one program combines
NO_SCORE = -1e30  # the score of masked keys: finite, as differences of -inf would be NaN
Pieces = Sequence[tuple[int, int]]  # (first dimension, number of dimensions, a power of 2)


@dataclass(frozen=True)
class Plan:
    """How the work is divided: query rows and keys of a tile, tiles of queries of a row and group,
    and splits of the keys.
    """

    rows: int
    keys: int
    num_tiles: int
    num_splits: int
    settings: BlockSizes


def paged_attention(  # noqa: PLR0913  as `api.py`, and how it runs
    q_PCHd: jax.Array,
    k_NGLd: jax.Array,
    v_NGLe: jax.Array | None,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    value_dim: int,
    window: jax.Array | int | None = None,
    sinks_H: jax.Array | None = None,
    context: int | None = None,
    num_splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return [P, C, H, e] in q's dtype; see `api.py`. Rows of padding are 0.

    num_splits: programs among which a row's keys are divided; None for as many as fill a GPU.
    Raises NotImplementedError for other dtypes.
    """
    del context
    _check_operands(q_PCHd, k_NGLd, v_NGLe)
    plan = make_plan(q_PCHd, k_NGLd, blocks_PW, value_dim, v_NGLe is not None, num_splits)
    p, c, h, _ = q_PCHd.shape
    if window is None:
        window = blocks_PW.shape[1] * k_NGLd.shape[2]
    operands = [
        q_PCHd,
        blocks_PW,
        positions_PC,
        jnp.asarray(window, jnp.int32).reshape(1),
        k_NGLd,
        *([] if v_NGLe is None else [v_NGLe]),
        *([] if sinks_H is None else [sinks_H]),
    ]
    body = _AttendToSplit(plan, scale, value_dim, v_NGLe is not None, sinks_H is not None)
    grid = p * k_NGLd.shape[1] * plan.num_tiles, plan.num_splits
    if plan.num_splits == 1:
        out = jax.ShapeDtypeStruct((p, c, h, value_dim), q_PCHd.dtype)
        return launch(body, out, grid, operands, blocks=plan.settings, interpret=interpret)
    of_rows = (plan.num_splits, p, c, h)
    parts = [
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*of_rows, value_dim), of_rows, of_rows)
    ]
    sums, tops, totals = launch_with_results(
        body, parts, grid, operands, blocks=plan.settings, interpret=interpret
    )
    return combine_splits(sums, tops, totals, q_PCHd.dtype, interpret)


def _check_operands(q_PCHd: jax.Array, k_NGLd: jax.Array, v_NGLe: jax.Array | None) -> None:
    """Raise NotImplementedError for dtypes that the kernel cannot read."""
    check_dtypes(q_PCHd)
    stored = stored_dtype(q_PCHd.dtype), stored_dtype(FP8)
    for x in (k_NGLd, v_NGLe):
        if x is not None and x.dtype not in stored:
            raise NotImplementedError(f"a cache of {x.dtype} for queries of {q_PCHd.dtype}")


def make_plan(
    q_PCHd: jax.Array | jax.ShapeDtypeStruct,
    k_NGLd: jax.Array,
    blocks_PW: jax.Array,
    value_dim: int,
    has_values: bool,
    num_splits: int | None,
) -> Plan:
    """Return the sizes of tiles that fit 99 KiB of shared memory, and the number of splits.

    They depend on shapes alone, so that a step's bits do not depend on the rows' lengths.
    """
    (p, c, h, d), (_, g, length, _) = q_PCHd.shape, k_NGLd.shape
    num_rows, itemsize = c * h // g, q_PCHd.dtype.itemsize
    largest = pl.next_power_of_2(QUERY_BYTES // (d * itemsize) + 1) // 2
    needed = pl.next_power_of_2(num_rows)
    rows = max(MIN_ROWS, min(needed, largest, MAX_ROWS))
    bytes_of_key = (d + value_dim * has_values) * itemsize
    keys = pl.next_power_of_2(TILE_BYTES // bytes_of_key + 1) // 2
    keys = max(16, min(keys, MAX_KEYS, length))
    if length % keys:
        raise NotImplementedError(f"blocks of {length} positions: not a multiple of {keys}")
    num_tiles = pl.cdiv(num_rows, rows)
    if num_splits is None:
        wanted = max(1, PROGRAMS // (p * g * num_tiles))
        num_splits = min(wanted, blocks_PW.shape[1] * length // keys, MAX_SPLITS)
        num_splits = pl.next_power_of_2(num_splits + 1) // 2
    num_stages = 1 if q_PCHd.dtype == jnp.float32 else 2
    settings = BlockSizes(num_warps=8 if rows == MAX_ROWS else 4, num_stages=num_stages)
    return Plan(rows, keys, num_tiles, num_splits, settings)


def split_dimensions(size: int) -> list[tuple[int, int]]:
    """Return pieces that cover `size` dimensions, each a power of 2 of at least 16: Triton's blocks
    are powers of 2, and one that covers 576 dimensions would be read and multiplied as 1,024.

    The last piece may reach beyond `size`.
    """
    pieces, start = [], 0
    while start < size:
        width = max(16, pl.next_power_of_2(size - start + 1) // 2)
        pieces.append((start, width))
        start += width
    return pieces


@dataclass(frozen=True)
class SplitAttention:
    """Attention of one tile of query rows to one split of their keys: parts of a kernel's body."""

    plan: Plan
    scale: float
    value_dim: int
    has_values: bool
    has_sinks: bool

    def start_state(
        self, sinks: Ref, head: jax.Array, is_row: jax.Array, split: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return (maximum score [rows], sum of weights [rows], weighted sums of each piece of the
        values) before the first key: the sinks, which the first split counts.
        """
        rows = self.plan.rows
        top, total = jnp.full(rows, NO_SCORE, jnp.float32), jnp.zeros(rows, jnp.float32)
        if self.has_sinks:
            of_head = load(sinks.at[head], is_row).astype(jnp.float32)
            top = jnp.where(split == 0, of_head, top)
            total = jnp.where(split == 0, 1.0, total)
        pieces = split_dimensions(self.value_dim)
        return top, total, *(jnp.zeros((rows, width), jnp.float32) for _, width in pieces)

    def add_tile(
        self,
        queries: Sequence[jax.Array],
        cached: tuple[Ref, Ref],
        where: tuple[jax.Array, jax.Array, jax.Array],
        is_key: jax.Array,
        seen: jax.Array,
        state: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        """Return the state after a tile of keys.

        where: (block, group, places in the block). is_key: False behind the tile's last query,
        where an earlier request may have left NaN.
        """
        (k, v), (block, group, place) = cached, where
        top, total, *sums = state

        def read(x: Ref, piece: tuple[int, int], size: int) -> jax.Array:
            at = index_range(*piece)
            mask = is_key[:, None] & (at < size)[None]
            some = load(x.at[block, group, place[:, None], at[None]], mask)
            return decode(some, queries[0].dtype)

        key_pieces = split_dimensions(k.shape[3])
        keys = {piece: read(k, piece, k.shape[3]) for piece in key_pieces}
        scores = sum(dot(q, keys[piece], (1, 1)) for q, piece in zip(queries, key_pieces))
        scores = jnp.where(seen, scores * self.scale, NO_SCORE)
        new_top = jnp.maximum(top, scores.max(axis=1))
        kept = jnp.exp(top - new_top)
        weights = jnp.where(seen, jnp.exp(scores - new_top[:, None]), 0.0)
        narrow = weights.astype(queries[0].dtype)
        for n, piece in enumerate(split_dimensions(self.value_dim)):
            is_read = not self.has_values and sum(piece) <= self.value_dim and piece in keys
            value = keys[piece] if is_read else read(v, piece, self.value_dim)
            sums[n] = sums[n] * kept[:, None] + dot(narrow, value, (1, 0))
        return new_top, total * kept + weights.sum(axis=1), *sums

    def write(
        self,
        outs: Sequence[Ref],
        state: tuple[jax.Array, ...],
        where: tuple[jax.Array, jax.Array, jax.Array],
        is_row: jax.Array,
        split: jax.Array,
        has_keys: jax.Array,
    ) -> None:
        """Write the output, or this split's part of it: a split without keys writes no sums."""
        (out, *tops_and_totals), (top, total, *sums) = outs, state
        p, token, head = where

        def write_sums(of_split: tuple[jax.Array, ...]) -> None:
            for some, piece in zip(sums, split_dimensions(self.value_dim), strict=True):
                at = index_range(*piece)
                to = out.at[(*of_split, p, token[:, None], head[:, None], at[None])]
                store(to, some, is_row[:, None] & (at < self.value_dim)[None])

        if not tops_and_totals:
            sums = [some / jnp.maximum(total, 1e-30)[:, None] for some in sums]
            write_sums(())
            return
        for ref, value in zip(tops_and_totals, (top, total), strict=True):
            store(ref.at[split, p, token, head], value, is_row)

        @pl.when(has_keys | (split == 0))
        def write_part() -> None:
            write_sums((split,))


@dataclass(frozen=True)
class _AttendToSplit(SplitAttention):
    """The kernel's body."""

    __name__ = "paged_attention_kernel"

    def __call__(
        self, q: Ref, blocks: Ref, positions: Ref, window: Ref, k: Ref, *refs: Ref
    ) -> None:
        v, *others = refs if self.has_values else (k, *refs)
        sinks, *outs = others if self.has_sinks else (None, *others)
        plan, (_, c, h, d), g = self.plan, q.shape, k.shape[1]
        heads = h // g  # of a group
        # programs that read the same keys are neighbours
        index, split = pl.program_id(0), pl.program_id(1)
        tile, p_and_g = index % plan.num_tiles, index // plan.num_tiles
        p, group = p_and_g // g, p_and_g % g
        row = index_range(tile * plan.rows, plan.rows)
        is_row, token, head = row < c * heads, row // heads, group * heads + row % heads
        at_row = load(positions.at[p, token], is_row)
        length = blocks.shape[1] * k.shape[2]
        is_query = is_row & (at_row < length)
        last = jnp.where(is_query, at_row, -1).max()
        earliest = jnp.where(is_query, at_row, length).min() - window[0] + 1
        first_tile = jnp.maximum(earliest, 0) // plan.keys
        end_tile = (last + plan.keys) // plan.keys
        tiles = jnp.maximum(end_tile - first_tile, 0)
        each = (tiles + plan.num_splits - 1) // plan.num_splits
        begin = first_tile + split * each
        end = jnp.minimum(begin + each, end_tile)

        queries = [
            load(q.at[p, token[:, None], head[:, None], at[None]], is_row[:, None] & (at < d)[None])
            for at in (index_range(*piece) for piece in split_dimensions(d))
        ]
        state = self.start_state(sinks, head, is_row, split)

        def attend_to_tile(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = index_range(i * plan.keys, plan.keys)
            place = i * plan.keys // k.shape[2]
            where = blocks[p, place], group, at - place * k.shape[2]
            seen = (at[None] <= at_row[:, None]) & (at[None] > (at_row - window[0])[:, None])
            seen &= is_query[:, None]
            return self.add_tile(queries, (k, v), where, at <= last, seen, state)

        state = lax.fori_loop(begin, end, attend_to_tile, state)
        self.write(outs, state, (p, token, head), is_row, split, begin < end)


def combine_splits(
    sums: jax.Array, tops: jax.Array, totals: jax.Array, dtype: jnp.dtype, interpret: bool
) -> jax.Array:
    """Return the attention [P, C, H, e] of whose softmax each split has computed a part.

    sums: float32 [splits, P, C, H, e], arbitrary where totals is 0. tops, totals: float32 [splits,
    P, C, H], the maximum score and the sum of weights relative to it.
    """
    num_splits, *shape, size = sums.shape
    width = pl.next_power_of_2(num_splits)

    def combine_splits_kernel(sums: Ref, tops: Ref, totals: Ref, out: Ref) -> None:
        row, column = pl.program_id(0), index_range(pl.program_id(1) * COLUMNS, COLUMNS)
        split, is_column = index_range(0, width), column < size
        is_split = split < num_splits
        total = load(totals.at[split, row], is_split)
        has_keys = total > 0
        top = jnp.where(has_keys, load(tops.at[split, row], is_split), NO_SCORE)
        weight = jnp.where(has_keys, jnp.exp(top - top.max()), 0.0)
        some = load(sums.at[split[:, None], row, column[None]], has_keys[:, None] & is_column[None])
        together = (some * weight[:, None]).sum(axis=0)
        y = together / jnp.maximum((total * weight).sum(), 1e-30)
        store(out.at[row, column], y, is_column)

    flat = [x.reshape(num_splits, -1, *x.shape[4:]) for x in (sums, tops, totals)]
    grid = flat[1].shape[1], pl.cdiv(size, COLUMNS)
    out = jax.ShapeDtypeStruct((grid[0], size), dtype)
    settings = BlockSizes(num_warps=4, num_stages=1)
    y = launch(combine_splits_kernel, out, grid, flat, blocks=settings, interpret=interpret)
    return y.reshape(*shape, size)
