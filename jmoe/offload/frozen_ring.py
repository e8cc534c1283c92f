"""Experts that a training step only reads: whole layers pass through ring slots of one device, from
host memory or NVMe.

Legend: E experts of a layer.
"""

import contextlib
from collections.abc import Iterator, Sequence

import jax

from jmoe.memory.closing import Closing
from jmoe.memory.ring import Ring, RingStats
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.slot_arrays import Arrays, DeviceSlotArrays, Fields, HostSlotArrays


class FrozenExpertRing(Closing):
    """Layers of experts in ring slots of E rows each.

    fields: the arrays of a record that a layer needs. num_slots: layers on the device at one time,
    those that load included. Closes `store`.
    """

    def __init__(
        self,
        store: TieredStore,
        index: ExpertIndex,
        fields: Fields,
        device: jax.Device,
        num_slots: int,
    ) -> None:
        self.store, self._index, self._on_cpu = store, index, device.platform == "cpu"
        make: type[HostSlotArrays | DeviceSlotArrays] = (
            HostSlotArrays if self._on_cpu else DeviceSlotArrays
        )
        self._slots = [make(index.num_experts, fields, device) for _ in range(num_slots)]
        self.num_bytes = sum(a.nbytes for slot in self._slots for a in slot.arrays.values())
        self._ring: Ring | None = None

    def begin_pass(self, order: Sequence[int]) -> None:
        """Begin a pass over layers, numbered among those with experts, in this order."""
        if self._ring is None:
            self._ring = Ring(order, len(self._slots), self._load_layer)
        else:
            self._ring.begin_round(order)

    @contextlib.contextmanager
    def next_layer(self, layer: int) -> Iterator[Arrays]:
        """Yield the arrays [E, ...] of the pass's next layer, which must be `layer`.

        On a CPU, programs that read them must have ended when the block ends.
        """
        assert self._ring is not None, "begin_pass comes first"
        acquired, slot = self._ring.acquire()
        assert acquired == layer, (acquired, layer)
        try:
            yield self._slots[slot].arrays
        finally:
            self._ring.release()

    def stats(self) -> RingStats | None:
        """Return the counters of loads and waits; None before the first pass."""
        return None if self._ring is None else self._ring.stats()

    def close(self) -> None:
        """End the threads and close the store."""
        try:
            if self._ring is not None:
                self._ring.close()
        finally:
            self.store.close()

    def _load_layer(self, layer: int, slot: int) -> int:
        """Copy a layer's experts into a ring slot; return the bytes copied."""
        records = self._index.record_numbers(layer)
        self.store.prefetch(records)
        for row, number in enumerate(records.tolist()):
            with self.store.get(number) as record:
                self._slots[slot].write(row, record)
        return sum(a.nbytes for a in self._slots[slot].arrays.values())
