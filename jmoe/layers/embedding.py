"""The embedding table, replicated or split over devices (SE-MoE section 4.3, arXiv 2205.10034).

`planning/embedding.py` chooses one of three layouts for training; inference on several devices has
the fourth:

- replicated: every device has the whole table.
- columns: a device has some columns. It looks up the tokens of all devices in its columns; one
  all-to-all brings each token's columns together.
- rows: device r has rows r, r + R, r + 2 R, ... A device requests each distinct row once from its
  owner: ids travel to the owner, rows come back, and the backward pass sends gradients to the
  owner. These three all-to-alls replace an all-reduce of the table's gradient.
- blocks of rows (inference): a device looks up the tokens of all devices in its block, and the
  results are summed over devices.

Legend: T local tokens, R devices, V vocabulary, D hidden, M rows of all devices, U rounds, C rows
per device and round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmoe.collectives.all_to_all import AllToAll, make_all_to_all
from jmoe.collectives.rows import reduce_scatter_rows_local
from jmoe.layers.loss import OutputHead, VocabularyShard
from jmoe.planning.embedding import EmbeddingPlan, rows_per_round
from jmoe.types import PyTree

Lookup = Callable[[jax.Array, jax.Array, DTypeLike], jax.Array]


def lookup(table_VD: jax.Array, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the embeddings of tokens, [..., D] in `dtype`, from a whole table.

    The cast comes after the lookup, so that gradients of one row are added in the table's dtype.
    """
    return table_VD[tokens].astype(dtype)


def scale_embeddings(x: jax.Array, factor: float) -> jax.Array:
    """Return x * factor in x's dtype, rounded explicitly: XLA may otherwise keep excess precision
    for a layer fused into the same program; x itself for factor 1.
    """
    if factor == 1.0:
        return x
    bits = jnp.finfo(x.dtype)
    return lax.reduce_precision(x * factor, exponent_bits=bits.nexp, mantissa_bits=bits.nmant)


def lookup_columns_local(
    table_VD: jax.Array, tokens_T: jax.Array, dtype: DTypeLike, axes: tuple[str, ...]
) -> jax.Array:
    """Return the embeddings of this device's tokens, [T, R D] in `dtype`, where each device holds D
    of the table's R D columns.
    """
    ids_RT = lax.all_gather(tokens_T, axes)
    blocks_RTD = make_all_to_all(axes)(lookup(table_VD, ids_RT, dtype))
    return blocks_RTD.swapaxes(0, 1).reshape(tokens_T.size, -1)


def lookup_row_block_local(
    table_VD: jax.Array, tokens_M: jax.Array, dtype: DTypeLike, axes: tuple[str, ...]
) -> jax.Array:
    """Return the embeddings of this device's tokens, [T, D] in `dtype`, where device r holds the
    r-th block of the table's rows.

    For inference: no gradient is taken. tokens_M: tokens of all devices. The sum over devices is
    exact, since all devices but the row's owner add 0.
    """
    own_M = VocabularyShard(axes, striped=False).local_index(tokens_M, table_VD.shape[0])
    here_M = (own_M >= 0) & (own_M < table_VD.shape[0])
    x_MD = jnp.where(here_M[:, None], lookup(table_VD, jnp.where(here_M, own_M, 0), dtype), 0)
    return reduce_scatter_rows_local(x_MD, axes).astype(dtype)


def _locate_rows(tokens_T: jax.Array, num_devices: int) -> tuple[jax.Array, jax.Array]:
    """Return (owner_T, the device that holds each token's row; place_T, the row's index among the
    distinct rows that this device requests from that owner).

    Row v belongs to device v % R: frequent tokens have neighbouring ids, and this spreads them.
    """
    owner_T = tokens_T % num_devices
    order_T = jnp.lexsort((tokens_T, owner_T))
    sorted_T, sorted_owner_T = tokens_T[order_T], owner_T[order_T]
    is_new_T = jnp.concatenate([jnp.ones(1, bool), sorted_T[1:] != sorted_T[:-1]])
    count_T = jnp.cumsum(is_new_T, dtype=jnp.int32)
    devices_R = jnp.arange(num_devices, dtype=tokens_T.dtype)
    before_R = (is_new_T & (sorted_owner_T < devices_R[:, None])).sum(axis=1, dtype=jnp.int32)
    place_T = (
        jnp.zeros_like(count_T)
        .at[order_T]
        .set(count_T - 1 - before_R[sorted_owner_T], unique_indices=True)
    )
    return owner_T, place_T


@dataclass(frozen=True)
class _RowExchange:
    """The all-to-alls that fetch each distinct row once, in as many rounds as the busiest pair of
    devices needs.

    Hashable, as a static argument of `custom_vjp` must be.
    """

    axes: tuple[str, ...]
    num_devices: int
    rows: int  # per device and round

    @property
    def all_to_all(self) -> AllToAll:
        return make_all_to_all(self.axes)

    def buffer_index(
        self, owner_T: jax.Array, place_T: jax.Array, round_index: jax.Array
    ) -> jax.Array:
        """Return int32 [T], the index of each token's row in the buffer of this round, or the
        buffer's length if the row comes in another round.
        """
        place_T = place_T - round_index * self.rows
        here_T = (place_T >= 0) & (place_T < self.rows)
        return jnp.where(here_T, owner_T * self.rows + place_T, self.num_devices * self.rows)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup_striped_rows(
    table_VD: jax.Array, tokens_T: jax.Array, dtype: DTypeLike, exchange: _RowExchange
) -> jax.Array:
    return _lookup_striped_rows_fwd(table_VD, tokens_T, dtype, exchange)[0]


