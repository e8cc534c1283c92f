"""The exchange of a layer's tokens by ragged all-to-all, inside `shard_map`: only rows with a token
are sent, none as padding.

The mesh engine uses `RaggedExchange` on GPUs, the only platform where XLA implements the
collective; training uses it through `RoundsExchange` of `ragged_rounds.py`. `PerDeviceExchange` of
`exchange.py` pads each block to the largest instead.

Legend: T local tokens, D hidden, K choices per token, N = T K assignments, E experts of all
devices, L experts of this device, R devices, M rows of the receive buffer, B blocks per device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.all_to_all import make_all_to_all
from jmoe.collectives.exchange import ArrivedRows, DispatchedTokens, TokenChoices
from jmoe.types import PyTree
from kernels_pallas.implementations import target_device
from kernels_pallas.saved import mark_saved_residual
from kernels_pallas.token_permute import combine, dispatch, sort_by_expert

RaggedAllToAll = Callable[..., jax.Array]
Blocks = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # the last operands of the collective


def supports_ragged_exchange(device: jax.Device) -> bool:
    """Return True if XLA implements the ragged all-to-all on such devices: on GPUs only."""
    return device.platform == "gpu"


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
) -> jax.Array:
    """Return the result of `lax.ragged_all_to_all`, which a GPU runs.

    Elsewhere, where XLA lacks the collective, every device gets all rows of all devices: the same
    result for tests, with R times the bytes.
    """
    blocks = input_offsets, send_sizes, output_offsets, recv_sizes
    if supports_ragged_exchange(target_device()):
        return lax.ragged_all_to_all(operand, output, *blocks, axis_name=axis_name)
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    send, num_devices = make_all_to_all(axes), lax.axis_size(axes)
    rows_RND = send(jnp.broadcast_to(operand, (num_devices, *operand.shape)))
    sent_R3B = send(jnp.stack([x.reshape(num_devices, -1) for x in blocks[:3]], axis=1))
    starts_R1B, sizes_R1B, lands_R1B = jnp.split(sent_R3B, 3, axis=1)
    at_N1 = jnp.arange(operand.shape[0], dtype=jnp.int32)[:, None]
    mine_RNB = (at_N1 >= starts_R1B) & (at_N1 < starts_R1B + sizes_R1B)
    place_RN = jnp.where(mine_RNB, lands_R1B - starts_R1B + at_N1, 0).sum(axis=-1, dtype=jnp.int32)
    place_RN = jnp.where(mine_RNB.any(axis=-1), place_RN, output.shape[0])
    return output.at[place_RN.reshape(-1)].set(
        rows_RND.reshape(-1, *operand.shape[1:]), mode="drop"
    )


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

    @property
    def send_blocks(self) -> Blocks:
        """The offsets and sizes with which this device's rows travel to the experts."""
        return self.sent_at_E, self.sent_E, self.lands_at_E, self.taken_RL.reshape(-1)

    @property
    def return_blocks(self) -> Blocks:
        """The offsets and sizes with which the experts' rows travel back."""
        back = (x.reshape(-1) for x in (self.taken_at_RL, self.taken_RL, self.returns_to_RL))
        taken_at, taken, returns_to = back
        return taken_at, taken, returns_to, self.sent_E


