"""The simulation's formulas where their answers are known."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks.comm.simulate import EMBEDDINGS, EXCHANGES, level_seconds, parse, simulate
from jmoe.config.cluster import LinkConfig


def rows(*options: str) -> dict[tuple[str, int], dict[str, Any]]:
    """By (kind, nodes)."""
    a: argparse.Namespace = parse(["--plot", "", *options])
    return {(row["kind"], row["nodes"]): row for row in simulate(a)}


FREE = (
    "--across-latency-us",
    "0",
    "--spine-latency-us",
    "0",
    "--inside-latency-us",
    "0",
    "--message-us",
    "0",
)


def test_a_link() -> None:
    link = LinkConfig(bytes_per_s=1e9, latency_s=1e-3)
    assert level_seconds(link, 1e-4, 2e9, messages=10, collectives=2) == pytest.approx(
        2 + 2e-3 + 1e-3
    )
    assert level_seconds(link, 1e-4, 0, messages=0, collectives=2) == 0.0  # no peers


def test_one_node_sends_nothing_across() -> None:
    for (kind, _), row in rows("--nodes", "1").items():
        assert row["across_bytes"] == 0 and row["inside_bytes"] > 0, kind


def test_dedup_saves_most_where_nodes_are_few_and_nothing_where_they_are_many() -> None:
    found = rows("--nodes", "2", "512")
    saved = {
        nodes: found["dedup", nodes]["across_bytes"] / found["flat", nodes]["across_bytes"]
        for nodes in (2, 512)
    }
    assert saved[2] == pytest.approx(2 / 8, rel=0.02)  # top-8 of 16 experts reaches both of 2 nodes
    assert saved[512] == pytest.approx(1, rel=0.02)
    top_1 = rows("--nodes", "8", "--top-k", "1")
    assert top_1["dedup", 8]["across_bytes"] == pytest.approx(
        top_1["flat", 8]["across_bytes"], rel=0.01
    )


def test_groups_bound_the_nodes_of_a_token() -> None:
    found = rows("--nodes", "8", "64", "256")
    for nodes in (8, 64, 256):
        part = (
            found["dedup, 4 nodes a token", nodes]["across_bytes"]
            / found["flat", nodes]["across_bytes"]
        )
        assert part <= 4 / 8 + 0.01
    assert rows("--nodes", "4")["dedup, 4 nodes a token", 4] == rows("--nodes", "4")["dedup", 4] | {
        "kind": "dedup, 4 nodes a token"
    }


def test_flat_approaches_all_rows_both_ways() -> None:
    row = rows("--nodes", "256")["flat", 256]
    assert row["across_bytes"] == pytest.approx(2 * 4096 * 8 * 2 * 8192, rel=0.01)


def test_columns_approach_two_times_the_activations() -> None:
    """Beside the head, which is whole: of an eighth of it, parameters in bfloat16 and gradient
    in float32 go around.
    """
    row = rows("--nodes", "8")["columns", 8]
    head = 131072 * 8192 * 6 / 8
    assert not row["parallel_head"]
    assert row["across_bytes"] - head * 7 / 8 == pytest.approx(
        7 / 8 * 2 * 4096 * 8192 * 2, rel=0.01
    )


def test_time_without_latency_is_bytes_over_bandwidth() -> None:
    slow = rows("--nodes", "16", *FREE)
    fast = rows("--nodes", "16", "--across-gb-per-s", "1e12", *FREE)
    wide = rows("--nodes", "16", "--across-gb-per-s", "1e12", "--inside-gb-per-s", "1e12", *FREE)
    for kind in (*EXCHANGES[:-1], *EMBEDDINGS):
        row = slow[kind, 16]
        across, inside = row["across_bytes"] / 50e9, row["inside_bytes"] / 450e9
        expected = max(across, inside) if kind == "flat" else across + inside
        assert row["seconds"] == pytest.approx(expected, rel=1e-9)
        assert fast[kind, 16]["seconds"] == pytest.approx(inside, rel=1e-6)
        assert wide[kind, 16]["seconds"] == pytest.approx(0, abs=1e-9)


def test_latency_is_what_an_endless_bandwidth_leaves() -> None:
    found = rows("--nodes", "4", "--across-gb-per-s", "1e12", "--inside-gb-per-s", "1e12")
    assert found["flat", 4]["seconds"] == pytest.approx(3 * 20e-6 + 3 * 24 * 0.5e-6, rel=1e-3)
    assert found["dedup", 4]["seconds"] == pytest.approx(
        4 * 20e-6 + 4 * 3 * 0.5e-6 + 3 * 8e-6 + 3 * 7 * 0.5e-6, rel=1e-3
    )


def test_auto_is_what_takes_least_up_to_1024_nodes() -> None:
    """Dedup with top-8 on few nodes; with top-1 two hops, the more of its messages are small."""
    small = "--hidden-size", "2048", "--top-k", "1", "--nodes"
    for kind, options in (
        ("dedup", ("--nodes", "8")),
        ("flat", ("--nodes", "64")),
        ("flat", (*small, "8", "--tokens", "65536")),
        ("hierarchical", (*small, "64", "--tokens", "4096")),
        ("hierarchical", (*small, "256", "--tokens", "16384")),
        # a flat one's buffers in eights are nearly empty
        ("dedup", ("--top-k", "1", "--nodes", "1024")),
    ):
        by_kind = {
            name: row for (name, _), row in rows(*options).items() if row["what"] == "exchange"
        }
        assert by_kind["auto"]["exchange"] == kind
        assert by_kind["auto"]["seconds"] == by_kind[kind]["seconds"]
        assert by_kind[kind]["seconds"] <= 1.12 * min(
            by_kind[name]["seconds"] for name in EXCHANGES[:3]
        )
