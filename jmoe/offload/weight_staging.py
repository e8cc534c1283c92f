"""Sends experts' weights from the host to a device, several experts in one transfer.

`expert_updates.HostUpdate` writes the weights of a group of experts next to each other in host
memory, pinned where that is possible. Each device has groups of its own, so that all links carry
transfers at the same time, and two groups of each size, so that one is written while the other is
sent.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax

from jmoe.memory.buffers import Allocate, Slots
from jmoe.memory.link import Link
from jmoe.memory.pinned import PinnedSlots
from jmoe.memory.record_layout import RecordLayout
from jmoe.offload.slot_arrays import Fields

# A larger group saves nothing: its transfer takes a hundred times as long as its start.
GROUP_BYTES = 1 << 26
MOST_EXPERTS = 8
GROUPS_AT_ONCE = 2


class Transfer:
    """A transfer to a device that is under way.

    arrays: their readiness is the end of the transfer.
    """

    def __init__(self, link: Link, start_s: float, arrays: Sequence[jax.Array], num_bytes: int):
        self.num_bytes = num_bytes
        self._link, self._start_s = link, start_s
        self._arrays: Sequence[jax.Array] | None = arrays
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait for the end of the transfer; several threads may."""
        with self._lock:
            if self._arrays is not None:
                jax.block_until_ready(self._arrays)
                self._arrays = None
                self._link.finish_transfer(self._start_s, self.num_bytes)


class ExpertGroup:
    """Host memory for the weights of a group of experts.

    arrays: by parameter, [experts of the group, ...], to be written before `send`. links: count the
    transfers, by device.
    """

    def __init__(
        self, layout: RecordLayout, memory: Slots, number: int, links: Mapping[jax.Device, Link]
    ) -> None:
        self.arrays = layout.views(memory[number])
        self._layout, self._memory, self._number = layout, memory, number
        self._links, self._transfers = links, list[Transfer]()

    def send(self, device: jax.Device) -> tuple[dict[str, jax.Array], Transfer]:
        """Begin to send the group; return its arrays, by parameter, in the device's memory.

        The group's memory must not change until `wait_until_writable` has returned.
        """
        link = self._links[device]
        start_s = link.start_transfer()
        if isinstance(self._memory, PinnedSlots) and device == self._memory.device:
            sent, read = self._memory.begin_copy(self._number, self._layout, list(self.arrays))
        else:
            # an array of a CPU device would be this memory itself
            on_cpu = device.platform == "cpu"
            values = {n: a.copy() if on_cpu else a for n, a in self.arrays.items()}
            sent = jax.device_put(values, device)
            read = list(sent.values())
        transfer = Transfer(link, start_s, read, sum(w.nbytes for w in sent.values()))
        self._transfers.append(transfer)
        return sent, transfer

    def wait_until_writable(self) -> None:
        """Wait until the group's memory may be written again."""
        for transfer in self._transfers:
            transfer.wait()
        self._transfers.clear()


class StagedGroups:
    """The groups of one device, in sizes that are powers of two.

    fields: shape and dtype of each parameter of an expert. allocate: allocates their memory.
    """

    def __init__(self, fields: Fields, allocate: Allocate, links: Mapping[jax.Device, Link]):
        expert_bytes = RecordLayout.from_arrays(fields).record_bytes
        largest = max(1, min(MOST_EXPERTS, GROUP_BYTES // expert_bytes))
        self._free: dict[int, queue.SimpleQueue[ExpertGroup]] = {}
        for size in (2**n for n in reversed(range(largest.bit_length()))):
            layout = RecordLayout.from_arrays(
                {name: ((size, *shape), dtype) for name, (shape, dtype) in fields.items()}
            )
            memory = allocate(GROUPS_AT_ONCE, layout.record_bytes)
            self._free[size] = queue.SimpleQueue()
            for number in range(GROUPS_AT_ONCE):
                self._free[size].put(ExpertGroup(layout, memory, number, links))

    def largest_group_size(self, num_experts: int) -> int:
        """Return the size of the largest group that `num_experts` experts fill."""
        return next(size for size in self._free if size <= num_experts)

    @contextlib.contextmanager
    def borrow(self, size: int) -> Iterator[ExpertGroup]:
        """Yield a group of `size` experts that no other thread has, whose memory may be written;
        wait for one. The group is free again when the block ends.
        """
        group = self._free[size].get()
        try:
            group.wait_until_writable()
            yield group
        finally:
            self._free[size].put(group)
