"""Layers pass through the slots of several fake devices, from records whose numbers say which
expert they are of.
"""

import contextlib
import threading
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jmoe.memory.pinned import choose_host_allocator
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords
from jmoe.memory.tiered_store import TieredStore
from jmoe.mesh import expert_mesh
from jmoe.offload import mesh_ring
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.mesh_ring import MeshRing
from jmoe.offload.placed_experts import even_placement, expert_numbers_by_local_device
from jmoe.offload.slot_arrays import DeviceSlotArrays, HostSlotArrays, NamedArrays
from jmoe.planning.placement import EMPTY

FIELDS = {"w_up": ((2, 6), np.dtype(np.float32)), "w_down": ((3, 2), np.dtype(np.uint16))}
INDEX = ExpertIndex(num_layers=3, num_experts=5)


def fill(number: int, views: dict[str, np.ndarray]) -> None:
    views["w_up"][...] = number
    views["w_down"][...] = np.asarray(number, jnp.bfloat16).view(np.uint16)


def open_store(mesh: Mesh, *, pins: bool = False) -> TieredStore:
    """Return all records in host memory, each for one device of the mesh."""
    by_device = expert_numbers_by_local_device(even_placement(INDEX.num_experts, mesh.size), mesh)
    owned = [
        [int(n) for layer in range(3) for n in INDEX.record_numbers(layer, experts)]
        for experts in by_device.values()
    ]
    memory = choose_host_allocator(
        "on" if pins else "off", "pin", list(by_device), list(map(len, owned))
    )
    layout, numbers = RecordLayout.from_arrays(FIELDS), chain.from_iterable(owned)
    return TieredStore(
        HostRecords.allocate_and_fill(layout, INDEX.num_records, fill, numbers, memory.allocate)
    )


@pytest.mark.parametrize(
    ("slots", "pins"),
    [(HostSlotArrays, False), (DeviceSlotArrays, False), (DeviceSlotArrays, True)],
)
@pytest.mark.parametrize("ring_slots", [1, 2])
def test_every_layer_comes_to_its_devices(
    slots: type[HostSlotArrays], pins: bool, ring_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds of three layers; five experts on four devices leave slots empty."""
    monkeypatch.setattr(mesh_ring, "HostSlotArrays", slots)
    mesh = expert_mesh(4)
    store = open_store(mesh, pins=pins)
    with store, store.get(0) as record:
        assert record.is_pinned == pins
    store = open_store(mesh, pins=pins)
    with store, contextlib.closing(MeshRing(mesh, INDEX, FIELDS, ring_slots, store)) as ring:
        assert ring.num_slots == 2 * ring_slots and ring.num_bytes == 2 * ring_slots * (
            2 * 6 * 4 + 3 * 2 * 2
        )
        where = ring.placements[0].physical_to_logical.ravel()
        assert sorted(where[where != EMPTY]) == list(range(5))
        for layer in [*range(3)] * 3:
            ring.acquire(layer)
            weights = ring.layer_weights(layer)
            for values, dtype in (
                (weights["w_up"], jnp.float32),
                (weights["w_down"], jnp.bfloat16),
            ):
                assert (
                    values.dtype == dtype
                    and [s.data.shape[0] for s in values.addressable_shards] == [2] * 4
                )
                held = np.asarray(values, np.float32)
                for slot in np.flatnonzero(where != EMPTY):
                    assert (held[slot] == INDEX.record_numbers(layer, where[slot])).all()
            assert {place for place in ring.occupancy() if place and place[0] == layer} == {
                (layer, expert) for expert in range(5)
            }
            jax.block_until_ready(weights)
            ring.release()
        assert ring.stats().policy == "ring"


def test_all_devices_are_copied_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a device waits until the other devices are written to."""
    all_write = threading.Barrier(4)

    class SlotsThatMeet(HostSlotArrays):
        def write(self, slot: int, record: NamedArrays) -> None:
            all_write.wait(timeout=60)
            super().write(slot, record)

    monkeypatch.setattr(mesh_ring, "HostSlotArrays", SlotsThatMeet)
    index, mesh = ExpertIndex(num_layers=2, num_experts=4), expert_mesh(4)
    layout = RecordLayout.from_arrays(FIELDS)
    store = TieredStore(HostRecords.allocate_and_fill(layout, index.num_records, fill))
    with store, contextlib.closing(MeshRing(mesh, index, FIELDS, 1, store)) as ring:
        for layer in (0, 1):
            ring.acquire(layer)
            ring.release()


def test_a_process_has_the_experts_of_its_devices() -> None:
    """This one has all, each once."""
    mesh = expert_mesh(4)
    by_device = expert_numbers_by_local_device(even_placement(5, 4), mesh)
    assert list(by_device) == list(mesh.devices.flat)
    assert np.concatenate(list(by_device.values())).tolist() == list(range(5))


@pytest.mark.parametrize("as_bits", [False, True])
def test_slots_keep_their_values_while_the_source_is_reused(as_bits: bool) -> None:
    """What was sent does not alias the record's memory, of a CPU's device either."""
    device = jax.devices()[0]
    layout = RecordLayout.from_arrays(FIELDS)
    memory = layout.zeros()
    views = layout.views(memory)
    slots = DeviceSlotArrays(3, FIELDS, device, as_bits=as_bits)
    for slot in range(3):
        fill(slot + 1, views)
        sent = slots.copy_to_device(views)
        memory[:] = 0
        slots.store_in_slot(slot, sent)
    bits = np.uint16 if as_bits else jnp.bfloat16
    assert slots.arrays["w_down"].dtype == bits
    for slot in range(3):
        assert (np.asarray(slots.arrays["w_up"][slot]) == slot + 1).all()
        w_down = np.asarray(slots.arrays["w_down"][slot]).view(jnp.bfloat16)
        assert (w_down == slot + 1).all()
