"""Which exchange is chosen and why, and the counts of rows and bytes against drawn routings and
by hand.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from jmoe.config.cluster import LinkConfig, LinksConfig
from jmoe.config.parallel import ExchangeKind
from jmoe.planning.exchange import (
    ExchangeLoad,
    Traffic,
    buffer_rows_per_destination,
    exchange_s,
    exchange_traffic,
    forward_backward_exchange_s,
    nodes_per_token,
    plan_exchange,
    receive_buffer_rows,
    smallest_uint_bytes,
)

KINDS = get_args(ExchangeKind)


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
    assert nodes_per_token(nodes, experts, k, n_group, topk_group) == pytest.approx(
        reached.mean(), rel=0.01
    )
    if n_group == nodes:
        assert reached.max() <= topk_group


def plan(
    kind: Any = "auto",
    nodes: int = 2,
    devices: int = 2,
    experts: int = 8,
    k: int = 2,
    **options: Any,
) -> Any:
    return plan_exchange(
        kind,
        num_nodes=nodes,
        devices_per_node=devices,
        num_experts=experts,
        num_experts_per_tok=k,
        **options,
    )


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({}, "dedup", "0.79 rows a token cross between 2 nodes with dedup, 1.00 without"),
        (
            {"experts": 64, "k": 8},
            "dedup",
            "1.00 rows a token cross between 2 nodes with dedup, 4.00 without",
        ),
        ({"k": 1}, "flat", "0.50 rows a token cross between 2 nodes with dedup, 0.50 without"),
        ({"nodes": 1, "devices": 4}, "flat", "all experts are on one node"),
        (
            {"nodes": 16, "devices": 8, "experts": 128},
            "flat",
            "1.82 rows .* with dedup, 1.88 without",
        ),
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


NVLINK, RAIL = LinkConfig(450e9, 8e-6), LinkConfig(50e9, 20e-6)
LINKS = LinksConfig(NVLINK, RAIL, RAIL, LinkConfig(25e9, 30e-6), message_s=5e-7, nodes_per_leaf=4)


@pytest.mark.parametrize(
    ("options", "tokens", "kind"),
    [
        # 31 + 7 messages, not 255
        ({"nodes": 32, "devices": 8, "experts": 256, "k": 1}, 2048, "hierarchical"),
        # flat's rows in eights are half empty
        ({"nodes": 32, "devices": 8, "experts": 256, "k": 1}, 1024, "dedup"),
        # 1 row where there were 4
        ({"nodes": 2, "devices": 8, "experts": 64, "k": 8}, 4096, "dedup"),
        ({"nodes": 2, "devices": 1, "experts": 8, "k": 1}, 4096, "flat"),  # two hops would be one
        ({"nodes": 1, "devices": 8, "experts": 64, "k": 8}, 4096, "flat"),
    ],
)
def test_the_choice_on_known_links(options: dict[str, Any], tokens: int, kind: str) -> None:
    load = ExchangeLoad(LINKS, tokens, row_bytes=2048, capacity_factor=1.0)
    chosen = plan(load=load, **options)
    assert chosen.kind == kind
    if options["nodes"] > 1:
        sizes = {"num_experts": options["experts"], "num_experts_per_tok": options["k"]}
        seconds = {
            each: forward_backward_exchange_s(plan(each, **options), load, **sizes)
            for each in KINDS
        }
        assert seconds[kind] <= 1.12 * min(seconds.values())  # type: ignore[index]
        assert re.fullmatch(
            r"on these links .* take [\d.e+]+ ms flat, [\d.e+]+ ms hier.*, .* ms dedup",
            chosen.reason,
        )


def test_two_hops_have_to_save_a_tenth() -> None:
    """Along the rail in place of over the spine: what a device sends takes half the time, or
    nearly all of it.
    """
    for spine_bytes_per_s, kind in ((25e9, "hierarchical"), (48e9, "flat")):
        slow = LinkConfig(spine_bytes_per_s, 0)
        links = LinksConfig(LinkConfig(1e15, 0), LinkConfig(50e9, 0), slow, slow)
        load = ExchangeLoad(links, 2**14, row_bytes=2048, capacity_factor=1.0)
        assert plan(nodes=8, devices=8, experts=64, k=1, load=load).kind == kind


def test_seconds_by_hand() -> None:
    """Four nodes of two devices, two nodes below each leaf switch; 1 kB/s inside, 100, 50 and 20
    bytes/s across.
    """
    inside, rail, leaf, spine = (
        LinkConfig(rate, late) for rate, late in ((1e3, 1.0), (100, 2.0), (50, 3.0), (20, 4.0))
    )
    links = LinksConfig(inside, rail, leaf, spine, message_s=0.1, nodes_per_leaf=2)
    sent = Traffic(across_bytes=600, inside_bytes=1000)
    # flat: 1 on the rail, 1 below the leaf switch, 4 over the spine; 600, 500 and 400 bytes of six
    # peers
    flat = 3 * (4.0 + 6 * 0.1) + max(600 / 100, 500 / 50, 400 / 20)
    assert exchange_s(plan("flat", 4), sent, links) == pytest.approx(flat)
    # in two hops 1 on the rail and 2 over the spine
    across = 3 * (4.0 + 3 * 0.1) + max(600 / 100, 400 / 20)
    assert exchange_s(plan("hierarchical", 4), sent, links) == pytest.approx(
        across + 3 * (1.0 + 0.1) + 1.0
    )
    across = 7 * (4.0 + 3 * 0.1) + max(600 / 100, 400 / 20)
    both = exchange_s(plan("dedup", 4), sent, links, backward=True)
    assert both == pytest.approx(across + 5 * (1.0 + 0.1) + 1.0)
    one = replace(links, nodes_per_leaf=0)  # nothing crosses the spine
    across = 3 * (2.0 + 3 * 0.1) + 600 / 100
    assert exchange_s(plan("hierarchical", 4), sent, one) == pytest.approx(
        across + 3 * (1.0 + 0.1) + 1.0
    )
    assert exchange_s(plan("hierarchical", 1), Traffic(0, 1000), links) == pytest.approx(
        3 * 1.1 + 1.0
    )


def test_traffic_by_hand() -> None:
    sizes: dict[str, Any] = {"num_tokens": 112, "num_experts": 8, "num_experts_per_tok": 2}

    def sent(kind: str, **options: bool) -> tuple[int, int]:
        found = exchange_traffic(
            plan(kind), **sizes, row_bytes=1000, capacity_factor=1.0, **options
        )
        return found.across_bytes, found.inside_bytes

    # 224 assignments over 4 devices: 56 rows each, there and back, and the sizes of 2 experts'
    # groups
    block = 56 * 2000 + 8
    assert sent("flat") == (2 * block, block)
    assert sent("hierarchical") == (2 * block, 2 * block)
    # 112 tokens x 11/14 go to a node: 88 rows, each with two weights (4 bytes) and two experts of 4
    # (1 byte)
    assert sent("dedup") == (88 * (2000 + 8 + 2), 112 * 2000 + 8)
    assert sent("dedup", backward=True)[0] == 88 * (4000 + 16 + 2)


def test_buffer_rows() -> None:
    assert buffer_rows_per_destination(125, 1000, 1.0) == 128  # in eights
    assert buffer_rows_per_destination(125, 1000, 1.25) == 160
    # a dropless first try has room for twice a fair share
    assert buffer_rows_per_destination(125, 1000, None) == 256
    assert (
        buffer_rows_per_destination(125, 1000, None, full_capacity=True)
        == buffer_rows_per_destination(125, 1000, 99.0)
        == 1000
    )
    assert buffer_rows_per_destination(2.5, 5, 1.0) == 5


def test_index_bytes() -> None:
    assert [smallest_uint_bytes(n) for n in (0, 255, 256, 65535, 65536)] == [1, 1, 2, 2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ring"}, "exchange = 'ring': must be one of auto, flat, hierarchical, dedup"),
        ({"nodes": 3}, "num_experts = 8: must be a multiple of 3 nodes"),
        ({"k": 9}, r"num_experts_per_tok = 9: must be in \[1, num_experts = 8\]"),
        ({"n_group": 3}, "n_group = 3: must divide num_experts = 8"),
        (
            {"k": 3, "n_group": 4},
            "num_experts_per_tok = 3: must not exceed the 2 experts of 1 groups",
        ),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**options)


def test_rows_of_a_devices_experts() -> None:
    """Every assignment, times the room for imbalance."""
    assert receive_buffer_rows(1024, 2, 4, 1.0) == 1024 * 2
    assert receive_buffer_rows(1024, 2, 4, None) == 2 * 1024 * 2
    assert receive_buffer_rows(1024, 2, 1, None) == 1024 * 2
    assert receive_buffer_rows(1024, 2, 4, None, ragged=True) == 1.5 * 1024 * 2
    assert receive_buffer_rows(1024, 2, 1, None, ragged=True) == 1024 * 2


def test_a_ragged_exchange_sends_an_even_load_and_all_counts() -> None:
    sizes = {"num_tokens": 1024, "num_experts": 64, "num_experts_per_tok": 2, "row_bytes": 100}
    kinds: list[Any] = ["flat", "ragged"]
    flat, ragged = (
        exchange_traffic(
            plan_exchange(
                kind, num_nodes=2, devices_per_node=4, num_experts=64, num_experts_per_tok=2
            ),
            **sizes,
            capacity_factor=None,
        )
        for kind in kinds
    )
    rows = 1024 * 2 // 8
    assert ragged.across_bytes == 4 * (2 * rows * 100 + 64 * 4)
    assert ragged.inside_bytes == 3 * (2 * rows * 100 + 64 * 4)
    assert 1.9 < flat.across_bytes / ragged.across_bytes < 2.0
