"""The exchange of a layer's tokens by ragged all-to-all, inside `shard_map`: only rows with a token
are sent, none as padding.

The mesh engine uses `RaggedExchange` on GPUs, the only platform where XLA implements the
collective; elsewhere `PerDeviceExchange` of `exchange.py` pads each block to the largest.

Legend: T local tokens, D hidden, K choices per token, N = T K assignments, E experts of all
devices, L experts of this device, R devices, M rows of the receive buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.exchange import ArrivedRows, DispatchedTokens, TokenChoices
from jmoe.types import PyTree
from kernels_pallas.token_permute import combine, dispatch, sort_by_expert

RaggedAllToAll = Callable[..., jax.Array]


def supports_ragged_exchange(device: jax.Device) -> bool:
    """Return True if `RaggedExchange` runs on such devices; its collective exists on GPUs only."""
    return device.platform == "gpu"


class BlockOffsets(NamedTuple):
    """Offsets and sizes of the blocks of rows, one block per (source device, expert), at sender and
    receiver.
    """

    sent_at_E: jax.Array  # offset in this device's rows, which are sorted by expert
    sent_E: jax.Array  # number of rows
    lands_at_E: jax.Array  # offset in the receive buffer of the expert's device
    taken_at_RL: jax.Array  # offset in this device's receive buffer, by expert, then source
    taken_RL: jax.Array  # number of rows
    returns_to_RL: jax.Array  # offset in the source device's rows


def block_offsets(counts_RE: jax.Array, device: jax.Array) -> BlockOffsets:
    """Return the offsets and sizes of the blocks that `device` sends and receives.

    counts_RE: int32, rows that each device sends to each expert.
    """
    num_devices, num_experts = counts_RE.shape
    local = num_experts // num_devices
    sent_at_RE = jnp.cumsum(counts_RE, axis=1) - counts_RE
    totals_RL = counts_RE.sum(axis=0, dtype=jnp.int32).reshape(num_devices, local)
    starts_RL = jnp.cumsum(totals_RL, axis=1) - totals_RL
    lands_at_RE = starts_RL.reshape(-1) + jnp.cumsum(counts_RE, axis=0) - counts_RE

    def local_columns(x_RE: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x_RE, device * local, local, 1)

    mine = (x_RE[device] for x_RE in (sent_at_RE, counts_RE, lands_at_RE))
    return BlockOffsets(*mine, *map(local_columns, (lands_at_RE, counts_RE, sent_at_RE)))


@dataclass(frozen=True)
class RaggedExchange:
    """The exchange that sends one row per assignment to its final position, sorted by expert, on
    the expert's device. Nothing is dropped.

    move: `lax.ragged_all_to_all` or an equivalent.
    """

    axis: str
    num_devices: int
    move: RaggedAllToAll = lax.ragged_all_to_all

    def dispatch_rows(
        self, x_TD: jax.Array, chosen: TokenChoices, rows: int, expected_rows: int
    ) -> DispatchedTokens:
        """Send each token's row to the devices of its experts.

        rows: M, at least the number of rows that any device receives. expected_rows: rows that a
        device receives when the load is balanced.
        """
        (num_tokens, k), num_experts = chosen.topk_idx_TK.shape, chosen.counts_E.size
        with jax.named_scope("dispatch"):
            order_N, rank_N = sort_by_expert(chosen.topk_idx_TK.reshape(-1), num_experts)
            used_N = jnp.arange(order_N.size, dtype=jnp.int32) < chosen.counts_E.sum(
                dtype=jnp.int32
            )
            token_N = jnp.where(used_N, order_N // k, num_tokens)
            row_TK = jnp.where(
                chosen.topk_idx_TK < num_experts, rank_N.reshape(num_tokens, k), order_N.size
            )
            send_ND = dispatch(x_TD, token_N, row_TK)
        with jax.named_scope("all_to_all"):
            counts_RE = lax.all_gather(chosen.counts_E, self.axis)
            parts = block_offsets(counts_RE, lax.axis_index(self.axis))
            outward = parts.sent_at_E, parts.sent_E, parts.lands_at_E, parts.taken_RL.reshape(-1)
            rows_MD = self._exchange_rows(send_ND, rows, *outward)
        sizes_L, none = parts.taken_RL.sum(axis=0, dtype=jnp.int32), jnp.zeros((), jnp.int32)
        handle = parts, chosen.topk_weights_TK, token_N, row_TK
        return DispatchedTokens((ArrivedRows(rows_MD, None, sizes_L, expected_rows),), none, handle)

    def combine(self, outs: Sequence[jax.Array], handle: PyTree) -> jax.Array:
        """Return float32 [T, D], the weighted sum of each token's expert outputs. outs: the outputs
        of the only chunk.
        """
        (out_MD,) = outs
        parts, topk_weights_TK, token_N, row_TK = handle
        with jax.named_scope("all_to_all_back"):
            back = parts.taken_at_RL, parts.taken_RL, parts.returns_to_RL
            back_ND = self._exchange_rows(
                out_MD, token_N.size, *(x.reshape(-1) for x in back), parts.sent_E
            )
        with jax.named_scope("combine"):
            return combine(back_ND, topk_weights_TK, token_N, row_TK)

    def _exchange_rows(self, rows_ND: jax.Array, num_rows: int, *parts: jax.Array) -> jax.Array:
        empty_MD = jnp.zeros((num_rows, rows_ND.shape[1]), rows_ND.dtype)
        return self.move(rows_ND, empty_MD, *parts, axis_name=self.axis)
