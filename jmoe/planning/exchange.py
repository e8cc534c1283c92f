"""Choice of the all-to-all that brings tokens to their experts, the size of its buffers, and its
traffic between nodes.

Pure functions. Symbols:

P  nodes
Q  devices per node
R  devices, P Q
E  experts of a layer, E / P on each node
T  tokens of a device
k  experts per token
"""

from dataclasses import dataclass
from math import ceil, comb
from typing import get_args

from jmoe.config.checks import check
from jmoe.config.cluster import LinkConfig, LinksConfig
from jmoe.config.parallel import ExchangeChoice, ExchangeKind

# first attempt of a dropless exchange: this multiple of a fair share per destination
DROPLESS_BUFFER = 2.0
# A ragged exchange runs in rounds; a round's receive buffer has this multiple of an even load.
RAGGED_BUFFER = 1.5
# Two hops permute rows twice, so they must save at least this fraction of the time. If the links'
# speeds are unknown, dedup must save this fraction of the rows that cross between nodes.
MIN_SAVING = 0.1
PADDED: tuple[ExchangeKind, ...] = ("flat", "hierarchical", "dedup")  # among which auto chooses
ONE_HOP: tuple[ExchangeKind, ...] = ("flat", "ragged")  # rows go to their experts' devices directly
# Number of all-to-alls (forward, backward) across nodes, and inside nodes, for dispatch and combine
# together: of rows, of the row counts per expert, and with dedup of each row's weights and
# expert indices.
COLLECTIVES: dict[ExchangeKind, tuple[tuple[int, int], tuple[int, int]]] = {
    "flat": ((3, 3), (2, 2)),
    "hierarchical": ((3, 3), (2, 2)),
    "dedup": ((4, 3), (3, 2)),
    "ragged": ((3, 3), (2, 2)),
}


@dataclass(frozen=True)
class ExchangePlan:
    """The token exchange of a layer. nodes_per_token: expected number of distinct nodes among a
    token's experts.
    """

    kind: ExchangeKind
    reason: str
    num_nodes: int
    devices_per_node: int
    nodes_per_token: float

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class ExchangeLoad:
    """Load of one device in a layer's exchange: `num_tokens` tokens of `row_bytes` each, and the
    speed of the links.
    """

    links: LinksConfig
    num_tokens: int
    row_bytes: int
    capacity_factor: float | None


def nodes_per_token(
    num_nodes: int,
    num_experts: int,
    num_experts_per_tok: int,
    n_group: int = 1,
    topk_group: int = 1,
) -> float:
    """Return the expected number of distinct nodes among a token's experts under uniform routing: P
    (1 - C(E - E/P, k) / C(E, k)).

    With group-limited routing, the k experts come from `topk_group` of `n_group` groups of E /
    n_group neighbouring experts. The limit is taken into account if every node holds whole groups,
    and ignored otherwise. Raises `ValueError` if the sizes do not divide.
    """
    check(num_nodes > 0, "num_nodes", num_nodes, "must be greater than 0")
    check(
        num_experts % num_nodes == 0,
        "num_experts",
        num_experts,
        f"must be a multiple of {num_nodes} nodes",
    )
    k = num_experts_per_tok
    check(
        0 < k <= num_experts,
        "num_experts_per_tok",
        k,
        f"must be in [1, num_experts = {num_experts}]",
    )
    check(
        num_experts % n_group == 0, "n_group", n_group, f"must divide num_experts = {num_experts}"
    )
    reachable = num_experts // n_group * topk_group
    check(
        k <= reachable,
        "num_experts_per_tok",
        k,
        f"must not exceed the {reachable} experts of {topk_group} groups",
    )
    if n_group == 1 or n_group % num_nodes:
        n_group = topk_group = num_nodes  # no limit: one group per node, all selected
    mine, group_size = n_group // num_nodes, num_experts // n_group
    missed = 0.0  # probability that a node is not reached
    # number of the node's groups that the token's routing selects
    for is_open in range(min(mine, topk_group) + 1):
        ways = comb(mine, is_open) * comb(n_group - mine, topk_group - is_open)
        others = comb((topk_group - is_open) * group_size, k) / comb(topk_group * group_size, k)
        missed += ways / comb(n_group, topk_group) * others
    return num_nodes * (1 - missed)


