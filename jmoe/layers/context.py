"""Context parallelism: sequences whose positions are split over a group of devices.

A group is `size` consecutive devices of the mesh, across all of its axes, so that parameters,
experts and checkpoints are laid out as without it. A sequence is cut into 2 size chunks; the device
of rank i in its group holds chunks i and 2 size - 1 - i, in this order. Then every device computes
the same number of causal scores: of its chunks, one sees few keys and the other many.

Legend: B sequences of a group, S positions of a device (two chunks of S / 2), K = size S positions
of a whole sequence.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.layers.documents import Documents
from jmoe.mesh import ALL
from kernels_pallas.saved import bfloat16_as_uint16


@dataclass(frozen=True)
class ContextGroup:
    """The groups of `size` devices that share sequences, of a mesh of `num_devices`. Its methods
    run inside `shard_map` over the mesh.
    """

    size: int
    num_devices: int

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a sequence."""
        return 2 * self.size

    @property
    def device_groups(self) -> list[list[int]]:
        """The devices of every group, numbered in the order of the mesh."""
        starts = range(0, self.num_devices, self.size)
        return [list(range(start, start + self.size)) for start in starts]

    def rank(self) -> jax.Array:
        """Return this device's rank in its group."""
        return lax.axis_index(ALL) % self.size

    def chunk_numbers(self) -> jax.Array:
        """Return int32 [2], the numbers of this device's chunks."""
        rank = self.rank()
        return jnp.stack([rank, self.num_chunks - 1 - rank])

    def positions(self, length: int) -> jax.Array:
        """Return int32 [S], the positions of this device's `length` tokens in their sequence."""
        chunk = length // 2
        return (self.chunk_numbers()[:, None] * chunk + jnp.arange(chunk)).reshape(-1)

    def own_positions(self, x_BK: jax.Array) -> jax.Array:
        """Return this device's positions [B, S, ...] of whole sequences [B, K, ...]."""
        chunks = x_BK.reshape(x_BK.shape[0], self.num_chunks, -1, *x_BK.shape[2:])
        own = jnp.take(chunks, self.chunk_numbers(), axis=1)
        return own.reshape(x_BK.shape[0], -1, *x_BK.shape[2:])

    def device_and_index(self, position: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """Return (the device of the first group that has `position` of its first sequence, the
        index there among its `length` tokens).
        """
        chunk = length // 2
        number = position // chunk
        is_second = number >= self.size
        rank = jnp.where(is_second, self.num_chunks - 1 - number, number)
        return rank, position % chunk + jnp.where(is_second, chunk, 0)

    def gather(self, x_BS: jax.Array) -> jax.Array:
        """Return whole sequences [B, K, ...] of what each device of the group has of them, [B, S,
        ...]. One all-gather; its gradient is one all-to-all, whose parts are added in float32.
        """
        ranks = _gather_ranks(x_BS, self)
        first, second = jnp.split(ranks, 2, axis=2)
        chunks = jnp.concatenate([first, second[::-1]])  # [chunks, B, S / 2, ...]
        return jnp.moveaxis(chunks, 0, 1).reshape(x_BS.shape[0], -1, *x_BS.shape[2:])

    def gather_together(self, *arrays: jax.Array) -> list[jax.Array]:
        """Return `gather` of arrays [B, S, heads, ...] that may differ in their last dimension, in
        one collective.
        """
        sizes = [x.shape[-1] for x in arrays]
        whole = self.gather(jnp.concatenate(arrays, axis=-1))
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        return jnp.split(whole, ends, axis=-1)

    def ends_before(self, x_B2: jax.Array) -> jax.Array:
        """Return the ends [B, 2, ...] of the chunks before this device's; zeros before the first.

        x_B2: the ends of this device's chunks. Each device sends one to either neighbour.
        """
        first, second = x_B2[:, 0], x_B2[:, 1]
        pairs = [pair for group in self.device_groups for pair in itertools.pairwise(group)]
        with jax.named_scope("context"):
            from_below = lax.ppermute(first, ALL, pairs)
            from_above = lax.ppermute(second, ALL, [(b, a) for a, b in pairs])
        is_last = self.rank() == self.size - 1  # whose chunks follow each other
        return jnp.stack([from_below, jnp.where(is_last, first, from_above)], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_ranks(x: jax.Array, group: ContextGroup) -> jax.Array:
    """Return [size, ...], the `x` of every device of the group."""
    with jax.named_scope("context"):
        return lax.all_gather(x, ALL, axis_index_groups=group.device_groups)


def _gather_ranks_fwd(x: jax.Array, group: ContextGroup) -> tuple[jax.Array, None]:
    return _gather_ranks(x, group), None


def _gather_ranks_bwd(group: ContextGroup, _: None, g_ranks: jax.Array) -> tuple[jax.Array]:
    # a reduce-scatter of as many bytes would round every partial sum to the gradients' dtype
    with jax.named_scope("context"):
        parts = lax.all_to_all(
            bfloat16_as_uint16(g_ranks),
            ALL,
            0,
            0,
            axis_index_groups=group.device_groups,
            tiled=True,
        )
    parts = lax.bitcast_convert_type(parts, g_ranks.dtype)
    return (parts.astype(jnp.float32).sum(axis=0).astype(g_ranks.dtype),)


_gather_ranks.defvjp(_gather_ranks_fwd, _gather_ranks_bwd)


class SplitSequences(NamedTuple):
    """Positions and document numbers of sequences that are split over devices.

    position: int32 [S] or [B, S], of this device's tokens in their sequence or document.
    number_BK: of all tokens of the sequences, as `Documents.number_BS`; None if a sequence is one
    document.
    """

    group: ContextGroup
    position: jax.Array
    number_BK: jax.Array | None = None


def split_sequences(
    group: ContextGroup, length: int, number_BK: jax.Array | None = None
) -> SplitSequences:
    """Return the `SplitSequences` of sequences of which each device has `length` tokens."""
    if number_BK is None:
        return SplitSequences(group, group.positions(length))
    everywhere = jnp.ones(number_BK.shape, bool)
    position_BK = Documents(everywhere, everywhere, number_BK).positions()
    return SplitSequences(group, group.own_positions(position_BK), number_BK)
