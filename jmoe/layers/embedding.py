"""The embedding table, unsharded on every device or each device's part of it (SE-MoE section 4.3,
arXiv 2205.10034).

Legend: T local tokens, R devices, V vocabulary, D hidden, U rounds, C rows of a round to each
device. By columns every device looks up everyone's tokens in its columns; by rows a row is asked
for at the device that has it. By blocks of rows, in inference, every device looks up everyone's
tokens in its block, and the sum over devices is all. Ids go one way, rows the other, gradients the
way of the ids: three all-to-alls, and no reduction of the table's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.all_to_all import AllToAll, make_all_to_all
from jmoe.collectives.rows import sum_scatter_rows_local
from jmoe.layers.loss import OutputHead, VocabularyShard
from jmoe.planning.embedding import EmbeddingPlan, round_rows

Lookup = Callable[[jax.Array, jax.Array, Any], jax.Array]


def lookup(table_VD: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """[..., D] in `dtype` of a whole table; cast afterwards, so that gradients add in the
    table's own dtype.
    """
    return table_VD[tokens].astype(dtype)


def lookup_columns_local(
    table_VD: jax.Array, tokens_T: jax.Array, dtype: Any, axes: tuple[str, ...]
) -> jax.Array:
    """[T, R D] in `dtype` of a table whose D columns of R D are here."""
    ids_RT = lax.all_gather(tokens_T, axes)
    blocks_RTD = make_all_to_all(axes)(lookup(table_VD, ids_RT, dtype))
    return blocks_RTD.swapaxes(0, 1).reshape(tokens_T.size, -1)


def lookup_block_local(
    table_VD: jax.Array, tokens_M: jax.Array, dtype: Any, axes: tuple[str, ...]
) -> jax.Array:
    """[T, D] in `dtype` of this device's tokens, of a table whose r-th block of rows is here.
    tokens: of all devices.

    Not differentiated. The sum over devices is exact: all but one add 0.
    """
    own_M = VocabularyShard(axes, striped=False).index(tokens_M, table_VD.shape[0])
    here_M = (own_M >= 0) & (own_M < table_VD.shape[0])
    x_MD = jnp.where(here_M[:, None], lookup(table_VD, jnp.where(here_M, own_M, 0), dtype), 0)
    return sum_scatter_rows_local(x_MD, axes).astype(dtype)


def _places(tokens_T: jax.Array, num_devices: int) -> tuple[jax.Array, jax.Array]:
    """Return (the device that has each token's row, the row's place among the distinct ones there).

    Rows are dealt out in turn, v to device v % R, because frequent tokens have neighbouring ids.
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
class _Rounds:
    """The exchange of each distinct id's row in rounds, until all are there; hashable, for
    `custom_vjp`.
    """

    axes: tuple[str, ...]
    num_devices: int
    rows: int  # of a round, to each device

    @property
    def all_to_all(self) -> AllToAll:
        return make_all_to_all(self.axes)

    def slots(self, owner_T: jax.Array, place_T: jax.Array, i: jax.Array) -> jax.Array:
        """Return where each token's row lies in the buffer of round i; beyond its end if not in
        this round.
        """
        place_T = place_T - i * self.rows
        here_T = (place_T >= 0) & (place_T < self.rows)
        return jnp.where(here_T, owner_T * self.rows + place_T, self.num_devices * self.rows)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup_rows(
    table_VD: jax.Array, tokens_T: jax.Array, dtype: Any, rounds: _Rounds
) -> jax.Array:
    return _lookup_rows_fwd(table_VD, tokens_T, dtype, rounds)[0]


