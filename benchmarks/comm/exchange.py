"""The exchange alone: tokens to their experts and back, `dispatch` and `combine`; the experts
change nothing.

Forward alone and with its backward pass, the kinds of exchange in turn. A shape is K:E:T, K of E
experts for each of a rank's T tokens of 1024 bfloat16. Formula:
`jmoe.planning.exchange.exchange_traffic`. The links are measured at the start, as a run does;
`planned_seconds` is what `jmoe.planning.exchange.exchange_s` makes of them, and `auto` the
exchange that a run would take.
"""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.lib.ranks import Clock, Rounds
from benchmarks.lib.report import JsonObject
from jmoe.config.cluster import LinksConfig
from jmoe.planning.exchange import (
    ExchangeLoad,
    ExchangePlan,
    Traffic,
    exchange_s,
    exchange_traffic,
    plan_exchange,
)

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

COMMANDS = {"exchange": "the exchange alone"}
HIDDEN_SIZE = 1024
DIRECTIONS = ("forward", "backward")  # backward: the forward pass too


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", nargs="+", default=["2:8:560", "8:64:128", "1:64:128"], help="K:E:T"
    )
    parser.add_argument("--kinds", nargs="+", default=["flat", "hierarchical", "dedup"])
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument(
        "--capacity-factor", type=float, default=1.0, help="buffers of this many fair shares"
    )


def make_program(
    plan: ExchangePlan,
    mesh: "Mesh",
    num_experts: int,
    capacity_factor: float | None,
    direction: str,
    *,
    full_capacity: bool = False,
    move: "Callable[..., jax.Array] | None" = None,
) -> "Callable[..., tuple[object, jax.Array]]":
    """Return a program for one exchange there and back.

    It maps (x [R T, D], topk_idx, topk_weights [R T, K]) to (y or the gradients, each device's
    dropped assignments). full_capacity: with buffers for the worst case. move: the ragged
    all-to-all of a ragged plan.
    """
    import jax
    import jax.numpy as jnp

    from jmoe.collectives.exchange import TokenChoices
    from jmoe.collectives.planned_exchange import (
        dispatch_and_combine_without_experts,
        make_exchange,
    )
    from jmoe.collectives.ragged import RaggedExchange
    from jmoe.collectives.ragged_rounds import RoundsExchange
    from jmoe.mesh import BATCH, EXPERT

    exchange = make_exchange(plan, EXPERT, capacity_factor)
    if move is not None:
        exchange = RoundsExchange(RaggedExchange(EXPERT, plan.num_devices, move))

    def body(x: jax.Array, idx: jax.Array, weights: jax.Array) -> tuple[object, jax.Array]:
        counts = (idx.reshape(-1, 1) == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)

        def there_and_back(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            chosen = TokenChoices(idx, weights, counts)
            y, dropped = dispatch_and_combine_without_experts(exchange, x, chosen, full_capacity)
            return y, dropped[None]

        if direction == "forward":
            return there_and_back(x, weights)
        y, vjp, dropped = jax.vjp(there_and_back, x, weights, has_aux=True)
        return vjp(y), dropped

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=BATCH, out_specs=BATCH, check_vma=False))


def draw(mesh: "Mesh", rank: int, shape: tuple[int, int, int]) -> "tuple[jax.Array, ...]":
    """Return random tokens, uniformly drawn experts and weights; one part on each rank."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jmoe.mesh import BATCH

    k, num_experts, num_tokens = shape
    rng = np.random.default_rng([rank, *shape])
    idx = rng.random((num_tokens, num_experts)).argsort(axis=1)[:, :k].astype(np.int32)
    x = rng.standard_normal((num_tokens, HIDDEN_SIZE), np.float32).astype(jnp.bfloat16)
    weights = np.full(idx.shape, 1 / k, np.float32)
    sharding = NamedSharding(mesh, BATCH)
    return tuple(
        jax.make_array_from_process_local_data(sharding, part) for part in (x, idx, weights)
    )


def formula(
    plan: ExchangePlan, shape: tuple[int, int, int], a: argparse.Namespace, direction: str
) -> Traffic:
    """Return the bytes that a rank sends."""
    k, num_experts, num_tokens = shape
    sizes = {"num_tokens": num_tokens, "num_experts": num_experts, "num_experts_per_tok": k}
    backward = direction == "backward"
    return exchange_traffic(
        plan,
        **sizes,
        row_bytes=2 * HIDDEN_SIZE,
        capacity_factor=a.capacity_factor,
        backward=backward,
    )


def measure(a: argparse.Namespace, mesh: "Mesh", clock: Clock) -> list[JsonObject]:
    """Return one row for every shape, direction and kind of exchange."""
    from jmoe.training.bandwidth import measure_links

    rows, links = [], measure_links(mesh)
    for shape in a.shapes:
        k, num_experts, num_tokens = map(int, shape.split(":"))
        rows += measure_shape(a, mesh, clock, (k, num_experts, num_tokens), links)
    return rows


def measure_shape(
    a: argparse.Namespace,
    mesh: "Mesh",
    clock: Clock,
    shape: tuple[int, int, int],
    links: LinksConfig,
) -> list[JsonObject]:
    import jax

    k, num_experts, num_tokens = shape
    args = draw(mesh, a.rank, shape)
    layer = {"num_nodes": a.nodes, "devices_per_node": a.ranks_per_node}
    layer |= {"num_experts": num_experts, "num_experts_per_tok": k}
    plans = {kind: plan_exchange(kind, **layer) for kind in a.kinds}
    auto = plan_exchange(
        "auto", **layer, load=ExchangeLoad(links, num_tokens, 2 * HIDDEN_SIZE, a.capacity_factor)
    )
    programs, dropped = {}, {}
    for kind, plan in plans.items():
        for direction in a.directions:
            program = make_program(plan, mesh, num_experts, a.capacity_factor, direction)
            counts = jax.jit(lambda d: d.sum())(program(*args)[1])
            dropped[kind] = int(counts) / (mesh.size * num_tokens * k)
            programs[direction, kind] = program
    taken = {key: Rounds() for key in programs}
    for _ in range(a.rounds):
        for key, program in programs.items():
            taken[key].add(*clock(program, *args))
    rows, reference = [], a.kinds[0]
    for (direction, kind), rounds in taken.items():
        sent, of = (formula(plans[each], shape, a, direction) for each in (kind, reference))
        planned_s = exchange_s(plans[kind], sent, links, backward=direction == "backward")
        row = rounds.result_row(reference, taken[direction, reference])
        formula_bytes = a.ranks_per_node * sent.across_bytes
        rows.append(
            {
                "mbit_per_s": a.rates[0],
                "top_k": k,
                "experts": num_experts,
                "tokens_per_rank": num_tokens,
                "direction": direction,
                "exchange": kind,
                **row,
                "planned_seconds": round(planned_s, 4),
                "auto": auto.kind,
                "formula_bytes": formula_bytes,
                "sent_to_formula": round(row["sent_bytes"] / formula_bytes, 3),
                "formula_ratio": round(sent.across_bytes / of.across_bytes, 3),
                "dropped_fraction": round(dropped[kind], 4),
            }
        )
    return rows
