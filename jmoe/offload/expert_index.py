"""The one numbering of experts' records, for training and inference alike.

Legend: N layers with experts, E experts of a layer, P of them this process's.
"""

from collections.abc import Mapping
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

    devices: of each part, this process's devices that have it: several where they are replicas of each other. saved:
    experts of which a checkpoint has this process's records; other processes save the rest of those that they have too.
    """

    experts: NDArray[np.int64]
    devices: tuple[tuple[jax.Device, ...], ...]
    saved: NDArray[np.int64]

    @classmethod
    def of(cls, mesh: Mesh, num_experts: int) -> Self:
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
            saved.append(numbers[numbers % len(processes) == processes.index(process)])  # they take turns
        return cls(np.concatenate(experts), tuple(devices), np.concatenate(saved))

    @property
    def per_device(self) -> int:
        return self.experts.size // len(self.devices)

    def split(self, arrays: Mapping[str, NDArray[Any]], axis: int = 0) -> list[dict[str, NDArray[Any]]]:
        """Return each part of arrays of all these experts."""
        parts = {name: np.split(w, len(self.devices), axis) for name, w in arrays.items()}
        return [{name: part[d] for name, part in parts.items()} for d in range(len(self.devices))]


@dataclass(frozen=True, eq=False)
class ExpertIndex:
    """Numbers the records of N layers of E experts each, layer by layer; local: those that this process has, or all."""

    num_layers: int
    num_experts: int
    local: LocalExperts | None = None

    @classmethod
    def of(cls, model: ModelConfig, local: LocalExperts | None = None) -> Self:
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
        return self._in_all_layers(None if self.local is None else self.local.experts)

    @property
    def saved_records(self) -> list[int]:
        """Return those of them that this process saves."""
        return self._in_all_layers(None if self.local is None else self.local.saved)

    def _in_all_layers(self, experts: NDArray[np.int64] | None) -> list[int]:
        records = [self.records(layer, experts) for layer in range(self.num_layers)]
        return [int(record) for record in np.concatenate(records)]
