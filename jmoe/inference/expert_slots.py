"""Expert weights on the device, in slots that a table maps experts to; and the MLP that reads them there.

Legend: T tokens, K choices a token, N = T K assignments, E experts of a layer, M slots, B rows a tile, D hidden,
F expert hidden, U = 2F (SwiGLU) or F.

A slot holds one expert of one layer. Which one is not part of any compiled program: the table of a layer is an
argument, so that the same program runs whether all experts lie in slots or a few pass through them.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.memory.buffers import PAGE_BYTES, RecordBuffers
from kernels_pallas.grouped_mlp.xla import Weights, expert_mlp
from kernels_pallas.token_permute import combine

T = TypeVar("T")


class Arrays(Protocol):
    """Arrays by name: a dict, or a record of a `TieredStore`."""

    def __getitem__(self, name: str, /) -> np.ndarray: ...


Fields = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]  # name -> (shape, dtype as stored) of one expert


class ExpertSlots(ABC):
    """M slots for one expert each."""

    _arrays: dict[str, jax.Array]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def num_slots(self) -> int:
        return next(iter(self._arrays.values())).shape[0]

    def run(self, program: Callable[[dict[str, jax.Array]], T]) -> T:
        """Call `program`, which starts a compiled one, with the slots' arrays by name."""
        return program(self._arrays)

    @abstractmethod
    def write(self, slot: int, record: Arrays) -> None:
        """Copy one expert's weights into a slot, from any thread. No program that reads this slot may be running."""


class HostSlots(ExpertSlots):
    """Slots of the CPU backend: memory that XLA reads as an array and that a copy fills."""

    def __init__(self, num_slots: int, fields: Fields) -> None:
        self._memory = {name: _memory((num_slots, *shape), dtype) for name, (shape, dtype) in fields.items()}
        cpu = jax.local_devices(backend="cpu")[0]
        self._arrays = {name: jax.device_put(m, cpu, may_alias=True) for name, m in self._memory.items()}
        for name, memory in self._memory.items():
            assert self._arrays[name].unsafe_buffer_pointer() == memory.ctypes.data, f"{name} was copied"

    def write(self, slot: int, record: Arrays) -> None:
        for name, memory in self._memory.items():
            np.copyto(memory[slot], record[name])


class DeviceSlots(ExpertSlots):
    """Slots in an accelerator's memory; a write is a transfer and an update in place, in order with the programs."""

    def __init__(self, num_slots: int, fields: Fields, device: jax.Device) -> None:
        self._device = device
        make = lambda shape, dtype: jnp.zeros((num_slots, *shape), dtype, device=device)  # noqa: E731
        self._arrays = {name: make(shape, dtype) for name, (shape, dtype) in fields.items()}
        self._put = jax.jit(_put, donate_argnums=0)
        self._lock = threading.Lock()  # an update gives up the arrays that a program may just be started with

    def run(self, program: Callable[[dict[str, jax.Array]], T]) -> T:
        with self._lock:
            return program(self._arrays)

    def write(self, slot: int, record: Arrays) -> None:
        sent = {name: jax.device_put(record[name], self._device) for name in self._arrays}
        jax.block_until_ready(sent)  # the record's memory is used again when this returns
        with self._lock:
            self._arrays = self._put(self._arrays, sent, np.int32(slot))


def _put(arrays: dict[str, jax.Array], record: dict[str, jax.Array], slot: jax.Array) -> dict[str, jax.Array]:
    return {name: lax.dynamic_update_index_in_dim(arrays[name], record[name], slot, 0) for name in arrays}


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros that begin on a page: XLA takes only what is aligned to 64 bytes without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = RecordBuffers(1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return pages.slot(0)[:num_bytes].view(dtype).reshape(shape)


def slot_mlp(
    x_TD: jax.Array,
    idx_TK: jax.Array,
    weights_TK: jax.Array,
    slots: Mapping[str, jax.Array],
    table_E: jax.Array,
    *,
    activation: str,
    tile_rows: int,
) -> jax.Array:
    """float32 [T, D]: the weighted sum of each token's experts, read from their slots.

    idx_TK: E for a choice that is none (padding). Assignments are sorted by expert and cut into tiles of one expert;
    the loop runs once a tile in use, so that an expert without tokens costs nothing and its slot may hold anything.
    """
    (num_tokens, k), num_experts = idx_TK.shape, table_E.shape[0]
    n, idx_N = num_tokens * k, idx_TK.reshape(-1)
    order_N = jnp.argsort(idx_N, stable=True).astype(jnp.int32)
    rank_N = jnp.zeros(n, jnp.int32).at[order_N].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
    sizes_E = (idx_N[:, None] == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    tiles_E = (sizes_E + tile_rows - 1) // tile_rows
    tile_ends_E = jnp.cumsum(tiles_E)
    token_N = jnp.concatenate([order_N // k, jnp.zeros(tile_rows, jnp.int32)])  # a tile may run past the end

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = (i >= tile_ends_E).sum(dtype=jnp.int32)
        row = starts_E[expert] + (i - (tile_ends_E[expert] - tiles_E[expert])) * tile_rows
        x_BD = x_TD[lax.dynamic_slice_in_dim(token_N, row, tile_rows)]
        y_BD = expert_mlp(x_BD, _expert(slots, table_E[expert], x_TD.dtype), activation).astype(jnp.float32)
        # rows past this expert's end are overwritten by the next tile
        return lax.dynamic_update_slice_in_dim(out, y_BD, row, axis=0)

    out = jnp.zeros((n + tile_rows, x_TD.shape[1]), jnp.float32)
    out = lax.fori_loop(0, tile_ends_E[-1], tile, out)
    weights_TK = jnp.where(idx_TK < num_experts, weights_TK, 0.0)
    return combine(out, weights_TK, order_N // k, rank_N.reshape(num_tokens, k), True)


def _expert(slots: Mapping[str, jax.Array], slot: jax.Array, dtype: jnp.dtype) -> Weights:
    """One slot's weights; bfloat16 is stored as its bits (see `kernels_pallas.saved.bits`)."""

    def pick(name: str) -> jax.Array:
        return lax.bitcast_convert_type(lax.dynamic_index_in_dim(slots[name], slot, 0, keepdims=False), dtype)

    biased = "b_up" in slots
    return Weights(pick("w_up"), pick("w_down"), pick("b_up") if biased else None, pick("b_down") if biased else None)
