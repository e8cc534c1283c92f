"""The layout of ragged groups of rows for XLA: the first C rows of each group in slots, the rest in
tiles.

The slots of all groups form one batched product [L, C, ...]; a loop runs once per tile. No work is
masked, and any group sizes are exact. `grouped_matmul/xla.py` and `grouped_mlp/xla.py` use these
types.

Legend: N rows sorted by group, L groups, C slots per group, B rows of a tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.saved import bfloat16_as_uint16
from kernels_pallas.token_permute.reference import take_mapped_rows


class RowSlots(NamedTuple):
    """The slot of each row, and the row of each slot."""

    rows_LC: jax.Array  # the row in each slot; N for an empty slot
    slot_N: jax.Array  # the slot of each row; L * C for a row without a slot
    starts_L: jax.Array
    ends_L: jax.Array


def assign_rows_to_slots(group_sizes_L: jax.Array, num_rows: int, slots_per_group: int) -> RowSlots:
    """Return the slots of rows, where the first `slots_per_group` rows of each group get one."""
    num_groups = group_sizes_L.shape[0]
    ends_L = jnp.cumsum(group_sizes_L)
    starts_L = ends_L - group_sizes_L
    at_C = jnp.arange(slots_per_group, dtype=jnp.int32)
    rows_LC = jnp.where(at_C < group_sizes_L[:, None], starts_L[:, None] + at_C, num_rows)
    at_N = jnp.arange(num_rows, dtype=jnp.int32)
    group_N = (at_N[:, None] >= ends_L).sum(axis=-1, dtype=jnp.int32)
    position_N = at_N - starts_L[jnp.minimum(group_N, num_groups - 1)]
    slotted_N = (group_N < num_groups) & (position_N < slots_per_group)
    slot_N = jnp.where(
        slotted_N, group_N * slots_per_group + position_N, num_groups * slots_per_group
    )
    return RowSlots(rows_LC, slot_N, starts_L, ends_L)


class GroupTiles(NamedTuple):
    """Tiles of `rows` rows each: group l has tiles_L[l] tiles, which cover rows first_L[l] to
    ends_L[l].
    """

    tiles_L: jax.Array
    first_L: jax.Array
    ends_L: jax.Array
    rows: int

    def num_tiles(self) -> jax.Array:
        """Return the number of tiles."""
        return self.tiles_L.sum(dtype=jnp.int32)

    def make_tile(self, i: jax.Array, num_rows: int) -> "GroupTile":
        """Return tile i. num_rows: N, all rows."""
        tile_ends_L = jnp.cumsum(self.tiles_L)
        group = (i >= tile_ends_L).sum(dtype=jnp.int32)
        first = self.first_L[group] + (i - (tile_ends_L[group] - self.tiles_L[group])) * self.rows
        start = jnp.minimum(first, num_rows - self.rows)
        at_B = start + jnp.arange(self.rows, dtype=jnp.int32)
        return GroupTile(group, start, (at_B >= first) & (at_B < self.ends_L[group]))


class GroupTile(NamedTuple):
    """The B rows from row `start`, of which mine_B marks those of the tile; the others belong to a
    neighbour.
    """

    group: jax.Array
    start: jax.Array
    mine_B: jax.Array

    def pick_entry(self, w_L: jax.Array) -> jax.Array:
        """Return the entry of the tile's group in w_L, an array over groups."""
        return pick_in_loop(w_L, self.group)

    def read_rows(self, x_ND: jax.Array, src_N: jax.Array | None = None) -> jax.Array:
        """Return the tile's rows [B, D], with zeros for rows that are not its own. src_N: row n is
        x_ND[src_N[n]].
        """
        inner_ND, start = lax.optimization_barrier((x_ND, self.start))  # see `pick_in_loop`
        rows_B = start + jnp.arange(self.mine_B.size, dtype=jnp.int32)
        x_BD = take_mapped_rows(as_sliceable(inner_ND), src_N, rows_B)
        return lax.bitcast_convert_type(jnp.where(self.mine_B[:, None], x_BD, 0), x_ND.dtype)

    def write_rows(self, out_ND: jax.Array, x_BD: jax.Array) -> jax.Array:
        """Return `out_ND`, an array from `as_sliceable`, with the tile's rows replaced by x_BD."""
        old_BD = lax.dynamic_slice_in_dim(out_ND, self.start, self.mine_B.size)
        new_BD = jnp.where(self.mine_B[:, None], as_sliceable(x_BD), old_BD)
        return lax.dynamic_update_slice_in_dim(out_ND, new_BD, self.start, axis=0)


def pick_in_loop(w_L: jax.Array, group: jax.Array) -> jax.Array:
    """Return w_L[group] inside the body of a loop.

    The barrier keeps XLA from converting all groups to bits before the loop: a copy of the whole
    array, even for a loop that never runs.
    """
    inner_L, group = lax.optimization_barrier((w_L, group))
    return lax.bitcast_convert_type(
        jnp.take(as_sliceable(inner_L), group, axis=0, mode="clip"), w_L.dtype
    )


def as_sliceable(x: jax.Array) -> jax.Array:
    """Return x in a form of which a part can be read or written without a copy of the whole array.

    Before JAX 0.12 XLA:CPU converts a whole bfloat16 array to float32 in order to access a part, so
    x is returned as its uint16 bits. Since 0.12 the conversion to bits would be such a copy, so x
    is returned unchanged.
    """
    return bfloat16_as_uint16(x) if jax.__version_info__ < (0, 12) else x
