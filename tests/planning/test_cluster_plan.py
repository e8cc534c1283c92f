"""Seconds of a cluster's traffic, against sums worked out by hand and against each other."""

from dataclasses import replace

import pytest

from jmoe.config import MachineConfig
from jmoe.config.cluster import ClusterConfig, NetworkConfig, StorageConfig
from jmoe.planning.cluster import (
    LayerExchangeSettings,
    checkpoint_write_s,
    context_s,
    dense_collectives_s,
    expert_all_reduce_s,
    plan_cluster,
)
from jmoe.planning.exchange import plan_exchange
from jmoe.planning.training import TrainingPlan, plan_training
from jmoe.planning.training_sizes import Machine, StatePlacement, TrainingSizes

# Inside a node 1 kB/s, between nodes 2 kB/s a node, no latency: sums can be done by hand.
CLUSTER = ClusterConfig(
    nodes=(1, 2),
    devices_per_node=2,
    network=NetworkConfig(1e3, 2e3, 0.0, 0.0),
    storage=StorageConfig(1e3),
    machine=MachineConfig(accelerator="h100", host_bytes=1, nvme_bytes=1),
)
MODEL = TrainingSizes(
    num_layers=3,
    num_experts=4,
    num_experts_per_tok=1,
    parameters_per_expert=5,
    dense_parameters=100,
    step_tokens=64,
    dense_flops=1e3,
    input_bytes=0,
    working_bytes=0,
    compute_dtype_bytes=2,
    gradient_bytes_per_parameter=4,
    num_devices=2,
    devices_per_host=2,
    residual_bytes=1,
)
ON_DEVICE = StatePlacement("device", "device", "host", 2, None, 2)
LATE = replace(CLUSTER, network=NetworkConfig(1e3, 2e3, 0.5, 0.25))


def training(model: TrainingSizes) -> TrainingPlan:
    return plan_training(
        model, ON_DEVICE, Machine(10**9, 10**9, 10**9, False, 1e3, 1e2, 1e9, 1e9, 1e9)
    )


def exchanged(nodes: int, devices: int, kind: str = "flat") -> LayerExchangeSettings:
    exchange = plan_exchange(
        kind,  # type: ignore[arg-type]
        num_nodes=nodes,
        devices_per_node=devices,
        num_experts=4,
        num_experts_per_tok=1,
    )
    return LayerExchangeSettings(exchange, row_bytes=10, capacity_factor=1.0)


def test_dense_parameters_of_one_node_stay_inside() -> None:
    """Half of 2 gathers of 200 bytes and of a reduction of 400, at 1 kB/s."""
    assert dense_collectives_s(MODEL, 1, CLUSTER) == pytest.approx(0.4)
    assert dense_collectives_s(replace(MODEL, micro_batches=3), 1, CLUSTER) == pytest.approx(1.2)
    # twice 400
    assert dense_collectives_s(replace(MODEL, shard_dense=False), 1, CLUSTER) == pytest.approx(0.4)
    # three layers, three collectives, one hop
    assert dense_collectives_s(MODEL, 1, LATE) == pytest.approx(0.4 + 3 * 3 * 0.5)


def test_dense_parameters_cross_between_nodes_once() -> None:
    """On four nodes three quarters of 800 bytes at 2 kB/s come to it; each layer's has two hops
    more.
    """
    assert dense_collectives_s(MODEL, 4, CLUSTER) == pytest.approx(0.4 + 0.3)
    assert dense_collectives_s(MODEL, 4, LATE) == pytest.approx(0.4 + 0.3 + 9 * (0.5 + 2 * 0.25))


def test_gradients_of_experts_are_summed_over_their_replicas() -> None:
    """A device has 30 parameters of experts: 120 bytes, there and back; a node's two rings share
    its link.
    """
    assert expert_all_reduce_s(MODEL, 1, CLUSTER) == 0.0
    assert expert_all_reduce_s(replace(MODEL, replicas=2), 2, CLUSTER) == pytest.approx(
        2 * 2 * 120 / 2 / 2e3
    )
    assert expert_all_reduce_s(replace(MODEL, replicas=4), 4, LATE) == pytest.approx(
        2 * 2 * 120 * 3 / 4 / 2e3 + 1.0
    )
    # both replicas in one node, all 60 parameters on each device
    alone = replace(MODEL, num_devices=1, replicas=2)
    assert expert_all_reduce_s(alone, 1, CLUSTER) == pytest.approx(2 * 240 / 2 / 1e3)
    assert expert_all_reduce_s(replace(alone, replicas=4), 2, CLUSTER) == pytest.approx(
        2 * 240 * 3 / 4 / 2e3
    )


