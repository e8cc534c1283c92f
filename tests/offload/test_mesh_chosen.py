"""Chosen experts come to the devices that own them, into slots of several layers."""

import contextlib
import threading
from typing import Any

import jax
import numpy as np
import pytest

from jmoe.memory import pinned
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords
from jmoe.memory.tiered_store import TieredStore
from jmoe.mesh import expert_mesh
from jmoe.offload.mesh_chosen import MeshChosenExperts
from jmoe.offload.slots import DeviceSlots
from jmoe.planning.placement import EMPTY
from tests.offload.test_mesh_ring import FIELDS, INDEX, fill, open_store

NONE = INDEX.num_experts  # padding


def check_operands(chosen: MeshChosenExperts, layer: int, experts: list[int]) -> None:
    """Assert that the slots of the table hold these experts of the layer."""
    where = chosen.placements[layer].physical_to_logical.ravel()
    rows = chosen.placements[layer].slots_per_device
    with chosen.locked_operands(layer) as (weights, table_NS):
        assert table_NS is not None and table_NS.shape == (chosen.mesh.size * rows,)
        table, held = np.asarray(table_NS), np.asarray(weights["w_up"], np.float32)
        assert [s.data.shape[0] for s in weights["w_up"].addressable_shards] == (
            [chosen.num_slots] * chosen.mesh.size
        )
        for place in np.flatnonzero(np.isin(where, experts) & (where != EMPTY)):
            slot = place // rows * chosen.num_slots + table[place]
            assert (held[slot] == INDEX.record_numbers(layer, where[place])).all()


@pytest.mark.parametrize("pins", [False, True])
def test_chosen_experts_come_to_their_devices(pins: bool) -> None:
    """Five experts on four devices, three slots for six experts of three layers on the first two;
    choices of three rounds.
    """
    rng, mesh = np.random.default_rng(0), expert_mesh(4)
    store = open_store(mesh, pins=pins)
    with store, contextlib.closing(MeshChosenExperts(mesh, INDEX, FIELDS, 3, store)) as chosen:
        assert chosen.num_bytes == 3 * (2 * 6 * 4 + 3 * 2 * 2)
        for _ in range(3):
            chosen.begin_step(whole_layers=False)
            for layer in range(3):
                choices = rng.integers(0, NONE + 1, (4, 2))
                chosen.acquire(layer, choices)
                check_operands(chosen, layer, [n for n in choices.ravel() if n != NONE])
                chosen.release()
        stats = chosen.stats()
        assert stats.policy == "experts" and stats.hits > 0 and stats.misses > 0
        # what was copied is what was missed, by one device each
        assert store.stats().host.transfers == stats.misses
        held = [place for place in chosen.occupancy() if place is not None]
        assert len(set(held)) == len(held) <= 12
        chosen.acquire(0, np.full((4, 2), NONE))  # padding alone needs no expert
        assert store.stats().host.transfers == stats.misses
        chosen.release()


def test_whole_layers_come_while_the_one_before_is_in_use() -> None:
    """Every expert of a layer, and those of the next one before they are asked for."""
    mesh = expert_mesh(4)
    store = open_store(mesh)
    with store, contextlib.closing(MeshChosenExperts(mesh, INDEX, FIELDS, 4, store)) as chosen:
        chosen.begin_step(whole_layers=True)
        for layer in range(3):
            chosen.acquire(layer, np.full((4, 2), NONE))
            check_operands(chosen, layer, list(range(5)))
            if layer < 2:
                assert {(layer + 1, n) for n in range(5)} <= set(chosen.occupancy())
            chosen.release()
        assert chosen.stats().misses == 0  # no choices are counted


def test_all_devices_are_copied_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a device waits until the other devices are written to."""
    all_write, write = threading.Barrier(4), DeviceSlots.write

    def write_together(self: DeviceSlots, slot: int, record: Any) -> None:
        all_write.wait(timeout=60)
        write(self, slot, record)

    monkeypatch.setattr(DeviceSlots, "write", write_together)
    mesh, layout = expert_mesh(4), RecordLayout.from_arrays(FIELDS)
    store = TieredStore(HostRecords.allocate_and_fill(layout, INDEX.num_records, fill))
    with store, contextlib.closing(MeshChosenExperts(mesh, INDEX, FIELDS, 2, store)) as chosen:
        for layer in (0, 1):
            chosen.begin_step(whole_layers=False)
            chosen.acquire(layer, chosen.placements[0].physical_to_logical[:, :1])
            chosen.release()


def test_a_failed_copy_and_too_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a device's thread reaches the step; two experts of a layer need two slots."""
    mesh = expert_mesh(4)
    store = open_store(mesh)
    with pytest.raises(ValueError, match="num_slots = 1: must hold the 2 experts of a layer"):
        MeshChosenExperts(mesh, INDEX, FIELDS, 1, store)
    with store, contextlib.closing(MeshChosenExperts(mesh, INDEX, FIELDS, 2, store)) as chosen:

        def fail(*_: Any) -> None:
            raise OSError("the link is down")

        monkeypatch.setattr(DeviceSlots, "write", fail)
        chosen.begin_step(whole_layers=False)
        with pytest.raises(OSError, match="the link is down"):
            chosen.acquire(0, np.array([[0, 4]]))


def test_too_little_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second device gets none: the log says so, and experts come from ordinary memory."""
    make = pinned.PinnedSlots

    def make_one(num_slots: int, slot_bytes: int, device: jax.Device) -> pinned.PinnedSlots:
        if device != jax.devices()[0]:
            raise RuntimeError("RESOURCE_EXHAUSTED: no room")
        return make(num_slots, slot_bytes, device)

    monkeypatch.setattr(pinned, "PinnedSlots", make_one)
    mesh = expert_mesh(4)
    store = open_store(mesh, pins=True)
    assert "of pinned host memory cannot be had, ordinary memory is used" in caplog.text
    with store, contextlib.closing(MeshChosenExperts(mesh, INDEX, FIELDS, 2, store)) as chosen:
        with store.get(0) as record:
            assert not record.is_pinned
        chosen.begin_step(whole_layers=False)
        chosen.acquire(0, np.arange(5)[None])
        check_operands(chosen, 0, list(range(5)))
        chosen.release()


def test_a_device_without_experts() -> None:
    """Eight devices for five experts: three own none, and run with slots that nothing reads."""
    mesh = expert_mesh(len(jax.devices()))
    store = open_store(mesh)
    with store, contextlib.closing(MeshChosenExperts(mesh, INDEX, FIELDS, 1, store)) as chosen:
        chosen.begin_step(whole_layers=False)
        for layer in range(3):
            chosen.acquire(layer, np.arange(5)[None])
            check_operands(chosen, layer, list(range(5)))
            chosen.release()
