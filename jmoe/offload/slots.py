"""Expert weights on the device: slots that hold one expert of one layer each, and are filled while others are read.

Legend: M slots, E experts of a layer.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.layers.slot_experts import ExpertInputs, bundled_mlp, table_mlp
from jmoe.memory.buffers import PAGE_BYTES, allocate_slots
from kernels_pallas.grouped_mlp import MLPWeights

TABLE_TILE_ROWS = 64


class NamedArrays(Protocol):
    """A dict of arrays, or a record of a `TieredStore`."""

    def __getitem__(self, name: str, /) -> np.ndarray: ...


Fields = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]  # name -> (shape, dtype as stored) of one expert


class ExpertSlots(ABC):
    """M slots for one expert each."""

    def __init__(self, num_slots: int, fields: Fields) -> None:
        expert_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields.values())
        self.num_slots, self.num_bytes = num_slots, num_slots * expert_bytes

    @abstractmethod
    def write(self, slot: int, record: NamedArrays) -> None:
        """Copy one expert's weights into a slot, from any thread. No program that reads this slot may be running."""

    @abstractmethod
    def mlp(self, routed: ExpertInputs, table_E: np.ndarray, activation: str) -> jax.Array:
        """Return float32 [T, D]: `routed.y_TD` + the weighted sum of each token's experts, in slots table_E[expert]."""


class HostSlots(ExpertSlots):
    """Slots of the CPU backend: memory that XLA reads as arrays, and that a copy fills."""

    def __init__(self, num_slots: int, fields: Fields) -> None:
        super().__init__(num_slots, fields)
        cpu = jax.local_devices(backend="cpu")[0]
        memory = {name: slot_memory(num_slots, shape, dtype) for name, (shape, dtype) in fields.items()}
        self._memory = [{name: slots[i] for name, slots in memory.items()} for i in range(num_slots)]
        self._weights = [as_weights({name: as_array(m, cpu) for name, m in slot.items()}) for slot in self._memory]

    def write(self, slot: int, record: NamedArrays) -> None:
        for name, memory in self._memory[slot].items():
            np.copyto(memory, record[name])

    def mlp(self, routed: ExpertInputs, table_E: np.ndarray, activation: str) -> jax.Array:
        return bundled_mlp(routed, [self._weights[slot] for slot in table_E], activation)

    def weights(self, slot: int) -> MLPWeights:
        """Return a slot's arrays: the slot's memory, not a copy."""
        return self._weights[slot]


class DeviceSlots(ExpertSlots):
    """Slots in an accelerator's memory; a write is a transfer and an update in place, in order with the programs."""

    def __init__(self, num_slots: int, fields: Fields, device: jax.Device) -> None:
        super().__init__(num_slots, fields)
        self._device = device
        make = lambda shape, dtype: jnp.zeros((num_slots, *shape), dtype, device=device)  # noqa: E731
        self._arrays = {name: make(shape, dtype) for name, (shape, dtype) in fields.items()}
        self._put = jax.jit(_put, donate_argnums=0)
        self._lock = threading.Lock()  # an update gives up the arrays that a program may just be started with

    def write(self, slot: int, record: NamedArrays) -> None:
        sent = {name: jax.device_put(record[name], self._device) for name in self._arrays}
        jax.block_until_ready(sent)  # the record's memory is used again when this returns
        with self._lock:
            self._arrays = self._put(self._arrays, sent, np.int32(slot))

    def mlp(self, routed: ExpertInputs, table_E: np.ndarray, activation: str) -> jax.Array:
        tile_rows = min(TABLE_TILE_ROWS, routed.h_TD.shape[0])
        with self._lock:
            return _table_mlp(activation, tile_rows, routed, self._arrays, table_E)


def _put(arrays: dict[str, jax.Array], record: dict[str, jax.Array], slot: jax.Array) -> dict[str, jax.Array]:
    return {name: lax.dynamic_update_index_in_dim(arrays[name], record[name], slot, 0) for name in arrays}


@partial(jax.jit, static_argnums=(0, 1))
def _table_mlp(
    activation: str, tile_rows: int, routed: ExpertInputs, slots: dict[str, jax.Array], table_E: jax.Array
) -> jax.Array:
    return table_mlp(routed, slots, table_E, activation=activation, tile_rows=tile_rows)


def slot_memory(num_slots: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[np.ndarray]:
    """Return zeros, each slot from a page on: XLA takes without a copy only what is aligned to 64 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = allocate_slots(num_slots, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return [page[:num_bytes].view(dtype).reshape(shape) for page in pages]


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the numbers whose bits uint16 are."""
    return np.dtype(jnp.bfloat16) if dtype == np.uint16 else dtype


def as_array(memory: np.ndarray, device: jax.Device) -> jax.Array:
    """Return an array over the memory, where uint16 are the bits of bfloat16."""
    array = jax.device_put(memory.view(stored_dtype(memory.dtype)), device, may_alias=True)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data, "the memory was copied"
    return array


def as_weights(arrays: Mapping[str, jax.Array]) -> MLPWeights:
    """Return an expert's or several experts' arrays, by name, as the weights of an MLP."""
    return MLPWeights(arrays["w_up"], arrays["w_down"], arrays.get("b_up"), arrays.get("b_down"))
