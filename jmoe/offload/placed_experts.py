"""Experts of inference spread over several devices: each device has expert slots per layer, filled
as a placement says.

`residency.open_placed_experts` makes these objects; the mesh runner reads their weights, and
`expert_placer` changes their placements.

Legend:
  E  experts of a layer
  N  devices
  S  expert slots of a device for a layer
  C  rows after which an expert's replicas repeat (`planning/placement.py`)
"""

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.mesh import BATCH, REPLICATED, put_sharded
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.policies import ExpertResidency, ResidencyStats
from jmoe.offload.slot_arrays import (
    Arrays,
    DeviceSlotArrays,
    Fields,
    NamedArrays,
)
from jmoe.planning.placement import (
    EMPTY,
    Placement,
    PlacementChanges,
    place_experts,
    placement_changes,
    slot_rows_and_sizes,
)

ReadRecord = Callable[[int], AbstractContextManager[NamedArrays]]


class MeshExperts(ExpertResidency):
    """Every layer's experts on the devices of a mesh, at first evenly, one replica each.

    copied_experts, copied_bytes, copied_s: copies of this process since the start. copies_N: copies
    to each device, by any process. follows_steps: whether `begin_step` has an effect.
    """

    follows_steps = False

    def __init__(
        self, mesh: Mesh, index: ExpertIndex, fields: Fields, slots_per_device: int
    ) -> None:
        self.mesh, self.index, self._fields = mesh, index, fields
        self._devices = list(mesh.devices.flat)
        self._mine = [
            n
            for n, device in enumerate(self._devices)
            if device.process_index == jax.process_index()
        ]
        self.process_of_N = np.asarray([device.process_index for device in self._devices])
        self.copied_experts, self.copied_bytes, self.copied_s = 0, 0, 0.0  # by this process
        self.copies_N = np.zeros(mesh.size, np.int64)  # to every device, by any process
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in fields.values()]
        self.expert_bytes = sum(sizes)
        even = even_placement(index.num_experts, mesh.size, slots_per_device)
        self.placements = [even] * index.num_layers
        self._replica_of_row = [
            put_sharded(even.replica_of_row, mesh, REPLICATED)
        ] * index.num_layers

    @abstractmethod
    def layer_weights(self, layer: int) -> Arrays:
        """Return the arrays of a layer's expert slots, [N S, ...] by name, sharded over the
        devices.
        """

    def replica_of_row(self, layer: int) -> jax.Array:
        """Return int32 [E, C], on every device: which replica of an expert takes each of its rows,
        by the layer's placement.
        """
        return self._replica_of_row[layer]

    @contextlib.contextmanager
    def locked_operands(self, layer: int) -> Iterator[tuple[Arrays, jax.Array | None]]:
        """Yield (weights, table) of an acquired layer, as `experts_on_mesh` takes them; until the
        block ends, no copy replaces them.
        """
        yield self.layer_weights(layer), None

    def acquire(self, layer: int, chosen_TK: np.ndarray | None = None) -> None:
        """Wait until a layer's experts are on this process's devices; layers must come in order.

        chosen_TK: the choices of all devices' tokens, E for no expert; None for all experts.
        """
        return

    def release(self) -> None:
        """Release the acquired layer; no program of this process may still read it."""
        return

    def _global_arrays(self, shards: list[Arrays]) -> Arrays:
        """Return global arrays [N S, ...] of this process's shards [S, ...], in device order."""
        where = NamedSharding(self.mesh, BATCH)

        def join_shards(parts: list[jax.Array]) -> jax.Array:
            shape = (self.mesh.size * parts[0].shape[0], *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, where, parts)

        return {name: join_shards([shard[name] for shard in shards]) for name in self._fields}


