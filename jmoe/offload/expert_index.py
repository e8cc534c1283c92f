"""The one numbering of experts' records, for training and inference alike.

Legend: N layers with experts, E experts of a layer, P of them this process's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike, NDArray

from jmoe.config import ModelConfig
from jmoe.mesh import DATA


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """The experts of each layer that are this process's, in parts of one size, in order.

    devices: of each part, this process's devices that have it: several where they are replicas of
    each other. saved: experts of which a checkpoint has this process's records; other processes
    save the rest of those that they have too.
    """

    experts: NDArray[np.int64]
    devices: tuple[tuple[jax.Device, ...], ...]
    saved: NDArray[np.int64]

    @classmethod
    def from_mesh(cls, mesh: Mesh, num_experts: int) -> Self:
        """Return those of a mesh in whose data axis devices have the same experts."""
        process, experts, devices, saved = jax.process_index(), [], [], []
        replicas_of_parts = mesh.devices.reshape(mesh.shape[DATA], -1).T.tolist()
        for part, replicas in enumerate(replicas_of_parts):
            mine = tuple(device for device in replicas if device.process_index == process)
            if not mine:
                continue
            devices.append(mine)
            numbers = np.split(np.arange(num_experts), len(replicas_of_parts))[part]
            experts.append(numbers)
            processes = sorted({device.process_index for device in replicas})
            # they take turns
            saved.append(numbers[numbers % len(processes) == processes.index(process)])
        return cls(np.concatenate(experts), tuple(devices), np.concatenate(saved))

    @property
    def per_device(self) -> int:
        return self.experts.size // len(self.devices)

    @property
    def all_devices(self) -> tuple[jax.Device, ...]:
        """Return this process's devices, part by part."""
        return tuple(device for replicas in self.devices for device in replicas)

    def has(self, layer: int) -> NDArray[np.bool_]:
        """Return [P], whether the process has each of `experts` in a layer."""
        return np.ones(self.experts.size, np.bool_)

    def of_layer(self, layer: int) -> NDArray[np.int64]:
        """Return the experts of a layer that the process has."""
        return self.experts[self.has(layer)]

    def saved_of(self, layer: int) -> NDArray[np.int64]:
        """Return those of them whose records it saves."""
        return self.saved

    def places(self, layer: int, position: int) -> list[tuple[int, int]]:
        """Return where number `position` of `experts` lies: (number among `all_devices`, row
        there), one at least.
        """
        part, row = divmod(position, self.per_device)
        first = sum(map(len, self.devices[:part]))
        return [(first + replica, row) for replica in range(len(self.devices[part]))]

    def chosen_shares(self, layer: int, chosen_P: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the share of each part's experts of a layer that are chosen."""
        shares: NDArray[np.float64] = chosen_P.reshape(len(self.devices), -1).mean(axis=1)
        return shares

    def arranged(
        self, layer: int, arrays: Mapping[str, NDArray[Any]]
    ) -> list[dict[str, NDArray[Any]]]:
        """Return what each device has of arrays of the layer's experts."""
        parts = zip(self.split(arrays), self.devices, strict=True)
        return [part for part, replicas in parts for _ in replicas]

    def split(
        self, arrays: Mapping[str, NDArray[Any]], axis: int = 0
    ) -> list[dict[str, NDArray[Any]]]:
        """Return each part of arrays of all these experts."""
        parts = {name: np.split(w, len(self.devices), axis) for name, w in arrays.items()}
        return [{name: part[d] for name, part in parts.items()} for d in range(len(self.devices))]


@dataclass(frozen=True, eq=False)
class SlottedExperts(LocalExperts):
    """Experts of which each device has those that it needs, in slots; `experts` are all, which the
    process has not all.

    slot_RNE: of each of this process's devices, in each layer; negative: the device has not the
    expert. saved_NE: those whose records this process saves. num_slots: of a device in a layer.
    """

    slot_RNE: NDArray[np.int32]
    saved_NE: NDArray[np.bool_]
    num_slots: int

    @classmethod
    def on(cls, mesh: Mesh, slot_RNE: NDArray[np.int32], num_slots: int) -> Self:
        """Return those of a mesh of these devices, in the order of their numbers; slot_RNE: of
        all processes'.
        """
        process, devices = jax.process_index(), mesh.devices.reshape(-1).tolist()
        processes = np.array([device.process_index for device in devices])
        has_PNE = np.stack(
            [(slot_RNE[processes == p] >= 0).any(axis=0) for p in range(processes.max() + 1)]
        )
        # processes that have an expert take turns
        turn_NE = np.arange(slot_RNE.shape[2]) % has_PNE.sum(axis=0)
        saved_NE = has_PNE[process] & (np.cumsum(has_PNE, axis=0)[process] - 1 == turn_NE)
        mine = tuple((device,) for device in devices if device.process_index == process)
        everyone = np.arange(slot_RNE.shape[2])
        return cls(everyone, mine, everyone, slot_RNE[processes == process], saved_NE, num_slots)

    @property
    def per_device(self) -> int:
        return self.num_slots

    def has(self, layer: int) -> NDArray[np.bool_]:
        """Return [E], whether a device of the process has the expert in a layer."""
        has_E: NDArray[np.bool_] = np.any(self.slot_RNE[:, layer] >= 0, axis=0)
        return has_E

    def saved_of(self, layer: int) -> NDArray[np.int64]:
        """Return the experts of a layer whose records the process saves."""
        return np.flatnonzero(self.saved_NE[layer])

    def places(self, layer: int, position: int) -> list[tuple[int, int]]:
        """Return where an expert lies: (number among `all_devices`, slot there)."""
        slots = self.slot_RNE[:, layer, position].tolist()
        return [(device, slot) for device, slot in enumerate(slots) if slot >= 0]

    def chosen_shares(self, layer: int, chosen_P: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the share of each device's experts of a layer that are chosen; 0 of a device
        without any.
        """
        has_RE = self.slot_RNE[:, layer] >= 0
        shares: NDArray[np.float64] = (has_RE & chosen_P).sum(axis=1) / np.maximum(
            has_RE.sum(axis=1), 1
        )
        return shares

    def arranged(
        self, layer: int, arrays: Mapping[str, NDArray[Any]]
    ) -> list[dict[str, NDArray[Any]]]:
        """Return what each device has of arrays of the layer's experts; 0 in slots without one."""
        rows: list[dict[str, NDArray[Any]]] = [
            {name: np.zeros((self.num_slots, *w.shape[1:]), w.dtype) for name, w in arrays.items()}
            for _ in self.all_devices
        ]
        for place, expert in enumerate(self.of_layer(layer).tolist()):
            for device, slot in self.places(layer, expert):
                for name, w in arrays.items():
                    rows[device][name][slot] = w[place]
        return rows


@dataclass(frozen=True, eq=False)
class ExpertIndex:
    """Numbers the records of N layers of E experts each, layer by layer; local: those that this
    process has, or all.
    """

    num_layers: int
    num_experts: int
    local: LocalExperts | None = None

    @classmethod
    def from_model(cls, model: ModelConfig, local: LocalExperts | None = None) -> Self:
        return cls(sum(kind != "dense" for kind in model.layer_kinds), model.num_experts, local)

    @property
    def num_records(self) -> int:
        return self.num_layers * self.num_experts

    def records(self, layer: int, experts: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the records of a layer's experts, of all of them by default."""
        chosen = np.arange(self.num_experts) if experts is None else np.asarray(experts, np.int64)
        return layer * self.num_experts + chosen

    def locate(self, record: int) -> tuple[int, int]:
        """Return the layer and the expert of a record."""
        return divmod(record, self.num_experts)

    @property
    def local_records(self) -> list[int]:
        """Return the records that this process has, layer by layer."""
        return self._in_all_layers(None if self.local is None else self.local.of_layer)

    @property
    def saved_records(self) -> list[int]:
        """Return those of them that this process saves."""
        return self._in_all_layers(None if self.local is None else self.local.saved_of)

    def _in_all_layers(self, experts_of: Callable[[int], NDArray[np.int64]] | None) -> list[int]:
        every = range(self.num_layers)
        records = [
            self.records(layer, None if experts_of is None else experts_of(layer))
            for layer in every
        ]
        return [int(record) for record in np.concatenate(records)]
