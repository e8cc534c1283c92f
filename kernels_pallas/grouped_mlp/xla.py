"""The grouped MLP in plain XLA, without masked expert work.

The first C rows of each group (its slots) form one batched product [L, C, D]. A loop computes the
remaining rows in tiles of B rows; balanced routing leaves none, and any routing is exact. The
backward pass needs the ragged rows and the slots' pre-activations, and recomputes those of the
tiles.

Legend: N rows sorted by group, L groups (local experts), C slots per group, B rows of a tile, D
hidden, F expert hidden, U = 2F (SwiGLU) or F (GELU); T tokens.
"""

from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.grouped_matmul.fp8_inputs import rounded
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
    h: jax.Array,
    weights: MLPWeights,
    activation: str,
    change: ProductChange | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    a = _times_scale(activate(h.astype(jnp.float32), activation), scale).astype(h.dtype)
    y = _product_with_change(a, weights.w_down, "w_down", change)
    if weights.b_down is not None:
        y = y + _times_scale(weights.b_down[..., None, :].astype(jnp.float32), scale)
    return y.astype(h.dtype)


def _times_scale(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Return x [..., B, F] times the factor of each row, [..., B]; x for None."""
    return x if scale is None else x * scale[..., None]


def expert_mlp(
    x: jax.Array,
    weights: MLPWeights,
    activation: str,
    change: ProductChange | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Return activate(x w_up + b_up) w_down + b_down in x's dtype, [..., B, D], with one expert's
    weights.

    change: added to both products, float32. scale: the factor of each row, [..., B].
    """
    h = _up_projection(x, weights, change)
    return _activate_and_down(h, weights, activation, change, scale)


def expert_mlp_of_rounded(
    x_BD: jax.Array, weights: MLPWeights, activation: str, change: ProductChange | None = None
) -> jax.Array:
    """Return `expert_mlp` whose products have inputs in fp8 (`grouped_matmul/fp8_inputs.py`), by
    products of float32.

    weights: matrices in float32.
    """

    def project(x: jax.Array, name: str, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = dot(rounded(x), w)
        added = None if change is None else change(name, x)
        y = y if added is None else y + added
        return y if bias is None else y + bias.astype(jnp.float32)

    h = project(x_BD, "w_up", weights.w_up, weights.b_up)
    a_BF = activate(h, activation).astype(x_BD.dtype)
    return project(a_BF, "w_down", weights.w_down, weights.b_down).astype(x_BD.dtype)


class _RowsOfMLP(NamedTuple):
    """Rows of a batched MLP, with what its forward pass computed: input [..., B, D],
    pre-activations [..., B, U], and the factor of each output, [..., B], or None.
    """

    x: jax.Array
    h: jax.Array
    scale: jax.Array | None


def _mlp_gradients(
    rows: _RowsOfMLP, dy: jax.Array, weights: MLPWeights, activation: str
) -> tuple[jax.Array, jax.Array | None, MLPWeights]:
    """Return the gradients (dx, dscale, dweights) of one batched MLP from its output gradient."""
    x, h, scale = rows
    a, activate_vjp = jax.vjp(lambda h: activate(h, activation), h.astype(jnp.float32))
    dscaled = dot(dy, weights.w_down, b_transposed=True)
    dh32 = activate_vjp(_times_scale(dscaled, scale))[0]
    dh, dy32 = dh32.astype(h.dtype), dy.astype(jnp.float32)
    dw_down = dot(transposed(_times_scale(a, scale).astype(h.dtype)), dy)
    dw_up = dot(transposed(x), dh)
    dx = dot(dh, weights.w_up, b_transposed=True).astype(x.dtype)
    db_up = None if weights.b_up is None else dh32.sum(axis=-2)
    db_down = None if weights.b_down is None else _times_scale(dy32, scale).sum(axis=-2)
    dscale = None
    if scale is not None:
        dscale = (dscaled * a).sum(axis=-1)
        if weights.b_down is not None:
            dscale += (dy32 * weights.b_down[..., None, :].astype(jnp.float32)).sum(axis=-1)
    return dx, dscale, MLPWeights(dw_up, dw_down, db_up, db_down)


class _Operands(NamedTuple):
    """The operands that have gradients."""

    x: jax.Array
    weights: MLPWeights
    scale_N: jax.Array | None


# operands, rows, layout, h_LCU
_Residuals: TypeAlias = tuple[_Operands, RowMap | None, RowSlots, jax.Array]
# bits of dx [N, D], dscale [N] or None, gradients of the weights
_TileSums: TypeAlias = tuple[jax.Array, jax.Array | None, MLPWeights]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_mlp(
    operands: _Operands,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    activation: str,
    slots_per_group: int,
) -> jax.Array:
    return _grouped_mlp_fwd(operands, group_sizes_L, rows, activation, slots_per_group)[0]


def _take_scale(scale_N: jax.Array | None, rows: jax.Array) -> jax.Array | None:
    """Return the factors of `rows`; an arbitrary one for an index out of range."""
    return None if scale_N is None else take_rows_or_last(scale_N, rows)


def _grouped_mlp_fwd(
    operands: _Operands,
    group_sizes_L: jax.Array,
    rows: RowMap | None,
    activation: str,
    slots_per_group: int,
) -> tuple[jax.Array, _Residuals]:
    (x, weights, scale_N), src_N = operands, None if rows is None else rows.src_M
    num_rows = (x if src_N is None else src_N).shape[0]
    layout = assign_rows_to_slots(group_sizes_L, num_rows, slots_per_group)
    h_LCU = mark_saved_residual(
        _up_projection(take_mapped_rows(x, src_N, layout.rows_LC), weights), "expert_up"
    )
    scale_LC = _take_scale(scale_N, layout.rows_LC)
    y_LCD = _activate_and_down(h_LCU, weights, activation, scale=scale_LC)
    y_ND = take_rows_or_last(y_LCD.reshape(-1, y_LCD.shape[-1]), layout.slot_N)
    if slots_per_group < num_rows:
        tiles_L = _count_overflow_tiles(layout, slots_per_group)

        def write_overflow_tile(i: jax.Array, bits_ND: jax.Array) -> jax.Array:
            group, rows_B = _overflow_tile_group_and_rows(
                layout, tiles_L, i, num_rows, slots_per_group
            )
            mine, x_BD = _weights_of_group(weights, group), take_mapped_rows(x, src_N, rows_B)
            y_BD = expert_mlp(x_BD, mine, activation, scale=_take_scale(scale_N, rows_B))
            return _write_rows(bits_ND, rows_B, y_BD)

        bits_ND = lax.fori_loop(
            0, tiles_L.sum(dtype=jnp.int32), write_overflow_tile, bfloat16_as_uint16(y_ND)
        )
        y_ND = lax.bitcast_convert_type(bits_ND, y_ND.dtype)
    return y_ND, (operands, rows, layout, h_LCU)


def _grouped_mlp_bwd(
    activation: str, slots_per_group: int, residuals: _Residuals, dy_ND: jax.Array
) -> tuple[_Operands, None, None]:
    (x, weights, scale_N), rows, layout, h_LCU = residuals
    num_rows, src_N = dy_ND.shape[0], None if rows is None else rows.src_M
    x_LCD, dy_LCD = take_mapped_rows(x, src_N, layout.rows_LC), take_rows(dy_ND, layout.rows_LC)
    in_slots = _RowsOfMLP(x_LCD, h_LCU, _take_scale(scale_N, layout.rows_LC))
    dx_LCD, dscale_LC, dweights = _mlp_gradients(in_slots, dy_LCD, weights, activation)
    dx_ND = take_rows_or_last(dx_LCD.reshape(-1, dx_LCD.shape[-1]), layout.slot_N)
    dscale_N = (
        None if dscale_LC is None else take_rows_or_last(dscale_LC.reshape(-1), layout.slot_N)
    )
    if slots_per_group < num_rows:
        tiles_L = _count_overflow_tiles(layout, slots_per_group)

        def add_tile_gradients(i: jax.Array, carry: _TileSums) -> _TileSums:
            bits_ND, dscale_N, dweights = carry
            group, rows_B = _overflow_tile_group_and_rows(
                layout, tiles_L, i, num_rows, slots_per_group
            )
            mine, x_BD = _weights_of_group(weights, group), take_mapped_rows(x, src_N, rows_B)
            tile = _RowsOfMLP(x_BD, _up_projection(x_BD, mine), _take_scale(scale_N, rows_B))
            dx_BD, dscale_B, dmine = _mlp_gradients(
                tile, take_rows(dy_ND, rows_B), mine, activation
            )
            dweights = jax.tree.map(lambda all_, one: all_.at[group].add(one), dweights, dmine)
            if dscale_N is not None and dscale_B is not None:
                dscale_N = dscale_N.at[rows_B].set(dscale_B, mode="drop")
            return _write_rows(bits_ND, rows_B, dx_BD), dscale_N, dweights

        first = bfloat16_as_uint16(dx_ND), dscale_N, dweights
        bits_ND, dscale_N, dweights = lax.fori_loop(
            0, tiles_L.sum(dtype=jnp.int32), add_tile_gradients, first
        )
        dx_ND = lax.bitcast_convert_type(bits_ND, dx_ND.dtype)
    dweights = jax.tree.map(lambda dw, w: dw.astype(w.dtype), dweights, weights)
    if rows is not None:
        dx_ND = sum_rows(dx_ND, rows.src_M, rows.row_TK, rows.complete).astype(x.dtype)
    return _Operands(dx_ND, dweights, dscale_N), None, None


_grouped_mlp.defvjp(_grouped_mlp_fwd, _grouped_mlp_bwd)


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    batched_rows_per_group: int,
    rows: RowMap | None = None,
    scale_N: jax.Array | None = None,
) -> jax.Array:
    """Return `grouped_mlp.api`'s result by XLA.

    batched_rows_per_group: rows of each group in the batched product; the others run in tiles.
    """
    num_rows = (x_ND if rows is None else rows.src_M).shape[0]
    operands, slots = _Operands(x_ND, weights, scale_N), min(batched_rows_per_group, num_rows)
    return _grouped_mlp(operands, group_sizes_L, rows, activation, slots)
