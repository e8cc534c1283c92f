"""Plans of a training run for a described cluster: one row for each number of nodes, as text or
JSON. Called by `train.py --cluster FILE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jmoe.config import TrainConfig, check
from jmoe.config.cluster import ClusterConfig, read_links
from jmoe.config.tiers import TIERS
from jmoe.planning.cluster import (
    ClusterPlan,
    LayerExchangeSettings,
    describe_bandwidths,
    plan_cluster,
)
from jmoe.planning.exchange import ExchangeLoad, plan_exchange
from jmoe.planning.roofline import scale_chosen_share
from jmoe.planning.training import plan_training
from jmoe.run.planner import training_plan, training_sizes, with_chosen_tiers
from jmoe.types import JsonObject

COMPUTED = "computed from the figures of the file by formulae, not measured"
# column heads of the table, and their widths in characters
COLUMNS = {
    "nodes": 5,
    "devices": 8,
    "mesh": 12,
    "device GB": 10,
    "host GB": 9,
    "disk GB": 9,
    "fits": 5,
}
COLUMNS |= {
    "compute": 9,
    "all-to-all": 11,
    "all-reduce": 11,
    "tiers": 9,
    "step": 9,
    "tokens/s": 13,
    "checkpoint": 11,
}


@dataclass(frozen=True)
class ClusterRow:
    """A run on `nodes` nodes: its mesh and plan, or the problem that keeps it from being split over
    them.
    """

    nodes: int
    mesh: tuple[int, int, int] | None = None
    plan: ClusterPlan | None = None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and not self.plan.training.lacking_bytes


def cluster_rows(config: TrainConfig, cluster: ClusterConfig) -> list[ClusterRow]:
    """Return the run's plan for each number of nodes in `cluster`. Raises `ValueError` for a model
    without experts.
    """
    experts = config.model.num_moe_layers
    check(
        experts > 0,
        "model.num_experts",
        config.model.num_experts,
        "the planner is for models with experts",
    )
    return [_cluster_row(config, cluster, nodes) for nodes in cluster.nodes]


def _cluster_row(config: TrainConfig, cluster: ClusterConfig, nodes: int) -> ClusterRow:
    try:
        return _plan_on_nodes(config, cluster, nodes)
    except ValueError as error:
        return ClusterRow(nodes, problem=str(error))


def config_for_nodes(config: TrainConfig, cluster: ClusterConfig, nodes: int) -> TrainConfig:
    """Return the run's configuration on `nodes` nodes, with mesh, batch size and tiers filled in.

    Raises `ValueError` if the run cannot be split over that many nodes, or if no tiers fit.
    """
    per_node = cluster.devices_per_node
    devices, intra = nodes * per_node, config.mesh.expert_intra or per_node
    mesh = dataclasses.replace(config.mesh, expert_intra=intra)
    if cluster.grows == "experts":
        data = max(1, config.mesh.data)
        inter = max(1, devices // (data * intra))
        mesh = dataclasses.replace(mesh, data=data, expert_inter=inter)
    data, inter, intra = mesh.resolve_shape(devices, per_node)
    mesh = dataclasses.replace(mesh, data=data, expert_inter=inter, expert_intra=intra)
    batch_size = config.batch_size
    if cluster.batch == "per_node":
        batch_size = batch_size * nodes // cluster.nodes[0]
    tiers = dataclasses.replace(
        config.tiers, chosen_share=_rescaled_chosen_share(config, batch_size)
    )
    split = dataclasses.replace(
        config, mesh=mesh, machine=cluster.machine, batch_size=batch_size, tiers=tiers
    )
    split = with_chosen_tiers(split)
    _, inter, intra = split.checked_mesh_shape(devices, per_node)
    whole = intra == per_node or (per_node % (inter * intra) == 0)
    constraint = f"must be {per_node}, the devices of a node, or all experts inside a node"
    check(whole, "mesh.expert_intra", intra, constraint)
    return split


def _rescaled_chosen_share(config: TrainConfig, batch_size: int) -> float:
    """Return `tiers.chosen_share` (fraction of a layer's experts that a step uses), rescaled from
    the run's batch size to `batch_size` sequences as under uniform routing
    (`scale_chosen_share`).
    """
    share, model = config.tiers.chosen_share, config.model
    measured_tokens, num_tokens = (
        size * config.sequence_length for size in (config.batch_size, batch_size)
    )
    routing = share, model.num_experts, model.num_experts_per_tok
    return scale_chosen_share(*routing, measured_tokens=measured_tokens, num_tokens=num_tokens)


def _plan_on_nodes(config: TrainConfig, cluster: ClusterConfig, nodes: int) -> ClusterRow:
    split = config_for_nodes(config, cluster, nodes)
    per_node = cluster.devices_per_node
    model = config.model
    own = training_plan(split)
    trained = dataclasses.replace(training_sizes(split), devices_per_host=per_node)
    training = plan_training(trained, own.placement, own.machine)
    data, inter, intra = split.checked_mesh_shape(nodes * per_node, per_node)
    row_bytes, load = trained.compute_dtype_bytes * model.hidden_size, None
    if config.comm.links:
        tokens = trained.step_tokens // trained.num_devices // trained.micro_batches
        load = ExchangeLoad(
            read_links(Path(config.comm.links)), tokens, row_bytes, model.capacity_factor
        )
    exchange = plan_exchange(
        config.comm.exchange,
        num_nodes=inter,
        devices_per_node=intra,
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        n_group=model.router.n_group,
        topk_group=model.router.topk_group,
        load=load,
    )
    exchanged = LayerExchangeSettings(exchange, row_bytes, model.capacity_factor)
    batch_tokens = split.batch_size * split.sequence_length
    return ClusterRow(
        nodes, (data, inter, intra), plan_cluster(training, exchanged, cluster, batch_tokens)
    )


def rows_as_json(rows: list[ClusterRow]) -> JsonObject:
    """Return the rows as a dict that JSON can hold; keys end in their unit (`_s`, `_bytes`)."""
    return {"basis": COMPUTED, "rows": [_row_as_json(row) for row in rows]}


def _row_as_json(row: ClusterRow) -> JsonObject:
    plan = row.plan
    if plan is None:
        return {"nodes": row.nodes, "problem": row.problem}
    training = plan.training
    return {
        "nodes": row.nodes,
        "devices": training.model.num_all_devices,
        "mesh": row.mesh,
        "batch_tokens": plan.batch_tokens,
        "tiers": {"experts": training.placement.experts, "optimizer": training.placement.optimizer},
        "bytes": {
            tier: {kind: n for where, kind, n in training.rows if where == tier} for tier in TIERS
        },
        "lacking_bytes": training.lacking_bytes,
        "step_s": plan.step_s,
        "step_without_overlap_s": plan.step_without_overlap_s,
        "compute_s": plan.compute_s,
        "all_to_all_s": plan.all_to_all_s,
        "context_s": plan.context_s,
        "all_reduce_s": plan.all_reduce_s,
        "tiers_s": plan.tier_transfers_s,
        "tokens_per_s": plan.tokens_per_s,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_s": plan.checkpoint_s,
    }


def table_lines(rows: list[ClusterRow], cluster: ClusterConfig) -> Iterator[str]:
    """Yield the rows as lines of a text table, followed by notes."""
    yield (
        f"{COMPUTED[0].upper()}{COMPUTED[1:]}; bytes of a device, and of a node's host memory and"
        " disk; seconds"
    )
    yield "".join(f"{head:>{width}}" for head, width in COLUMNS.items())
    for row in rows:
        plan = row.plan
        if plan is None:
            yield f"{row.nodes:>5}  {row.problem}"
            continue
        training = plan.training
        sizes = [f"{training.bytes_on_tier(tier) / 1e9:,.1f}" for tier in TIERS]
        parts = (
            plan.compute_s,
            plan.all_to_all_s + plan.context_s,
            plan.all_reduce_s,
            plan.tier_transfers_s,
            plan.step_s,
        )
        cells = [
            str(row.nodes),
            str(training.model.num_all_devices),
            "x".join(map(str, row.mesh or ())),
            *sizes,
        ]
        cells += [
            "no" if training.lacking_bytes else "yes",
            *(f"{seconds:,.3f}" for seconds in parts),
        ]
        cells += [f"{plan.tokens_per_s:,.0f}", f"{plan.checkpoint_s:,.1f}"]
        yield "".join(
            f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)
        )
    shown = [row.plan for row in rows if row.plan is not None]
    lacking = [plan for plan in shown if plan.training.lacking_bytes]
    for line in lacking[0].training.advice() if lacking else ():
        yield f"{lacking[0].nodes} nodes do not fit: {line}"
    if shown:
        yield (
            "step: all-to-alls (and gathers of keys and values), and the longer of compute with"
            " tiers and of all-reduce (and dense layers' gathers)"
        )
        yield (
            f"checkpoint: {shown[0].checkpoint_bytes / 1e9:,.1f} GB on the disk that all nodes"
            " share"
        )
        machine = shown[0].training.machine
        yield (
            f"devices of {machine.flops / 1e12:.4g} TFLOP/s ({machine.source});"
            f" {describe_bandwidths(cluster.network)}"
        )
