"""Slots of one device as arrays [S, ...] by name: a row of each array holds one expert.

Slots of inference (`slots.py`, `placed_experts.py`, `mesh_ring.py`) and of training
(`training_slots.py`) write their rows with `put_record`.

Legend:
  S  slots
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.memory.buffers import PAGE_BYTES, allocate_slots
from jmoe.memory.record_handle import Record
from kernels_pallas.compressed import uint16_as_bfloat16
from kernels_pallas.grouped_mlp import MLPWeights


class NamedArrays(Protocol):
    """Arrays by name: a dict, or a `Record` of a `TieredStore`."""

    def __getitem__(self, name: str, /) -> np.ndarray: ...


Arrays = dict[str, jax.Array]
# name -> (shape, stored dtype) of one expert's arrays
Fields = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class HostSlotArrays:
    """Slots of a CPU device: host memory that XLA reads as arrays [S, ...] in place.

    No program that reads the slots may be running during a write.
    """

    def __init__(self, num_slots: int, fields: Fields, device: jax.Device) -> None:
        self._memory = {
            name: _aligned_zeros((num_slots, *shape), dtype)
            for name, (shape, dtype) in fields.items()
        }
        self.arrays: Arrays = {name: jax_view(m, device) for name, m in self._memory.items()}

    def write(self, slot: int, record: NamedArrays) -> None:
        """Copy one expert's weights into a slot."""
        for name, memory in self._memory.items():
            np.copyto(memory[slot], record[name])


class DeviceSlotArrays:
    """Slots in a device's memory: a write sends the record and updates the slot in place.

    The update runs after the programs that read the slot, since a device runs its programs in
    order. as_bits: arrays have the stored dtypes, uint16 for bfloat16; otherwise bfloat16.
    transposed: names of matrices that slots hold transposed.
    """

    def __init__(
        self,
        num_slots: int,
        fields: Fields,
        device: jax.Device,
        *,
        as_bits: bool = False,
        transposed: tuple[str, ...] = (),
    ) -> None:
        self._device, self._as_bits, self._transposed = device, as_bits, transposed
        self.arrays = zero_arrays(
            num_slots,
            {
                name: (shape, dtype if as_bits else dtype_of_stored_bits(dtype))
                for name, (shape, dtype) in with_transposed(fields, transposed).items()
            },
            device,
        )

    def write(self, slot: int, record: NamedArrays) -> None:
        """Copy one expert's weights into a slot; the record's memory may be reused afterwards."""
        self.store_in_slot(slot, self.copy_to_device(record))

    def copy_to_device(self, record: NamedArrays) -> Arrays:
        """Return one expert's arrays in the device's memory, after the transfer has ended."""
        if isinstance(record, Record) and (self._as_bits or record.is_pinned):
            return record.copy_to_device(self.arrays, self._device)
        values = {name: record[name] for name in self.arrays}
        if not self._as_bits:
            values = {name: v.view(dtype_of_stored_bits(v.dtype)) for name, v in values.items()}
        if self._device.platform == "cpu":  # an array there may alias the record's memory
            values = {name: v.copy() for name, v in values.items()}
        return jax.block_until_ready(jax.device_put(values, self._device))

    def store_in_slot(self, slot: int, sent: Mapping[str, jax.Array]) -> None:
        """Store what `copy_to_device` returned in a slot; donates `arrays`."""
        self.arrays = put_record(self.arrays, sent, np.int32(slot), self._transposed)


def with_transposed(fields: Fields, transposed: tuple[str, ...]) -> Fields:
    """Return fields of which the named ones have swapped dimensions."""
    return {
        name: (shape[::-1] if name in transposed else shape, dtype)
        for name, (shape, dtype) in fields.items()
    }


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def put_record(
    slots: Arrays,
    record: Mapping[str, jax.Array],
    slot: jax.Array,
    transposed: tuple[str, ...] = (),
) -> Arrays:
    """Return slots [S, ...] with one slot overwritten; donates and updates `slots` in place.

    record: arrays of the slots' dtypes, or bits of bfloat16 as uint16. transposed: names of arrays
    that slots hold transposed.
    """
    values = {
        name: uint16_as_bfloat16(record[name]) if held.dtype == jnp.bfloat16 else record[name]
        for name, held in slots.items()
    }
    values |= {name: values[name].T for name in transposed}
    return {
        name: lax.dynamic_update_index_in_dim(held, values[name], slot, 0)
        for name, held in slots.items()
    }


@partial(jax.jit, donate_argnums=0)
def put_records(slots: Arrays, records: Mapping[str, jax.Array], rows: np.ndarray) -> Arrays:
    """Return slots [S, ...] with several slots overwritten; donates and updates `slots` in place.

    records: by name, [number of `rows`, ...]. rows: int32, the slots to overwrite.
    """
    for n in range(rows.shape[0]):
        slots = {
            name: lax.dynamic_update_index_in_dim(slots[name], records[name][n], rows[n], 0)
            for name in slots
        }
    return slots


def zero_arrays(num_slots: int, fields: Fields, device: jax.Device) -> Arrays:
    """Return zeros [S, ...] by name in the device's memory."""
    return {
        name: jnp.zeros((num_slots, *shape), dtype, device=device)
        for name, (shape, dtype) in fields.items()
    }


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros that begin at a page: XLA aliases only memory that is aligned to 64 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    (page,) = allocate_slots(1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return page[:num_bytes].view(dtype).reshape(shape)


def dtype_of_stored_bits(dtype: np.dtype) -> np.dtype:
    """Return the dtype that stored bits stand for: bfloat16 for uint16, else the dtype itself."""
    return np.dtype(jnp.bfloat16) if dtype == np.uint16 else dtype


def jax_view(memory: np.ndarray, device: jax.Device) -> jax.Array:
    """Return a JAX array that aliases the memory; uint16 are read as the bits of bfloat16."""
    array = jax.device_put(memory.view(dtype_of_stored_bits(memory.dtype)), device, may_alias=True)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data, "the memory was copied"
    return array


def as_mlp_weights(arrays: Mapping[str, jax.Array]) -> MLPWeights:
    """Return arrays of one or several experts, by name, as `MLPWeights`."""
    return MLPWeights(arrays["w_up"], arrays["w_down"], arrays.get("b_up"), arrays.get("b_down"))