class PlacedExperts(MeshExperts):
    """Every layer's experts stay on the devices of a mesh until a new placement moves them.

    Each process fills its own devices' slots. A device runs its programs in order, so a write does
    not disturb earlier programs that read the slot.
    """

    def __init__(
        self,
        mesh: Mesh,
        index: ExpertIndex,
        fields: Fields,
        slots_per_device: int,
        read: ReadRecord,
        placements: Sequence[Placement] | None = None,
    ) -> None:
        """Fill the slots.

        read: a function that opens an expert's record by its number. placements: one per layer,
        permanent; layers on disjoint devices may then share a row of slots. None means even
        placement, with a row of `slots_per_device` slots for each layer.
        """
        super().__init__(mesh, index, fields, slots_per_device)
        self._read = read
        first = list(placements or self.placements)
        # layer -> row of slots; row -> slots per device
        self._rows, slots = list(range(index.num_layers)), [slots_per_device] * index.num_layers
        if placements is not None:
            self._rows, slots = slot_rows_and_sizes(placements)
        self.num_slots = sum(slots)
        self.num_bytes = self.num_slots * self.expert_bytes
        self._held = [np.full((mesh.size, one.slots_per_device), EMPTY, np.int32) for one in first]
        self._slots = [
            [DeviceSlotArrays(count, fields, self._devices[n]) for n in self._mine]
            for count in slots
        ]
        self._weights = [self._global_arrays([one.arrays for one in row]) for row in self._slots]
        for layer, placement in enumerate(first):
            self.apply_copies(layer, self.copies_for_placement(layer, placement))
        self.copied_experts, self.copied_bytes, self.copied_s = 0, 0, 0.0
        self.copies_N[:] = 0

    def layer_weights(self, layer: int) -> Arrays:
        return self._weights[self._rows[layer]]

    def copies_for_placement(self, layer: int, placement: Placement) -> PlacementChanges:
        """Return the copies that a new placement of a layer needs."""
        return placement_changes(self._held[layer], placement)

    def apply_copies(self, layer: int, changed: PlacementChanges) -> None:
        """Copy new experts to this process's devices, and route the layer's next tokens by the new
        placement.
        """
        begun = time.perf_counter()
        held, row = self._held[layer].copy(), self._rows[layer]
        slots = dict(zip(self._mine, self._slots[row], strict=True))
        for device, slot, expert in changed.fills:
            held[device, slot] = expert
            self.copies_N[device] += 1
            if device in slots:
                self._copy_into_slot(
                    slots[device], slot, self.index.record_numbers(layer, expert).item()
                )
                self.copied_experts += 1
                self.copied_bytes += self.expert_bytes
        if changed.fills:
            self._weights[row] = self._global_arrays([one.arrays for one in self._slots[row]])
        if changed.placement.replica_of_row is not self.placements[layer].replica_of_row:
            self._replica_of_row[layer] = put_sharded(
                changed.placement.replica_of_row, self.mesh, REPLICATED
            )
        self._held[layer], self.placements[layer] = held, changed.placement
        self.copied_s += time.perf_counter() - begun

    def recopy_one_expert(self) -> None:
        """Copy the first expert of this process's first device once more; callers time this."""
        row = self._slots[0]
        self._copy_into_slot(
            row[0], 0, self.index.record_numbers(0, self._held[0][self._mine[0], 0]).item()
        )
        jax.block_until_ready(row[0].arrays)
        self._weights[0] = self._global_arrays([one.arrays for one in row])

    def stats(self) -> ResidencyStats:
        return ResidencyStats("resident")

    def occupancy(self) -> list[tuple[int, int] | None]:
        held: list[tuple[int, int] | None] = []
        for row in range(len(self._weights)):
            layers = [layer for layer, other in enumerate(self._rows) if other == row]
            slots: list[tuple[int, int] | None] = [None] * self._held[layers[0]].size
            for layer in layers:
                for slot in np.flatnonzero(self._held[layer] != EMPTY):
                    slots[slot] = (layer, int(self._held[layer].flat[slot]))
            held += slots
        return held

    def _copy_into_slot(self, slots: DeviceSlotArrays, slot: int, record: int) -> None:
        with self._read(record) as arrays:
            slots.write(slot, arrays)


def expert_numbers_by_local_device(
    placement: Placement, mesh: Mesh
) -> dict[jax.Device, np.ndarray]:
    """Return the numbers of the experts on each of this process's devices, in mesh order."""
    return {
        device: experts[experts != EMPTY]
        for device, experts in zip(mesh.devices.flat, placement.physical_to_logical, strict=True)
        if device.process_index == jax.process_index()
    }


def even_placement(
    num_experts: int, num_devices: int, slots_per_device: int | None = None
) -> Placement:
    """Return a placement with one replica of each expert, in order.

    slots_per_device: None means as few as hold all experts.
    """
    slots_per_device = slots_per_device or -(-num_experts // num_devices)
    packed = {"slots_per_device": slots_per_device, "max_packed": slots_per_device}
    return place_experts(np.ones(num_experts), num_devices, policy="even", **packed)
