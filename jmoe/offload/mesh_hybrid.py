"""Computes some experts of a mesh's devices on the CPU of the process that owns them.

In steps of few tokens each device's chosen experts without a slot are divided as on one device: its
link copies a share of them, and the CPU computes the others from host memory. Tokens reach a device
first, as rows sorted by expert; the CPU reads the rows of its experts there, and its outputs take
their place before the rows return. So processes need not agree on who computes what.

`residency.open_placed_experts` makes these objects; the mesh runner calls them.

Legend:
  N  devices
  S  experts of a layer on a device
  M  rows of a device
  T  rows that the CPU computes
  D  hidden size
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.memory.tiered_store import TieredStore
from jmoe.mesh import BATCH
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.host_experts import CopyShares, HostExperts, PartlyCopiedExperts
from jmoe.offload.mesh_chosen import MeshChosenExperts
from jmoe.offload.policies import WAIT_LIMIT_S
from jmoe.offload.slot_arrays import Arrays, Fields
from jmoe.offload.slots import DeviceSlots


class ArrivedBatch(NamedTuple):
    """The rows of a batch's tokens on all devices.

    rows_MD: [N M, D], sorted by expert on each device. sizes_S: int32 [N S], the number of each
    expert's rows.
    """

    rows_MD: jax.Array
    sizes_S: jax.Array


@dataclass(frozen=True)
class ColdRows:
    """Rows that the CPU computes for this process's devices, of all batches of a layer.

    is_cold_NS: bool, on the devices: the experts whose rows these are. places: for each batch and
    device, the numbers of these rows among its M. order_T: the rows by expert, which is how the CPU
    computes them. num_experts: that the CPU computes. part: of their outputs and the seconds that
    these take; None if no row is the CPU's.
    """

    is_cold_NS: jax.Array
    places: list[list[np.ndarray]]
    order_T: np.ndarray
    num_experts: int
    part: Future[tuple[np.ndarray, float]] | None


class MeshHybridExperts(MeshChosenExperts):
    """An even share of every layer's experts on each device, as `MeshChosenExperts` keeps them; in
    steps of few tokens the CPU computes a share of the experts that are in no slot.

    on_host: whether the CPU may compute experts in this step; the same in all processes.
    """

    on_host = False

    def __init__(
        self,
        mesh: Mesh,
        index: ExpertIndex,
        fields: Fields,
        num_slots: int,
        store: TieredStore,
        host: HostExperts,
    ) -> None:
        """Make the policies over empty slots.

        num_slots: of a device. host: the experts of this process's devices.
        """
        self._host, self._shares = host, CopyShares(store)
        self._by_device: list[PartlyCopiedExperts] = []  # the policies
        super().__init__(mesh, index, fields, num_slots, store)
        self._zeros: dict[tuple[jax.Device, tuple[int, ...]], jax.Array] = {}

    def _make_policy(self, slots: DeviceSlots, experts: np.ndarray) -> PartlyCopiedExperts:
        policy = PartlyCopiedExperts(slots, self._store, self.index, self._shares, experts=experts)
        self._by_device.append(policy)
        return policy

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        self._shares.measure_link()
        self.on_host = on_host and not whole_layers
        super().begin_step(whole_layers=whole_layers, on_host=on_host)

    def acquire(self, layer: int, chosen_TK: np.ndarray | None = None) -> None:
        """Acquire a layer; in a step `on_host` its copies may still be under way, and
        `locked_operands` waits for them.
        """
        self._begin_acquire(layer, chosen_TK)
        if not self.on_host:
            self._finish_acquire()

    @contextlib.contextmanager
    def locked_operands(self, layer: int) -> Iterator[tuple[Arrays, jax.Array | None]]:
        if self.on_host:
            self._finish_acquire()
        with super().locked_operands(layer) as operands:
            yield operands

    def start_cold_rows(
        self, layer: int, batches: Sequence[ArrivedBatch], activation: str
    ) -> ColdRows:
        """Begin to compute the rows of an acquired layer's experts that have no slot, in a thread.
        Waits until the rows are on this process's devices.
        """
        for x in (x for batch in batches for x in batch):
            for shard in x.addressable_shards:  # all devices send at once
                shard.data.copy_to_host_async()
        is_cold = [
            policy.pool.slot_of[self.index.record_numbers(layer, experts)] < 0
            for policy, experts in zip(self._by_device, self._experts.values(), strict=True)
        ]
        places: list[list[np.ndarray]] = []
        inputs: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        for batch in batches:
            rows, sizes = map(_shards_by_device, batch)
            places.append([])
            for is_cold_S, (device, experts) in zip(is_cold, self._experts.items(), strict=True):
                expert_M = np.repeat(
                    np.arange(experts.size), np.asarray(sizes[device])[: experts.size]
                )
                place_T = np.flatnonzero(is_cold_S[expert_M])
                places[-1].append(place_T)
                if place_T.size:
                    inputs.append(np.asarray(rows[device])[place_T])
                    numbers.append(experts[expert_M[place_T]])
        number_T = np.concatenate(numbers) if numbers else np.zeros(0, np.int32)
        order_T, computed = np.argsort(number_T, kind="stable"), np.unique(number_T)
        for policy, experts in zip(self._by_device, self._experts.values(), strict=True):
            policy.count_on_host(int(np.isin(experts, computed).sum()))
        part = None
        if inputs:
            rows_TD, records_E = np.concatenate(inputs)[order_T], self.index.record_numbers(layer)
            part = self._host.start_compute_rows(rows_TD, number_T[order_T], records_E, activation)
        is_cold_NS = self._put_flags(layer, is_cold)
        return ColdRows(is_cold_NS, places, order_T, computed.size, part)

    def wait_for_cold_rows(
        self, cold: ColdRows, batches: Sequence[ArrivedBatch]
    ) -> list[jax.Array]:
        """Return the outputs of `cold` in the places of their rows, for each batch [N M, D] in the
        dtype of its rows, with zeros in all other places.
        """
        dtype, hidden = batches[0].rows_MD.dtype, batches[0].rows_MD.shape[1]
        out_TD = np.zeros((cold.order_T.size, hidden), dtype)
        if cold.part is not None:
            try:
                computed_TD, seconds = cold.part.result(WAIT_LIMIT_S)
            except Exception as error:
                for policy in self._by_device:
                    policy.fail(error)
                raise
            self._shares.record_computed(cold.num_experts * self._host.expert_bytes, seconds)
            out_TD[cold.order_T] = computed_TD[: cold.order_T.size].astype(dtype)
        outputs: list[jax.Array] = []
        first = 0
        where = NamedSharding(self.mesh, BATCH)
        for (rows_MD, _), places in zip(batches, cold.places, strict=True):
            shape, shards = (rows_MD.shape[0] // self.mesh.size, hidden), []
            for device, place_T in zip(self._experts, places, strict=True):
                end = first + place_T.size
                shards.append(self._put_rows(device, shape, place_T, out_TD[first:end]))
                first = end
            outputs.append(jax.make_array_from_single_device_arrays(rows_MD.shape, where, shards))
        return outputs

    def _put_flags(self, layer: int, flags: Sequence[np.ndarray]) -> jax.Array:
        """Return bool [N S] of flags of each device's experts, False for places without an
        expert.
        """
        size = self.placements[layer].slots_per_device
        shards = [
            jax.device_put(np.pad(mine, (0, size - mine.size)), device)
            for device, mine in zip(self._experts, flags, strict=True)
        ]
        where = NamedSharding(self.mesh, BATCH)
        return jax.make_array_from_single_device_arrays((self.mesh.size * size,), where, shards)

    def _put_rows(
        self,
        device: jax.Device,
        shape: tuple[int, int],
        place_T: np.ndarray,
        out_TD: np.ndarray,
    ) -> jax.Array:
        """Return an array of `shape` on a device, with `out_TD` in the rows `place_T` and zeros in
        the others.
        """
        if not place_T.size:  # most layers, once the experts in use have slots
            if (device, shape) not in self._zeros:
                self._zeros[device, shape] = jax.device_put(np.zeros(shape, out_TD.dtype), device)
            return self._zeros[device, shape]
        values_MD = np.zeros(shape, out_TD.dtype)
        values_MD[place_T] = out_TD
        return jax.device_put(values_MD, device)

    def close(self) -> None:
        self._host.close()
        super().close()


def _shards_by_device(x: jax.Array) -> dict[jax.Device, jax.Array]:
    """Return this process's shards of an array."""
    return {shard.device: shard.data for shard in x.addressable_shards}
