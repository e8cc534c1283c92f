"""The grouped matmul in plain XLA, without masked work: for CPUs, and for GPUs older than Hopper.

Groups of equal size are one batched product. Otherwise the first C rows of each group (its slots)
form one batched product, and a loop computes the remaining rows in tiles of one group. C is chosen
at run time among a few values, as the cheapest for the group sizes: groups of similar size fit into
slots, one hot group runs in large tiles, and a few rows read only the weights of their own groups.

Legend: N rows sorted by group, D inner, F outer dimension, E groups, C slots per group, B rows of a
tile; T tokens.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.groups import GroupTiles, RowSlots, as_sliceable, assign_rows_to_slots
from kernels_pallas.matmul import MIN_ROWS, dot, transposed
from kernels_pallas.token_permute.reference import take_mapped_rows, take_rows, take_rows_or_last

SLOT_FACTORS = (0.625, 1.0, 1.125)  # slots of a group / an even share; C = 0 is a choice too
SLOT_MULTIPLE = 16
TILE_ROWS = (256, 64)
TILE_COST_ROWS = 64  # cost of reading the weights for a tile, in rows of product


def _slots_per_group_choices(num_rows: int, num_groups: int) -> list[int]:
    share = num_rows / num_groups
    some = {math.ceil(share * f / SLOT_MULTIPLE) * SLOT_MULTIPLE for f in SLOT_FACTORS}
    return [0, *sorted(c for c in some if c <= num_rows and c * num_groups <= 2 * num_rows)]


def _large_and_small_tiles(
    starts: jax.Array, ends: jax.Array, slots_per_group: int, num_rows: int
) -> list[GroupTiles]:
    """Return large tiles for the part of each group that fills them, and small tiles for the
    rest.
    """
    large, small = (min(rows, max(MIN_ROWS, num_rows)) for rows in TILE_ROWS)
    over = jnp.maximum(ends - starts - slots_per_group, 0)
    filled = over // large
    first = starts + slots_per_group
    rest = (over - filled * large + small - 1) // small
    return [
        GroupTiles(filled, first, ends, large),
        GroupTiles(rest, first + filled * large, ends, small),
    ]


def _rows_of_equal_groups(
    x_ND: jax.Array, num_groups: int, src_N: jax.Array | None = None
) -> jax.Array:
    """Return [E, N / E, D], the rows of groups of equal size."""
    x_ND = x_ND if src_N is None else take_rows_or_last(x_ND, src_N)
    return x_ND.reshape(num_groups, -1, x_ND.shape[1])


def _pad_to_min_rows(
    x_ND: jax.Array, src_N: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return (x, src_N) with one of them padded to MIN_ROWS rows: src_N, or x if src_N is None."""
    if src_N is not None:
        return x_ND, jnp.pad(src_N, (0, MIN_ROWS - src_N.shape[0]))
    return jnp.pad(x_ND, ((0, MIN_ROWS - x_ND.shape[0]), (0, 0))), None


