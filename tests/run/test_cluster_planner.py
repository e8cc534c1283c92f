"""A preset on a cluster of paper: bytes add up, one node is the ordinary plan, and nodes and
links pull their way.
"""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jmoe.config import MeshConfig, TiersConfig, TrainConfig
from jmoe.config.cluster import ClusterConfig, read_cluster
from jmoe.configs import PRESETS
from jmoe.run.cluster_planner import (
    ClusterRow,
    cluster_rows,
    config_for_nodes,
    rows_as_json,
    table_lines,
)
from jmoe.run.planner import training_plan

SAMPLE = Path(__file__).resolve().parents[2] / "launch" / "clusters" / "h100.toml"
QWEN = PRESETS["qwen3-30b-a3b"][1]
WHOLE = dataclasses.replace(QWEN, mesh=dataclasses.replace(QWEN.mesh, context=1))
STREAMED = dataclasses.replace(
    QWEN,
    mesh=MeshConfig(1, 1, 0),
    batch_size=8192,
    tiers=TiersConfig(experts="nvme", optimizer="nvme"),
)


def cluster(**changes: Any) -> ClusterConfig:
    return dataclasses.replace(read_cluster(SAMPLE), **changes)


def planned(config: TrainConfig, on: ClusterConfig) -> list[Any]:
    rows = cluster_rows(config, on)
    assert [row.problem for row in rows] == [""] * len(rows)
    return [row.plan for row in rows]


def kinds(plan: Any, tier: str, word: str) -> int:
    return sum(size for where, kind, size in plan.training.rows if where == tier and word in kind)


def test_one_node_is_the_ordinary_plan() -> None:
    on = cluster(nodes=(1,))
    (plan,) = planned(QWEN, on)
    ordinary = training_plan(
        dataclasses.replace(QWEN, mesh=MeshConfig(1, 1, 8), machine=on.machine)
    )
    assert plan.training == ordinary
    assert plan.compute_s == ordinary.step_s() and plan.tier_transfers_s == 0


def test_bytes_on_all_devices_are_the_models() -> None:
    total, _ = QWEN.model.total_and_active_parameters()
    for plan in planned(QWEN, cluster()):
        model, devices = plan.training.model, 8 * plan.nodes
        dense = devices * kinds(plan, "device", "dense weights")
        # what does not divide evenly
        assert 0 <= 16 * model.dense_parameters - dense < 16 * devices
        state = sum(
            kinds(plan, "device", f"experts: {kind}")
            for kind in ("weights", "moments", "gradients")
        )
        assert devices * state == 16 * model.num_all_expert_parameters * model.replicas
        assert model.dense_parameters + model.num_all_expert_parameters == total
        assert plan.checkpoint_bytes == 12 * total


def test_bytes_on_all_disks_are_the_models() -> None:
    """Experts off the device are spread over all nodes, each with those of its own devices."""
    plans = planned(STREAMED, cluster(nodes=(1, 2, 4), grows="experts"))
    for plan in plans:
        model = plan.training.model
        assert model.replicas == 1 and model.num_devices == 8 * plan.nodes
        for kind, size in (("experts: weights", 4), ("experts: moments", 8)):
            assert plan.nodes * kinds(plan, "nvme", kind) == size * model.num_all_expert_parameters
    assert [
        row.mesh for row in cluster_rows(STREAMED, cluster(nodes=(1, 2, 4), grows="experts"))
    ] == [(1, nodes, 8) for nodes in (1, 2, 4)]
    assert plans[0].tier_transfers_s > plans[1].tier_transfers_s > plans[2].tier_transfers_s > 0


def test_more_nodes_share_a_batch_or_bring_their_own() -> None:
    config = dataclasses.replace(QWEN, batch_size=8192)
    shared = planned(config, cluster(batch="fixed"))
    # each device updates as many experts as before
    assert 1.8 < shared[0].compute_s / shared[1].compute_s < 2
    assert all(a.compute_s > b.compute_s for a, b in pairwise(shared))
    assert all(a.all_to_all_s > b.all_to_all_s for a, b in pairwise(shared))
    assert all(a.all_reduce_s < b.all_reduce_s for a, b in pairwise(shared))
    own = planned(QWEN, cluster(batch="per_node"))
    assert all(b.batch_tokens == 2 * a.batch_tokens for a, b in pairwise(own))
    assert len({plan.all_to_all_s for plan in own}) == 1


