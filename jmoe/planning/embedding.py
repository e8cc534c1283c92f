"""Partition of the embedding table and the output head over devices, and the traffic of each
choice.

Pure functions. Symbols:

P  nodes
Q  devices per node
R  devices, P Q
V  vocabulary size
H  hidden size
T  tokens per device that are looked up in one forward and backward pass
"""

from dataclasses import dataclass
from math import ceil
from typing import get_args

from jmoe.config.checks import check
from jmoe.config.parallel import SPLIT_SIZES, EmbeddingChoice, EmbeddingKind
from jmoe.planning.exchange import MIN_SAVING, Traffic

MASTER_BYTES = 4  # per parameter, and per element of its summed gradient
ID_BYTES = 4
# A round fetches this fraction of a fair share from each device. Text repeats tokens, so one
# or two rounds suffice.
ROUND_SHARE = 0.5


@dataclass(frozen=True)
class EmbeddingPlan:
    """Partition of the embedding table, and whether each device computes the logits of its part of
    the vocabulary (`parallel_head`).

    kind: `replicated` treats the table like any other dense parameter, so that each device has all
    of it during a pass; `columns` puts H / R columns of every row on each device; `rows` puts every
    R-th row on each device.
    """

    kind: EmbeddingKind
    reason: str
    num_nodes: int
    devices_per_node: int
    parallel_head: bool

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class EmbeddingSizes:
    """Sizes of the embedding table, and the tokens of a device in one pass.

    activation_bytes: bytes per number in the compute dtype. sharded: dense parameters are sharded
    at rest (ZeRO-3), so a replicated table is all-gathered, and its gradient reduce-scattered, in
    every pass; otherwise its gradient is all-reduced.
    """

    vocab_size: int
    hidden_size: int
    tied: bool
    num_tokens: int
    activation_bytes: int
    sharded: bool


def rows_per_round(num_tokens: int, num_devices: int) -> int:
    """Return the rows that a device fetches from each other device in one round: a multiple of 8,
    at most `num_tokens`.
    """
    return min(num_tokens, -(-ceil(ROUND_SHARE * num_tokens / num_devices) // 8) * 8)


def embedding_traffic(plan: EmbeddingPlan, vocabulary: EmbeddingSizes, rounds: int = 2) -> Traffic:
    """Return the bytes that one device sends in a forward and backward pass, for lookup and head
    together.

    `columns`: token ids to every device, then T H / R activations to each and their gradients back.
    `rows`: the same for the fixed-size buffers of `rounds` rounds of rows.

    A parallel head sends T hidden states with labels and weights to all devices (across nodes
    first, then inside), R T times three numbers of the softmax, and gradients back. A tied table in
    columns is also converted to parts of the vocabulary, and its gradient back. A whole parameter
    travels around a ring of a node's devices, and its shards around a ring of nodes
    (`mesh.hierarchy`).
    """
    p, q, r, v = plan.num_nodes, plan.devices_per_node, plan.num_devices, vocabulary
    c, tokens = v.activation_bytes, v.num_tokens
    table = v.vocab_size * v.hidden_size
    ring_bytes = block_bytes = across_bytes = inside_bytes = 0.0  # block: to each peer
    if plan.kind == "replicated":
        ring_bytes += 2 * table * MASTER_BYTES
    elif plan.kind == "columns":
        block_bytes += tokens * (ID_BYTES + 2 * v.hidden_size // r * c)
    else:
        block_bytes += rounds * rows_per_round(tokens, r) * (ID_BYTES + 2 * v.hidden_size * c)
    if plan.parallel_head:
        row_bytes = 2 * v.hidden_size * c + 2 * 4 + r * 3 * 4
        across_bytes += (p - 1) * tokens * row_bytes
        inside_bytes += (q - 1) * p * tokens * row_bytes
        block_bytes += 2 * table * c / r**2 if v.tied and plan.kind == "columns" else 0
    elif not v.tied or plan.kind != "replicated":
        ring_bytes += table * (c + MASTER_BYTES if v.sharded else 2 * MASTER_BYTES)
    across_bytes += (p - 1) * q * block_bytes + (p - 1) / p / q * ring_bytes
    inside_bytes += (q - 1) * block_bytes + (q - 1) / q * ring_bytes
    return Traffic(round(across_bytes), round(inside_bytes))


def plan_embedding(
    kind: EmbeddingChoice, vocabulary: EmbeddingSizes, *, num_nodes: int, devices_per_node: int
) -> EmbeddingPlan:
    """Return the partition named by `kind`; `auto` selects the one that sends the fewest bytes over
    the slowest level of the network.

    The head is computed in parts of the vocabulary if that moves fewer bytes than gathering a whole
    head. Hidden states of all devices then go to all devices, which pays off for R T up to about V.
    A tied table in columns must be converted to such parts and back in every pass; a table in rows
    already has that form. Raises `ValueError` if `kind` is unknown or the sizes do not divide by
    the number of devices.
    """
    names = ("auto", *get_args(EmbeddingKind))
    check(kind in names, "embedding", kind, f"must be one of {', '.join(names)}")
    devices = num_nodes * devices_per_node
    if devices == 1:
        return EmbeddingPlan(
            "replicated", "one device", num_nodes, devices_per_node, parallel_head=False
        )

    def slowest_level_bytes(plan: EmbeddingPlan) -> int:
        sent = embedding_traffic(plan, vocabulary)
        return sent.across_bytes if num_nodes > 1 else sent.inside_bytes

    def cheapest_plan_of(kind: EmbeddingKind) -> EmbeddingPlan:
        plans = [
            EmbeddingPlan(kind, "as configured", num_nodes, devices_per_node, p)
            for p in (False, True)
        ]
        return plans[0] if kind == "replicated" else min(plans, key=slowest_level_bytes)

    if kind != "auto":
        for name in SPLIT_SIZES.get(kind, ()):
            size, many = getattr(vocabulary, name), f"must be a multiple of the {devices} devices"
            check(size % devices == 0, name, size, f"{many} for embedding = {kind!r}")
        return cheapest_plan_of(kind)
    even = [
        kind
        for kind, sizes in SPLIT_SIZES.items()
        if not any(getattr(vocabulary, n) % devices for n in sizes)
    ]
    if not even:
        reason = f"vocab_size = {vocabulary.vocab_size} is no multiple of {devices} devices"
        return EmbeddingPlan("replicated", reason, num_nodes, devices_per_node, parallel_head=False)
    replicated, best = cheapest_plan_of("replicated"), cheapest_plan_of(even[0])
    for other in map(cheapest_plan_of, even[1:]):
        best = (
            other
            if slowest_level_bytes(other) < (1 - MIN_SAVING) * slowest_level_bytes(best)
            else best
        )
    where = "to other nodes" if num_nodes > 1 and devices_per_node > 1 else "to other devices"
    chosen_mb, replicated_mb = (slowest_level_bytes(plan) / 1e6 for plan in (best, replicated))
    reason = (
        f"a device sends {chosen_mb:.1f} MB {where} in a pass with {best.kind}, {replicated_mb:.1f}"
        " MB replicated"
    )
    chosen = best if chosen_mb < replicated_mb else replicated
    return EmbeddingPlan(chosen.kind, reason, num_nodes, devices_per_node, chosen.parallel_head)