def _lookup_rows_fwd(table_VD: jax.Array, tokens_T: jax.Array, dtype: Any, rounds: _Rounds) -> Any:
    num_rows, size = table_VD.shape[0], rounds.num_devices * rounds.rows
    owner_T, place_T = _places(tokens_T, rounds.num_devices)
    needed = lax.pmax(place_T.max() // rounds.rows + 1, rounds.axes)

    def fetch(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_TD, asked_URC = carry
        slot_T = rounds.slots(owner_T, place_T, i)
        ids = (
            jnp.full(size, num_rows, jnp.int32)
            .at[slot_T]
            .set(tokens_T // rounds.num_devices, mode="drop")
        )
        asked_RC = rounds.all_to_all(ids.reshape(rounds.num_devices, -1))
        found_RCD = jnp.take(table_VD, asked_RC, axis=0, mode="fill", fill_value=0).astype(dtype)
        got_MD = rounds.all_to_all(found_RCD).reshape(size, -1)
        x_TD = x_TD + jnp.take(got_MD, slot_T, axis=0, mode="fill", fill_value=0)
        return x_TD, lax.dynamic_update_index_in_dim(asked_URC, asked_RC, i, 0)

    x_TD = jnp.zeros((tokens_T.size, table_VD.shape[1]), dtype)
    asked_URC = jnp.full(
        (-(-tokens_T.size // rounds.rows), rounds.num_devices, rounds.rows), num_rows, jnp.int32
    )
    x_TD, asked_URC = lax.fori_loop(0, needed, fetch, (x_TD, asked_URC))
    return x_TD, (asked_URC, owner_T, place_T, needed, table_VD)


def _lookup_rows_bwd(dtype: Any, rounds: _Rounds, residuals: Any, g_TD: jax.Array) -> Any:
    asked_URC, owner_T, place_T, needed, table_VD = residuals
    size = rounds.num_devices * rounds.rows

    def give_back(i: jax.Array, dtable_VD: jax.Array) -> jax.Array:
        slot_T = rounds.slots(owner_T, place_T, i)
        sums_MD = (
            jnp.zeros((size, g_TD.shape[1]), jnp.float32)
            .at[slot_T]
            .add(g_TD.astype(jnp.float32), mode="drop")
        )
        sums_RCD = rounds.all_to_all(
            sums_MD.astype(dtype).reshape(rounds.num_devices, rounds.rows, -1)
        )
        return dtable_VD.at[asked_URC[i]].add(sums_RCD.astype(dtable_VD.dtype), mode="drop")

    return lax.fori_loop(0, needed, give_back, jnp.zeros_like(table_VD)), None


_lookup_rows.defvjp(_lookup_rows_fwd, _lookup_rows_bwd)


def lookup_rows_local(
    table_VD: jax.Array, tokens_T: jax.Array, dtype: Any, axes: tuple[str, ...]
) -> jax.Array:
    """[T, D] in `dtype` of a table of which every R-th row is here, the device's own first.

    Gradients of one id are added in float32 on a device, go to the row's device in `dtype` and are
    added there in the table's.
    """
    devices = lax.axis_size(axes)
    return _lookup_rows(
        table_VD, tokens_T, dtype, _Rounds(axes, devices, round_rows(tokens_T.size, devices))
    )


@dataclass(frozen=True)
class Embedding:
    """The planned lookup in the parameter `embedding` [V, D].

    axes: of all devices; the last is inside a node. Rows are kept as [V / R, R, D]: an entry [i, r]
    is row i R + r.
    """

    plan: EmbeddingPlan
    axes: tuple[str, ...]
    tied: bool

    @property
    def striped(self) -> bool:
        return self.plan.kind == "rows"

    @property
    def split(self) -> dict[str, int]:
        """Parameters that a device holds a part of -> the dimension in which they are split."""
        if self.plan.kind == "replicated":
            return {}
        return {"embedding": 1} | ({"head": 1} if self.plan.parallel_head and not self.tied else {})

    def kept(self, table_VD: jax.Array) -> jax.Array:
        """A whole table as it is kept."""
        return (
            table_VD.reshape(-1, self.plan.num_devices, table_VD.shape[1])
            if self.striped
            else table_VD
        )

    def lookup(self, table: jax.Array, tokens_BS: jax.Array, dtype: Any) -> jax.Array:
        """[B, S, D] in `dtype` of this device's part of the table."""
        if self.plan.kind == "replicated":
            return lookup(table, tokens_BS, dtype)
        tokens_T = tokens_BS.reshape(-1)
        if self.striped:
            x_TD = lookup_rows_local(table.reshape(table.shape[0], -1), tokens_T, dtype, self.axes)
        else:
            x_TD = lookup_columns_local(table, tokens_T, dtype, self.axes)
        return x_TD.reshape(*tokens_BS.shape, -1)

    @property
    def output_head(self) -> OutputHead:
        """The head and loss that go with it."""
        return OutputHead(self.plan, self.axes, self.tied)