def block_offsets(
    counts_RE: jax.Array,
    device: jax.Array,
    first_row: jax.Array | int = 0,
    num_rows: int | None = None,
) -> BlockOffsets:
    """Return the offsets and sizes of the blocks that `device` sends and receives.

    counts_RE: int32, rows that each device sends to each expert. first_row, num_rows: of all rows
    that a device receives, by expert and then source, only these are sent, to a buffer of
    `num_rows`; None sends all.
    """
    num_devices, num_experts = counts_RE.shape
    local = num_experts // num_devices
    sent_at_RE = jnp.cumsum(counts_RE, axis=1) - counts_RE
    totals_RL = counts_RE.sum(axis=0, dtype=jnp.int32).reshape(num_devices, local)
    starts_RL = jnp.cumsum(totals_RL, axis=1) - totals_RL
    lands_at_RE = starts_RL.reshape(-1) + jnp.cumsum(counts_RE, axis=0) - counts_RE
    if num_rows is not None:
        window = first_row, first_row + num_rows
        begin_RE, end_RE = (
            jnp.clip(x_RE, *window) for x_RE in (lands_at_RE, lands_at_RE + counts_RE)
        )
        sent_at_RE += jnp.clip(begin_RE - lands_at_RE, 0, counts_RE)
        counts_RE, lands_at_RE = end_RE - begin_RE, begin_RE - first_row

    def local_columns(x_RE: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x_RE, device * local, local, 1)

    mine = (x_RE[device] for x_RE in (sent_at_RE, counts_RE, lands_at_RE))
    return BlockOffsets(*mine, *map(local_columns, (lands_at_RE, counts_RE, sent_at_RE)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def move_rows(
    move: RaggedAllToAll,
    rows_ND: jax.Array,
    buffer_MD: jax.Array,
    blocks: Blocks,
    reverse: Blocks,
) -> jax.Array:
    """Return `buffer_MD` with the rows written that the other devices send here.

    blocks, reverse: offsets and sizes of this move and of the one that brings the rows back, by
    which the gradient of `rows_ND` travels. The gradient of `buffer_MD` is that of the result, not
    zeroed in overwritten rows: the caller must ignore it there.
    """
    return move(rows_ND, buffer_MD, *blocks)


def _move_rows_fwd(
    move: RaggedAllToAll,
    rows_ND: jax.Array,
    buffer_MD: jax.Array,
    blocks: Blocks,
    reverse: Blocks,
) -> tuple[jax.Array, tuple[Blocks, jax.Array]]:
    # a residual without elements: only its shape is read
    empty_N0 = jnp.zeros((rows_ND.shape[0], 0), rows_ND.dtype)
    return move_rows(move, rows_ND, buffer_MD, blocks, reverse), (reverse, empty_N0)


def _move_rows_bwd(
    move: RaggedAllToAll, residuals: tuple[Blocks, jax.Array], dy_MD: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    reverse, empty_N0 = residuals
    empty_ND = jnp.zeros((empty_N0.shape[0], dy_MD.shape[1]), dy_MD.dtype)
    return move(dy_MD, empty_ND, *reverse), dy_MD, None, None


move_rows.defvjp(_move_rows_fwd, _move_rows_bwd)


class SortedChoices(NamedTuple):
    """A device's N assignments sorted by expert, those without an expert last.

    token_N: the token of each, T without an expert. row_TK: the place of each choice in that order,
    N without an expert.
    """

    token_N: jax.Array
    row_TK: jax.Array

    @classmethod
    def from_token_choices(cls, chosen: TokenChoices) -> "SortedChoices":
        """Return the choices of this device's tokens, sorted."""
        (num_tokens, k), num_experts = chosen.topk_idx_TK.shape, chosen.counts_E.size
        order_N, rank_N = sort_by_expert(chosen.topk_idx_TK.reshape(-1), num_experts)
        used_N = jnp.arange(order_N.size, dtype=jnp.int32) < chosen.counts_E.sum(dtype=jnp.int32)
        token_N = jnp.where(used_N, order_N // k, num_tokens)
        row_TK = jnp.where(
            chosen.topk_idx_TK < num_experts, rank_N.reshape(num_tokens, k), order_N.size
        )
        return cls(*(mark_saved_residual(x, "routing") for x in (token_N, row_TK)))

    def gather_rows(self, x_TD: jax.Array) -> jax.Array:
        """Return [N, D], the tokens' rows in this order."""
        return dispatch(x_TD, self.token_N, self.row_TK)


@dataclass(frozen=True)
class RaggedExchange:
    """The exchange that sends one row per assignment to its final position, sorted by expert, on
    the expert's device. Nothing is dropped.

    move: `ragged_all_to_all` or an equivalent.
    """

    axes: str | tuple[str, ...]
    num_devices: int
    move: RaggedAllToAll = ragged_all_to_all

    def gather_counts(self, counts_E: jax.Array) -> jax.Array:
        """Return [R, E], the rows that each device sends to each expert."""
        axes = self.axes if isinstance(self.axes, tuple) else (self.axes,)
        counts_RE = jnp.broadcast_to(counts_E, (self.num_devices, counts_E.size))
        return mark_saved_residual(make_all_to_all(axes)(counts_RE), "routing")

    def send_rows(
        self, rows_ND: jax.Array, buffer_MD: jax.Array, offsets: BlockOffsets
    ) -> jax.Array:
        """Return `buffer_MD` with the rows that arrived for this device's experts."""
        with jax.named_scope("all_to_all"):
            return self._move(rows_ND, buffer_MD, offsets.send_blocks, offsets.return_blocks)

    def return_rows(
        self, out_MD: jax.Array, buffer_ND: jax.Array, offsets: BlockOffsets
    ) -> jax.Array:
        """Return `buffer_ND` with the experts' outputs for this device's rows."""
        with jax.named_scope("all_to_all_back"):
            return self._move(out_MD, buffer_ND, offsets.return_blocks, offsets.send_blocks)

    def _move(
        self, rows_ND: jax.Array, buffer_MD: jax.Array, blocks: Blocks, reverse: Blocks
    ) -> jax.Array:
        return move_rows(
            partial(self.move, axis_name=self.axes), rows_ND, buffer_MD, blocks, reverse
        )

    def dispatch_rows(
        self, x_TD: jax.Array, chosen: TokenChoices, rows: int, expected_rows: int
    ) -> DispatchedTokens:
        """Send each token's row to the devices of its experts.

        rows: M, at least the number of rows that any device receives. expected_rows: rows that a
        device receives when the load is balanced.
        """
        with jax.named_scope("dispatch"):
            choices = SortedChoices.from_token_choices(chosen)
            send_ND = choices.gather_rows(x_TD)
            offsets = block_offsets(self.gather_counts(chosen.counts_E), lax.axis_index(self.axes))
        empty_MD = jnp.zeros((rows, send_ND.shape[1]), send_ND.dtype)
        rows_MD = self.send_rows(send_ND, empty_MD, offsets)
        sizes_L, none = offsets.taken_RL.sum(axis=0, dtype=jnp.int32), jnp.zeros((), jnp.int32)
        handle = offsets, chosen.topk_weights_TK, choices
        return DispatchedTokens((ArrivedRows(rows_MD, None, sizes_L, expected_rows),), none, handle)

    def combine(self, outs: Sequence[jax.Array], handle: PyTree) -> jax.Array:
        """Return float32 [T, D], the weighted sum of each token's expert outputs. outs: the outputs
        of the only chunk.
        """
        (out_MD,) = outs
        offsets, topk_weights_TK, choices = handle
        empty_ND = jnp.zeros((choices.token_N.size, out_MD.shape[1]), out_MD.dtype)
        back_ND = self.return_rows(out_MD, empty_ND, offsets)
        with jax.named_scope("combine"):
            return combine(back_ND, topk_weights_TK, choices.token_N, choices.row_TK)