def test_copies_of_the_state_sum_their_shards_once() -> None:
    """Two copies on two nodes of four: gathers cross two nodes, half of 800 bytes a micro-batch; a
    device then all-reduces a quarter of 400 bytes with one other, and both of a node share its
    link.
    """
    two = replace(MODEL, replicas=4, copies=2)
    assert two.num_dense_shards == 4
    gathers_s = 0.4 + 800 / 2 / 2e3
    assert dense_collectives_s(two, 4, CLUSTER) == pytest.approx(gathers_s + 2 * 100 / 2e3)
    again = replace(two, micro_batches=3)
    assert dense_collectives_s(again, 4, CLUSTER) == pytest.approx(3 * gathers_s + 2 * 100 / 2e3)
    on_each = replace(MODEL, replicas=4, copies=4)  # nothing is gathered between nodes
    assert dense_collectives_s(on_each, 4, CLUSTER) == pytest.approx(0.4 + 2 * 200 * 1.5 / 2e3)
    # 30 parameters of experts: gathered twice in 16 bits and reduced by two replicas, then summed
    split = replace(two, expert_sharding="weights")
    rings_s, sums_s = 2 * 240 / 2 / 2e3, 2 * 60 / 2e3
    assert expert_all_reduce_s(split, 4, CLUSTER) == pytest.approx(rings_s + sums_s)


def test_all_to_alls_take_the_links_that_there_are() -> None:
    """A device's 32 tokens: 16 rows of 10 bytes to the other one, there and back, and back
    again; 8 bytes of sizes.
    """
    plan = plan_cluster(training(MODEL), exchanged(1, 2), CLUSTER, 64)
    layer_bytes = 2 * 2 * 16 * 10 + 8
    assert plan.all_to_all_s == pytest.approx(3 * layer_bytes / 1e3)
    assert (
        plan_cluster(training(MODEL), exchanged(2, 1), CLUSTER, 64).all_to_all_s
        == plan.all_to_all_s
    )
    again = plan_cluster(training(replace(MODEL, residual_bytes=0)), exchanged(1, 2), CLUSTER, 64)
    assert again.all_to_all_s == pytest.approx(3 * (layer_bytes + 2 * 16 * 10 + 8) / 1e3)
    late = plan_cluster(training(MODEL), exchanged(1, 2), LATE, 64)
    assert late.all_to_all_s == pytest.approx(plan.all_to_all_s + 3 * 4 * 0.5)
    # 16 tokens, rows in eights: 8 to each of the three others, two of them away
    wide = replace(MODEL, num_devices=4)
    block_bytes = 2 * 2 * 8 * 10 + 4
    flat, dedup = (
        plan_cluster(training(wide), exchanged(2, 2, kind), CLUSTER, 64)
        for kind in ("flat", "dedup")
    )
    assert flat.all_to_all_s == pytest.approx(3 * max(2 * block_bytes * 2 / 2e3, block_bytes / 1e3))
    assert dedup.all_to_all_s > 0
    pair = replace(MODEL, num_devices=1, replicas=2)  # each device has all experts
    assert plan_cluster(training(pair), exchanged(1, 1), CLUSTER, 64).all_to_all_s == 0.0


def test_a_checkpoint_takes_as_long_as_its_slowest_way() -> None:
    """160 parameters of 12 bytes. The experts are written by one group's nodes, the dense ones
    by all.
    """
    assert checkpoint_write_s(MODEL, 4, 1e9, CLUSTER) == pytest.approx(1.92)
    fast = replace(CLUSTER, storage=StorageConfig(1e9))
    assert checkpoint_write_s(MODEL, 4, 1e9, fast) == pytest.approx((12 * 100 / 4 + 12 * 60) / 2e3)
    assert checkpoint_write_s(replace(MODEL, num_devices=4), 4, 1e9, fast) == pytest.approx(
        (12 * 100 / 4 + 12 * 30) / 2e3
    )
    assert checkpoint_write_s(MODEL, 4, 10.0, fast) == pytest.approx((12 * 100 / 2 + 12 * 30) / 10)
    whole = replace(MODEL, shard_dense=False)
    assert checkpoint_write_s(whole, 4, 1e9, fast) == pytest.approx((12 * 100 + 12 * 60) / 2e3)


def test_keys_and_values_go_in_rings() -> None:
    """600 bytes of a device at 1 kB/s inside a node; to the next node at 2 kB/s, or slower."""
    inside = replace(MODEL, context=2, context_bytes=600)
    assert context_s(inside, CLUSTER) == pytest.approx(0.6)
    across = replace(inside, context=4)
    assert context_s(across, CLUSTER) == pytest.approx(0.6)
    slow = replace(CLUSTER, network=NetworkConfig(1e3, 1e2, 0.0, 0.0))
    assert (context_s(inside, slow), context_s(across, slow)) == pytest.approx((0.6, 6.0))
    alone, shared = (
        plan_cluster(training(model), exchanged(1, 2), CLUSTER, 64) for model in (MODEL, inside)
    )
    assert shared.step_s == pytest.approx(alone.step_s + 0.6)


def test_the_step_is_the_sum_of_what_waits() -> None:
    plan = plan_cluster(training(MODEL), exchanged(1, 2), CLUSTER, 64)
    assert plan.step_s == plan.all_to_all_s + max(plan.training.step_s(), plan.all_reduce_s)
    assert plan.step_without_overlap_s == pytest.approx(
        plan.compute_s + plan.tier_transfers_s + plan.all_reduce_s + plan.all_to_all_s
    )
    assert plan.tokens_per_s == 64 / plan.step_s
    assert plan.checkpoint_bytes == 160 * 12
