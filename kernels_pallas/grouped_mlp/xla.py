"""The grouped MLP in plain XLA, without masked expert work.

The first C rows of each group (its slots) form one batched product [L, C, D]. A loop computes the
remaining rows in tiles of B rows; balanced routing leaves none, and any routing is exact. The
backward pass needs the ragged rows and the slots' pre-activations, and recomputes those of the
tiles.

Legend: N rows sorted by group, L groups (local experts), C slots per group, B rows of a tile, D
hidden, F expert hidden, U = 2F (SwiGLU) or F (GELU); T tokens.
"""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.grouped_mlp.reference import MLPWeights, ProductChange, activate
from kernels_pallas.groups import RowSlots, assign_rows_to_slots, pick_in_loop
from kernels_pallas.matmul import dot, transposed
from kernels_pallas.saved import bfloat16_as_uint16, mark_saved_residual
from kernels_pallas.token_permute.api import RowMap, sum_rows
from kernels_pallas.token_permute.reference import take_mapped_rows, take_rows, take_rows_or_last

TILE_ROWS = 64


def _count_overflow_tiles(layout: RowSlots, slots_per_group: int) -> jax.Array:
    """Return int32 [L], the number of tiles for the rows beyond each group's slots."""
    over_L = jnp.maximum(layout.ends_L - layout.starts_L - slots_per_group, 0)
    return (over_L + TILE_ROWS - 1) // TILE_ROWS


def _overflow_tile_group_and_rows(
    layout: RowSlots, tiles_L: jax.Array, i: jax.Array, num_rows: int, slots_per_group: int
) -> tuple[jax.Array, jax.Array]:
    """Return (group, rows [B]) of overflow tile i. Rows past the group's end have index
    `num_rows`.
    """
    tile_ends_L = jnp.cumsum(tiles_L)
    group = (i >= tile_ends_L).sum(dtype=jnp.int32)
    j = i - (tile_ends_L[group] - tiles_L[group])
    rows_B = (
        layout.starts_L[group]
        + slots_per_group
        + j * TILE_ROWS
        + jnp.arange(TILE_ROWS, dtype=jnp.int32)
    )
    return group, jnp.where(rows_B < layout.ends_L[group], rows_B, num_rows)


def _weights_of_group(weights: MLPWeights, group: jax.Array) -> MLPWeights:
    """Return one group's weights."""
    return jax.tree.map(lambda w: pick_in_loop(w, group), weights)


def _write_rows(bits_ND: jax.Array, rows_B: jax.Array, x_BD: jax.Array) -> jax.Array:
    """Return bits_ND with x's rows written at rows_B; rows with an index past the end are
    dropped.
    """
    return bits_ND.at[rows_B].set(bfloat16_as_uint16(x_BD), mode="drop")


def _product_with_change(
    x: jax.Array, w: jax.Array, name: str, change: ProductChange | None
) -> jax.Array:
    y = dot(x, w)
    added = None if change is None else change(name, x)
    return y if added is None else y + added


def _up_projection(
    x: jax.Array, weights: MLPWeights, change: ProductChange | None = None
) -> jax.Array:
    h = _product_with_change(x, weights.w_up, "w_up", change)
    if weights.b_up is not None:
        h = h + weights.b_up[..., None, :].astype(jnp.float32)
    return h.astype(x.dtype)


def _activate_and_down(
    h: jax.Array, weights: MLPWeights, activation: str, change: ProductChange | None = None
) -> jax.Array:
    a = activate(h.astype(jnp.float32), activation).astype(h.dtype)
    y = _product_with_change(a, weights.w_down, "w_down", change)
    if weights.b_down is not None:
        y = y + weights.b_down[..., None, :].astype(jnp.float32)
    return y.astype(h.dtype)


def expert_mlp(
    x: jax.Array, weights: MLPWeights, activation: str, change: ProductChange | None = None
) -> jax.Array:
    """Return activate(x w_up + b_up) w_down + b_down in x's dtype, [..., B, D], with one expert's
    weights.

    change: added to both products, float32.
    """
    h = _up_projection(x, weights, change)
    return _activate_and_down(h, weights, activation, change)


def _mlp_gradients(
    x: jax.Array, h: jax.Array, dy: jax.Array, weights: MLPWeights, activation: str
) -> tuple[jax.Array, MLPWeights]:
    """Return the gradients (dx, dweights) of one batched MLP from its input, pre-activations and
    output gradient.
    """
    a, activate_vjp = jax.vjp(lambda h: activate(h, activation), h.astype(jnp.float32))
    da = dot(dy, weights.w_down, b_transposed=True)
    dh32 = activate_vjp(da)[0]
    dh = dh32.astype(h.dtype)
    dw_down = dot(transposed(a.astype(h.dtype)), dy)
    dw_up = dot(transposed(x), dh)
    dx = dot(dh, weights.w_up, b_transposed=True).astype(x.dtype)
    db_up = None if weights.b_up is None else dh32.sum(axis=-2)
    db_down = None if weights.b_down is None else dy.astype(jnp.float32).sum(axis=-2)
    return dx, MLPWeights(dw_up, dw_down, db_up, db_down)


