"""The exchange of tokens that a plan names; for measuring, its all-to-alls alone, and an exchange
without experts.
"""

from dataclasses import replace
from functools import partial

import jax

from jmoe.collectives.all_to_all import AllToAll, make_all_to_all
from jmoe.collectives.exchange import (
    ArrivedRows,
    Exchange,
    OneDeviceExchange,
    PerDeviceExchange,
    PerNodeExchange,
    TokenChoices,
)
from jmoe.collectives.ragged import RaggedExchange
from jmoe.collectives.ragged_rounds import RoundsExchange
from jmoe.planning.exchange import ONE_HOP, ExchangePlan
from jmoe.types import PyTree


def make_exchange(
    plan: ExchangePlan,
    axes: tuple[str, ...],
    capacity_factor: float | None,
    *,
    complete: bool = True,
    experts_weigh: bool = False,
) -> Exchange | RoundsExchange:
    """Return the planned exchange over `axes`. `hierarchical` and `dedup` need two axes, (across
    nodes, within a node).

    capacity_factor: rows per destination, at each level, over their number when routing is uniform.
    None: dropless; the first try has buffers for twice the uniform load. complete: every choice is
    an expert, never E (no expert). experts_weigh: on one device the experts, not `combine`,
    multiply their outputs by the router's weights. Raises ValueError if the number of axes does not
    fit the plan, or a `ragged` plan comes with a capacity factor.
    """
    if plan.num_devices == 1:
        return OneDeviceExchange(complete, experts_weigh)
    if plan.kind == "ragged":
        if capacity_factor is not None:
            raise ValueError(
                f"capacity_factor = {capacity_factor}: must be None with exchange = 'ragged',"
                " which drops nothing"
            )
        return RoundsExchange(RaggedExchange(axes, plan.num_devices))
    if plan.kind not in ONE_HOP and len(axes) != 2:
        raise ValueError(
            f"exchange = {plan.kind!r}: needs two expert axes, across nodes and inside a node, not"
            f" {axes}"
        )
    if plan.kind != "dedup":
        return PerDeviceExchange(
            make_all_to_all(axes, plan.kind == "hierarchical"), plan.num_devices, capacity_factor
        )
    inside = PerDeviceExchange(make_all_to_all(axes[1:]), plan.devices_per_node, capacity_factor)
    return PerNodeExchange(
        make_all_to_all(axes[:1]), inside, plan.num_nodes, plan.nodes_per_token, capacity_factor
    )


def dispatch_and_combine_without_experts(
    exchange: Exchange | RoundsExchange,
    x_TD: jax.Array,
    chosen: TokenChoices,
    full_capacity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (float32 y_TD, this device's dropped assignments) of a dispatch and a combine between
    which experts change nothing. full_capacity: as for `dispatch`.
    """

    def return_rows(params: PyTree, others: PyTree, arrived: ArrivedRows) -> jax.Array:
        return arrived.rows_MD

    dispatched = exchange.dispatch(x_TD, chosen, full_capacity)
    if isinstance(exchange, RoundsExchange):
        y_TD = exchange.run_experts(dispatched.handle, return_rows, (), ())
    else:
        rows = [arrived.rows_MD for arrived in dispatched.chunks]
        y_TD = exchange.combine(rows, dispatched.handle)
    return y_TD, dispatched.dropped


def trace_dispatch_all_to_alls(
    exchange: Exchange | RoundsExchange,
    x: jax.ShapeDtypeStruct,
    chosen: TokenChoices,
    num_chunks: int = 1,
) -> list[tuple[AllToAll, PyTree]]:
    """Return the all-to-alls that `exchange.dispatch` calls, each with the shapes of its operands.

    A ragged exchange is measured by an all-to-all of as many rows, an even load without padding.
    x, chosen: shapes (`ShapeDtypeStruct`) of the arguments.
    """
    sent: list[tuple[AllToAll, PyTree]] = []
    if isinstance(exchange, RoundsExchange):
        num_devices, axes = exchange.ragged.num_devices, exchange.ragged.axes
        assert isinstance(axes, tuple)
        even_rows = -(-chosen.topk_idx_TK.size // num_devices)
        rows = jax.ShapeDtypeStruct((num_devices, even_rows, x.shape[1]), x.dtype)
        return [(make_all_to_all(axes), rows)]

    def recording_calls(all_to_all: AllToAll) -> AllToAll:
        def record_call(tree: PyTree) -> PyTree:
            sent.append(
                (all_to_all, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree))
            )
            return tree

        return record_call

    if isinstance(exchange, PerNodeExchange):
        inside = replace(exchange.inside, all_to_all=recording_calls(exchange.inside.all_to_all))
        exchange = replace(exchange, across=recording_calls(exchange.across), inside=inside)
    elif isinstance(exchange, PerDeviceExchange):
        exchange = replace(exchange, all_to_all=recording_calls(exchange.all_to_all))
    jax.eval_shape(partial(exchange.dispatch, num_chunks=num_chunks), x, chosen)
    return sent
