"""Numbers the experts' records, and tells which experts a process and its devices have.

Training and inference share this numbering: the record of expert `e` in MoE layer `n` is `n * E +
e`.

Legend:
  N  MoE layers
  E  experts of a layer
  P  entries of `LocalExperts.experts`
  R  devices of this process
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike, NDArray

from jmoe.config import ModelConfig
from jmoe.mesh import num_expert_copies


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """The experts of this process, the same in every layer, in equal shards of consecutive experts.

    experts: int64 [P], expert numbers, shard by shard. devices: for each shard, this process's
    devices that hold it; several if they are replicas of each other. saved: the experts whose
    records this process writes to a checkpoint; processes with the same experts split the writing.
    """

    experts: NDArray[np.int64]
    devices: tuple[tuple[jax.Device, ...], ...]
    saved: NDArray[np.int64]

    @classmethod
    def from_mesh(cls, mesh: Mesh, num_experts: int) -> Self:
        """Return the experts of this process on a mesh.

        Devices that differ only in their position on the data axis hold the same experts.
        """
        process, experts, devices, saved = jax.process_index(), [], [], []
        replicas_by_shard = mesh.devices.reshape(num_expert_copies(mesh), -1).T.tolist()
        for shard, replicas in enumerate(replicas_by_shard):
            mine = tuple(device for device in replicas if device.process_index == process)
            if not mine:
                continue
            devices.append(mine)
            numbers = np.split(np.arange(num_experts), len(replicas_by_shard))[shard]
            experts.append(numbers)
            processes = sorted({device.process_index for device in replicas})
            # processes with the same experts split the saving evenly
            saved.append(numbers[numbers % len(processes) == processes.index(process)])
        return cls(np.concatenate(experts), tuple(devices), np.concatenate(saved))

    @property
    def max_experts_per_device(self) -> int:
        """Return the number of experts in each shard, which every device of the shard holds."""
        return self.experts.size // len(self.devices)

    @property
    def all_devices(self) -> tuple[jax.Device, ...]:
        """Return this process's devices, shard by shard."""
        return tuple(device for replicas in self.devices for device in replicas)

    def local_mask(self, layer: int) -> NDArray[np.bool_]:
        """Return bool [P]: whether this process has each expert of `experts` in the layer."""
        return np.ones(self.experts.size, np.bool_)

    def local_experts_in_layer(self, layer: int) -> NDArray[np.int64]:
        """Return the numbers of the layer's experts that this process has, ascending."""
        return self.experts[self.local_mask(layer)]

    def saved_experts_in_layer(self, layer: int) -> NDArray[np.int64]:
        """Return the numbers of the layer's experts whose records this process writes to a
        checkpoint.
        """
        return self.saved

    def replica_rows(self, layer: int, position: int) -> list[tuple[int, int]]:
        """Return (position in `all_devices`, row on that device) of every replica of
        `experts[position]`.
        """
        shard, row = divmod(position, self.max_experts_per_device)
        first = sum(map(len, self.devices[:shard]))
        return [(first + replica, row) for replica in range(len(self.devices[shard]))]

    def chosen_fractions(self, layer: int, chosen_P: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return float64, one value a shard: the fraction of the shard's experts that are chosen.

        chosen_P: whether each expert of `experts` is chosen.
        """
        shares: NDArray[np.float64] = chosen_P.reshape(len(self.devices), -1).mean(axis=1)
        return shares

    def expert_rows_by_device(
        self, layer: int, arrays: Mapping[str, np.ndarray]
    ) -> list[dict[str, np.ndarray]]:
        """Return one dict for each device of `all_devices`: the arrays of its experts, by name.

        The arrays are views [experts per device, ...] of `arrays`; replicas share one dict. arrays:
        by name, [experts of this process, ...], in the order of `local_experts_in_layer(layer)`.
        """
        shards = zip(self.split_by_shard(arrays), self.devices, strict=True)
        return [shard for shard, replicas in shards for _ in replicas]

    def split_by_shard(
        self, arrays: Mapping[str, np.ndarray], axis: int = 0
    ) -> list[dict[str, np.ndarray]]:
        """Return arrays of all P experts, by name, split along `axis` into one dict a shard."""
        split = {name: np.split(w, len(self.devices), axis) for name, w in arrays.items()}
        return [{name: ws[d] for name, ws in split.items()} for d in range(len(self.devices))]


@dataclass(frozen=True, eq=False)
class SlottedExperts(LocalExperts):
    """Experts that each device holds in slots, different ones in every layer.

    `experts` lists all E experts of a layer; `local_mask` tells which are local. slot_RNE: the slot
    of each expert on each of this process's devices in each layer, negative if the device does not
    have the expert. saved_NE: whether this process writes the expert's record to a checkpoint.
    num_slots: slots per device and layer.
    """

    slot_RNE: NDArray[np.int32]
    saved_NE: NDArray[np.bool_]
    num_slots: int

    @classmethod
    def from_slot_table(cls, mesh: Mesh, slot_RNE: NDArray[np.int32], num_slots: int) -> Self:
        """Return the experts of this process on a mesh.

        slot_RNE: of all devices of the mesh, in the order of `mesh.devices`.
        """
        process, devices = jax.process_index(), mesh.devices.reshape(-1).tolist()
        processes = np.array([device.process_index for device in devices])
        has_PNE = np.stack(
            [(slot_RNE[processes == p] >= 0).any(axis=0) for p in range(processes.max() + 1)]
        )
        # one of the processes that have an expert saves it; the choice rotates with its number
        turn_NE = np.arange(slot_RNE.shape[2]) % has_PNE.sum(axis=0)
        saved_NE = has_PNE[process] & (np.cumsum(has_PNE, axis=0)[process] - 1 == turn_NE)
        mine = tuple((device,) for device in devices if device.process_index == process)
        everyone = np.arange(slot_RNE.shape[2])
        return cls(everyone, mine, everyone, slot_RNE[processes == process], saved_NE, num_slots)

    @property
    def max_experts_per_device(self) -> int:
        """Return the number of slots of a device for a layer; some may be empty."""
        return self.num_slots

    def local_mask(self, layer: int) -> NDArray[np.bool_]:
        """Return bool [E]: whether some device of this process has the expert in the layer."""
        has_E: NDArray[np.bool_] = np.any(self.slot_RNE[:, layer] >= 0, axis=0)
        return has_E

    def saved_experts_in_layer(self, layer: int) -> NDArray[np.int64]:
        """Return the numbers of the layer's experts whose records this process writes to a
        checkpoint.
        """
        return np.flatnonzero(self.saved_NE[layer])

    def replica_rows(self, layer: int, position: int) -> list[tuple[int, int]]:
        """Return (position in `all_devices`, slot on that device) of every replica of expert
        `position`.
        """
        slots = self.slot_RNE[:, layer, position].tolist()
        return [(device, slot) for device, slot in enumerate(slots) if slot >= 0]

    def chosen_fractions(self, layer: int, chosen_P: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return float64 [R]: the fraction of each device's experts that are chosen, 0 for a device
        without experts.
        """
        has_RE = self.slot_RNE[:, layer] >= 0
        shares: NDArray[np.float64] = (has_RE & chosen_P).sum(axis=1) / np.maximum(
            has_RE.sum(axis=1), 1
        )
        return shares

    def expert_rows_by_device(
        self, layer: int, arrays: Mapping[str, np.ndarray]
    ) -> list[dict[str, np.ndarray]]:
        """Return one dict for each device of `all_devices`: new arrays [num_slots, ...] by name,
        with each expert in its slot and zeros in empty slots.

        arrays: by name, [experts of this process, ...], in the order of
        `local_experts_in_layer(layer)`.
        """
        rows: list[dict[str, np.ndarray]] = [
            {name: np.zeros((self.num_slots, *w.shape[1:]), w.dtype) for name, w in arrays.items()}
            for _ in self.all_devices
        ]
        for place, expert in enumerate(self.local_experts_in_layer(layer).tolist()):
            for device, slot in self.replica_rows(layer, expert):
                for name, w in arrays.items():
                    rows[device][name][slot] = w[place]
        return rows


@dataclass(frozen=True, eq=False)
class ExpertIndex:
    """Numbers the experts' records from 0 to N E - 1, layer by layer.

    local_experts: the experts that this process has; None means all of them.
    """

    num_layers: int
    num_experts: int
    local_experts: LocalExperts | None = None

    @classmethod
    def from_model(cls, model: ModelConfig, local: LocalExperts | None = None) -> Self:
        """Return the index of a model's experts, with every layer that is not dense as an MoE
        layer.
        """
        return cls(len(model.expert_layers), model.num_experts, local)

    @property
    def num_records(self) -> int:
        return self.num_layers * self.num_experts

    def record_numbers(self, layer: int, experts: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the record numbers of a layer's experts; of all E experts if `experts` is None."""
        chosen = np.arange(self.num_experts) if experts is None else np.asarray(experts, np.int64)
        return layer * self.num_experts + chosen

    def layer_and_expert_of(self, record: int) -> tuple[int, int]:
        """Return (MoE layer, expert) of a record number."""
        return divmod(record, self.num_experts)

    @property
    def local_records(self) -> list[int]:
        """Return the record numbers of this process's experts, layer by layer."""
        return self._records_of_all_layers(
            None if self.local_experts is None else self.local_experts.local_experts_in_layer
        )

    @property
    def saved_records(self) -> list[int]:
        """Return the record numbers that this process writes to a checkpoint, layer by layer."""
        return self._records_of_all_layers(
            None if self.local_experts is None else self.local_experts.saved_experts_in_layer
        )

    def _records_of_all_layers(
        self, experts_of: Callable[[int], NDArray[np.int64]] | None
    ) -> list[int]:
        """Return the record numbers, layer by layer, of the experts that `experts_of` returns for a
        layer; of all experts if it is None.
        """
        every = range(self.num_layers)
        records = [
            self.record_numbers(layer, None if experts_of is None else experts_of(layer))
            for layer in every
        ]
        return [int(record) for record in np.concatenate(records)]