def plan_exchange(
    kind: ExchangeChoice,
    *,
    num_nodes: int,
    devices_per_node: int,
    num_experts: int,
    num_experts_per_tok: int,
    n_group: int = 1,
    topk_group: int = 1,
    load: ExchangeLoad | None = None,
) -> ExchangePlan:
    """Return the exchange named by `kind`; `auto` selects one by topology and routing. The plan's
    `reason` explains the choice.

    load: if given, `auto` selects the exchange with the least time for dispatch and combine in both
    passes; otherwise it compares the rows that cross between nodes. Raises `ValueError` for an
    unknown `kind`.
    """
    names = ("auto", *get_args(ExchangeKind))
    check(kind in names, "exchange", kind, f"must be one of {', '.join(names)}")
    reached = nodes_per_token(num_nodes, num_experts, num_experts_per_tok, n_group, topk_group)
    away = (num_nodes - 1) / num_nodes  # fraction of a token's rows that leave its node
    flat, dedup = num_experts_per_tok * away, reached * away
    chosen: ExchangeKind
    if kind != "auto":
        chosen, reason = kind, "as configured"
    elif num_nodes == 1:
        chosen, reason = "flat", "all experts are on one node"
    elif load is None:
        chosen = "dedup" if dedup <= (1 - MIN_SAVING) * flat else "flat"
        reason = (
            f"{dedup:.2f} rows a token cross between {num_nodes} nodes with dedup, {flat:.2f}"
            " without"
        )
    else:
        sizes = {"num_experts": num_experts, "num_experts_per_tok": num_experts_per_tok}
        seconds = {
            each: forward_backward_exchange_s(
                ExchangePlan(each, "", num_nodes, devices_per_node, reached), load, **sizes
            )
            for each in PADDED
        }
        fastest = min(seconds, key=lambda each: seconds[each])
        chosen = fastest if seconds[fastest] <= (1 - MIN_SAVING) * seconds["flat"] else "flat"
        times = ", ".join(f"{1e3 * taken:.3g} ms {each}" for each, taken in seconds.items())
        reason = f"on these links a layer's all-to-alls take {times}"
    return ExchangePlan(chosen, reason, num_nodes, devices_per_node, reached)


def forward_backward_exchange_s(
    plan: ExchangePlan, load: ExchangeLoad, *, num_experts: int, num_experts_per_tok: int
) -> float:
    """Return the seconds of a layer's all-to-alls: dispatch and combine, forward and backward."""
    sent = exchange_traffic(
        plan,
        num_tokens=load.num_tokens,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        row_bytes=load.row_bytes,
        capacity_factor=load.capacity_factor,
        backward=True,
    )
    return exchange_s(plan, sent, load.links, backward=True)


