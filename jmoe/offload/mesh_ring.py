"""Serves experts that do not fit the devices of a mesh: whole layers stream through ring slots.

Each device holds its share of the layer's experts. `residency.open_placed_experts` makes the ring;
the mesh runner acquires and releases its layers.

Legend:
  N  devices
  S  experts of a layer on a device
  K  ring slots
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from jax.sharding import Mesh

from jmoe.memory.ring import Ring
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.placed_experts import MeshExperts
from jmoe.offload.policies import ResidencyStats
from jmoe.offload.slot_arrays import (
    Arrays,
    DeviceSlotArrays,
    Fields,
    HostSlotArrays,
)
from jmoe.planning.placement import EMPTY


class MeshRing(MeshExperts):
    """K ring slots, each of S expert slots on every device: whole layers pass through them in
    order.

    Each process loads its own devices' experts, placed evenly, from its own host memory or NVMe.
    Each device has a thread that copies to it, so that N devices load over N links at once.
    Processes load without synchronization.
    """

    streams = True

    def __init__(
        self, mesh: Mesh, index: ExpertIndex, fields: Fields, ring_slots: int, store: TieredStore
    ) -> None:
        slots_per_device = -(-index.num_experts // mesh.size)
        super().__init__(mesh, index, fields, slots_per_device)
        self._store = store
        self.num_slots = ring_slots * slots_per_device
        self.num_bytes = self.num_slots * self.expert_bytes
        on_cpu = self._devices[0].platform == "cpu"
        make: type[HostSlotArrays | DeviceSlotArrays] = (
            HostSlotArrays if on_cpu else DeviceSlotArrays
        )
        self._slots = [
            [make(slots_per_device, fields, self._devices[n]) for n in self._mine]
            for _ in range(ring_slots)
        ]
        self._weights: list[Arrays] = [{}] * ring_slots
        self._slot_of: dict[int, int] = {}  # only the acquired layer
        self._threads = ThreadPoolExecutor(len(self._mine), thread_name_prefix="copy to device")
        self.ring = Ring(range(index.num_layers), ring_slots, self._load_local_experts)

    def acquire(self, layer: int, chosen_TK: np.ndarray | None = None) -> None:
        next_layer, slot = self.ring.acquire()
        assert next_layer == layer, (next_layer, layer)
        self._slot_of = {layer: slot}

    def layer_weights(self, layer: int) -> Arrays:
        return self._weights[self._slot_of[layer]]

    def release(self) -> None:
        self.ring.release()

    def stats(self) -> ResidencyStats:
        ring = self.ring.stats()
        return ResidencyStats("ring", ring.waits, ring.waited_s)

    def occupancy(self) -> list[tuple[int, int] | None]:
        experts = self.placements[0].physical_to_logical[self._mine].ravel().tolist()
        return [
            None if layer is None or expert == EMPTY else (layer, expert)
            for layer in self.ring.layer_by_slot
            for expert in experts
        ]

    def close(self) -> None:
        self.ring.close()
        self._threads.shutdown()

    def _load_local_experts(self, layer: int, ring_slot: int) -> int:
        """Copy the layer's experts of this process's devices into a ring slot; return the bytes
        copied.
        """
        for ahead in (layer, (layer + 1) % self.index.num_layers):
            self._store.prefetch([record for _, _, record in self._local_expert_slots(ahead)])
        places = self._local_expert_slots(layer)
        places_by_device = [
            [place for place in places if place[0] == device] for device in range(len(self._mine))
        ]
        # list() raises the error of a thread
        list(self._threads.map(partial(self._load_one_device, ring_slot), places_by_device))
        self._weights[ring_slot] = self._global_arrays(
            [slots.arrays for slots in self._slots[ring_slot]]
        )
        return len(places) * self._store.layout.data_bytes

    def _load_one_device(self, ring_slot: int, expert_slots: list[tuple[int, int, int]]) -> None:
        """Copy experts into one device's part of a ring slot.

        expert_slots: (device, slot, record number), as of `_local_expert_slots`.
        """
        for device, slot, number in expert_slots:
            with self._store.get(number) as record:
                self._slots[ring_slot][device].write(slot, record)

    def _local_expert_slots(self, layer: int) -> list[tuple[int, int, int]]:
        """Return (device, slot, record number) of each of the layer's experts on this process's
        devices.

        device: position among this process's devices.
        """
        return [
            (device, slot, int(self.index.record_numbers(layer, expert)))
            for device, n in enumerate(self._mine)
            for slot, expert in enumerate(self.placements[layer].physical_to_logical[n].tolist())
            if expert != EMPTY
        ]