# x, rows, layout, weights, h_LCU
_Residuals: TypeAlias = tuple[jax.Array, RowMap | None, RowSlots, MLPWeights, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped_mlp(
    x: jax.Array,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    weights: MLPWeights,
    activation: str,
    slots_per_group: int,
) -> jax.Array:
    return _grouped_mlp_fwd(x, group_sizes_L, rows, weights, activation, slots_per_group)[0]


def _grouped_mlp_fwd(
    x: jax.Array,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    weights: MLPWeights,
    activation: str,
    slots_per_group: int,
) -> tuple[jax.Array, _Residuals]:
    src_N = None if rows is None else rows.src_M
    num_rows = (x if src_N is None else src_N).shape[0]
    layout = assign_rows_to_slots(group_sizes_L, num_rows, slots_per_group)
    h_LCU = mark_saved_residual(
        _up_projection(take_mapped_rows(x, src_N, layout.rows_LC), weights), "expert_up"
    )
    y_LCD = _activate_and_down(h_LCU, weights, activation)
    y_ND = take_rows_or_last(y_LCD.reshape(-1, y_LCD.shape[-1]), layout.slot_N)
    if slots_per_group < num_rows:
        tiles_L = _count_overflow_tiles(layout, slots_per_group)

        def write_overflow_tile(i: jax.Array, bits_ND: jax.Array) -> jax.Array:
            group, rows_B = _overflow_tile_group_and_rows(
                layout, tiles_L, i, num_rows, slots_per_group
            )
            mine = _weights_of_group(weights, group)
            y_BD = expert_mlp(take_mapped_rows(x, src_N, rows_B), mine, activation)
            return _write_rows(bits_ND, rows_B, y_BD)

        bits_ND = lax.fori_loop(
            0, tiles_L.sum(dtype=jnp.int32), write_overflow_tile, bfloat16_as_uint16(y_ND)
        )
        y_ND = lax.bitcast_convert_type(bits_ND, y_ND.dtype)
    return y_ND, (x, rows, layout, weights, h_LCU)


def _grouped_mlp_bwd(
    activation: str, slots_per_group: int, residuals: _Residuals, dy_ND: jax.Array
) -> tuple[jax.Array, None, None, MLPWeights]:
    x, rows, layout, weights, h_LCU = residuals
    num_rows, src_N = dy_ND.shape[0], None if rows is None else rows.src_M
    x_LCD, dy_LCD = take_mapped_rows(x, src_N, layout.rows_LC), take_rows(dy_ND, layout.rows_LC)
    dx_LCD, dweights = _mlp_gradients(x_LCD, h_LCU, dy_LCD, weights, activation)
    dx_ND = take_rows_or_last(dx_LCD.reshape(-1, dx_LCD.shape[-1]), layout.slot_N)
    if slots_per_group < num_rows:
        tiles_L = _count_overflow_tiles(layout, slots_per_group)

        def add_tile_gradients(
            i: jax.Array, carry: tuple[jax.Array, MLPWeights]
        ) -> tuple[jax.Array, MLPWeights]:
            bits_ND, dweights = carry
            group, rows_B = _overflow_tile_group_and_rows(
                layout, tiles_L, i, num_rows, slots_per_group
            )
            mine, x_BD = _weights_of_group(weights, group), take_mapped_rows(x, src_N, rows_B)
            dx_BD, dmine = _mlp_gradients(
                x_BD, _up_projection(x_BD, mine), take_rows(dy_ND, rows_B), mine, activation
            )
            dweights = jax.tree.map(lambda all_, one: all_.at[group].add(one), dweights, dmine)
            return _write_rows(bits_ND, rows_B, dx_BD), dweights

        bits_ND, dweights = lax.fori_loop(
            0,
            tiles_L.sum(dtype=jnp.int32),
            add_tile_gradients,
            (bfloat16_as_uint16(dx_ND), dweights),
        )
        dx_ND = lax.bitcast_convert_type(bits_ND, dx_ND.dtype)
    dweights = jax.tree.map(lambda dw, w: dw.astype(w.dtype), dweights, weights)
    if rows is None:
        return dx_ND, None, None, dweights
    dx_TD = sum_rows(dx_ND, rows.src_M, rows.row_TK, rows.complete).astype(x.dtype)
    return dx_TD, None, None, dweights


_grouped_mlp.defvjp(_grouped_mlp_fwd, _grouped_mlp_bwd)


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    batched_rows_per_group: int,
    rows: RowMap | None = None,
) -> jax.Array:
    """Return `grouped_mlp.api`'s result by XLA.

    batched_rows_per_group: rows of each group in the batched product; the others run in tiles.
    """
    num_rows = (x_ND if rows is None else rows.src_M).shape[0]
    return _grouped_mlp(
        x_ND, group_sizes_L, rows, weights, activation, min(batched_rows_per_group, num_rows)
    )
