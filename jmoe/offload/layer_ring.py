"""The residency policy `ring` of inference on one device: whole layers pass through ring slots."""

import numpy as np
from numpy.typing import NDArray

from jmoe.memory.ring import Ring
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.policies import Residency, ResidencyStats, copy_record
from jmoe.offload.slots import ExpertSlots


class LayerRing(Residency):
    """K ring slots of E expert slots each: whole layers pass through them in order (MoESys, section
    3.3.2).
    """

    streams = True

    def __init__(
        self, slots: ExpertSlots, store: TieredStore, index: ExpertIndex, ring_slots: int
    ) -> None:
        super().__init__(slots, index)
        self._store = store
        self.ring = Ring(range(index.num_layers), ring_slots, self._load_layer)

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        layer, slot = self.ring.acquire()
        assert layer == moe_layer, (layer, moe_layer)
        return self._expert_slots_of(slot).astype(np.int32)

    def release(self, moe_layer: int) -> None:
        self.ring.release()

    def stats(self) -> ResidencyStats:
        ring = self.ring.stats()
        return ResidencyStats("ring", ring.waits, ring.waited_s)

    def occupancy(self) -> list[tuple[int, int] | None]:
        experts = range(self.index.num_experts)
        return [
            None if layer is None else (layer, expert)
            for layer in self.ring.layer_by_slot
            for expert in experts
        ]

    def close(self) -> None:
        self.ring.close()

    def _expert_slots_of(self, ring_slot: int) -> NDArray[np.int64]:
        """Return the expert slots of a ring slot.

        A ring slot has E expert slots, so `ExpertIndex` numbers them like the records of a layer.
        """
        return self.index.record_numbers(ring_slot)

    def _load_layer(self, layer: int, ring_slot: int) -> int:
        """Copy a layer's experts into a ring slot; return the bytes copied."""
        for ahead in (layer, (layer + 1) % self.index.num_layers):
            self._store.prefetch(self.index.record_numbers(ahead))
        for record, slot in zip(
            self.index.record_numbers(layer).tolist(),
            self._expert_slots_of(ring_slot).tolist(),
            strict=True,
        ):
            copy_record(self._store, record, self.slots, slot)
        return self.index.num_experts * self._store.layout.data_bytes
