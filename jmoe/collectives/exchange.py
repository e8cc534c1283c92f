"""The movement of one MoE layer's tokens to their experts and of the outputs back, inside
`shard_map`.

`planned_exchange.make_exchange` builds an `Exchange`; `MoELayer` calls its `dispatch` and
`combine`. Forward and backward passes gather rows and never scatter them; sums are float32. Buffers
have a fixed size: if a destination gets more assignments than it has buffer rows, those with the
largest weights are sent (the first among equal weights), and the dropped ones are counted.
`ragged_rounds.py` has the exchange that drops nothing.

With several chunks a buffer crosses in several all-to-alls, so that the experts start on the first
chunk while the next is in flight. Each destination's kept rows are dealt to the chunks in turn, so
each chunk has an even share of each expert's rows, and the results do not depend on the number of
chunks.

Legend: T local tokens, D hidden, K choices per token, N = T K assignments, E experts, L experts of
this device, R devices = P nodes x Q devices per node, X chunks, C buffer rows per destination, M
rows of a whole buffer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.all_to_all import AllToAll
from jmoe.planning.exchange import buffer_rows_per_destination, smallest_uint_bytes
from jmoe.types import PyTree
from kernels_pallas.saved import mark_saved, mark_saved_residual
from kernels_pallas.token_permute import (
    RowMap,
    combine,
    dispatch,
    row_weights,
    sort_by_expert,
    sum_rows,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows_or_tokens", "rows", "group_sizes_L", "weights_M"],
    meta_fields=["expected_rows"],
)
@dataclass(frozen=True)
class ArrivedRows:
    """One chunk of rows for this device's experts."""

    # [M, D], sorted by expert; with `rows`, this device's tokens [T, D], from which `rows` gathers
    rows_or_tokens: jax.Array
    rows: RowMap | None
    group_sizes_L: jax.Array  # int32
    expected_rows: int  # sum of group_sizes_L when the load is even
    # float32, the router's weight of each row, by which the experts multiply their output; None
    # if `combine` does
    weights_M: jax.Array | None = None

    @property
    def rows_MD(self) -> jax.Array:
        """Rows [M, D] sorted by local expert. Rows beyond the last group hold arbitrary values."""
        if self.rows is None:
            return self.rows_or_tokens
        with jax.named_scope("dispatch"):
            return dispatch(
                self.rows_or_tokens, self.rows.src_M, self.rows.row_TK, self.rows.complete
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DispatchedTokens:
    """Rows on the devices of their experts.

    handle: passed to `combine`, which sends the outputs back.
    """

    chunks: tuple[ArrivedRows, ...]
    dropped: jax.Array  # int32, assignments that this device dropped; devices' values add up
    handle: PyTree


class TokenChoices(NamedTuple):
    """Each token's experts (E for no expert), their weights, and the number of assignments per
    expert.
    """

    topk_idx_TK: jax.Array
    topk_weights_TK: jax.Array
    counts_E: jax.Array  # int32

    @classmethod
    def from_topk(
        cls, topk_idx_TK: jax.Array, topk_weights_TK: jax.Array, num_experts: int
    ) -> "TokenChoices":
        """Return `TokenChoices` with the number of assignments per expert computed from
        `topk_idx_TK`.
        """
        experts = jnp.arange(num_experts, dtype=topk_idx_TK.dtype)
        counts_E = (topk_idx_TK[:, :, None] == experts).sum(axis=(0, 1), dtype=jnp.int32)
        return cls(topk_idx_TK, topk_weights_TK, counts_E)


class Exchange(Protocol):
    """A way to move rows to the devices of their experts and outputs back."""

    def dispatch(
        self,
        x_TD: jax.Array,
        chosen: TokenChoices,
        full_capacity: bool = False,
        num_chunks: int = 1,
    ) -> DispatchedTokens:
        """Send each token's row to the devices of its experts.

        full_capacity: size the buffers for the worst case, so that nothing is dropped. num_chunks:
        the most chunks to send the rows in.
        """

    def combine(self, outs: Sequence[jax.Array], handle: PyTree) -> jax.Array:
        """Return float32 y_TD, the weighted sum of each token's expert outputs. A dropped
        assignment adds 0.

        outs: [M, D] per chunk, the experts' outputs for its rows.
        """


def _order_and_rank_by_expert(idx_N: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Return (order, rank): the assignments stably sorted by expert, and the position of each
    assignment in that order.
    """
    order_N, rank_N = sort_by_expert(idx_N, num_experts)
    return mark_saved_residual(order_N, "routing"), mark_saved_residual(rank_N, "routing")


@dataclass(frozen=True)
class OneDeviceExchange:
    """The exchange if all experts are on this device: a sort. Nothing is sent or dropped, and
    experts gather the rows themselves.

    complete: every choice is an expert, never E (no expert). experts_weigh: the experts multiply
    their outputs by the router's weights, before the down projection, so that no output is saved
    for the backward pass; otherwise `combine` does.
    """

    complete: bool = True
    experts_weigh: bool = False

    def dispatch(
        self,
        x_TD: jax.Array,
        chosen: TokenChoices,
        full_capacity: bool = False,
        num_chunks: int = 1,
    ) -> DispatchedTokens:
        with jax.named_scope("dispatch"):
            topk_idx_TK, topk_weights_TK, counts_E = chosen
            order_N, rank_N = _order_and_rank_by_expert(topk_idx_TK.reshape(-1), counts_E.size)
            choice_N, row_TK = order_N, rank_N.reshape(topk_idx_TK.shape)
            if not self.complete:
                used_N = jnp.arange(order_N.size, dtype=jnp.int32) < counts_E.sum(dtype=jnp.int32)
                choice_N = jnp.where(used_N, order_N, topk_idx_TK.size)
                row_TK = jnp.where(topk_idx_TK < counts_E.size, row_TK, topk_idx_TK.size)
            rows = RowMap(choice_N // topk_idx_TK.shape[1], row_TK, complete=self.complete)
            weights_N = row_weights(topk_weights_TK, choice_N, row_TK)
        arrived = ArrivedRows(
            x_TD, rows, counts_E, topk_idx_TK.size, weights_N if self.experts_weigh else None
        )
        dropped = jnp.zeros((), jnp.int32)
        return DispatchedTokens((arrived,), dropped, (topk_weights_TK, rows))

    def combine(self, outs: Sequence[jax.Array], handle: PyTree) -> jax.Array:
        with jax.named_scope("combine"):
            (out_MD,), (topk_weights_TK, rows) = outs, handle
            places = rows.src_M, rows.row_TK, rows.complete
            if self.experts_weigh:
                return sum_rows(out_MD, *places)
            return combine(out_MD, topk_weights_TK, *places)


@dataclass(frozen=True)
class PerDeviceExchange:
    """The exchange that sends one row per assignment to the device of its expert.

    Capacity is per destination device, not per expert.
    """

    all_to_all: AllToAll
    num_devices: int
    capacity_factor: float | None

    def dispatch(
        self,
        x_TD: jax.Array,
        chosen: TokenChoices,
        full_capacity: bool = False,
        num_chunks: int = 1,
    ) -> DispatchedTokens:
        num_assignments = chosen.topk_idx_TK.size
        fair_rows = num_assignments / self.num_devices
        rows = buffer_rows_per_destination(
            fair_rows, num_assignments, self.capacity_factor, full_capacity
        )
        return self.dispatch_rows(x_TD, chosen, rows, num_assignments, num_chunks)

    def dispatch_rows(
        self,
        x_TD: jax.Array,
        chosen: TokenChoices,
        rows: int,
        expected_rows: int,
        num_chunks: int = 1,
    ) -> DispatchedTokens:
        """Dispatch with buffers of `rows` rows per destination device, in at most `num_chunks`
        chunks.

        expected_rows: rows that arrive on this device when the load is balanced.
        """
        (num_tokens, k), num_devices = chosen.topk_idx_TK.shape, self.num_devices
        num_chunks, width = _num_chunks_and_width(rows, num_chunks)
        with jax.named_scope("dispatch"):
            idx_N, kept_E = _drop_lightest(chosen, num_devices, rows)
            order_N, rank_N = _order_and_rank_by_expert(idx_N, kept_E.size)
            kept_RL = kept_E.reshape(num_devices, -1)
            totals_R = kept_RL.sum(axis=1, dtype=jnp.int32)
            starts_R = jnp.cumsum(totals_R) - totals_R
            at_C = jnp.arange(rows, dtype=jnp.int32)
            sorted_RC = jnp.where(
                at_C < totals_R[:, None], starts_R[:, None] + at_C, num_tokens * k
            )
            token_RC = jnp.take(order_N // k, sorted_RC, mode="fill", fill_value=num_tokens)
            token_XM = _deal_into_chunks(token_RC, num_chunks, num_tokens).reshape(num_chunks, -1)
            dest_N = idx_N // kept_RL.shape[1]
            place_N = rank_N - jnp.take(starts_R, dest_N, mode="clip")
            row_TK = _index_in_chunks(dest_N, place_N, num_devices, rows, num_chunks).reshape(
                num_tokens, k
            )
            chunks = _dispatch_in_chunks(x_TD, token_XM, row_TK)
        arrived, sorts = [], []
        sizes_XRL = _expert_rows_per_chunk(kept_RL, num_chunks)
        for sent_MD, sizes_RL in zip(chunks, sizes_XRL, strict=True):
            with jax.named_scope("all_to_all"):
                sent_RCD = sent_MD.reshape(num_devices, width, -1)
                recv_RCD, recv_RL = self.all_to_all((sent_RCD, sizes_RL))
                recv_RCD = mark_saved(recv_RCD, "expert_rows")
                recv_RL = mark_saved_residual(recv_RL, "routing")
            with jax.named_scope("sort_by_expert"):
                sorts.append(sort := _order_and_rank_of_arrivals(recv_RL, width))
                recv_MD = recv_RCD.reshape(num_devices * width, -1)
                rows_MD = dispatch(recv_MD, sort[0], sort[1][:, None], True)
                group_sizes_L = recv_RL.sum(axis=0, dtype=jnp.int32)
            arrived.append(
                ArrivedRows(rows_MD, None, group_sizes_L, -(-expected_rows // num_chunks))
            )
        dropped = chosen.counts_E.sum(dtype=jnp.int32) - kept_RL.sum(dtype=jnp.int32)
        return DispatchedTokens(
            tuple(arrived), dropped, (sorts, chosen.topk_weights_TK, token_XM.reshape(-1), row_TK)
        )

    def combine(self, outs: Sequence[jax.Array], handle: PyTree) -> jax.Array:
        sorts, topk_weights_TK, token_M, row_TK = handle
        back = []
        for out_MD, (order_M, rank_M) in zip(outs, sorts, strict=True):
            with jax.named_scope("sort_by_source"):
                out_MD = dispatch(out_MD, rank_M, order_M[:, None], True)
            with jax.named_scope("all_to_all_back"):
                back_MD = self.all_to_all(
                    out_MD.reshape(self.num_devices, -1, out_MD.shape[1])
                ).reshape(out_MD.shape)
                back.append(mark_saved(back_MD, "expert_rows"))
        with jax.named_scope("combine"):
            return combine(_concatenate_chunks(back), topk_weights_TK, token_M, row_TK)


def _num_chunks_and_width(rows: int, num_chunks: int) -> tuple[int, int]:
    """Return (number of chunks, rows of a chunk) for `rows` per destination; never more chunks than
    rows.
    """
    num_chunks = max(1, min(num_chunks, rows))
    return num_chunks, -(-rows // num_chunks)


def _deal_into_chunks(x_RC: jax.Array, num_chunks: int, empty: int) -> jax.Array:
    """Return [X, R, width, ...]: row i of each destination goes to chunk i % X; `empty` fills the
    end.
    """
    num_chunks, width = _num_chunks_and_width(x_RC.shape[1], num_chunks)
    padding = [(0, 0)] * x_RC.ndim
    padding[1] = 0, num_chunks * width - x_RC.shape[1]
    x_RC = jnp.pad(x_RC, padding, constant_values=empty)
    return jnp.moveaxis(x_RC.reshape(x_RC.shape[0], width, num_chunks, *x_RC.shape[2:]), 2, 0)


@jax.custom_vjp
def _dispatch_in_chunks(
    x_TD: jax.Array, token_XM: jax.Array, row_TK: jax.Array
) -> tuple[jax.Array, ...]:
    """Return each chunk's rows [M, D], gathered into arrays of their own; slices of one array would
    be copied.

    token_XM, row_TK: as in `dispatch`, of all chunks laid end to end.
    """
    return tuple(dispatch(x_TD, token_M, row_TK) for token_M in token_XM)


def _dispatch_in_chunks_fwd(
    x_TD: jax.Array, token_XM: jax.Array, row_TK: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    return _dispatch_in_chunks(x_TD, token_XM, row_TK), (token_XM, row_TK)


def _dispatch_in_chunks_bwd(
    residuals: tuple[jax.Array, jax.Array], dy_XMD: tuple[jax.Array, ...]
) -> tuple[jax.Array, None, None]:
    token_XM, row_TK = residuals
    dy_MD = _concatenate_chunks(dy_XMD)
    return sum_rows(dy_MD, token_XM.reshape(-1), row_TK).astype(dy_MD.dtype), None, None


_dispatch_in_chunks.defvjp(_dispatch_in_chunks_fwd, _dispatch_in_chunks_bwd)


def _index_in_chunks(
    dest: jax.Array, row: jax.Array, num_dest: int, rows: int, num_chunks: int
) -> jax.Array:
    """Return the index, in all chunks of `_deal_into_chunks` laid end to end, of row `row` of
    destination `dest`; the total length if there is no such row.
    """
    num_chunks, width = _num_chunks_and_width(rows, num_chunks)
    slot = (row % num_chunks * num_dest + dest) * width + row // num_chunks
    return jnp.where((dest < num_dest) & (row < rows), slot, num_chunks * num_dest * width)


def _expert_rows_per_chunk(sizes_RL: jax.Array, num_chunks: int) -> jax.Array:
    """Return int32 [X, R, L], the number of rows of each expert in each of X chunks. A
    destination's rows are ordered by expert and dealt to the chunks in turn.
    """
    ends_RL = jnp.cumsum(sizes_RL, axis=1, dtype=jnp.int32)
    last_X = jnp.arange(num_chunks - 1, -1, -1, dtype=jnp.int32)[:, None, None]
    return (ends_RL + last_X) // num_chunks - (ends_RL - sizes_RL + last_X) // num_chunks


def _concatenate_chunks(chunks: Sequence[jax.Array]) -> jax.Array:
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks)


def _is_among_heaviest(
    dest_N: jax.Array, weights_N: jax.Array, totals_R: jax.Array, rows: int
) -> jax.Array:
    """Return bool [N]: whether an assignment is among the `rows` of largest weight for its
    destination, the first among equal weights.

    totals_R: assignments per destination; dest_N = R for no destination. Destination and weight are
    sorted as one 32-bit integer, several times as fast as a sort by two keys; weights that differ
    only in their last log2(R) bits count as equal.
    """
    num_dest, weight_bits = totals_R.size, 32 - totals_R.size.bit_length()
    lightness_N = ~lax.bitcast_convert_type(jnp.maximum(weights_N, 0), jnp.uint32) & 0x7FFFFFFF
    key_N = dest_N.astype(jnp.uint32) << weight_bits | lightness_N >> (31 - weight_bits)
    sorted_N, starts_R = jnp.sort(key_N), jnp.cumsum(totals_R) - totals_R
    # key of the last assignment that fits, for destinations with too many
    limit_R = jnp.take(sorted_N, starts_R + rows - 1, mode="clip")
    limit_R = jnp.where(totals_R > rows, limit_R, jnp.uint32(0xFFFFFFFF))
    limit_N = jnp.take(limit_R, dest_N, mode="clip")
    below_R, up_to_R = (
        jnp.searchsorted(sorted_N, limit_R, side=side, method="scan_unrolled").astype(jnp.int32)
        for side in ("left", "right")
    )
    room_R, ties_R = rows - (below_R - starts_R), up_to_R - below_R
    is_tie_N = (key_N == limit_N) & (dest_N < num_dest)
    _, rank_N = sort_by_expert(jnp.where(is_tie_N, dest_N, num_dest), num_dest)
    tie_N = rank_N - jnp.take(jnp.cumsum(ties_R) - ties_R, dest_N, mode="clip")
    return (key_N < limit_N) | (is_tie_N & (tie_N < jnp.take(room_R, dest_N, mode="clip")))


def _drop_lightest(
    chosen: TokenChoices, num_devices: int, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Return (idx_N, counts_E) of the assignments that fit into `rows` rows per device; dropped
    assignments have idx E.

    Capacity is per device, so experts of one device compete for it, as in DeepSeek-V2
    (arXiv:2405.04434).
    """
    counts_E = chosen.counts_E
    idx_N, num_experts = chosen.topk_idx_TK.reshape(-1), counts_E.size
    if idx_N.size <= rows:
        return idx_N, counts_E
    totals_R = counts_E.reshape(num_devices, -1).sum(axis=1, dtype=jnp.int32)
    weights_N = lax.stop_gradient(chosen.topk_weights_TK).reshape(-1)

    def drop_over_capacity() -> tuple[jax.Array, jax.Array]:
        kept_N = _is_among_heaviest(
            idx_N // (num_experts // num_devices), weights_N, totals_R, rows
        )
        kept_idx_N = jnp.where(kept_N, idx_N, num_experts)
        experts = jnp.arange(num_experts, dtype=jnp.int32)
        return kept_idx_N, (kept_idx_N[:, None] == experts).sum(axis=0, dtype=jnp.int32)

    idx_N, counts_E = lax.cond(
        (totals_R > rows).any(), drop_over_capacity, lambda: (idx_N, counts_E)
    )
    return mark_saved_residual(idx_N, "routing"), mark_saved_residual(counts_E, "routing")


def _order_and_rank_of_arrivals(sizes_RL: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return (order, rank) that sort arrived rows by local expert, empty rows last.

    sizes_RL: rows from each source device for each local expert; they arrive in this order.
    """
    ends_RL = jnp.cumsum(sizes_RL, axis=1)
    at_C = jnp.arange(rows, dtype=jnp.int32)
    expert_M = (
        (at_C[None, :, None] >= ends_RL[:, None, :]).sum(axis=-1, dtype=jnp.int32).reshape(-1)
    )
    return _order_and_rank_by_expert(expert_M, sizes_RL.shape[1])


class _Crossing(NamedTuple):
    """Where a device's rows are in the buffers that cross nodes. num_assignments: of its tokens,
    of which `dropped` did not fit.
    """

    src_M: jax.Array
    slot_TP: jax.Array
    dropped: jax.Array
    num_assignments: int


@dataclass(frozen=True)
class PerNodeExchange:
    """The exchange that sends a token's row once to every node with one of its experts (dedup),
    then within the node to the experts' devices.

    A device exchanges rows with the device at the same place in each other node. The row travels
    with the experts chosen in that node and their weights; the receiving device forwards it to its
    neighbours, sums their weighted outputs and returns one row, rounded to the rows' dtype.

    across: the function that runs an all-to-all across nodes. inside: the exchange within a node.
    nodes_per_token: expected number of nodes with one of a token's experts; it sizes the buffers.
    """

    across: AllToAll
    inside: PerDeviceExchange
    num_nodes: int
    nodes_per_token: float
    capacity_factor: float | None

    def dispatch(
        self,
        x_TD: jax.Array,
        chosen: TokenChoices,
        full_capacity: bool = False,
        num_chunks: int = 1,
    ) -> DispatchedTokens:
        num_tokens, k = chosen.topk_idx_TK.shape
        fair_rows = num_tokens * self.nodes_per_token / self.num_nodes
        rows = buffer_rows_per_destination(
            fair_rows, num_tokens, self.capacity_factor, full_capacity
        )
        chunks, there, crossing = self._choices_across(x_TD, chosen, rows, num_chunks)
        fair_rows = num_tokens * k / self.inside.num_devices
        by_chunk, device_rows, lost = self._choices_per_chunk(
            there, len(chunks), fair_rows, full_capacity
        )
        crossing = crossing._replace(dropped=crossing.dropped + lost)
        return self._forward_inside(chunks, by_chunk, device_rows, crossing)

    def dispatch_rows(
        self, x_TD: jax.Array, chosen: TokenChoices, rows: int, device_rows: int
    ) -> DispatchedTokens:
        """Dispatch in one chunk with buffers of `rows` rows for each node, and inside a node of
        `device_rows` for each device.
        """
        chunks, there, crossing = self._choices_across(x_TD, chosen, rows, 1)
        return self._forward_inside(chunks, [there], device_rows, crossing)

    def _choices_across(
        self, x_TD: jax.Array, chosen: TokenChoices, rows: int, num_chunks: int
    ) -> tuple[tuple[jax.Array, ...], TokenChoices, _Crossing]:
        """Send each row's choices to the nodes of its experts; return (the rows of each chunk,
        still to be sent, the choices that arrived here, the way back).

        rows: of a buffer per node.
        """
        topk_idx_TK, topk_weights_TK, counts_E = chosen
        (num_tokens, k), num_nodes = topk_idx_TK.shape, self.num_nodes
        node_size = counts_E.size // num_nodes  # experts of a node
        with jax.named_scope("dispatch"):
            on_TKP = (topk_idx_TK // node_size)[:, :, None] == jnp.arange(
                num_nodes, dtype=jnp.int32
            )
            weights_TP = jnp.where(on_TKP, topk_weights_TK[:, :, None], 0).sum(axis=1)
            place_TP, src_PC = _assign_buffer_rows(on_TKP.any(axis=1), weights_TP, rows)
            lost_TKP = on_TKP & (place_TP == rows)[:, None, :]
            nodes, src_M = jnp.arange(num_nodes, dtype=jnp.int32), src_PC.reshape(-1)
            idx_MK = _local_experts_of_rows(topk_idx_TK, src_M, num_nodes, node_size)
            send_MK = dispatch(
                topk_weights_TK, src_M, _index_in_chunks(nodes, place_TP, num_nodes, rows, 1)
            )
            slot_TP = _index_in_chunks(nodes, place_TP, num_nodes, rows, num_chunks)
            src_XPC = _deal_into_chunks(src_PC, num_chunks, num_tokens)
            sent_XM = src_XPC.reshape(src_XPC.shape[0], -1)  # at most as many chunks as rows
            chunks = _dispatch_in_chunks(x_TD, sent_XM, slot_TP)
        with jax.named_scope("all_to_all_across"):
            weights_MK, idx_MK = self.across(
                tuple(a.reshape(num_nodes, rows, k) for a in (send_MK, idx_MK))
            )
            weights_MK = mark_saved(weights_MK, "routing").reshape(-1, k)
            idx_MK = mark_saved_residual(idx_MK, "routing").astype(jnp.int32).reshape(-1, k)
        there = TokenChoices.from_topk(idx_MK, weights_MK, node_size)
        lost = lost_TKP.sum(dtype=jnp.int32)
        return chunks, there, _Crossing(src_XPC.reshape(-1), slot_TP, lost, num_tokens * k)

    def _forward_inside(
        self,
        chunks: Sequence[jax.Array],
        by_chunk: Sequence[TokenChoices],
        device_rows: int,
        crossing: _Crossing,
    ) -> DispatchedTokens:
        """Send the rows of each chunk across nodes, and forward those that arrive to the devices of
        their experts. device_rows: of a buffer per device.
        """
        expected_rows = -(-crossing.num_assignments // len(chunks))
        arrived = []
        for sent_MD, chosen in zip(chunks, by_chunk, strict=True):
            with jax.named_scope("all_to_all_across"):
                sent_PCD = sent_MD.reshape(self.num_nodes, -1, sent_MD.shape[1])
                recv_MD = self.across(sent_PCD).reshape(sent_MD.shape)
            arrived.append(self.inside.dispatch_rows(recv_MD, chosen, device_rows, expected_rows))
        dropped = sum((part.dropped for part in arrived), crossing.dropped)
        handle = [part.handle for part in arrived], crossing.src_M, crossing.slot_TP
        return DispatchedTokens(tuple(part.chunks[0] for part in arrived), dropped, handle)

    def _choices_per_chunk(
        self, arrived_choices: TokenChoices, num_chunks: int, fair_rows: float, full_capacity: bool
    ) -> tuple[list[TokenChoices], int, jax.Array]:
        """Return (choices per chunk, buffer rows per device of the node, number of choices dropped
        by all chunks together).

        arrived_choices: the choices of all rows that crossed. The dropped choices do not depend on
        the number of chunks. All kept choices may fall into one chunk, so each chunk has buffer
        rows for all of them; the exception is the first try of a dropless step, which may overflow
        and gets an even share per chunk.
        """
        num_rows, k = arrived_choices.topk_idx_TK.shape
        node_size, most_rows = arrived_choices.counts_E.size, num_rows * k
        device_rows = buffer_rows_per_destination(
            fair_rows, most_rows, self.capacity_factor, full_capacity
        )
        if num_chunks == 1:
            return [arrived_choices], device_rows, jnp.zeros((), jnp.int32)
        idx_N, kept_E = _drop_lightest(arrived_choices, self.inside.num_devices, device_rows)
        rows_PCK = self.num_nodes, -1, k
        idx_XPCK = _deal_into_chunks(idx_N.reshape(rows_PCK), num_chunks, node_size)
        weights_XPCK = _deal_into_chunks(
            arrived_choices.topk_weights_TK.reshape(rows_PCK), num_chunks, 0
        )
        chunks = zip(
            idx_XPCK.reshape(num_chunks, -1, k),
            weights_XPCK.reshape(num_chunks, -1, k),
            strict=True,
        )
        by_chunk = [
            TokenChoices.from_topk(idx_MK, weights_MK, node_size) for idx_MK, weights_MK in chunks
        ]
        most_rows = idx_XPCK[0].size
        if self.capacity_factor is None:
            device_rows = buffer_rows_per_destination(
                fair_rows / num_chunks, most_rows, None, full_capacity
            )
        lost = arrived_choices.counts_E.sum(dtype=jnp.int32) - kept_E.sum(dtype=jnp.int32)
        return by_chunk, min(device_rows, most_rows), lost

    def combine(self, outs: Sequence[jax.Array], handle: PyTree) -> jax.Array:
        inside, src_M, slot_TP = handle
        back = []
        for out_MD, own in zip(outs, inside, strict=True):
            partial_MD = self.inside.combine([out_MD], own).astype(out_MD.dtype)
            with jax.named_scope("all_to_all_across_back"):
                back_PCD = self.across(partial_MD.reshape(self.num_nodes, -1, partial_MD.shape[1]))
                back.append(back_PCD.reshape(partial_MD.shape))
        with jax.named_scope("combine"):
            return sum_rows(_concatenate_chunks(back), src_M, slot_TP)


def _assign_buffer_rows(
    needed_TP: jax.Array, weights_TP: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Return (place_TP, the buffer row of each needed (token, node), in token order; src_PC, the
    token of each buffer row).

    If a node has too few rows, the pairs with the largest weights get them. place_TP is `rows` for
    a pair that is not needed or is dropped; src_PC is T for an empty row.
    """
    num_tokens, num_nodes = needed_TP.shape
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    totals_P = needed_TP.sum(axis=0, dtype=jnp.int32)
    weights_N = lax.stop_gradient(weights_TP).reshape(-1)

    def drop_lightest() -> jax.Array:
        dest_N = jnp.where(needed_TP, nodes, num_nodes).reshape(-1)
        return needed_TP & _is_among_heaviest(dest_N, weights_N, totals_P, rows).reshape(
            needed_TP.shape
        )

    if rows < num_tokens:
        needed_TP = lax.cond((totals_P > rows).any(), drop_lightest, lambda: needed_TP)
    place_TP = jnp.where(needed_TP, jnp.cumsum(needed_TP, axis=0, dtype=jnp.int32) - 1, rows)
    place_TP = mark_saved_residual(place_TP, "routing")
    src_PC = jnp.full((num_nodes, rows), num_tokens, jnp.int32)
    tokens_T = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    return place_TP, src_PC.at[nodes, place_TP].set(tokens_T, mode="drop")


def _local_experts_of_rows(
    topk_idx_TK: jax.Array, src_M: jax.Array, num_nodes: int, node_size: int
) -> jax.Array:
    """Return [M, K], the experts of each row as indices within the row's destination node.

    `node_size` stands for an expert of another node and for empty rows. The integer type is as
    small as the number of experts allows, since the array is sent.
    """
    idx_MK = jnp.take(topk_idx_TK, src_M, axis=0, mode="fill", fill_value=num_nodes * node_size)
    idx_PCK = idx_MK.reshape(num_nodes, -1, idx_MK.shape[1])
    idx_PCK = idx_PCK - node_size * jnp.arange(num_nodes, dtype=jnp.int32)[:, None, None]
    idx_PCK = jnp.where((idx_PCK >= 0) & (idx_PCK < node_size), idx_PCK, node_size)
    return idx_PCK.reshape(idx_MK.shape).astype(f"uint{8 * smallest_uint_bytes(node_size)}")
