"""How ragged groups of rows are cut for XLA: the first C rows of each into slots, the rest into
tiles.

Legend: N rows sorted by group, L groups, C slots a group, B rows a tile.

The slots of all groups go through one batched product [L, C, ...]; the tiles through a loop that
runs as often as there are tiles, so that no work is masked and any routing is exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.saved import bits
from kernels_pallas.token_permute.reference import take_mapped_rows


class Layout(NamedTuple):
    """The destination of each row."""

    rows_LC: jax.Array  # the row in each slot, N where empty
    slot_N: jax.Array  # the slot of each row, L * C where it has none
    starts_L: jax.Array
    ends_L: jax.Array


def slot_layout(group_sizes_L: jax.Array, num_rows: int, slots: int) -> Layout:
    """The layout with C = `slots`."""
    num_groups = group_sizes_L.shape[0]
    ends_L = jnp.cumsum(group_sizes_L)
    starts_L = ends_L - group_sizes_L
    at_C = jnp.arange(slots, dtype=jnp.int32)
    rows_LC = jnp.where(at_C < group_sizes_L[:, None], starts_L[:, None] + at_C, num_rows)
    at_N = jnp.arange(num_rows, dtype=jnp.int32)
    group_N = (at_N[:, None] >= ends_L).sum(axis=-1, dtype=jnp.int32)
    position_N = at_N - starts_L[jnp.minimum(group_N, num_groups - 1)]
    slotted_N = (group_N < num_groups) & (position_N < slots)
    slot_N = jnp.where(slotted_N, group_N * slots + position_N, num_groups * slots)
    return Layout(rows_LC, slot_N, starts_L, ends_L)


class Tiles(NamedTuple):
    """Tiles of `rows` rows: group l has tiles_L[l] of them, from row first_L[l] to ends_L[l]."""

    tiles_L: jax.Array
    first_L: jax.Array
    ends_L: jax.Array
    rows: int

    def total(self) -> jax.Array:
        """How many tiles there are."""
        return self.tiles_L.sum(dtype=jnp.int32)

    def at(self, i: jax.Array, num_rows: int) -> "Tile":
        """Tile i of `num_rows` rows in all."""
        tile_ends_L = jnp.cumsum(self.tiles_L)
        group = (i >= tile_ends_L).sum(dtype=jnp.int32)
        first = self.first_L[group] + (i - (tile_ends_L[group] - self.tiles_L[group])) * self.rows
        start = jnp.minimum(first, num_rows - self.rows)
        at_B = start + jnp.arange(self.rows, dtype=jnp.int32)
        return Tile(group, start, (at_B >= first) & (at_B < self.ends_L[group]))


class Tile(NamedTuple):
    """Rows `start` and on of a group; mine_B: which of them are the tile's."""

    group: jax.Array
    start: jax.Array
    mine_B: jax.Array

    def pick(self, w_L: jax.Array) -> jax.Array:
        """The group's part of an array of all groups."""
        return pick(w_L, self.group)

    def read(self, x_ND: jax.Array, src_N: jax.Array | None = None) -> jax.Array:
        """The tile's rows [B, D], and zeros for those that are not its own. src_N: row n is
        x_ND[src_N[n]].
        """
        inner_ND, start = lax.optimization_barrier((x_ND, self.start))  # see `pick`
        rows_B = start + jnp.arange(self.mine_B.size, dtype=jnp.int32)
        x_BD = take_mapped_rows(partly(inner_ND), src_N, rows_B)
        return lax.bitcast_convert_type(jnp.where(self.mine_B[:, None], x_BD, 0), x_ND.dtype)

    def write(self, out_ND: jax.Array, x_BD: jax.Array) -> jax.Array:
        """An array as `partly` gave it, with the tile's rows replaced."""
        old_BD = lax.dynamic_slice_in_dim(out_ND, self.start, self.mine_B.size)
        new_BD = jnp.where(self.mine_B[:, None], partly(x_BD), old_BD)
        return lax.dynamic_update_slice_in_dim(out_ND, new_BD, self.start, axis=0)


def pick(w_L: jax.Array, group: jax.Array) -> jax.Array:
    """w_L[group], in the body of a loop.

    Without the barrier XLA makes the bits of all groups before the loop: a copy of the whole array,
    even for a loop that never runs.
    """
    inner_L, group = lax.optimization_barrier((w_L, group))
    return lax.bitcast_convert_type(
        jnp.take(partly(inner_L), group, axis=0, mode="clip"), w_L.dtype
    )


def partly(x: jax.Array) -> jax.Array:
    """An array in the form in which a part of it is read or written without a copy of the whole.

    XLA:CPU of JAX before 0.12 converts a whole bfloat16 array to float32 for that, but not its
    bits; later ones would copy the whole array to make the bits, even for a loop that never runs.
    """
    return bits(x) if jax.__version_info__ < (0, 12) else x
