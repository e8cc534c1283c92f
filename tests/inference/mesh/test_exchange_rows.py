"""Rows of the buffers in which an engine's devices exchange tokens, counted one by one."""

import dataclasses

import numpy as np
import pytest

from jmoe.config.engine import EngineMesh
from jmoe.inference.mesh.exchange_rows import (
    buffer_row_counts,
    choose_exchange,
    dedup_row_counts,
)
from jmoe.planning.placement import placement_from_slots
from tests import model_configs


def test_buffers_hold_the_largest_part_and_little_more() -> None:
    """What each of two devices sends to each: sizes are those that padding compiles, one where
    rows are few.
    """
    even = placement_from_slots(np.arange(4).reshape(2, 2), np.ones(4))
    choices = {
        "none": np.full((128, 2), 4),
        "even": np.tile([0, 2], (128, 1)),
        "all to one": np.tile([0, 1], (128, 1)),
    }
    # at most 92 of 128 to one device
    uneven = np.concatenate([choices["even"][:100], choices["all to one"][:28]])
    for choice, padded, ragged in [
        (choices["none"], [80, 96, 128], [160, 192, 256]),
        (choices["even"], [80], [160]),
        (uneven, [96], [160]),  # the busier device gets 156 in all
        (choices["all to one"], [128], [256]),
        (choices["none"][:32], [32], [64]),
    ]:
        assert list(buffer_row_counts(even, choice, ragged=False)) == padded
        assert list(buffer_row_counts(even, choice, ragged=True)) == ragged


def test_a_token_crosses_to_a_node_once_and_is_forwarded_to_each_device() -> None:
    """Four devices of two experts, two of them a node; counted token by token."""
    placement = placement_from_slots(np.arange(8).reshape(4, 2), np.ones(8))
    rng = np.random.default_rng(0)
    idx_TK = np.argsort(rng.random((256, 8)), axis=1)[:, :3]
    idx_TK[rng.random(256) < 0.1] = 8  # padding
    across, inside = np.zeros((4, 2), int), np.zeros((2, 4), int)
    for token, experts in enumerate(idx_TK):
        source = token // 64
        devices = [expert // 2 for expert in experts if expert < 8]
        for node in {device // 2 for device in devices}:
            across[source, node] += 1
        for device in devices:
            inside[source % 2, device] += 1
    ((rows, device_rows),) = dedup_row_counts(placement, idx_TK, 2)
    sizes = dedup_row_counts(placement, np.full_like(idx_TK, 8), 2)
    assert (rows, device_rows) in sizes and sizes[-1] == (64, 2 * 64 * 3)
    assert rows >= across.max() and device_rows >= inside.max()
    smaller = [s for s in sizes if s < (rows, device_rows)]
    assert all(s[0] < across.max() or s[1] < inside.max() for s in smaller)
    few = np.full((16, 3), 8)
    assert dedup_row_counts(placement, few, 2) == [(4, 24)]


def test_auto_takes_dedup_if_it_saves_rows() -> None:
    """Of a token's two choices some are on one node; one choice crosses once anyway."""
    config = model_configs.MODEL  # one choice of eight experts
    assert choose_exchange(config, EngineMesh(devices=4), 2) == "flat"
    two = dataclasses.replace(config, num_experts_per_tok=2)
    assert choose_exchange(two, EngineMesh(devices=4), 2) == "dedup"
    assert choose_exchange(two, EngineMesh(devices=4), 1) == "flat"
    assert choose_exchange(two, EngineMesh(devices=4, nodes=2, exchange="flat"), 2) == "flat"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 4, "nodes": 3}, "nodes = 3: must divide devices = 4"),
        ({"devices": 4, "nodes": 1, "exchange": "dedup"}, "exchange = 'dedup': needs several"),
        ({"nodes": 1}, "mesh.nodes = 1: must be 0 with mesh.devices = 1"),
    ],
)
def test_bad_nodes_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineMesh(**options)  # type: ignore[arg-type]
