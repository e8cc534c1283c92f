"""Allocates host memory for records, page-aligned for O_DIRECT and device transfers.

Legend:
  M  slots
  R  bytes of a slot
"""

import contextlib
import mmap
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from jmoe.config import check

PAGE_BYTES = 4096
Slots = Sequence[NDArray[np.uint8]] | NDArray[np.uint8]  # M slots of R bytes
Allocate = Callable[[int, int], Slots]  # (M, R) -> zeros, each slot at a multiple of PAGE_BYTES


def allocate_slots(
    num_slots: int, slot_bytes: int, *, huge_pages: bool = True
) -> NDArray[np.uint8]:
    """Return zeros uint8 [M, R] in one anonymous mapping, each slot at a multiple of 4096 bytes.

    O_DIRECT reads need this alignment, and a device driver can pin such memory in place.
    huge_pages: ask the kernel for transparent huge pages, which cause fewer page faults; the kernel
    may ignore this. Raises `ValueError` if num_slots is not positive or slot_bytes is not a
    positive multiple of 4096, `OSError` if the system refuses the memory.
    """
    check(num_slots > 0, "num_slots", num_slots, "must be greater than 0")
    whole_pages = slot_bytes > 0 and slot_bytes % PAGE_BYTES == 0
    check(whole_pages, "slot_bytes", slot_bytes, f"must be a positive multiple of {PAGE_BYTES}")
    total_bytes = num_slots * slot_bytes
    try:
        memory = mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        what = f"{total_bytes} bytes of host memory ({num_slots} slots of {slot_bytes} bytes)"
        raise OSError(error.errno, f"the system does not give {what}: {error.strerror}") from error
    if huge_pages:
        # kernels without huge pages refuse; the memory is usable all the same
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, slot_bytes)
