"""The numbering of experts' records: old checkpoints and packs lean on it."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jmoe.offload.expert_index import ExpertIndex, LocalExperts, SlottedExperts
from tests.model_configs import mesh_of


def test_records_are_numbered_layer_by_layer() -> None:
    index = ExpertIndex(3, 8)
    assert index.num_records == 24
    assert index.record_numbers(2).tolist() == list(range(16, 24))
    assert index.record_numbers(1, [5, 0]).tolist() == [13, 8]
    assert [index.layer_and_expert_of(record) for record in (0, 7, 13)] == [(0, 0), (0, 7), (1, 5)]
    assert index.local_records == list(range(24))


def test_a_process_has_records_of_its_own() -> None:
    local = LocalExperts(np.array([2, 3]), (), np.array([3]))
    assert ExpertIndex(3, 4, local).local_records == [2, 3, 6, 7, 10, 11]
    assert ExpertIndex(3, 4, local).saved_records == [3, 7, 11]
    everyone = LocalExperts.from_mesh(mesh_of(1, 2, 2), 8)
    assert (everyone.experts.tolist(), everyone.max_experts_per_device) == (list(range(8)), 2)
    parts = everyone.split_by_shard({"w": np.arange(8)})
    assert [part["w"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_replicas_of_a_process_have_the_same_experts() -> None:
    mesh = mesh_of(2, 2, 2)
    both = LocalExperts.from_mesh(mesh, 8)
    assert both.experts.tolist() == both.saved.tolist() == list(range(8))
    assert both.devices == tuple(zip(*mesh.devices.reshape(2, 4).tolist(), strict=True))


@pytest.mark.parametrize(
    ("shape", "processes", "own"),
    [
        ((2, 1, 2), [0, 0, 1, 1], [range(8), range(8)]),
        ((2, 1, 2), [0, 1, 2, 3], [range(4), range(4, 8), range(4), range(4, 8)]),
        ((4, 1, 2), [0, 0, 0, 0, 1, 1, 2, 2], [range(8)] * 3),
        ((2, 1, 4), [0, 0, 0, 1, 1, 1, 2, 2], [range(6), [0, 1, 2, 3, 6, 7], range(4, 8)]),
    ],
)
def test_processes_with_the_same_experts_save_them_in_turn(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], processes: list[int], own: list[Any]
) -> None:
    devices: Any = [SimpleNamespace(process_index=number) for number in processes]
    mesh: Any = SimpleNamespace(
        devices=np.array(devices).reshape(shape), shape={"replica": 1, "data": shape[0]}
    )
    saved = []
    for number, experts in enumerate(own):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        local = LocalExperts.from_mesh(mesh, 8)
        assert local.experts.tolist() == list(experts)
        assert local.saved.size > 0 and set(local.saved) <= set(experts)
        assert sum(map(len, local.devices)) == processes.count(number)
        saved += local.saved.tolist()
    assert sorted(saved) == list(range(8))


def test_experts_in_slots_lie_on_the_devices_that_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers of four experts on three devices: the first one's is everywhere, and saved by
    one process.
    """
    slot_RNE = np.array(
        [
            [[0, 1, -1, -1], [0, 1, -1, -1]],
            [[0, -1, 1, -1], [1, 0, -1, -1]],
            [[0, -1, -1, 1], [-1, -1, 0, 1]],
        ]
    )
    devices: Any = [SimpleNamespace(process_index=number) for number in (0, 0, 1)]
    mesh: Any = SimpleNamespace(devices=np.array(devices))
    saved = []
    for process, own in enumerate(([[0, 1, 2], [0, 1]], [[0, 3], [2, 3]])):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        local = SlottedExperts.from_slot_table(mesh, slot_RNE, 2)
        assert local.max_experts_per_device == 2 and local.all_devices == (
            (devices[2],) if process else tuple(devices[:2])
        )
        assert [local.local_experts_in_layer(layer).tolist() for layer in (0, 1)] == own
        index = ExpertIndex(2, 4, local)
        assert index.local_records == [*own[0], *(4 + expert for expert in own[1])]
        saved += index.saved_records
    assert sorted(saved) == list(range(8))
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    local = SlottedExperts.from_slot_table(mesh, slot_RNE, 2)
    assert [local.replica_rows(1, expert) for expert in (0, 1)] == [
        [(0, 0), (1, 1)],
        [(0, 1), (1, 0)],
    ]
    rows = local.expert_rows_by_device(0, {"w": np.array([[5], [6], [7]])})
    assert [row["w"].tolist() for row in rows] == [[[5], [6]], [[5], [7]]]
