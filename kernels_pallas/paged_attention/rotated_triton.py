"""Attention of single tokens over a KV cache in blocks, in a Triton kernel that also norms and
rotates their queries and keys and writes keys and values to the cache: launches of their own
otherwise.

Each program rotates the queries of its group. A row's own key and value are not read from the
cache: the last split of a group computes them, writes them, and attends to them, rounded as the
cache stores them.

Legend: P rows of a step, H query heads, G key/value heads, X = (H + 2 G) d columns of queries, keys
and values; N blocks, L positions of a block, W blocks of a table; d dimensions; R rows of a tile.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from kernels_pallas.cached_values import decode
from kernels_pallas.paged_attention.triton import SplitAttention, combine_splits, make_plan
from kernels_pallas.rotary_write import NewHeads, Rotary, write_to_cache
from kernels_pallas.triton import Ref, index_range, launch_with_results, split_optional

State = tuple[jax.Array, ...]  # as `SplitAttention.start_state` returns it


def rotate_write_and_attend(  # noqa: PLR0913  as `rotate_and_write` and `paged_attention`
    qkv_PCX: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    rotary: Rotary,
    *,
    scale: float,
    bias: tuple[jax.Array, DTypeLike] | None = None,
    window: jax.Array | int | None = None,
    sinks_H: jax.Array | None = None,
    num_splits: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (attention [P, 1, H, d]; the cache's keys and values with this step's): the results of
    `paged_attention` after `rotate_and_write`.

    Raises NotImplementedError as they do, for several tokens a row, and for more query heads of a
    group than a tile has.
    """
    k_NGLd, v_NGLd = cache
    (p, c, _), (_, g, length, d) = qkv_PCX.shape, k_NGLd.shape
    if c != 1:
        raise NotImplementedError(f"{c} tokens a row")
    if v_NGLd.shape != k_NGLd.shape:
        raise NotImplementedError(f"a cache of keys {k_NGLd.shape} and values {v_NGLd.shape}")
    heads, arrays = NewHeads.from_columns(qkv_PCX, k_NGLd, rotary, bias)
    queries = jax.ShapeDtypeStruct((p, c, heads.num_heads, d), heads.dtype)
    plan = make_plan(queries, k_NGLd, blocks_PW, d, True, num_splits)
    if plan.num_tiles > 1:
        raise NotImplementedError(f"{heads.num_heads // g} query heads of a group")
    if window is None:
        window = blocks_PW.shape[1] * length
    operands = [
        *(blocks_PW, positions_PC, jnp.asarray(window, jnp.int32).reshape(1), *arrays),
        *([] if sinks_H is None else [sinks_H]),
        *cache,
    ]
    of_rows = (plan.num_splits, *queries.shape[:3])
    parts = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*of_rows, d), of_rows, of_rows)]
    outs = [queries] if plan.num_splits == 1 else parts
    first, of_cache = len(operands) - 2, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache]
    body = _RotateWriteAndAttend(plan, scale, d, True, sinks_H is not None, heads)
    *attended, k_NGLd, v_NGLd = launch_with_results(
        body,
        [*outs, *of_cache],
        (p * g, plan.num_splits),
        operands,
        blocks=plan.settings,
        aliases={first: len(outs), first + 1: len(outs) + 1},
        interpret=interpret,
    )
    if plan.num_splits == 1:
        return attended[0], k_NGLd, v_NGLd
    sums, tops, totals = attended
    return combine_splits(sums, tops, totals, heads.dtype, interpret), k_NGLd, v_NGLd


@dataclass(frozen=True)
class _RotateWriteAndAttend(SplitAttention):
    """The kernel's body: attention of the query heads of one row and group to one split of their
    keys.
    """

    heads: NewHeads
    __name__ = "rotated_attention_kernel"

    def __call__(self, blocks: Ref, positions: Ref, window: Ref, *refs: Ref) -> None:
        new, others = self.heads.split(refs)
        (sinks,), others = split_optional(others, [self.has_sinks])
        # the cache's memory, which the kernel changes: inputs and results share it
        *outs, k, v = others[2:]
        plan, (_, g, length, _) = self.plan, k.shape
        p, group, split = pl.program_id(0) // g, pl.program_id(0) % g, pl.program_id(1)
        per_group = self.heads.num_heads // g
        row, at = index_range(0, plan.rows), positions[p, 0]
        is_row, head, token = row < per_group, group * per_group + row, (p, jnp.int32(0))
        query = self.heads.queries(new, token, head, at)
        query = jnp.where(is_row[:, None], query, jnp.zeros_like(query))
        is_real = at < blocks.shape[1] * length
        begin, end = self._tiles_of_split(at, window[0], is_real, split)

        def attend_to_tile(i: jax.Array, state: State) -> State:
            place = index_range(i * plan.keys, plan.keys)
            block = i * plan.keys // length
            where = blocks[p, block], group, place - block * length
            is_key = place < at
            seen = (is_key & (place > at - window[0]))[None] & is_row[:, None]
            return self.add_tile([query], (k, v), where, is_key, seen, state)

        state = self.start_state(sinks, head, is_row, split)
        state = lax.fori_loop(begin, end, attend_to_tile, state)
        is_own = is_real & (split == plan.num_splits - 1)

        def attend_to_own_key(state: State) -> State:
            place = blocks[p, at // length], group, at % length
            key = write_to_cache(k, place, self.heads.key(new, token, group, at))
            value = write_to_cache(v, place, self.heads.value(new, token, group))
            dtype = self.heads.dtype
            return self._add_key(query, decode(key, dtype), decode(value, dtype), state)

        state = lax.cond(is_own, attend_to_own_key, lambda state: state, state)
        place = p, jnp.zeros_like(row), head
        self.write(outs, state, place, is_row, split, (begin < end) | is_own)

    def _tiles_of_split(
        self, at: jax.Array, window: jax.Array, is_real: jax.Array, split: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the first and the end of a split's tiles of keys before position `at`."""
        plan = self.plan
        first = jnp.maximum(at - window + 1, 0) // plan.keys
        end = jnp.where(is_real, (at + plan.keys - 1) // plan.keys, first)
        each = (jnp.maximum(end - first, 0) + plan.num_splits - 1) // plan.num_splits
        begin = first + split * each
        return begin, jnp.minimum(begin + each, end)

    def _add_key(self, query: jax.Array, key: jax.Array, value: jax.Array, state: State) -> State:
        """Return the state after one key [1, d] and its value, as `add_tile` does."""
        top, total, sums = state
        score = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32), axis=1) * self.scale
        new_top = jnp.maximum(top, score)
        kept, weight = jnp.exp(top - new_top), jnp.exp(score - new_top)
        narrow = weight.astype(self.heads.dtype).astype(jnp.float32)
        sums = sums * kept[:, None] + narrow[:, None] * value.astype(jnp.float32)
        return new_top, total * kept + weight, sums
