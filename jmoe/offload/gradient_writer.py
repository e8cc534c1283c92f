"""Writes the gradients of experts from the devices to their records, in threads of its own: as
many as devices, so that all links can carry gradients at the same time.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.memory.link import Link
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.training_slots import DeviceStacks, TrainingSlots


class GradientWriter:
    """Writes one layer's gradients after another.

    slots: where the layers' experts are on the devices; gradients have the same rows. guard: a
    function that returns the context manager in which the threads write. waited_s: seconds that
    callers waited for the threads. links: count the gradients that have come from each device.
    """

    def __init__(
        self,
        store: TieredStore,
        index: ExpertIndex,
        slots: TrainingSlots,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._store, self._index, self._slots, self._guard = store, index, slots, guard
        self._threads = ThreadPoolExecutor(len(slots.devices), "gradients")
        self._writes: list[list[Future[None]]] = []  # by layer, then by device
        self.links = [Link() for _ in slots.devices]
        self.waited_s = 0.0

    @property
    def received_bytes(self) -> int:
        """Return the bytes of gradients that have come from the devices."""
        return sum(link.stats().num_bytes for link in self.links)

    def start_write(
        self, layer: int, experts: NDArray[np.int64], gradients: Sequence[DeviceStacks]
    ) -> None:
        """Begin to write the gradients of a layer's experts, after waiting until at most one
        earlier layer is still being written.

        experts: positions among the process's experts, ascending. gradients: by device, then by
        parameter: [L, ...], or [M, ...] of `experts` if a slot holds only a part of the experts.
        """
        self.wait_for_writes(most_pending=1)
        rows = self._rows_by_device(layer, experts)
        for d in rows:  # all transfers begin as soon as the gradients are there
            for g in gradients[d].values():
                g.copy_to_host_async()
        # a done thread keeps its arguments until it runs again, so the arrays are in a list
        self._writes.append(
            [self._threads.submit(self._write, d, own, [gradients[d]]) for d, own in rows.items()]
        )

    def _rows_by_device(
        self, layer: int, experts: NDArray[np.int64]
    ) -> dict[int, list[tuple[int, int]]]:
        """Return, by position of the device that sends them, (record number, row) of the experts'
        gradients.
        """
        local = self._index.local_experts
        assert local is not None
        records = self._index.record_numbers(layer, local.experts[experts]).tolist()
        by_device: dict[int, list[tuple[int, int]]] = {}
        for expert, record in zip(experts.tolist(), records, strict=True):
            device, row = local.replica_rows(layer, expert)[0]
            own = by_device.setdefault(device, [])
            # with few rows, gradients are [M, ...] of chosen experts in ascending order
            own.append((record, row if self._slots.num_rows is None else len(own)))
        return by_device

    def _write(
        self, device: int, rows: list[tuple[int, int]], gradients: list[DeviceStacks]
    ) -> None:
        """Write the records of a device's gradients, and empty `gradients`."""
        with self._guard():
            link, stacks = self.links[device], jax.block_until_ready(gradients.pop())
            start_s = link.start_transfer()
            on_host = {name: np.asarray(g) for name, g in stacks.items()}
            link.finish_transfer(start_s, sum(g.nbytes for g in on_host.values()))
            del stacks
            for index, row in rows:
                with self._store.get(index, writable=True, will_overwrite=True) as record:
                    for name, g in on_host.items():
                        np.copyto(record[name], g[row])
                    record.close_as_changed()

    def wait_for_writes(self, most_pending: int = 0) -> None:
        """Wait until at most `most_pending` layers are still being written; raise the error of a
        failed write.
        """
        begun = time.perf_counter()
        while len(self._writes) > most_pending:
            layer = self._writes.pop(0)
            wait(layer)
            for write in layer:
                write.result()
        self.waited_s += time.perf_counter() - begun

    def close(self) -> None:
        """End the threads after the writes that have begun."""
        self._threads.shutdown()
