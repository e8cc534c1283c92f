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


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """The experts of each layer that are this process's, and the devices they are spread over evenly, in order."""

    experts: NDArray[np.int64]
    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, mesh: Mesh, num_experts: int) -> Self:
        """Return those of a mesh whose devices all have experts of their own."""
        per_device, process = num_experts // mesh.size, jax.process_index()
        ranks = [(rank, device) for rank, device in enumerate(mesh.devices.flat) if device.process_index == process]
        experts = [np.arange(rank * per_device, (rank + 1) * per_device) for rank, _ in ranks]
        return cls(np.concatenate(experts), tuple(device for _, device in ranks))

    @property
    def per_device(self) -> int:
        return self.experts.size // len(self.devices)

    def split(self, arrays: Mapping[str, NDArray[Any]], axis: int = 0) -> list[dict[str, NDArray[Any]]]:
        """Return each device's part of arrays of all these experts."""
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
        return cls(model.num_moe_layers, model.num_experts, local)

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
        experts = None if self.local is None else self.local.experts
        records = [self.records(layer, experts) for layer in range(self.num_layers)]
        return [int(record) for record in np.concatenate(records)]
