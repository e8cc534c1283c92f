"""Exchanges whose rows are padded, as a dropless run has them, against the ragged one.

load: balanced draws experts uniformly; skewed draws expert e with a weight of 1 / (e + 1), so that
the first devices get most rows. A padded exchange whose first buffers overflow runs again with
buffers for the worst case, as a training step does (`runs`). Forward and backward pass, dispatch
and combine; the experts change nothing. A shape is K:E:T, K of E experts for each of a rank's T
tokens of 1024 bfloat16. XLA has no ragged all-to-all on CPUs: sockets between the ranks carry
exactly its rows (`benchmarks/lib/socket_rows.py`), while gloo carries the padded buffers. Bytes:
those that the first node sends, measured at its link, and by formula. buffer_rows: of a device's
receive buffers.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.comm.exchange import HIDDEN_SIZE, make_program
from benchmarks.lib.linked_nodes import ADDRESSES
from benchmarks.lib.ranks import Clock, Rounds
from benchmarks.lib.report import JsonObject
from benchmarks.lib.socket_rows import SocketRows
from jmoe.config.parallel import ExchangeKind
from jmoe.planning.exchange import (
    ExchangePlan,
    exchange_traffic,
    plan_exchange,
    ragged_buffer_rows,
    receive_buffer_rows,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

COMMANDS = {"padding": "padded and ragged rows"}
LOADS = ("balanced", "skewed")
KINDS: tuple[ExchangeKind, ...] = ("flat", "dedup", "ragged")
WORST = 1e9  # a capacity factor that no load exceeds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["2:8:560", "8:64:128"], help="K:E:T")


@dataclass(frozen=True)
class Shape:
    """K of E experts for each of a rank's T tokens, under a load."""

    k: int
    num_experts: int
    num_tokens: int
    load: str

    def draw_experts(self, rank: int) -> np.ndarray:
        """Return int32 [T, K], the experts of a rank's tokens."""
        rng = np.random.default_rng([rank, self.k, self.num_experts, self.num_tokens])
        weights_E = np.ones(self.num_experts)
        if self.load == "skewed":
            weights_E /= np.arange(1, self.num_experts + 1)
        # the largest of log weight + Gumbel noise: draws without replacement
        noise_TE = rng.gumbel(size=(self.num_tokens, self.num_experts))
        order_TE = np.argsort(-(np.log(weights_E) + noise_TE), axis=1)
        return order_TE[:, : self.k].astype(np.int32)

    def counts(self, num_ranks: int) -> np.ndarray:
        """Return int32 [R, E], the rows that each rank sends to each expert."""
        experts = [self.draw_experts(rank).reshape(-1) for rank in range(num_ranks)]
        counts = [np.bincount(idx, minlength=self.num_experts) for idx in experts]
        return np.stack(counts).astype(np.int32)