def _run_even_or_cheapest_layout(
    group_sizes_E: jax.Array,
    num_rows: int,
    run_even: Callable[[], jax.Array],
    run_layout: Callable[[RowSlots, int, list[GroupTiles]], jax.Array],
) -> jax.Array:
    """Return run_even() if all groups have one size and cover all rows, else run_layout(layout,
    slots_per_group, tiles) with the cheapest number of slots.
    """
    num_groups = group_sizes_E.shape[0]
    ends_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    starts_E = ends_E - group_sizes_E
    choices = _slots_per_group_choices(num_rows, num_groups)

    def runner_with_slots(slots_per_group: int) -> Callable[[], jax.Array]:
        def run_with_slots() -> jax.Array:
            return run_layout(
                assign_rows_to_slots(group_sizes_E, num_rows, slots_per_group),
                slots_per_group,
                _large_and_small_tiles(starts_E, ends_E, slots_per_group, num_rows),
            )

        return run_with_slots

    costs = []
    for slots_per_group in choices:
        tiles = _large_and_small_tiles(starts_E, ends_E, slots_per_group, num_rows)
        costs.append(
            slots_per_group * num_groups
            + sum((t.num_tiles() * (t.rows + TILE_COST_ROWS) for t in tiles), jnp.int32(0))
        )
    branches = [runner_with_slots(slots_per_group) for slots_per_group in choices]
    cheapest = jnp.argmin(jnp.stack(costs)).astype(jnp.int32)
    if num_rows % num_groups == 0:
        is_even = (group_sizes_E == num_rows // num_groups).all()
        cheapest = jnp.where(is_even, len(branches), cheapest)
        branches.append(run_even)
    return lax.switch(cheapest, branches)


def grouped_matmul(
    x_ND: jax.Array,
    w: jax.Array,
    group_sizes_E: jax.Array,
    *,
    transpose_rhs: bool = False,
    src_N: jax.Array | None = None,
    scale_EF: jax.Array | None = None,
) -> jax.Array:
    """Return [N, F] in x's dtype; see `grouped_matmul.api`. Rows beyond the groups hold arbitrary
    finite values.

    src_N: row n is x[src_N[n]], where x is [T, D]. scale_EF: factors of the columns of 8-bit
    weights.
    """
    num_rows = (x_ND if src_N is None else src_N).shape[0]
    num_columns = w.shape[1 if transpose_rhs else 2]
    if num_rows < MIN_ROWS:
        x, src_M = _pad_to_min_rows(x_ND, src_N)
        y = grouped_matmul(
            x, w, group_sizes_E, transpose_rhs=transpose_rhs, src_N=src_M, scale_EF=scale_EF
        )
        return y[:num_rows]

    def scaled_matmul(x: jax.Array, w: jax.Array, scale: jax.Array | None) -> jax.Array:
        y = dot(x, w.astype(x.dtype), b_transposed=transpose_rhs)
        return (y if scale is None else y * scale[..., None, :]).astype(x.dtype)

    def multiply_equal_groups() -> jax.Array:
        return scaled_matmul(_rows_of_equal_groups(x_ND, w.shape[0], src_N), w, scale_EF).reshape(
            num_rows, num_columns
        )

    def multiply_slots_and_tiles(
        layout: RowSlots, slots_per_group: int, tiles: list[GroupTiles]
    ) -> jax.Array:
        if slots_per_group:
            y_ECF = scaled_matmul(take_mapped_rows(x_ND, src_N, layout.rows_LC), w, scale_EF)
            y_NF = take_rows_or_last(y_ECF.reshape(-1, num_columns), layout.slot_N)
        else:
            y_NF = jnp.zeros((num_rows, num_columns), x_ND.dtype)
        out = as_sliceable(y_NF)
        for some in tiles:

            def write_tile(i: jax.Array, out: jax.Array, some: GroupTiles = some) -> jax.Array:
                one = some.make_tile(i, num_rows)
                scale_F = None if scale_EF is None else one.pick_entry(scale_EF)
                return one.write_rows(
                    out, scaled_matmul(one.read_rows(x_ND, src_N), one.pick_entry(w), scale_F)
                )

            out = lax.fori_loop(0, some.num_tiles(), write_tile, out)
        return lax.bitcast_convert_type(out, x_ND.dtype)

    return _run_even_or_cheapest_layout(
        group_sizes_E, num_rows, multiply_equal_groups, multiply_slots_and_tiles
    )


def weight_gradient(
    x_ND: jax.Array, dy_NF: jax.Array, group_sizes_E: jax.Array, *, src_N: jax.Array | None = None
) -> jax.Array:
    """Return [E, D, F] in x's dtype: x^T dy over each group's rows. src_N: as in
    `grouped_matmul`.
    """
    num_rows, num_groups = dy_NF.shape[0], group_sizes_E.shape[0]
    if num_rows < MIN_ROWS:
        x, src_M = _pad_to_min_rows(x_ND, src_N)
        return weight_gradient(x, _pad_to_min_rows(dy_NF, None)[0], group_sizes_E, src_N=src_M)

    def multiply_equal_groups() -> jax.Array:
        return dot(
            transposed(_rows_of_equal_groups(x_ND, num_groups, src_N)),
            _rows_of_equal_groups(dy_NF, num_groups),
        ).astype(x_ND.dtype)

    def multiply_slots_and_tiles(
        layout: RowSlots, slots_per_group: int, tiles: list[GroupTiles]
    ) -> jax.Array:
        if slots_per_group:
            x_ECD = take_mapped_rows(x_ND, src_N, layout.rows_LC)
            dy_ECF = take_rows(dy_NF, layout.rows_LC)
            dw_EDF = dot(transposed(x_ECD), dy_ECF)
        else:
            dw_EDF = jnp.zeros((num_groups, x_ND.shape[1], dy_NF.shape[1]), jnp.float32)
        for some in tiles:

            def add_tile(i: jax.Array, dw_EDF: jax.Array, some: GroupTiles = some) -> jax.Array:
                one = some.make_tile(i, num_rows)
                return dw_EDF.at[one.group].add(
                    dot(transposed(one.read_rows(x_ND, src_N)), one.read_rows(dy_NF))
                )

            dw_EDF = lax.fori_loop(0, some.num_tiles(), add_tile, dw_EDF)
        return dw_EDF.astype(x_ND.dtype)

    return _run_even_or_cheapest_layout(
        group_sizes_E, num_rows, multiply_equal_groups, multiply_slots_and_tiles
    )
