"""Serves experts that do not fit the devices of a mesh: each device keeps the experts that tokens
choose in slots of its own, and fetches the others over its own link.

`residency.open_placed_experts` makes these objects; the mesh runner acquires and releases layers.

Legend:
  N  devices
  S  experts of a layer on a device
  M  expert slots of a device
"""

import contextlib
from collections.abc import Iterator
from dataclasses import fields

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.memory.tiered_store import TieredStore
from jmoe.mesh import BATCH
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.placed_experts import MeshExperts, expert_numbers_by_local_device
from jmoe.offload.policies import ChosenExperts, ResidencyStats
from jmoe.offload.slot_arrays import Arrays, Fields
from jmoe.offload.slots import DeviceSlots


class MeshChosenExperts(MeshExperts):
    """An even share of every layer's experts on each device, in M slots for those of all layers.

    Each of this process's devices has a `ChosenExperts` policy: its own hot set, copy threads and
    slots. Processes copy without synchronization, and run the same programs, which look slots up
    in a table.
    """

    streams, follows_steps = True, True

    def __init__(
        self, mesh: Mesh, index: ExpertIndex, fields: Fields, num_slots: int, store: TieredStore
    ) -> None:
        """num_slots: M. Raises `ValueError` if they do not hold the experts of one layer."""
        super().__init__(mesh, index, fields, -(-index.num_experts // mesh.size))
        self._store = store
        self._experts = expert_numbers_by_local_device(self.placements[0], mesh)
        self._policies = [
            self._make_policy(
                DeviceSlots(num_slots, fields, device, as_bits=device.platform != "cpu"), experts
            )
            for device, experts in self._experts.items()
        ]
        self.num_slots, self.num_bytes = num_slots, num_slots * self.expert_bytes
        self._layer: int | None = None  # the acquired one
        # its records that are, or will be, in slots, by device
        self._records: list[list[int]] = []
        self._tables: list[jax.Array] = []  # its int32 [S] on each of this process's devices
        self._whole_layers = False

    def _make_policy(self, slots: DeviceSlots, experts: np.ndarray) -> ChosenExperts:
        """Return the policy of one device's slots. experts: those of a layer that it owns."""
        return ChosenExperts(slots, self._store, self.index, experts=experts)

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        if used := [record for one in self._policies for record in one.used_records]:
            self._store.count_step(used)
        self._whole_layers = whole_layers
        for policy in self._policies:
            policy.begin_step(whole_layers=whole_layers, on_host=on_host)

    def acquire(self, layer: int, chosen_TK: np.ndarray | None = None) -> None:
        self._begin_acquire(layer, chosen_TK)
        self._finish_acquire()

    def _begin_acquire(self, layer: int, chosen_TK: np.ndarray | None) -> None:
        """Begin the copies that a layer waits for."""
        chosen = None if self._whole_layers else chosen_TK
        self._records = [policy.begin_acquire(layer, chosen) for policy in self._policies]
        self._layer = layer

    def _finish_acquire(self) -> None:
        """Wait for the layer's copies, and put its tables on the devices."""
        layer = self._layer
        assert layer is not None, "no layer is acquired"
        self._tables = []
        for policy, mine, (device, experts) in zip(
            self._policies, self._records, self._experts.items(), strict=True
        ):
            table_S = np.zeros(self.placements[layer].slots_per_device, np.int32)
            table_S[: experts.size] = policy.finish_acquire(layer, mine)[experts]
            self._tables.append(jax.device_put(table_S, device))

    def release(self) -> None:
        assert self._layer is not None, "no layer is acquired"
        for policy in self._policies:
            policy.release(self._layer)
        self._layer = None

    @contextlib.contextmanager
    def locked_operands(self, layer: int) -> Iterator[tuple[Arrays, jax.Array | None]]:
        assert layer == self._layer, (layer, self._layer)
        with contextlib.ExitStack() as locks:
            shards = []
            for policy in self._policies:
                assert isinstance(policy.slots, DeviceSlots)
                shards.append(locks.enter_context(policy.slots.locked_arrays()))
            num_rows = self.mesh.size * self.placements[layer].slots_per_device
            table_NS = jax.make_array_from_single_device_arrays(
                (num_rows,), NamedSharding(self.mesh, BATCH), self._tables
            )
            yield self._global_arrays(shards), table_NS

    def layer_weights(self, layer: int) -> Arrays:
        """Return the arrays [N M, ...] of all slots; only `locked_operands` says which are of the
        layer.
        """
        with self.locked_operands(layer) as (weights, _):
            return weights

    def stats(self) -> ResidencyStats:
        """Return the sums over this process's devices; `layers` counts each layer of a step once
        for every device.
        """
        each = [policy.stats() for policy in self._policies]
        names = [field.name for field in fields(ResidencyStats) if field.name != "policy"]
        return ResidencyStats(
            each[0].policy, *(sum(getattr(one, n) for one in each) for n in names)
        )

    def occupancy(self) -> list[tuple[int, int] | None]:
        return [place for policy in self._policies for place in policy.occupancy()]

    def close(self) -> None:
        for policy in self._policies:
            policy.close()
