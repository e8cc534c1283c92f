"""Pinned host memory, from which a device copies directly.

XLA copies ordinary host memory to a pinned buffer of its own first. `offload/residency.py` and
`offload/train_stores.py` call `choose_host_allocator`.

Legend:
  M  slots
  R  bytes of a slot
"""

import ctypes
import logging
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.memory.buffers import PAGE_BYTES, Allocate, Slots, allocate_slots
from jmoe.memory.record_layout import RecordLayout

KIND = "pinned_host"

log = logging.getLogger("jmoe")


class PinnedSlots(list[NDArray[np.uint8]]):
    """M slots of R bytes in a device's pinned host memory, each page-aligned.

    The slots are memory of JAX arrays that the host writes to. A slot must not be written while it
    is being sent, and only `copy_to_device` may read the JAX arrays. Raises `RuntimeError` if JAX
    does not provide the memory, or if a probe shows that written bytes do not reach the device.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: jax.Device) -> None:
        self._slot_bytes, self.device = slot_bytes, device
        place = SingleDeviceSharding(device, memory_kind=KIND)
        self._device_memory = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
        padded_bytes = slot_bytes + PAGE_BYTES  # space to align to a page
        self._arrays = [
            jax.device_put(np.zeros(padded_bytes, np.uint8), place) for _ in range(num_slots)
        ]
        addresses = [array.unsafe_buffer_pointer() for array in jax.block_until_ready(self._arrays)]
        self._begins = [-address % PAGE_BYTES for address in addresses]
        slots = [
            (ctypes.c_uint8 * slot_bytes).from_address(address + begin)
            for address, begin in zip(addresses, self._begins, strict=True)
        ]
        super().__init__(np.ctypeslib.as_array(slot) for slot in slots)
        probe = RecordLayout.from_arrays({"probe": ((slot_bytes,), np.uint8)})
        for value in (1, 0):
            self[0][:] = value
            if not np.all(np.asarray(self.copy_to_device(0, probe, ["probe"])["probe"]) == value):
                raise RuntimeError(
                    f"what is written to the {KIND} memory of {device} does not arrive there"
                )

    def copy_to_device(
        self, slot: int, layout: RecordLayout, names: Collection[str]
    ) -> dict[str, jax.Array]:
        """Return arrays of the record in a slot, by name, in the device's memory, after the
        transfer has ended.
        """
        return jax.block_until_ready(self.begin_copy(slot, layout, names)[0])

    def begin_copy(
        self, slot: int, layout: RecordLayout, names: Collection[str]
    ) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """Begin to send the record in a slot; return (its arrays by name, arrays whose readiness
        means that the slot may be written).
        """
        padded = jax.device_put(self._arrays[slot], self._device_memory)
        arrays = _unpack_fields(
            layout, self._slot_bytes, tuple(names), padded, np.int32(self._begins[slot])
        )
        # `padded` may alias the slot on a CPU, and is then read until the arrays are unpacked
        on_cpu = self.device.platform == "cpu"
        return arrays, list(arrays.values()) if on_cpu else [padded]


class PinnedSlotsOfDevices(list[NDArray[np.uint8]]):
    """Slots in the pinned host memory of several devices: those of the first device come first.

    A slot is sent to the device that pins it. Raises as `PinnedSlots` does.
    """

    def __init__(
        self, counts: Sequence[int], slot_bytes: int, devices: Sequence[jax.Device]
    ) -> None:
        """counts: the number of slots of each device."""
        self._of_devices = [
            PinnedSlots(count, slot_bytes, device)
            for count, device in zip(counts, devices, strict=True)
            if count
        ]
        self._places = [(slots, n) for slots in self._of_devices for n in range(len(slots))]
        super().__init__(chain.from_iterable(self._of_devices))

    def copy_to_device(
        self, slot: int, layout: RecordLayout, names: Collection[str]
    ) -> dict[str, jax.Array]:
        """Return arrays of the record in a slot, as `PinnedSlots.copy_to_device` does."""
        slots, n = self._places[slot]
        return slots.copy_to_device(n, layout, names)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _unpack_fields(
    layout: RecordLayout,
    num_bytes: int,
    names: tuple[str, ...],
    padded: jax.Array,
    begin: jax.Array,
) -> dict[str, jax.Array]:
    record_R = lax.dynamic_slice(padded, (begin,), (num_bytes,))
    arrays = {}
    for f in layout.fields:
        if f.name in names:
            part = record_R[f.offset_bytes : f.offset_bytes + f.num_bytes]
            words = part.reshape(-1, f.dtype.itemsize) if f.dtype.itemsize > 1 else part
            arrays[f.name] = lax.bitcast_convert_type(words, jnp.dtype(f.dtype)).reshape(f.shape)
    return arrays


class HostAllocator(NamedTuple):
    """An allocator of host memory for records, and a log note that names the kind of memory."""

    allocate: Allocate
    note: str


def choose_host_allocator(
    setting: Literal["auto", "on", "off"],
    field: str,
    devices: Sequence[jax.Device],
    counts: Sequence[int] | None = None,
) -> HostAllocator:
    """Return pinned or ordinary host memory for records.

    setting: "auto" pins if that is possible and the device is not a CPU. field: the setting's name,
    for errors. devices: this process's devices. counts: the number of records that go to each of
    them, in the order of the records; None means that a record may go to any, and only a process
    with one device can then pin. Raises `ValueError` if the setting is "on" and memory cannot be
    pinned.
    """
    device = devices[0]
    can_pin = (len(devices) == 1 or counts is not None) and KIND in [
        memory.kind for memory in device.addressable_memories()
    ]
    needed = (
        f"must be auto or off unless a process has one device, or holds each record in host memory"
        f" for one device alone, with {KIND} memory; here it has {list(devices)}"
    )
    check(can_pin or setting != "on", field, setting, needed)
    if setting == "off" or not can_pin or (setting == "auto" and device.platform == "cpu"):
        return HostAllocator(allocate_slots, "records in ordinary host memory")
    owners = f"{device}" if len(devices) == 1 else f"{len(devices)} devices, each its own"
    return HostAllocator(
        partial(_allocate_pinned_or_ordinary, devices, counts),
        f"records in pinned host memory of {owners}",
    )


def _allocate_pinned_or_ordinary(
    devices: Sequence[jax.Device], counts: Sequence[int] | None, num_slots: int, slot_bytes: int
) -> Slots:
    """Return pinned memory; if there is not enough, ordinary memory with a warning."""
    try:
        if counts is None:
            return PinnedSlots(num_slots, slot_bytes, devices[0])
        assert sum(counts) == num_slots, (counts, num_slots)
        return PinnedSlotsOfDevices(counts, slot_bytes, devices)
    except RuntimeError as error:
        size = f"{num_slots * slot_bytes} bytes of pinned host memory"
        log.warning(
            "%s cannot be had, ordinary memory is used: %s", size, str(error).splitlines()[0]
        )
        return allocate_slots(num_slots, slot_bytes)