def test_a_larger_batch_chooses_a_larger_share() -> None:
    tiers = dataclasses.replace(STREAMED.tiers, chosen_share=0.4)
    config = dataclasses.replace(
        STREAMED, mesh=QWEN.mesh, batch_size=8, sequence_length=4, tiers=tiers
    )
    own, shared = (
        [
            plan.training.model.chosen_share
            for plan in planned(config, cluster(nodes=nodes, batch=batch))
        ]
        for nodes, batch in (((1, 2, 4), "per_node"), ((1,), "fixed"))
    )
    assert own[0] == pytest.approx(0.4) == shared[0]
    assert own[0] < own[1] < own[2] < 1


def test_faster_links_and_disks_take_less_time() -> None:
    config, on = dataclasses.replace(QWEN, mesh=MeshConfig(0, 4, 8)), cluster()
    slow = planned(config, on)
    network = dataclasses.replace(
        on.network, between_bytes_per_s=2 * on.network.between_bytes_per_s
    )
    storage = dataclasses.replace(on.storage, write_bytes_per_s=2 * on.storage.write_bytes_per_s)
    for before, after in zip(
        slow, planned(config, dataclasses.replace(on, network=network)), strict=True
    ):
        assert after.all_to_all_s < before.all_to_all_s and after.all_reduce_s < before.all_reduce_s
        assert after.compute_s == before.compute_s and after.step_s < before.step_s
    for before, after in zip(
        slow, planned(config, dataclasses.replace(on, storage=storage)), strict=True
    ):
        assert after.checkpoint_s == pytest.approx(before.checkpoint_s / 2)


def test_a_number_of_nodes_that_does_not_fit_the_run_says_why() -> None:
    rows = cluster_rows(WHOLE, cluster(batch="fixed"))
    assert [row.problem.split(":")[0] for row in rows] == ["", "", "", *["batch_size = 256"] * 5]
    shared = cluster_rows(QWEN, cluster(batch="fixed"))
    assert [row.plan and row.plan.training.model.context for row in shared[2:5]] == [1, 2, 4]
    across = dataclasses.replace(QWEN, mesh=MeshConfig(0, 4, 4))
    with pytest.raises(
        ValueError,
        match=r"mesh\.expert_intra = 4: must be 8, the devices of a node, or all experts",
    ):
        config_for_nodes(across, cluster(), 8)
    config_for_nodes(dataclasses.replace(QWEN, mesh=MeshConfig(0, 2, 4)), cluster(), 8)
    dense = dataclasses.replace(QWEN, model=dataclasses.replace(QWEN.model, num_experts=0))
    with pytest.raises(ValueError, match="the planner is for models with experts"):
        cluster_rows(dense, cluster())


def test_what_is_shown() -> None:
    on = cluster(nodes=(8, 16, 64), batch="fixed")
    rows = cluster_rows(WHOLE, on)
    text = list(table_lines(rows, on))
    assert text[0].startswith("Computed from the figures of the file by formulae, not measured; ")
    assert text[2].split()[:3] == ["8", "64", "8x1x8"] and "no" in text[2].split()
    wider = dataclasses.replace(QWEN, mesh=MeshConfig(expert_inter=2, expert_intra=8))
    assert "yes" in next(
        line for line in table_lines(cluster_rows(wider, on), on) if "4x2x8" in line
    )
    assert text[4].startswith("   64  batch_size = 256: must be a multiple of 512 devices")
    shown = json.loads(json.dumps(rows_as_json(rows), allow_nan=False))
    assert shown["basis"].endswith("not measured")
    first, _, last = shown["rows"]
    assert last == {"nodes": 64, "problem": rows[2].problem}
    plan = rows[0].plan
    assert plan is not None and first["step_s"] == plan.step_s and first["devices"] == 64
    assert sum(first["bytes"]["device"].values()) == plan.training.bytes_on_tier("device")


def test_too_little_memory_is_said_once() -> None:
    on = cluster(machine=dataclasses.replace(read_cluster(SAMPLE).machine, device_bytes=10**10))
    rows = cluster_rows(QWEN, on)
    assert not any(row.fits for row in rows) and not ClusterRow(8).fits
    assert (
        len(
            [
                line
                for line in table_lines(rows, on)
                if line.startswith("8 nodes do not fit: device: ")
            ]
        )
        == 1
    )
    auto = dataclasses.replace(QWEN, tiers=TiersConfig(experts="auto", optimizer="auto"))
    small = dataclasses.replace(on.machine, host_bytes=10**10, nvme_bytes=10**9)
    assert cluster_rows(auto, dataclasses.replace(on, machine=small))[0].problem.startswith(
        "tiers = 'auto': no choice"
    )