def buffer_rows_per_destination(
    fair_rows: float, most_rows: int, capacity_factor: float | None, full_capacity: bool = False
) -> int:
    """Return the buffer rows per destination: capacity_factor times the fair share, rounded up to a
    multiple of 8, at most `most_rows`.

    capacity_factor: None (dropless) uses `DROPLESS_BUFFER`. full_capacity: return `most_rows`.
    """
    if full_capacity:
        return most_rows
    factor = DROPLESS_BUFFER if capacity_factor is None else capacity_factor
    return min(most_rows, -(-ceil(factor * fair_rows) // 8) * 8)


def ragged_buffer_rows(num_assignments: int, num_devices: int) -> int:
    """Return the rows of the receive buffer of one round of a ragged exchange: `RAGGED_BUFFER`
    times an even load, rounded up to a multiple of 8, at most all rows of all devices.

    num_assignments: (token, expert) assignments of a device.
    """
    return buffer_rows_per_destination(
        num_assignments, num_devices * num_assignments, RAGGED_BUFFER
    )


def receive_buffer_rows(
    num_tokens: int,
    num_experts_per_tok: int,
    num_devices: int,
    capacity_factor: float | None,
    *,
    ragged: bool = False,
) -> int:
    """Return the rows of a device's receive buffers, over all of its experts. num_tokens: tokens of
    the device.
    """
    assignments = num_tokens * num_experts_per_tok
    if num_devices == 1:
        return assignments
    if ragged:
        return ragged_buffer_rows(assignments, num_devices)
    return num_devices * buffer_rows_per_destination(
        assignments / num_devices, assignments, capacity_factor
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends, dispatch and combine together."""

    across_bytes: int  # to other nodes
    inside_bytes: int  # to other devices of its node


def exchange_traffic(
    plan: ExchangePlan,
    *,
    num_tokens: int,
    num_experts: int,
    num_experts_per_tok: int,
    row_bytes: int,
    capacity_factor: float | None,
    backward: bool = False,
) -> Traffic:
    """Return the bytes that a device sends to exchange its `num_tokens` tokens. Buffers are sent
    whole, full or not; `ragged` sends only rows.

    `flat` sends C rows to each device, for dispatch and again for combine; `ragged` sends T k / R
    rows if the load is even, and E counts. `hierarchical` sends the rows of `flat` across nodes,
    and then all P C rows of its place in the node inside the node. `dedup` sends C rows to each
    node and back, each with k weights and k expert indices, and C' rows to each device inside.
    backward: add the backward pass, which sends rows and weights again.
    """
    p, q, k = plan.num_nodes, plan.devices_per_node, num_experts_per_tok
    passes = 2 if backward else 1
    sizes_bytes = num_experts // (p * q) * 4
    if plan.kind == "ragged":
        block_bytes = passes * 2 * num_tokens * k * row_bytes // (p * q) + 4 * num_experts
        return Traffic((p - 1) * q * block_bytes, (q - 1) * block_bytes)
    if plan.kind != "dedup":
        rows = buffer_rows_per_destination(
            num_tokens * k / (p * q), num_tokens * k, capacity_factor
        )
        block_bytes = passes * 2 * rows * row_bytes + sizes_bytes
        hops = p if plan.kind == "hierarchical" else 1
        return Traffic((p - 1) * q * block_bytes, hops * (q - 1) * block_bytes)
    rows = buffer_rows_per_destination(
        num_tokens * plan.nodes_per_token / p, num_tokens, capacity_factor
    )
    across = rows * (passes * (2 * row_bytes + 4 * k) + k * smallest_uint_bytes(num_experts // p))
    rows = buffer_rows_per_destination(num_tokens * k / q, p * rows * k, capacity_factor)
    return Traffic((p - 1) * across, (q - 1) * (passes * 2 * rows * row_bytes + sizes_bytes))


def exchange_s(
    plan: ExchangePlan, sent: Traffic, links: LinksConfig, *, backward: bool = False
) -> float:
    """Return the seconds that a layer's all-to-alls take to send the bytes in `sent`.

    A collective takes the latency of its farthest link, a time per message, and the time of its
    bytes; bytes to far peers also use the near links. `flat` and `ragged` use links inside and
    across nodes at once; the other kinds use them one after the other.
    """
    p, q = plan.num_nodes, plan.devices_per_node
    below = min(p, links.nodes_per_leaf or p)  # nodes under one leaf switch
    # peers in other nodes by link; in two hops a device sends along its rail alone
    peers = (
        (below - 1, (below - 1) * (q - 1), (p - below) * q)
        if plan.kind in ONE_HOP
        else (below - 1, 0, p - below)
    )
    across, inside = (
        sum(times) for times in zip(*COLLECTIVES[plan.kind][: 1 + backward], strict=True)
    )
    across_s = _network_level_s(
        (links.rail, links.leaf, links.spine), peers, sent.across_bytes, across, links.message_s
    )
    inside_s = _network_level_s(
        (links.inside,), (q - 1,), sent.inside_bytes, inside, links.message_s
    )
    return max(across_s, inside_s) if plan.kind in ONE_HOP else across_s + inside_s


def _network_level_s(
    path: tuple[LinkConfig, ...],
    peers: tuple[int, ...],
    sent_bytes: float,
    collectives: int,
    message_s: float,
) -> float:
    """Return the seconds of `collectives` that send `sent_bytes` in total, spread evenly over the
    peers.

    path: links from near to far. peers: number of peers at the distance of each link.
    """
    everyone = sum(peers)
    if everyone == 0:
        return 0.0
    farthest = max(i for i, there in enumerate(peers) if there)
    bytes_s = max(
        sent_bytes * sum(peers[i:]) / everyone / link.bytes_per_s for i, link in enumerate(path)
    )
    return collectives * (path[farthest].latency_s + everyone * message_s) + bytes_s


def smallest_uint_bytes(largest: int) -> int:
    """Return the size in bytes of the smallest unsigned integer type that holds `largest`: 1, 2 or
    4.
    """
    return next(size for size in (1, 2, 4) if largest < 2 ** (8 * size))
