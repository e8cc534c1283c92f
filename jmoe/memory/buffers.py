"""Host memory for records: page-aligned, allocated once, cut into equal slots.

Page alignment is what O_DIRECT reads need, and what lets a device driver pin the memory where it is. Axes: M slots,
R bytes of a slot.
"""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from jmoe.config import check

PAGE_BYTES = 4096


class RecordBuffers:
    """`num_slots` slots of `slot_bytes` bytes (a multiple of 4096) in one anonymous mapping, zero at first.

    huge_pages: ask the kernel for transparent huge pages (fewer page faults; a hint, it may decline).
    The memory goes back to the system when the last array that views it is gone. Raises `ValueError` for sizes that
    make no sense, `OSError` where the system refuses the memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, huge_pages: bool = True) -> None:
        check(num_slots > 0, "num_slots", num_slots, "must be greater than 0")
        check(
            slot_bytes > 0 and slot_bytes % PAGE_BYTES == 0,
            "slot_bytes",
            slot_bytes,
            f"must be a positive multiple of {PAGE_BYTES}",
        )
        total_bytes = num_slots * slot_bytes
        try:
            memory = mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            what = f"{total_bytes} bytes of host memory ({num_slots} slots of {slot_bytes} bytes)"
            raise OSError(error.errno, f"the system does not give {what}: {error.strerror}") from error
        if huge_pages:
            with contextlib.suppress(OSError):  # a kernel without huge pages; the memory is as good without
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._slots_MR = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, slot_bytes)

    @property
    def num_slots(self) -> int:
        return self._slots_MR.shape[0]

    @property
    def slot_bytes(self) -> int:
        return self._slots_MR.shape[1]

    @property
    def total_bytes(self) -> int:
        return self._slots_MR.nbytes

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """Return the writable bytes `[slot_bytes]` of one slot."""
        return self._slots_MR[slot]