def place_on_mesh(mesh: "Mesh", rank: int, shape: Shape) -> tuple[Any, ...]:
    """Return (tokens, experts, weights), one part on each rank."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jmoe.mesh import BATCH

    idx = shape.draw_experts(rank)
    rng = np.random.default_rng([rank, 1])
    x = rng.standard_normal((shape.num_tokens, HIDDEN_SIZE), np.float32).astype(jnp.bfloat16)
    parts = x, idx, np.full(idx.shape, 1 / shape.k, np.float32)
    place = NamedSharding(mesh, BATCH)
    return tuple(jax.make_array_from_process_local_data(place, part) for part in parts)


def ragged_bytes(counts_RE: np.ndarray, rows: int, num_nodes: int) -> int:
    """Return the bytes of rows and counts that the first node sends to the others, forwards and
    backwards. rows: of a receive buffer; a later round's rows travel a third time in that
    direction, to compute them anew.
    """
    num_ranks, num_experts = counts_RE.shape
    own, local = num_ranks // num_nodes, num_experts // num_ranks
    lands_RE = np.zeros_like(counts_RE)
    for device in range(num_ranks):
        block = slice(device * local, (device + 1) * local)
        by_expert = counts_RE[:, block].T.reshape(-1)
        lands_RE[:, block] = (np.cumsum(by_expert) - by_expert).reshape(local, num_ranks).T
    first_RE = np.clip(rows - lands_RE, 0, counts_RE)
    away = slice(own * local, num_experts)
    out, again = counts_RE[:own, away].sum(), (counts_RE - first_RE)[:own, away].sum()
    home = counts_RE[own:, : own * local].sum()
    counts = own * (num_ranks - own) * num_experts * 4
    return int((2 * (out + home) + again) * 2 * HIDDEN_SIZE + counts)


def measure(a: argparse.Namespace, mesh: "Mesh", clock: Clock) -> list[JsonObject]:
    """Return one row for every shape, load and kind of exchange."""
    num_ranks = a.nodes * a.ranks_per_node
    nodes = [rank // a.ranks_per_node for rank in range(num_ranks)]
    addresses = [ADDRESSES[node] if a.rates[0] else "127.0.0.1" for node in nodes]
    sockets = SocketRows(a.rank, addresses)
    shapes = [Shape(*map(int, text.split(":")), load) for text in a.shapes for load in LOADS]
    return [row for shape in shapes for row in measure_shape(a, mesh, clock, shape, sockets)]


def plan_of(a: argparse.Namespace, shape: Shape, kind: ExchangeKind) -> ExchangePlan:
    """Return the plan of an exchange of this kind."""
    return plan_exchange(
        kind,
        num_nodes=a.nodes,
        devices_per_node=a.ranks_per_node,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.k,
    )


def programs_of(
    plan: ExchangePlan, mesh: "Mesh", shape: Shape, args: tuple[Any, ...], sockets: SocketRows
) -> list[Callable[..., object]]:
    """Return the compiled programs of one exchange: a second one, with buffers for the worst case,
    if the first drops assignments.
    """
    import jax

    move = sockets.ragged_all_to_all if plan.kind == "ragged" else None
    first, full = (
        make_program(
            plan, mesh, shape.num_experts, None, "backward", full_capacity=full_capacity, move=move
        )
        for full_capacity in (False, True)
    )
    dropped = int(jax.jit(lambda d: d.sum())(first(*args)[1]))
    programs: list[Callable[..., object]] = [first, full] if dropped else [first]
    jax.block_until_ready(programs[-1](*args))
    return programs


def formula_bytes(
    a: argparse.Namespace,
    shape: Shape,
    kind: ExchangeKind,
    runs: int,
    counts_RE: np.ndarray,
    rows: int,
) -> int:
    """Return the bytes that the first node sends. rows: of a ragged exchange's receive buffer."""
    if kind == "ragged":
        return ragged_bytes(counts_RE, rows, a.nodes)
    sent = [
        exchange_traffic(
            plan_of(a, shape, kind),
            num_tokens=shape.num_tokens,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.k,
            row_bytes=2 * HIDDEN_SIZE,
            capacity_factor=factor,
            backward=True,
        )
        for factor in (None, WORST)[:runs]
    ]
    return a.ranks_per_node * sum(each.across_bytes for each in sent)


def measure_shape(
    a: argparse.Namespace, mesh: "Mesh", clock: Clock, shape: Shape, sockets: SocketRows
) -> list[JsonObject]:
    """Return one row for every kind of exchange."""
    args = place_on_mesh(mesh, a.rank, shape)
    programs = {
        kind: programs_of(plan_of(a, shape, kind), mesh, shape, args, sockets) for kind in KINDS
    }
    taken = {kind: Rounds() for kind in KINDS}
    for _ in range(a.rounds):
        for kind, some in programs.items():
            times = [clock(program, *args) for program in some]
            taken[kind].add(*(sum(part) for part in zip(*times, strict=True)))
    counts_RE = shape.counts(mesh.size)
    totals_R = counts_RE.sum(axis=0).reshape(mesh.size, -1).sum(axis=1)
    ragged_rows = ragged_buffer_rows(shape.num_tokens * shape.k, mesh.size)
    rows = []
    for kind, rounds in taken.items():
        ragged, runs, row = (
            kind == "ragged",
            len(programs[kind]),
            rounds.result_row("flat", taken["flat"]),
        )
        expected = formula_bytes(a, shape, kind, runs, counts_RE, ragged_rows)
        buffer_rows = receive_buffer_rows(
            shape.num_tokens, shape.k, mesh.size, WORST if runs > 1 else None, ragged=ragged
        )
        own = {
            "mbit_per_s": a.rates[0],
            "top_k": shape.k,
            "experts": shape.num_experts,
            "tokens_per_rank": shape.num_tokens,
            "load": shape.load,
            "busiest_device": round(float(totals_R.max() / totals_R.mean()), 2),
            "exchange": kind,
            "runs": runs,
            "rounds": int(-(-totals_R.max() // ragged_rows)) if ragged else 1,
        }
        compared = {
            "formula_bytes": expected,
            "sent_to_formula": round(row["sent_bytes"] / expected, 3),
            "bytes_to_flat": round(row["sent_bytes"] / max(1, rounds_bytes(taken["flat"])), 3),
            "buffer_rows": buffer_rows,
        }
        rows.append(own | row | compared)
    return rows


def rounds_bytes(rounds: Rounds) -> int:
    """Return the median of the bytes that a node sent."""
    return int(np.median(rounds.sent_bytes))