def _lookup_striped_rows_fwd(
    table_VD: jax.Array, tokens_T: jax.Array, dtype: DTypeLike, exchange: _RowExchange
) -> PyTree:
    num_rows, size = table_VD.shape[0], exchange.num_devices * exchange.rows
    owner_T, place_T = _locate_rows(tokens_T, exchange.num_devices)
    needed = lax.pmax(place_T.max() // exchange.rows + 1, exchange.axes)

    def fetch_round(
        i: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        x_TD, asked_URC = carry
        slot_T = exchange.buffer_index(owner_T, place_T, i)
        ids = (
            jnp.full(size, num_rows, jnp.int32)
            .at[slot_T]
            .set(tokens_T // exchange.num_devices, mode="drop")
        )
        asked_RC = exchange.all_to_all(ids.reshape(exchange.num_devices, -1))
        found_RCD = jnp.take(table_VD, asked_RC, axis=0, mode="fill", fill_value=0).astype(dtype)
        got_MD = exchange.all_to_all(found_RCD).reshape(size, -1)
        x_TD = x_TD + jnp.take(got_MD, slot_T, axis=0, mode="fill", fill_value=0)
        return x_TD, lax.dynamic_update_index_in_dim(asked_URC, asked_RC, i, 0)

    x_TD = jnp.zeros((tokens_T.size, table_VD.shape[1]), dtype)
    asked_URC = jnp.full(
        (-(-tokens_T.size // exchange.rows), exchange.num_devices, exchange.rows),
        num_rows,
        jnp.int32,
    )
    x_TD, asked_URC = lax.fori_loop(0, needed, fetch_round, (x_TD, asked_URC))
    return x_TD, (asked_URC, owner_T, place_T, needed, table_VD)


def _lookup_striped_rows_bwd(
    dtype: DTypeLike, exchange: _RowExchange, residuals: PyTree, g_TD: jax.Array
) -> PyTree:
    asked_URC, owner_T, place_T, needed, table_VD = residuals
    size = exchange.num_devices * exchange.rows

    def send_round_gradients(i: jax.Array, dtable_VD: jax.Array) -> jax.Array:
        slot_T = exchange.buffer_index(owner_T, place_T, i)
        sums_MD = (
            jnp.zeros((size, g_TD.shape[1]), jnp.float32)
            .at[slot_T]
            .add(g_TD.astype(jnp.float32), mode="drop")
        )
        sums_RCD = exchange.all_to_all(
            sums_MD.astype(dtype).reshape(exchange.num_devices, exchange.rows, -1)
        )
        return dtable_VD.at[asked_URC[i]].add(sums_RCD.astype(dtable_VD.dtype), mode="drop")

    return lax.fori_loop(0, needed, send_round_gradients, jnp.zeros_like(table_VD)), None


_lookup_striped_rows.defvjp(_lookup_striped_rows_fwd, _lookup_striped_rows_bwd)


def lookup_striped_rows_local(
    table_VD: jax.Array, tokens_T: jax.Array, dtype: DTypeLike, axes: tuple[str, ...]
) -> jax.Array:
    """Return the embeddings of this device's tokens, [T, D] in `dtype`, where device r holds rows
    r, r + R, r + 2 R, ... of the table.

    Gradients of one row are summed in float32 on the requesting device, sent to the owner in
    `dtype`, and summed there in the table's dtype.
    """
    devices = lax.axis_size(axes)
    return _lookup_striped_rows(
        table_VD,
        tokens_T,
        dtype,
        _RowExchange(axes, devices, rows_per_round(tokens_T.size, devices)),
    )


@dataclass(frozen=True)
class Embedding:
    """The lookup in the parameter `embedding` [V, D], whose layout over devices `plan` gives.

    axes: the mesh axes of all devices; the last lies within a node. In the layout `rows` the
    parameter has shape [V / R, R, D], where entry [i, r] is row i R + r; `to_parameter_shape`
    converts to it.
    """

    plan: EmbeddingPlan
    axes: tuple[str, ...]
    tied: bool

    @property
    def is_striped(self) -> bool:
        """True if device r holds rows r, r + R, r + 2 R, ... of the table."""
        return self.plan.kind == "rows"

    @property
    def split_dims(self) -> dict[str, int]:
        """The split dimension of each parameter that is split over devices, by parameter name."""
        if self.plan.kind == "replicated":
            return {}
        return {"embedding": 1} | ({"head": 1} if self.plan.parallel_head and not self.tied else {})

    def to_parameter_shape(self, table_VD: jax.Array) -> jax.Array:
        """Return a whole table [V, D] in the shape of the parameter."""
        return (
            table_VD.reshape(-1, self.plan.num_devices, table_VD.shape[1])
            if self.is_striped
            else table_VD
        )

    def lookup(self, table: jax.Array, tokens_BS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the tokens' embeddings, [B, S, D] in `dtype`. table: this device's shard of the
        parameter.
        """
        if self.plan.kind == "replicated":
            return lookup(table, tokens_BS, dtype)
        tokens_T = tokens_BS.reshape(-1)
        if self.is_striped:
            x_TD = lookup_striped_rows_local(
                table.reshape(table.shape[0], -1), tokens_T, dtype, self.axes
            )
        else:
            x_TD = lookup_columns_local(table, tokens_T, dtype, self.axes)
        return x_TD.reshape(*tokens_BS.shape, -1)

    @property
    def output_head(self) -> OutputHead:
        """The model's output head, split over devices by the same plan."""
        return OutputHead(self.plan, self.axes, self.tied)
