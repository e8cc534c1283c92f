"""Two layouts of dense layers and KV cache over devices: by sequences, or by attention heads.

`RowLayout` (data parallel): each device has all dense weights, its own sequences, and blocks of the
cache for them, so M = N P. Hidden states [P, C, D] stay on the row's device.

`HeadLayout` (tensor parallel): each device has its heads of all blocks, so M = Q, and runs its
shard of every dense layer on all tokens. Between layers it holds t consecutive tokens, [t, D],
which splits norms, routers and the exchange to experts too (sequence parallelism, arXiv
2205.05198): tokens are gathered before a layer, and the layer's outputs reduce-scattered.

Called by the programs and the runner of this folder.

Legend:
N devices
P rows of a step on one device
M rows of a step on all devices
Q chunks of a group
C tokens a row
T tokens of a step
t T / N, rounded up
D hidden
V vocabulary
W blocks of a table
S positions of a table
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jmoe.collectives.rows import all_gather_rows_local, reduce_scatter_rows_local
from jmoe.inference.cached_layers import UNSHARDED, Arrays, DenseLayerRunner
from jmoe.inference.kv_cache import BLOCK
from jmoe.inference.scheduler import ROWS_RATIO, ChunkGroup, bucket_sizes, smallest_bucket
from jmoe.layers.embedding import lookup_row_block_local
from jmoe.mesh import BATCH, EXPERT, HEADS, REPLICATED

AXES = EXPERT


class MeshBatch(NamedTuple):
    """A `ChunkGroup` as host arrays of M rows, in the order of the devices; rows without a chunk
    have position S.

    blocks_MW: each row's table of blocks, numbered on its device. place_Q: the row, of the M, that
    holds each chunk.
    """

    tokens_MC: np.ndarray
    blocks_MW: np.ndarray
    positions_MC: np.ndarray
    place_Q: np.ndarray


def all_gather_local(x: jax.Array) -> jax.Array:
    """Return all devices' [P, ...] arrays as one array [N P, ...], on every device.

    Sends bits, as XLA:CPU would send bfloat16 as float32.
    """
    return _transpose_devices(all_gather_rows_local(x, AXES), EXPERT[::-1])


def _transpose_devices(x_M: jax.Array, axes: tuple[str, str]) -> jax.Array:
    """Return x [M, ...], whose M / N rows of every device are ordered by the devices' indices on
    `axes`, with the order of the axes swapped.

    Devices are numbered by (node, place in the node); the collectives of `collectives/rows.py`
    order rows by (place, node).
    """
    slow, fast = (lax.axis_size(axis) for axis in axes)
    if slow == 1 or fast == 1:
        return x_M
    return x_M.reshape(slow, fast, -1, *x_M.shape[1:]).swapaxes(0, 1).reshape(x_M.shape)


def broadcast_from_local(x: jax.Array, is_source: jax.Array) -> jax.Array:
    """Return, on all devices, the `x` of the one device on which `is_source` is true, bit for bit.

    Implemented as a sum of bits to which the other devices add 0.
    """
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    whole = lax.bitcast_convert_type(x, bits).astype(jnp.uint32)
    sent = lax.psum(jnp.where(is_source, whole, jnp.zeros_like(whole)), EXPERT)
    return lax.bitcast_convert_type(sent.astype(bits), x.dtype)


@dataclass(frozen=True)
class RowLayout:
    """Layout in which every device has all dense weights, and sequences and blocks of its own.

    num_blocks: of all devices. table_width: W.
    """

    mesh: Mesh
    max_batch: int
    num_blocks: int
    table_width: int

    # partition specs of each; `BATCH` splits the leading dimension over the devices
    weights, cache, tokens = REPLICATED, BATCH, BATCH
    splits_head = False

    @property
    def rows_per_device(self) -> int:
        return self.max_batch // self.mesh.size

    @property
    def num_table_positions(self) -> int:
        """S, the positions of a table; also the position that marks padding."""
        return self.table_width * BLOCK

    def device_of_row(self, row: int) -> int:
        """Return the device that holds the cache blocks of a row's sequence; -1 if every device
        holds a part of every block.
        """
        return row // self.rows_per_device

    def locate_block(self, block: int) -> tuple[int, int]:
        """Return (the device that has a block, or -1 if every device has a part of it; the block's
        number there).
        """
        return divmod(block, self.num_blocks // self.mesh.size)

    def block_numbers_on_device(self, global_blocks: Any) -> np.ndarray:
        """Return the numbers that blocks have on the device that holds them.

        global_blocks: their numbers among the blocks of all devices.
        """
        return np.asarray(global_blocks) % (self.num_blocks // self.mesh.size)

    def local_weights(self, arrays: Arrays) -> Arrays:
        """Return this device's weights of a module. arrays: the module's weights as a program gets
        them inside `shard_map`.
        """
        return arrays

    def dense_runner(self, num_tokens: int) -> DenseLayerRunner:
        """Return the object that runs dense layers on this device in a step of `num_tokens` tokens;
        use it inside `shard_map`.
        """
        return UNSHARDED

    def hidden_shape(self, batch: MeshBatch, hidden_size: int) -> tuple[int, ...]:
        """Return the global shape of hidden states, whose first dimension is split over the
        devices.
        """
        return (*batch.tokens_MC.shape, hidden_size)

    def gather_last_hidden_local(self, x_PCD: jax.Array, positions_PC: jax.Array) -> jax.Array:
        """Return the hidden state of each row's last token, [M, D], on every device."""
        last_P = _last_token_index(positions_PC, self.num_table_positions)
        return all_gather_local(x_PCD[jnp.arange(x_PCD.shape[0]), last_P])

    def gather_row_hidden_local(self, x_PCD: jax.Array, place: jax.Array, width: int) -> jax.Array:
        """Return the hidden states of row `place` of the M rows, [C, D], on every device."""
        rows = x_PCD.shape[0]
        all_NCD = all_gather_local(lax.dynamic_index_in_dim(x_PCD, place % rows, 0))
        return lax.dynamic_index_in_dim(all_NCD, place // rows, 0, keepdims=False)

    def make_batch(self, group: ChunkGroup) -> MeshBatch:
        """Return a batch with each chunk of a group in a row of the device that holds its cache,
        padded to a compiled shape.
        """
        counts_N = np.bincount(
            [self.device_of_row(chunk.row) for chunk in group.chunks], minlength=self.mesh.size
        )
        return self._padded_batch(
            group,
            smallest_bucket(max(1, int(np.max(counts_N))), self._row_buckets(group.width)),
        )

    def padding_batches(self, num_rows: int, width: int) -> list[MeshBatch]:
        """Return a batch of padding for every shape that a group of `num_rows` chunks of `width`
        tokens can take, to compile programs.
        """
        most = smallest_bucket(min(num_rows, self.rows_per_device), self._row_buckets(width))
        group = ChunkGroup((), num_rows, width)
        return [
            self._padded_batch(group, size) for size in self._row_buckets(width) if size <= most
        ]

    def _row_buckets(self, width: int) -> tuple[int, ...]:
        """Return the rows per device for which programs are compiled, ascending."""
        if width == 1:
            return bucket_sizes(self.rows_per_device)
        sizes = [1]
        while sizes[-1] * ROWS_RATIO < self.rows_per_device:
            sizes.append(sizes[-1] * ROWS_RATIO)
        return tuple(sorted({*sizes, self.rows_per_device}))

    def _padded_batch(self, group: ChunkGroup, rows_per_device: int) -> MeshBatch:
        """Return a group's chunks as a batch with `rows_per_device` rows on each device."""
        place_Q = np.zeros(group.num_rows, np.int32)
        free_N = np.arange(self.mesh.size) * rows_per_device
        for q, chunk in enumerate(group.chunks):
            device = self.device_of_row(chunk.row)
            place_Q[q] = free_N[device]
            free_N[device] += 1
        return self._fill_batch(group, place_Q, self.mesh.size * rows_per_device)

    def _fill_batch(self, group: ChunkGroup, place_Q: np.ndarray, num_rows: int) -> MeshBatch:
        """Return a batch of `num_rows` rows with each chunk in its row of `place_Q`."""
        tokens_MC = np.zeros((num_rows, group.width), np.int32)
        blocks_MW = np.zeros((num_rows, self.table_width), np.int32)
        positions_MC = np.full((num_rows, group.width), self.num_table_positions, np.int32)
        for at, chunk in zip(place_Q, group.chunks, strict=False):
            blocks_MW[at, : len(chunk.block_ids)] = self.block_numbers_on_device(chunk.block_ids)
            tokens_MC[at, : len(chunk.tokens)] = chunk.tokens
            positions_MC[at, : len(chunk.tokens)] = np.arange(chunk.start, chunk.end)
        return MeshBatch(tokens_MC, blocks_MW, positions_MC, place_Q)


@dataclass(frozen=True)
class HeadLayout(RowLayout):
    """Layout in which every device has its heads of all blocks, and its shard of the other dense
    layers.

    Weights are stacked shards, [N, ...].
    """

    weights, cache, tokens = BATCH, HEADS, REPLICATED
    splits_head = True

    def device_of_row(self, row: int) -> int:
        return -1

    def locate_block(self, block: int) -> tuple[int, int]:
        return -1, block

    def block_numbers_on_device(self, global_blocks: Any) -> np.ndarray:
        return np.asarray(global_blocks)

    def local_weights(self, arrays: Arrays) -> Arrays:
        return tuple(w[0] for w in arrays)

    def dense_runner(self, num_tokens: int) -> DenseLayerRunner:
        return ShardedDenseLayerRunner(num_tokens, self.mesh.size, self.num_table_positions)

    def hidden_shape(self, batch: MeshBatch, hidden_size: int) -> tuple[int, ...]:
        return -(-batch.tokens_MC.size // self.mesh.size) * self.mesh.size, hidden_size

    def gather_last_hidden_local(self, x_tD: jax.Array, positions_QC: jax.Array) -> jax.Array:
        q, c = positions_QC.shape
        at_Q = jnp.arange(q, dtype=jnp.int32) * c + _last_token_index(
            positions_QC, self.num_table_positions
        )
        own_Q = at_Q - lax.axis_index(EXPERT) * x_tD.shape[0]
        here_Q = (own_Q >= 0) & (own_Q < x_tD.shape[0])
        return broadcast_from_local(x_tD[jnp.where(here_Q, own_Q, 0)], here_Q[:, None])

    def gather_row_hidden_local(self, x_tD: jax.Array, place: jax.Array, width: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(all_gather_local(x_tD), place * width, width)

    def make_batch(self, group: ChunkGroup) -> MeshBatch:
        return self._fill_batch(group, np.arange(group.num_rows, dtype=np.int32), group.num_rows)

    def padding_batches(self, num_rows: int, width: int) -> list[MeshBatch]:
        return [self.make_batch(ChunkGroup((), num_rows, width))]


@dataclass(frozen=True)
class ShardedDenseLayerRunner(DenseLayerRunner):
    """Runs this device's shards of the dense layers on all T tokens of a step.

    Inputs and outputs are this device's t tokens.
    """

    num_tokens: int
    num_devices: int
    num_table_positions: int

    @property
    def _num_padding_tokens(self) -> int:
        return -self.num_tokens % self.num_devices

    def lookup(  # type: ignore[override]
        self, table_VD: jax.Array, tokens_QC: jax.Array, dtype: DTypeLike
    ) -> jax.Array:
        """Return the embeddings of this device's tokens, [t, D], from all devices' blocks of the
        table.

        table_VD: this device's block.
        """
        tokens_M = jnp.pad(tokens_QC.reshape(-1), (0, self._num_padding_tokens))
        return lookup_row_block_local(table_VD, _transpose_devices(tokens_M, EXPERT), dtype, AXES)

    def device_positions(self, positions_QC: jax.Array) -> jax.Array:
        all_T = jnp.pad(
            positions_QC.reshape(-1),
            (0, self._num_padding_tokens),
            constant_values=self.num_table_positions,
        )
        size = all_T.size // self.num_devices
        return lax.dynamic_slice_in_dim(all_T, lax.axis_index(EXPERT) * size, size)

    def apply(self, layer: Callable[[jax.Array], jax.Array], h_tD: jax.Array) -> jax.Array:
        """Return a layer's output for this device's tokens, float32 [t, D], summed over the
        devices.

        Partial outputs are sent in the dtype of `h_tD` and added in float32.
        """
        part_TD = layer(all_gather_local(h_tD)[: self.num_tokens])
        part_MD = jnp.pad(part_TD.astype(h_tD.dtype), ((0, self._num_padding_tokens), (0, 0)))
        return reduce_scatter_rows_local(_transpose_devices(part_MD, EXPERT), AXES)


def _last_token_index(positions_PC: jax.Array, num_table_positions: int) -> jax.Array:
    """Return the index of the last token of each row, int32; 0 for rows of padding."""
    return jnp.maximum((positions_PC < num_table_positions).sum(axis=1, dtype=jnp.int32) - 1, 0)
