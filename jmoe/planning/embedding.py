"""How the embedding table and the output head are split over devices, and what each way makes a
device send.

Pure functions. Symbols: R devices = P nodes x Q devices a node, V vocabulary, H hidden size; each
device looks up T tokens in a pass forwards and backwards.
"""

from dataclasses import dataclass
from math import ceil
from typing import get_args

from jmoe.config.checks import check
from jmoe.config.parallel import SPLIT_SIZES, EmbeddingChoice, EmbeddingKind
from jmoe.planning.exchange import MIN_SAVING, Traffic

MASTER_BYTES = 4  # of a parameter and of its gradient's sum
ID_BYTES = 4
# Rows are fetched in rounds of this part of a fair share to each device. Text repeats itself: one
# or two rounds do.
ROUND_SHARE = 0.5


@dataclass(frozen=True)
class EmbeddingPlan:
    """How the table lies on the devices, and whether each computes the logits of its part of the
    vocabulary.

    replicated: like any other dense parameter, whole in every pass. columns: H / R of every row on
    each device. rows: every R-th row on each device.
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
class Vocabulary:
    """The table to split, and the tokens of a device in one pass.

    activation_bytes: of a number in the compute dtype. sharded: dense parameters are split at rest
    (ZeRO-3), so a whole one is gathered, and its gradient scattered, in every pass; else its
    gradient is summed over all devices.
    """

    vocab_size: int
    hidden_size: int
    tied: bool
    num_tokens: int
    activation_bytes: int
    sharded: bool


def round_rows(num_tokens: int, num_devices: int) -> int:
    """Return rows that a device fetches from each other in one round, in eights, never more than
    its tokens.
    """
    return min(num_tokens, -(-ceil(ROUND_SHARE * num_tokens / num_devices) // 8) * 8)


def embedding_traffic(plan: EmbeddingPlan, vocabulary: Vocabulary, rounds: int = 2) -> Traffic:
    """Return bytes that one device sends in a pass forwards and backwards, for the lookup and the
    head together.

    columns: the ids to every device, T H / R activations to each and their gradients back. rows:
    the same for the rows that `rounds` rounds have room for. A parallel head: T hidden states with
    labels and weights to all devices, across nodes first and then inside, R T times three numbers
    of the softmax, and gradients back; a tied table in columns becomes one in parts of the
    vocabulary and its gradient the reverse. A whole parameter goes around a ring of the devices of
    a node, and a part of it around one of the nodes (`mesh.hierarchy`).
    """
    p, q, r, v = plan.num_nodes, plan.devices_per_node, plan.num_devices, vocabulary
    c, tokens = v.activation_bytes, v.num_tokens
    table = v.vocab_size * v.hidden_size
    ring_bytes = block_bytes = across_bytes = inside_bytes = 0.0  # block: to every other device
    if plan.kind == "replicated":
        ring_bytes += 2 * table * MASTER_BYTES
    elif plan.kind == "columns":
        block_bytes += tokens * (ID_BYTES + 2 * v.hidden_size // r * c)
    else:
        block_bytes += rounds * round_rows(tokens, r) * (ID_BYTES + 2 * v.hidden_size * c)
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
    kind: EmbeddingChoice, vocabulary: Vocabulary, *, num_nodes: int, devices_per_node: int
) -> EmbeddingPlan:
    """Return the partition of this name, or with `auto` the one that spares the slowest level most;
    else columns.

    The head is computed in parts of the vocabulary where that moves fewer bytes than a whole head
    does: hidden states of all devices then go to all, so it is right for R T tokens up to about V.
    A tied table in columns has to be turned into such parts and back in every pass, in rows it lies
    so already.
    """
    names = ("auto", *get_args(EmbeddingKind))
    check(kind in names, "embedding", kind, f"must be one of {', '.join(names)}")
    devices = num_nodes * devices_per_node
    if devices == 1:
        return EmbeddingPlan(
            "replicated", "one device", num_nodes, devices_per_node, parallel_head=False
        )

    def slow_bytes(plan: EmbeddingPlan) -> int:
        sent = embedding_traffic(plan, vocabulary)
        return sent.across_bytes if num_nodes > 1 else sent.inside_bytes

    def plan_for(kind: EmbeddingKind) -> EmbeddingPlan:
        plans = [
            EmbeddingPlan(kind, "as configured", num_nodes, devices_per_node, p)
            for p in (False, True)
        ]
        return plans[0] if kind == "replicated" else min(plans, key=slow_bytes)

    if kind != "auto":
        for name in SPLIT_SIZES.get(kind, ()):
            size, many = getattr(vocabulary, name), f"must be a multiple of the {devices} devices"
            check(size % devices == 0, name, size, f"{many} for embedding = {kind!r}")
        return plan_for(kind)
    even = [
        kind
        for kind, sizes in SPLIT_SIZES.items()
        if not any(getattr(vocabulary, n) % devices for n in sizes)
    ]
    if not even:
        reason = f"vocab_size = {vocabulary.vocab_size} is no multiple of {devices} devices"
        return EmbeddingPlan("replicated", reason, num_nodes, devices_per_node, parallel_head=False)
    replicated, best = plan_for("replicated"), plan_for(even[0])
    for other in map(plan_for, even[1:]):
        best = other if slow_bytes(other) < (1 - MIN_SAVING) * slow_bytes(best) else best
    where = "to other nodes" if num_nodes > 1 and devices_per_node > 1 else "to other devices"
    chosen_mb, replicated_mb = (slow_bytes(plan) / 1e6 for plan in (best, replicated))
    reason = (
        f"a device sends {chosen_mb:.1f} MB {where} in a pass with {best.kind}, {replicated_mb:.1f}"
        " MB replicated"
    )
    chosen = best if chosen_mb < replicated_mb else replicated
    return EmbeddingPlan(chosen.kind, reason, num_nodes, devices_per_node, chosen.parallel_head)
