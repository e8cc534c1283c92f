"""Experts that do not fit the devices of a mesh: whole layers pass through slots, of which each
device fills its part.

Legend: N devices, S experts of a layer on a device, K ring slots.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmoe.memory.ring import Ring
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.placed_experts import Arrays, MeshExperts, put_record
from jmoe.offload.policies import ResidencyStats
from jmoe.offload.slots import Fields, NamedArrays, as_array, as_weights, slot_memory, stored_dtype
from jmoe.planning.placement import EMPTY
from kernels_pallas.grouped_mlp import MLPWeights


class HostLayerSlots:
    """S slots of a device of the CPU backend: memory that XLA reads as arrays [S, ...], and that
    a copy fills.
    """

    def __init__(self, num_slots: int, fields: Fields, device: jax.Device) -> None:
        whole = {name: ((num_slots, *shape), dtype) for name, (shape, dtype) in fields.items()}
        self._memory = {name: slot_memory(shape, dtype) for name, (shape, dtype) in whole.items()}
        self.arrays = {name: as_array(memory, device) for name, memory in self._memory.items()}

    def write(self, slot: int, record: NamedArrays) -> None:
        """Copy one expert's weights into a slot. No program that reads the slots may be running."""
        for name, memory in self._memory.items():
            np.copyto(memory[slot], record[name])


class DeviceLayerSlots:
    """S slots in an accelerator's memory, [S, ...]; a write is a transfer and an update in
    place.
    """

    def __init__(self, num_slots: int, fields: Fields, device: jax.Device) -> None:
        self._device = device
        self.arrays: Arrays = {
            name: jnp.zeros((num_slots, *shape), stored_dtype(dtype), device=device)
            for name, (shape, dtype) in fields.items()
        }

    def write(self, slot: int, record: NamedArrays) -> None:
        """Copy one expert's weights into a slot, after programs that read it: a device runs them
        in order.
        """
        values = {name: record[name] for name in self.arrays}
        sent = {
            name: jax.device_put(v.view(stored_dtype(v.dtype)), self._device)
            for name, v in values.items()
        }
        jax.block_until_ready(sent)  # the record's memory is used again when this returns
        self.arrays = put_record(self.arrays, sent, np.int32(slot))


class MeshRing(MeshExperts):
    """K ring slots, each of S expert slots on every device: whole layers pass through them in
    order.

    Every process loads what its devices have of a layer by the even placement, from host memory or
    NVMe of its own, so that N devices stream over N links at once; processes need not agree when.
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
        make: Any = HostLayerSlots if self._devices[0].platform == "cpu" else DeviceLayerSlots
        self._slots = [
            [make(slots_per_device, fields, self._devices[n]) for n in self._mine]
            for _ in range(ring_slots)
        ]
        self._weights: list[Arrays] = [{}] * ring_slots
        self._slot_of: dict[int, int] = {}  # of the layer acquired
        self.ring = Ring(range(index.num_layers), ring_slots, self._load)

    def acquire(self, layer: int) -> None:
        next_layer, slot = self.ring.acquire()
        assert next_layer == layer, (next_layer, layer)
        self._slot_of = {layer: slot}

    def weights(self, layer: int) -> MLPWeights:
        return as_weights(self._weights[self._slot_of[layer]])

    def release(self) -> None:
        self.ring.release()

    def stats(self) -> ResidencyStats:
        ring = self.ring.stats()
        return ResidencyStats("ring", ring.waits, ring.waited_s)

    def occupancy(self) -> list[tuple[int, int] | None]:
        experts = self.placements[0].physical_to_logical[self._mine].ravel().tolist()
        return [
            None if layer is None or expert == EMPTY else (layer, expert)
            for layer in self.ring.layers
            for expert in experts
        ]

    def close(self) -> None:
        self.ring.close()

    def _load(self, layer: int, ring_slot: int) -> int:
        for ahead in (layer, (layer + 1) % self.index.num_layers):
            self._store.prefetch([record for _, _, record in self._places(ahead)])
        places = self._places(layer)
        for device, slot, number in places:
            with self._store.get(number) as record:
                self._slots[ring_slot][device].write(slot, record)
        self._weights[ring_slot] = self._joined([slots.arrays for slots in self._slots[ring_slot]])
        return len(places) * self._store.layout.data_bytes

    def _places(self, layer: int) -> list[tuple[int, int, int]]:
        """Return (which of this process's devices, its slot, the record) of every expert that
        they have of a layer.
        """
        return [
            (device, slot, int(self.index.records(layer, expert)))
            for device, n in enumerate(self._mine)
            for slot, expert in enumerate(self.placements[layer].physical_to_logical[n].tolist())
            if expert != EMPTY
        ]
