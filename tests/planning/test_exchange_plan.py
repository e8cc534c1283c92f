"""Which exchange is chosen and why, and the counts of rows and bytes against drawn routings and by hand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from jmoe.planning.exchange import (
    buffer_rows,
    exchange_traffic,
    expert_rows,
    index_bytes,
    nodes_per_token,
    plan_exchange,
)


@pytest.mark.parametrize(
    ("nodes", "experts", "k", "n_group", "topk_group"),
    [
        (2, 8, 1, 1, 1),
        (2, 8, 2, 1, 1),
        (2, 64, 8, 1, 1),
        (8, 64, 8, 1, 1),
        (4, 16, 16, 1, 1),
        (4, 32, 4, 4, 2),  # a group a node
        (2, 32, 4, 8, 3),  # four groups a node
        (4, 32, 4, 4, 4),  # all groups open: no limit
        (8, 32, 4, 4, 2),  # a group on two nodes: the limit is left out of account
    ],
)
def test_nodes_per_token_is_what_uniform_routing_reaches(
    nodes: int, experts: int, k: int, n_group: int, topk_group: int
) -> None:
    rng = np.random.default_rng(0)
    tokens = 20000
    if n_group % nodes:
        n_group = topk_group = 1
    open_TG = rng.random((tokens, n_group)).argsort(axis=1) < topk_group
    score_TE = rng.random((tokens, experts)) + np.repeat(open_TG, experts // n_group, axis=1)
    idx_TK = np.argsort(-score_TE, axis=1)[:, :k]
    reached = (idx_TK[:, :, None] // (experts // nodes) == np.arange(nodes)).any(axis=1).sum(axis=1)
    assert nodes_per_token(nodes, experts, k, n_group, topk_group) == pytest.approx(reached.mean(), rel=0.01)
    if n_group == nodes:
        assert reached.max() <= topk_group


def plan(kind: Any = "auto", nodes: int = 2, devices: int = 2, experts: int = 8, k: int = 2, **groups: int) -> Any:
    return plan_exchange(
        kind, num_nodes=nodes, devices_per_node=devices, num_experts=experts, num_experts_per_tok=k, **groups
    )


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({}, "dedup", "0.79 rows a token cross between 2 nodes with dedup, 1.00 without"),
        ({"experts": 64, "k": 8}, "dedup", "1.00 rows a token cross between 2 nodes with dedup, 4.00 without"),
        ({"k": 1}, "flat", "0.50 rows a token cross between 2 nodes with dedup, 0.50 without"),
        ({"nodes": 1, "devices": 4}, "flat", "all experts are on one node"),
        ({"nodes": 16, "devices": 8, "experts": 128}, "flat", "1.82 rows .* with dedup, 1.88 without"),
        (
            {"nodes": 16, "devices": 8, "experts": 256, "k": 8, "n_group": 16, "topk_group": 4},
            "dedup",
            "3.* rows a token cross between 16 nodes with dedup, 7.50 without",
        ),
        ({"kind": "hierarchical"}, "hierarchical", "as configured"),
    ],
)
def test_the_choice_and_its_reason(options: dict[str, Any], kind: str, reason: str) -> None:
    chosen = plan(**options)
    assert chosen.kind == kind
    assert re.fullmatch(reason, chosen.reason)


def test_traffic_by_hand() -> None:
    sizes: dict[str, Any] = {"num_tokens": 112, "num_experts": 8, "num_experts_per_tok": 2}

    def sent(kind: str, **options: bool) -> tuple[int, int]:
        found = exchange_traffic(plan(kind), **sizes, row_bytes=1000, capacity_factor=1.0, **options)
        return found.across_bytes, found.inside_bytes

    # 224 assignments over 4 devices: 56 rows each, there and back, and the sizes of 2 experts' groups
    block = 56 * 2000 + 8
    assert sent("flat") == (2 * block, block)
    assert sent("hierarchical") == (2 * block, 2 * block)
    # 112 tokens x 11/14 go to a node: 88 rows, each with two weights (4 bytes) and two experts of 4 (1 byte)
    assert sent("dedup") == (88 * (2000 + 8 + 2), 112 * 2000 + 8)
    assert sent("dedup", backward=True)[0] == 88 * (4000 + 16 + 2)


def test_buffer_rows() -> None:
    assert buffer_rows(125, 1000, 1.0) == 128  # in eights
    assert buffer_rows(125, 1000, 1.25) == 160
    assert buffer_rows(125, 1000, None) == 256  # a dropless first try has room for twice a fair share
    assert buffer_rows(125, 1000, None, full_capacity=True) == buffer_rows(125, 1000, 99.0) == 1000
    assert buffer_rows(2.5, 5, 1.0) == 5


def test_index_bytes() -> None:
    assert [index_bytes(n) for n in (0, 255, 256, 65535, 65536)] == [1, 1, 2, 2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ring"}, "exchange = 'ring': must be one of auto, flat, hierarchical, dedup"),
        ({"nodes": 3}, "num_experts = 8: must be a multiple of 3 nodes"),
        ({"k": 9}, r"num_experts_per_tok = 9: must be in \[1, num_experts = 8\]"),
        ({"n_group": 3}, "n_group = 3: must divide num_experts = 8"),
        ({"k": 3, "n_group": 4}, "num_experts_per_tok = 3: must not exceed the 2 experts of 1 groups"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**options)


def test_rows_of_a_devices_experts() -> None:
    """Every assignment, times the room for imbalance."""
    assert expert_rows(1024, 2, 4, 1.0) == 1024 * 2
    assert expert_rows(1024, 2, 4, None) == 2 * 1024 * 2
    assert expert_rows(1024, 2, 1, None) == 1024 * 2
