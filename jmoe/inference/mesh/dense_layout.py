"""Two ways to share the dense layers and the cache between devices: rows of the cache on each, or
heads of all rows.

Legend: N devices, R cache rows of a device, P rows of a step on a device, M rows of a step, Q
chunks of a group, C tokens a row, T tokens of a step, t = T / N rounded up, D hidden, V vocabulary.
With rows (`RowLayout`) every device has all weights; M = N P, and the hidden states [P, C, D] are
where the row is. With heads (`HeadLayout`) M = Q and every device runs its part of each layer on
all tokens; between layers it holds t consecutive ones, [t, D], so that norms, routers and the
exchange to experts are split too (sequence parallelism, arXiv 2205.05198): tokens are gathered
before a layer, and its outputs summed where the tokens are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jmoe.collectives.rows import all_gather_rows_local, sum_scatter_rows_local
from jmoe.inference.runner import WHOLE, Arrays, WholeLayers
from jmoe.inference.scheduler import ROWS_RATIO, ChunkGroup, bucket, buckets
from jmoe.layers.embedding import lookup_block_local
from jmoe.mesh import BATCH, EXPERT_INTRA, HEADS, REPLICATED
from kernels_pallas.saved import bits

AXES = (EXPERT_INTRA,)


class MeshBatch(NamedTuple):
    """The chunks of a group as the devices take them; a position of S marks padding.

    rows_M: of the cache as a device has it. place_Q: where each of the group's chunks is among the
    M.
    """

    tokens_MC: np.ndarray
    rows_M: np.ndarray
    positions_MC: np.ndarray
    place_Q: np.ndarray


def all_gather_local(x: jax.Array) -> jax.Array:
    """Return [N P, ...] of [P, ...], as bits: XLA:CPU would send bfloat16 as float32."""
    return all_gather_rows_local(x, AXES)


def sent_by_local(x: jax.Array, mine: jax.Array) -> jax.Array:
    """Return the x of the one device where `mine` is true on all, bit for bit: a sum to which
    the others add 0.
    """
    whole = (
        lax.bitcast_convert_type(x, jnp.uint32)
        if x.dtype == jnp.float32
        else bits(x).astype(jnp.uint32)
    )
    sent = lax.psum(jnp.where(mine, whole, jnp.zeros_like(whole)), EXPERT_INTRA)
    if x.dtype in (jnp.float32, jnp.uint32):
        return lax.bitcast_convert_type(sent, x.dtype)
    return lax.bitcast_convert_type(sent.astype(jnp.uint16), x.dtype)


@dataclass(frozen=True)
class RowLayout:
    """Every device has all dense weights, and runs them for its own rows of the cache. length:
    S.
    """

    mesh: Mesh
    max_batch: int
    length: int

    # where they are, with one entry a device in `BATCH`
    weights, cache, tokens = REPLICATED, BATCH, BATCH
    splits_head = False

    @property
    def rows_per_device(self) -> int:
        return self.max_batch // self.mesh.size

    def home(self, row: int) -> tuple[int, int]:
        """Return (the device that has a row of the cache, or -1 if all do; the row's number
        there).
        """
        return divmod(row, self.rows_per_device)

    def own(self, arrays: Arrays) -> Arrays:
        """Return this device's arrays of a module, in `shard_map`."""
        return arrays

    def layers(self, num_tokens: int) -> WholeLayers:
        """Return how this device runs a dense layer on a step of so many tokens, in `shard_map`."""
        return WHOLE

    def hidden_shape(self, batch: MeshBatch, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of hidden states, whose first dimension is split over the devices."""
        return (*batch.tokens_MC.shape, hidden_size)

    def last_local(self, x_PCD: jax.Array, positions_PC: jax.Array) -> jax.Array:
        """Return [M, D], each row's last token, on every device."""
        last_P = _last(positions_PC, self.length)
        return all_gather_local(x_PCD[jnp.arange(x_PCD.shape[0]), last_P])

    def row_local(self, x_PCD: jax.Array, place: jax.Array, width: int) -> jax.Array:
        """Return [C, D] on every device: the row at `place` of the M."""
        rows = x_PCD.shape[0]
        all_NCD = all_gather_local(lax.dynamic_index_in_dim(x_PCD, place % rows, 0))
        return lax.dynamic_index_in_dim(all_NCD, place // rows, 0, keepdims=False)

    def deal(self, group: ChunkGroup) -> MeshBatch:
        """Return the chunks of a group by device, as numpy arrays padded to [M, width]."""
        counts_N = np.bincount(
            [self.home(chunk.row)[0] for chunk in group.chunks], minlength=self.mesh.size
        )
        return self._dealt(group, bucket(max(1, int(np.max(counts_N))), self._sizes(group.width)))

    def padding(self, num_rows: int, width: int) -> list[MeshBatch]:
        """Return batches without tokens, in every shape that a group of this size may take, to
        compile programs.
        """
        most = bucket(min(num_rows, self.rows_per_device), self._sizes(width))
        group = ChunkGroup((), num_rows, width)
        return [self._dealt(group, size) for size in self._sizes(width) if size <= most]

    def _sizes(self, width: int) -> tuple[int, ...]:
        """Return the rows of a device that programs are compiled for, ascending."""
        if width == 1:
            return buckets(self.rows_per_device)
        sizes = [1]
        while sizes[-1] * ROWS_RATIO < self.rows_per_device:
            sizes.append(sizes[-1] * ROWS_RATIO)
        return tuple(sorted({*sizes, self.rows_per_device}))

    def _dealt(self, group: ChunkGroup, rows_per_device: int) -> MeshBatch:
        place_Q = np.zeros(group.num_rows, np.int32)
        free_N = np.arange(self.mesh.size) * rows_per_device
        for q, chunk in enumerate(group.chunks):
            device, _ = self.home(chunk.row)
            place_Q[q] = free_N[device]
            free_N[device] += 1
        return self._batch(group, place_Q, self.mesh.size * rows_per_device)

    def _batch(self, group: ChunkGroup, place_Q: np.ndarray, num_rows: int) -> MeshBatch:
        tokens_MC = np.zeros((num_rows, group.width), np.int32)
        rows_M = np.zeros(num_rows, np.int32)
        positions_MC = np.full((num_rows, group.width), self.length, np.int32)
        for at, chunk in zip(place_Q, group.chunks, strict=False):
            rows_M[at] = self.home(chunk.row)[1]
            tokens_MC[at, : len(chunk.tokens)] = chunk.tokens
            positions_MC[at, : len(chunk.tokens)] = np.arange(chunk.start, chunk.end)
        return MeshBatch(tokens_MC, rows_M, positions_MC, place_Q)


@dataclass(frozen=True)
class HeadLayout(RowLayout):
    """Every device has its heads of all rows, and its part of the other dense layers. Weights:
    [N, ...] of all.
    """

    weights, cache, tokens = BATCH, HEADS, REPLICATED
    splits_head = True

    def home(self, row: int) -> tuple[int, int]:
        return -1, row

    def own(self, arrays: Arrays) -> Arrays:
        return tuple(w[0] for w in arrays)

    def layers(self, num_tokens: int) -> WholeLayers:
        return SplitLayers(num_tokens, self.mesh.size, self.length)

    def hidden_shape(self, batch: MeshBatch, hidden_size: int) -> tuple[int, ...]:
        return -(-batch.tokens_MC.size // self.mesh.size) * self.mesh.size, hidden_size

    def last_local(self, x_tD: jax.Array, positions_QC: jax.Array) -> jax.Array:
        q, c = positions_QC.shape
        at_Q = jnp.arange(q, dtype=jnp.int32) * c + _last(positions_QC, self.length)
        own_Q = at_Q - lax.axis_index(EXPERT_INTRA) * x_tD.shape[0]
        here_Q = (own_Q >= 0) & (own_Q < x_tD.shape[0])
        return sent_by_local(x_tD[jnp.where(here_Q, own_Q, 0)], here_Q[:, None])

    def row_local(self, x_tD: jax.Array, place: jax.Array, width: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(all_gather_local(x_tD), place * width, width)

    def deal(self, group: ChunkGroup) -> MeshBatch:
        return self._batch(group, np.arange(group.num_rows, dtype=np.int32), group.num_rows)

    def padding(self, num_rows: int, width: int) -> list[MeshBatch]:
        return [self.deal(ChunkGroup((), num_rows, width))]


@dataclass(frozen=True)
class SplitLayers(WholeLayers):
    """A device's part of the dense layers, for all T tokens of a step; t of them, the device's
    own, come and go.
    """

    num_tokens: int
    num_devices: int
    length: int

    @property
    def _padding(self) -> int:
        return -self.num_tokens % self.num_devices

    def lookup(self, table_VD: jax.Array, tokens_QC: jax.Array, dtype: Any) -> jax.Array:  # type: ignore[override]
        """Return [t, D] of this device's tokens, by all devices' blocks of the table."""
        return lookup_block_local(
            table_VD, jnp.pad(tokens_QC.reshape(-1), (0, self._padding)), dtype, AXES
        )

    def own(self, positions_QC: jax.Array) -> jax.Array:
        all_T = jnp.pad(positions_QC.reshape(-1), (0, self._padding), constant_values=self.length)
        size = all_T.size // self.num_devices
        return lax.dynamic_slice_in_dim(all_T, lax.axis_index(EXPERT_INTRA) * size, size)

    def apply(self, layer: Callable[[jax.Array], jax.Array], h_tD: jax.Array) -> jax.Array:
        """Return float32 [t, D]: the sum over devices, whose parts are sent in the dtype of h
        and added in float32.
        """
        part_TD = layer(all_gather_local(h_tD)[: self.num_tokens])
        return sum_scatter_rows_local(
            jnp.pad(part_TD.astype(h_tD.dtype), ((0, self._padding), (0, 0))), AXES
        )


def _last(positions_PC: jax.Array, length: int) -> jax.Array:
    """Return where in each row its last token is."""
    return jnp.maximum((positions_PC < length).sum(axis=1, dtype=jnp.int32) - 1, 0)
