"""Which partition of the embedding is chosen, and what its formula says is sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jmoe.planning.embedding import (
    EmbeddingPlan,
    EmbeddingSizes,
    embedding_traffic,
    plan_embedding,
    rows_per_round,
)

V, H, T = 50304, 1024, 256
GPT = EmbeddingSizes(V, H, tied=True, num_tokens=T, activation_bytes=2, sharded=False)


def plan(
    kind: Any = "auto", vocabulary: EmbeddingSizes = GPT, nodes: int = 2, inside: int = 2
) -> EmbeddingPlan:
    return plan_embedding(kind, vocabulary, num_nodes=nodes, devices_per_node=inside)


def changed(**values: Any) -> EmbeddingSizes:
    return dataclasses.replace(GPT, **values)


def test_one_device_keeps_everything() -> None:
    for kind in ("auto", "columns", "rows", "replicated"):
        found = plan(kind, nodes=1, inside=1)
        assert (found.kind, found.parallel_head) == ("replicated", False)
    assert embedding_traffic(plan(nodes=1, inside=1), GPT) == embedding_traffic(
        plan("replicated", nodes=1, inside=1), GPT
    )
    assert embedding_traffic(plan(nodes=1, inside=1), GPT).across_bytes == 0


def test_auto_is_columns_with_a_parallel_head_where_tokens_are_few() -> None:
    found = plan("auto", changed(tied=False))
    assert (found.kind, found.parallel_head) == ("columns", True)
    assert (
        found.reason
        == "a device sends 1.6 MB to other nodes in a pass with columns, 206.0 MB replicated"
    )
    assert plan("auto", changed(tied=False), nodes=1, inside=4).kind == "columns"


def test_auto_is_rows_for_a_tied_table() -> None:
    """Its shards are parts of the vocabulary as they lie; columns would be turned round in every
    pass.
    """
    found = plan()
    assert (found.kind, found.parallel_head) == ("rows", True)
    assert (
        found.reason
        == "a device sends 1.6 MB to other nodes in a pass with rows, 103.0 MB replicated"
    )
    assert (
        10 * embedding_traffic(found, GPT).across_bytes
        < embedding_traffic(plan("columns"), GPT).across_bytes
    )


def test_a_head_is_whole_where_tokens_are_many() -> None:
    """Hidden states of all tokens against the table: the turn is near as many tokens as the
    vocabulary has entries.
    """
    few, many = changed(tied=False, num_tokens=V // 16), changed(tied=False, num_tokens=V)
    assert plan("columns", few).parallel_head and plan("rows", few).parallel_head
    assert not plan("columns", many).parallel_head and not plan("rows", many).parallel_head


def test_auto_is_replicated_where_a_device_has_more_tokens_than_the_vocabulary_is_large() -> None:
    small = EmbeddingSizes(256, 64, tied=True, num_tokens=65536, activation_bytes=2, sharded=True)
    assert plan("auto", small).kind == "replicated"
    assert plan("columns", small).kind == "columns"  # whoever asks for it gets it


def test_what_does_not_divide() -> None:
    found = plan("auto", changed(vocab_size=50257))
    assert found.kind == "replicated"
    assert found.reason == "vocab_size = 50257 is no multiple of 4 devices"
    with pytest.raises(
        ValueError,
        match="vocab_size = 50257: must be a multiple of the 4 devices for embedding = 'rows'",
    ):
        plan("rows", changed(vocab_size=50257))
    with pytest.raises(ValueError, match="hidden_size = 1022: must be a multiple of the 4 devices"):
        plan("columns", changed(hidden_size=1022))
    assert plan("rows", changed(hidden_size=1022)).kind == "rows"
    assert plan("auto", changed(hidden_size=1022, tied=False)).kind == "rows"
    with pytest.raises(
        ValueError, match="embedding = 'diagonals': must be one of auto, replicated, columns, rows"
    ):
        plan("diagonals")


def test_bytes_of_columns() -> None:
    """Ids and two times H / R activations of every token to each device; the parallel head's
    hidden states and more.
    """
    for tied in (True, False):
        vocabulary = changed(tied=tied)
        found = dataclasses.replace(plan("columns", vocabulary), parallel_head=True)
        block = T * 4 + 2 * T * H // 4 * 2 + (2 * V * H * 2 // 16 if tied else 0)
        row = 2 * H * 2 + 8 + 4 * 12
        sent = embedding_traffic(found, vocabulary)
        assert (sent.across_bytes, sent.inside_bytes) == (2 * block + T * row, block + 2 * T * row)


def test_bytes_of_rows() -> None:
    found = dataclasses.replace(plan("rows"), parallel_head=True)
    block, row = 2 * 32 * (4 + 2 * H * 2), 2 * H * 2 + 8 + 4 * 12
    sent = embedding_traffic(found, GPT)
    assert rows_per_round(T, 4) == 32
    assert (sent.across_bytes, sent.inside_bytes) == (2 * block + T * row, block + 2 * T * row)
    assert embedding_traffic(found, GPT, rounds=1).across_bytes == block + T * row


def test_bytes_of_whole_parameters() -> None:
    """A ring over R devices sends 2 (R - 1) / R of a sum; across P nodes a device sends that for
    its Q-th of it.
    """
    table = V * H * 4
    sent = embedding_traffic(plan("replicated"), GPT)
    assert (sent.across_bytes, sent.inside_bytes) == (2 * table // 2 // 2, 2 * table // 2)
    assert (
        embedding_traffic(plan("replicated"), changed(tied=False)).across_bytes
        == 2 * sent.across_bytes
    )
    sharded = embedding_traffic(
        plan("replicated"), changed(tied=False, sharded=True)
    ).across_bytes  # the head in bfloat16
    assert sharded == sent.across_bytes * 7 // 4
    inside = embedding_traffic(plan("replicated", nodes=1, inside=4), GPT)
    assert (inside.across_bytes, inside.inside_bytes) == (0, 2 * table * 3 // 4)
