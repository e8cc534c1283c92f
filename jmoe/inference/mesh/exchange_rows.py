"""How an engine's devices exchange tokens, and the rows of the buffers that this takes.

Every process derives both from the options and from the choices of all tokens.

Legend: T tokens of all devices, K choices a token.
"""

import math
from collections.abc import Sequence

import numpy as np

from jmoe.config import ModelConfig
from jmoe.config.engine import EngineMesh
from jmoe.config.parallel import ExchangeKind
from jmoe.inference.scheduler import smallest_bucket
from jmoe.planning.exchange import plan_exchange
from jmoe.planning.placement import Placement

BUFFER_FACTORS = (1.25, 1.5, 2.0, 4.0, 8.0, 16.0)  # rows of a buffer / an even share of them
# if all rows are at most this many, there is one size of buffers: smaller ones would save little
FEW_ROWS = 64


def choose_exchange(config: ModelConfig, on: EngineMesh, num_nodes: int) -> ExchangeKind:
    """Return the exchange of tokens between an engine's devices: `mesh.exchange`, or for `auto`
    dedup if that saves enough of the rows that cross between nodes.
    """
    if on.exchange != "auto":
        return on.exchange
    if num_nodes == 1 or not config.num_moe_layers or config.num_experts % num_nodes:
        return "flat"
    plan = plan_exchange(
        "auto",
        num_nodes=num_nodes,
        devices_per_node=on.devices // num_nodes,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        n_group=config.router.n_group,
        topk_group=config.router.topk_group,
    )
    return plan.kind


def buffer_row_counts(placement: Placement, idx_TK: np.ndarray, ragged: bool) -> Sequence[int]:
    """Return [rows of the smallest buffer size that fits the exchange]; all sizes for pure padding.

    idx_TK: choices of all devices' tokens, in the order of the devices.
    ragged: a buffer holds all that a device receives; otherwise the rows of one source and
        destination.
    """
    num_devices, (num_tokens, k) = placement.num_devices, idx_TK.shape
    mine = num_tokens // num_devices
    everything, fair = (num_tokens * k, mine * k) if ragged else (mine * k, mine * k / num_devices)
    sizes = {everything}
    if everything > FEW_ROWS:
        sizes.update(min(everything, math.ceil(factor * fair)) for factor in BUFFER_FACTORS)
    token, choice = np.nonzero(idx_TK < placement.num_experts)
    if not token.size:
        return sorted(sizes)
    device = placement.replica_of_tokens(token, idx_TK[token, choice]) // placement.slots_per_device
    sent = np.bincount(device if ragged else token // mine * num_devices + device)
    return [smallest_bucket(int(np.max(sent)), tuple(sorted(sizes)))]


def dedup_row_counts(
    placement: Placement, idx_TK: np.ndarray, num_nodes: int
) -> Sequence[tuple[int, int]]:
    """Return [(rows from a device to a node, rows from a device to another of its node)], the
    smallest sizes of buffers that fit the exchange; all sizes for pure padding.

    idx_TK: as for `buffer_row_counts`. A device forwards the rows of all devices at its place in
    their nodes.
    """
    num_devices, (num_tokens, k) = placement.num_devices, idx_TK.shape
    mine, per_node = num_tokens // num_devices, num_devices // num_nodes
    most = mine, num_nodes * mine * k
    sizes = [most]
    if num_nodes * mine * k > FEW_ROWS:
        fair = mine * min(k, num_nodes) / num_nodes, mine * k / per_node
        sizes = [
            (min(most[0], math.ceil(factor * fair[0])), min(most[1], math.ceil(factor * fair[1])))
            for factor in BUFFER_FACTORS
        ] + sizes
    token, choice = np.nonzero(idx_TK < placement.num_experts)
    if not token.size:
        return sorted({*sizes})
    device = placement.replica_of_tokens(token, idx_TK[token, choice]) // placement.slots_per_device
    crossings = np.unique(token * num_nodes + device // per_node)  # a token to a node once
    across = np.bincount(crossings // num_nodes // mine * num_nodes + crossings % num_nodes)
    forwarder = token // mine % per_node
    inside = np.bincount(forwarder * num_devices + device)
    rows, device_rows = int(np.max(across)), int(np.max(inside))
    return [next(size for size in sizes if rows <= size[0] and device_rows <= size[1])]
