"""Writes the gradients of experts from the devices to their records, in a thread of its own."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.training_slots import DeviceStacks, TrainingSlots


class GradientWriter:
    """Writes one layer's gradients after another.

    slots: where the layers' experts are on the devices; gradients have the same rows. guard: a
    function that returns the context manager in which the thread writes. waited_s: seconds that
    callers waited for the thread.
    received_bytes: bytes of gradients that have come from the devices.
    """

    def __init__(
        self,
        store: TieredStore,
        index: ExpertIndex,
        slots: TrainingSlots,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._store, self._index, self._slots, self._guard = store, index, slots, guard
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._writes: list[Future[None]] = []
        self.waited_s, self.received_bytes = 0.0, 0

    def start_write(
        self, layer: int, experts: NDArray[np.int64], gradients: Sequence[DeviceStacks]
    ) -> None:
        """Begin to write the gradients of a layer's experts, after waiting until at most one
        earlier layer is still being written.

        experts: positions among the process's experts, ascending. gradients: by device, then by
        parameter: [L, ...], or [M, ...] of `experts` if a slot holds only a part of the experts.
        """
        self.wait_for_writes(most_pending=1)
        own = list(gradients)  # a done thread keeps its arguments until it runs again
        self._writes.append(self._thread.submit(self._write, layer, experts, own))

    def _write(self, layer: int, experts: NDArray[np.int64], gradients: list[DeviceStacks]) -> None:
        """Write the records of a layer's gradients, and empty `gradients`."""
        local = self._index.local_experts
        assert local is not None
        with self._guard():
            firsts = [local.replica_rows(layer, expert)[0] for expert in experts.tolist()]
            # gradients are [M, ...], chosen experts in ascending order
            if self._slots.num_rows is not None:
                devices = np.array([d for d, _ in firsts])
                rows = np.arange(devices.size) - np.searchsorted(devices, devices)
                firsts = list(zip(devices.tolist(), rows.tolist(), strict=True))
            on_host = {
                d: {name: np.asarray(g) for name, g in gradients[d].items()}
                for d in {d for d, _ in firsts}
            }
            self.received_bytes += sum(g.nbytes for own in on_host.values() for g in own.values())
            gradients.clear()
            records = self._index.record_numbers(layer, local.experts[experts]).tolist()
            for (d, row), index in zip(firsts, records, strict=True):
                with self._store.get(index, writable=True, empty=True) as record:
                    for name, g in on_host[d].items():
                        np.copyto(record[name], g[row])
                    record.close_as_changed()

    def wait_for_writes(self, most_pending: int = 0) -> None:
        """Wait until at most `most_pending` layers are still being written; raise the error of a
        failed write.
        """
        begun = time.perf_counter()
        while len(self._writes) > most_pending:
            self._writes.pop(0).result()
        self.waited_s += time.perf_counter() - begun

    def close(self) -> None:
        """End the thread after the writes that have begun."""
        self._thread.shutdown()
