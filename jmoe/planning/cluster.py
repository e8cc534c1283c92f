"""Predicted time of a training step and a checkpoint on many nodes: adds network traffic to a plan
of `plan_training`.

Pure functions, called by `jmoe.run.cluster_planner`. Symbols:

N  nodes
Q  devices per node
G  devices that share the experts; there are N Q / G such groups (replicas)
B  bytes on every device after a gather, or before a reduction
"""

import math
from dataclasses import dataclass

from jmoe.config.cluster import ClusterConfig, NetworkConfig
from jmoe.planning.exchange import ONE_HOP, ExchangePlan, Traffic, exchange_traffic
from jmoe.planning.state_bytes import saved_bytes_per_parameter
from jmoe.planning.training import TrainingPlan
from jmoe.planning.training_sizes import TrainingSizes

GRADIENT_BYTES = 4  # per parameter, where gradients are summed


@dataclass(frozen=True)
class LayerExchangeSettings:
    """How a MoE layer exchanges tokens, from which `all_to_all_s` computes the time.

    row_bytes: bytes of a token's hidden state.
    """

    exchange: ExchangePlan
    row_bytes: int
    capacity_factor: float | None


@dataclass(frozen=True)
class ClusterPlan:
    """A training plan on `nodes` nodes, with the time of its network traffic in seconds.
    batch_tokens: tokens of a step on all nodes.
    """

    training: TrainingPlan
    nodes: int
    batch_tokens: int
    all_to_all_s: float
    context_s: float
    all_reduce_s: float
    checkpoint_bytes: int
    checkpoint_s: float

    @property
    def compute_s(self) -> float:
        return sum(self.training.compute_s_by_pass)

    @property
    def tier_transfers_s(self) -> float:
        """Return the seconds of a step's transfers between device, host memory and disk."""
        return sum(self.training.transfers_s_by_pass)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: all-to-alls and gathers of keys and values, plus the longer
        of the device's own work (compute, tiers) and all-reduces.
        """
        alone_s = self.all_to_all_s + self.context_s
        return max(self.training.step_s(), self.all_reduce_s) + alone_s

    @property
    def step_without_overlap_s(self) -> float:
        """Return the seconds of a step without any overlap."""
        alone_s = self.all_to_all_s + self.context_s
        return self.training.step_s(overlapped=False) + self.all_reduce_s + alone_s

    @property
    def tokens_per_s(self) -> float:
        return self.batch_tokens / self.step_s


def plan_cluster(
    training: TrainingPlan,
    exchanged: LayerExchangeSettings,
    cluster: ClusterConfig,
    batch_tokens: int,
) -> ClusterPlan:
    """Return the plan of `training` on the nodes that its devices fill, with the times of its
    network traffic.

    batch_tokens: tokens of a step on all nodes.
    """
    model = training.model
    nodes = model.num_all_devices // cluster.devices_per_node
    return ClusterPlan(
        training,
        nodes,
        batch_tokens,
        all_to_all_s(training, exchanged, cluster),
        context_s(model, cluster),
        dense_collectives_s(model, nodes, cluster) + expert_all_reduce_s(model, nodes, cluster),
        int(sum(_checkpoint_bytes(model))),
        checkpoint_write_s(model, nodes, training.machine.link_bytes_per_s, cluster),
    )


def all_to_all_s(
    training: TrainingPlan, exchanged: LayerExchangeSettings, cluster: ClusterConfig
) -> float:
    """Return the seconds that a step spends in all-to-alls of tokens, from `exchange_traffic` and
    the speed of the links.

    A layer exchanges twice per micro-batch (forward, backward), or three times if the backward pass
    recomputes it.
    """
    model, exchange = training.model, exchanged.exchange
    if model.num_devices == 1:
        return 0.0
    tokens = model.step_tokens // model.num_devices // model.micro_batches
    passes, seconds = sum(training.dense_products_by_pass), 0.0
    for backward, times in ((True, 1), (False, max(0, passes - 3))):
        sent = exchange_traffic(
            exchange,
            num_tokens=tokens,
            num_experts=model.num_experts,
            num_experts_per_tok=model.num_experts_per_tok,
            row_bytes=exchanged.row_bytes,
            capacity_factor=exchanged.capacity_factor,
            backward=backward,
        )
        messages = 2 * (1 + backward)  # dispatch and combine
        seconds += times * _exchange_s(sent, exchange, messages, model.num_devices, cluster)
    return seconds * model.num_layers * model.micro_batches


def _exchange_s(
    sent: Traffic, exchange: ExchangePlan, messages: int, num_devices: int, cluster: ClusterConfig
) -> float:
    """Return the seconds of one layer's all-to-alls: the time of the bytes in `sent`, and a latency
    for each of `messages` messages.
    """
    network, per_node = cluster.network, cluster.devices_per_node
    if num_devices <= per_node:  # a node has all experts, so no token leaves its node
        inside_bytes = sent.across_bytes + sent.inside_bytes
        return inside_bytes / network.inside_bytes_per_s + messages * network.inside_latency_s
    between_s = (
        sent.across_bytes * per_node / network.between_bytes_per_s
        + messages * network.between_latency_s
    )
    inside_s = sent.inside_bytes / network.inside_bytes_per_s + messages * network.inside_latency_s
    return max(between_s, inside_s) if exchange.kind in ONE_HOP else between_s + inside_s


def context_s(model: TrainingSizes, cluster: ClusterConfig) -> float:
    """Return the seconds in which devices that share sequences gather keys and values and reduce
    their gradients, in rings: a node's link to the next carries what one device sends.
    """
    network = cluster.network
    inside_s = model.context_bytes / network.inside_bytes_per_s
    if model.context <= cluster.devices_per_node:
        return inside_s
    return max(inside_s, model.context_bytes / network.between_bytes_per_s)


def dense_collectives_s(model: TrainingSizes, nodes: int, cluster: ClusterConfig) -> float:
    """Return the seconds of a step's all-gathers of dense parameters (forward and backward) and
    reductions of their gradients.

    Sharded parameters are gathered and reduced in every micro-batch; gradients of replicated ones
    are all-reduced once per step.
    """
    gathered = model.dense_parameters * model.compute_dtype_bytes
    reduced = model.dense_parameters * GRADIENT_BYTES
    if not model.shard_dense:
        return 2 * _all_gathers_s(reduced, nodes, model.num_layers, cluster)
    inside = max(1, nodes // model.copies)  # nodes of a copy of the state
    gathers_s = 2 * _all_gathers_s(gathered, inside, model.num_layers, cluster)
    reductions_s = _all_gathers_s(reduced, inside, model.num_layers, cluster)
    shard_bytes = reduced / model.num_dense_shards
    per_micro_batch_s = (gathers_s + reductions_s) * model.micro_batches
    return per_micro_batch_s + _copies_all_reduce_s(model, shard_bytes, nodes, cluster)


def _copies_all_reduce_s(
    model: TrainingSizes, shard_bytes: float, nodes: int, cluster: ClusterConfig
) -> float:
    """Return the seconds in which the copies of the state sum their gradients once in a step, of
    which each device has `shard_bytes`. All devices of a node share its link.
    """
    copies, network, per_node = model.copies, cluster.network, cluster.devices_per_node
    if copies == 1:
        return 0.0
    ring_bytes = 2 * shard_bytes * (copies - 1) / copies
    if nodes == 1:
        return ring_bytes / network.inside_bytes_per_s
    hops_s = 2 * _log2_hops(copies) * network.between_latency_s
    return per_node * ring_bytes / network.between_bytes_per_s + hops_s


def _all_gathers_s(
    ring_bytes: float, nodes: int, collectives: int, cluster: ClusterConfig
) -> float:
    """Return the seconds of all-gathers with `ring_bytes` B in total: B (N - 1) / N across nodes,
    then B (Q - 1) / Q inside.
    """
    network, per_node = cluster.network, cluster.devices_per_node
    return (
        ring_bytes * (nodes - 1) / nodes / network.between_bytes_per_s
        + ring_bytes * (per_node - 1) / per_node / network.inside_bytes_per_s
        + collectives
        * (
            _log2_hops(nodes) * network.between_latency_s
            + _log2_hops(per_node) * network.inside_latency_s
        )
    )


def _log2_hops(members: int) -> int:
    """Return the messages one after another of a collective among `members`: log2, rounded up."""
    return math.ceil(math.log2(members))


def expert_all_reduce_s(model: TrainingSizes, nodes: int, cluster: ClusterConfig) -> float:
    """Return the seconds in which replicas reduce the gradients of their experts, and gather the
    experts that they split, with one ring per device of a group.

    A ring of r replicas moves B (r - 1) / r bytes for a gather or a reduce-scatter, twice that for
    an all-reduce. The min(G, Q) rings of a node share its network link. Replicas that split their
    experts, in copies of the state, all-reduce their shards over the copies once.
    """
    parameters = model.num_device_expert_parameters
    if model.expert_sharding == "none":
        return _replicas_ring_s(
            model, model.replicas, 2 * GRADIENT_BYTES * parameters, nodes, cluster
        )
    gathers = 1 if model.expert_sharding == "optimizer" else 2  # in every micro-batch
    bytes_per_parameter = model.micro_batches * (
        GRADIENT_BYTES + gathers * model.compute_dtype_bytes
    )
    shards, of_copy = model.num_expert_shards, max(1, nodes // model.copies)
    rings_s = _replicas_ring_s(model, shards, bytes_per_parameter * parameters, of_copy, cluster)
    shard_bytes = GRADIENT_BYTES * parameters / shards
    return rings_s + _copies_all_reduce_s(model, shard_bytes, nodes, cluster)


def _replicas_ring_s(
    model: TrainingSizes, replicas: int, num_bytes: float, nodes: int, cluster: ClusterConfig
) -> float:
    """Return the seconds of rings of `replicas` devices on `nodes` nodes, one ring per device of a
    group, in each of which `num_bytes` travel to all devices.
    """
    network = cluster.network
    if replicas == 1:
        return 0.0
    ring_bytes = num_bytes * (replicas - 1) / replicas
    rings = min(model.num_devices, cluster.devices_per_node)
    if nodes == 1:
        return (
            ring_bytes / network.inside_bytes_per_s
            + 2 * _log2_hops(replicas) * network.inside_latency_s
        )
    return (
        rings * ring_bytes / network.between_bytes_per_s
        + 2 * _log2_hops(replicas) * network.between_latency_s
    )


def checkpoint_write_s(
    model: TrainingSizes, nodes: int, link_bytes_per_s: float, cluster: ClusterConfig
) -> float:
    """Return the seconds until a checkpoint is on the shared disk, limited by the disk, the busiest
    node's link, or a device's link to its host.
    """
    dense, experts = _checkpoint_bytes(model)
    # one group writes the experts
    group_nodes = max(1, model.num_devices // cluster.devices_per_node)
    of_node = dense / (nodes if model.shard_dense else 1) + experts / group_nodes
    of_device = dense / model.num_dense_shards
    of_device += experts / model.num_devices / model.num_expert_shards
    return max(
        (dense + experts) / cluster.storage.write_bytes_per_s,
        of_node / cluster.network.between_bytes_per_s,
        of_device / link_bytes_per_s,
    )


def _checkpoint_bytes(model: TrainingSizes) -> tuple[float, float]:
    """Return the bytes in a checkpoint of the parameters outside of experts, and of all experts."""
    dense_bytes, expert_bytes = saved_bytes_per_parameter(model)
    return dense_bytes * model.dense_parameters, expert_bytes * model.num_all_expert_parameters


def describe_bandwidths(network: NetworkConfig) -> str:
    """Return the network's bandwidths as text."""
    inside, between = network.inside_bytes_per_s / 1e9, network.between_bytes_per_s / 1e9
    return (
        f"links {inside:,.4g} GB/s a device inside a node, {between:,.4g} GB/s a node between"
        " nodes, each way"
    )
