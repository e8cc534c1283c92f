"""Slots on this process's devices for the layers that a training step is at: arrays of the layers'
experts.

Legend: P experts of this process, L on each of its devices, M rows of a slot there.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jmoe.config import OptimizerConfig
from jmoe.memory.record import Record
from jmoe.offload.expert_index import LocalExperts
from jmoe.offload.lazy_adamw import MissedSteps, catch_up
from jmoe.offload.slot_rows import ChosenRows, SlotRows, larger_room

log = logging.getLogger(__name__)

# [L, ...] each, on one device; [M, ...] with room for a part of the experts
DeviceStacks = dict[str, jax.Array]
Slot = list[DeviceStacks]  # of each of this process's devices
Moments = Mapping[str, Any]  # by the parameter's name


@partial(jax.jit, donate_argnums=0)
def _place(stacks: DeviceStacks, row: jax.Array, weights: Mapping[str, jax.Array]) -> DeviceStacks:
    return {
        name: lax.dynamic_update_index_in_dim(w, weights[name], row, 0)
        for name, w in stacks.items()
    }


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(
    config: OptimizerConfig,
    stacks: DeviceStacks,
    row: jax.Array,
    m: Mapping[str, jax.Array],
    v: Mapping[str, jax.Array],
    g: Mapping[str, jax.Array],
    missed: MissedSteps,
) -> tuple[DeviceStacks, dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """Run `catch_up` for one row of a slot; return (slot, w, m, v)."""
    w = {
        name: lax.dynamic_index_in_dim(stack, row, 0, keepdims=False)
        for name, stack in stacks.items()
    }
    w, m, v = catch_up(w, m, v, g, missed, config=config)
    stacks = {
        name: lax.dynamic_update_index_in_dim(stack, w[name], row, 0)
        for name, stack in stacks.items()
    }
    return stacks, w, m, v


class TrainingSlots:
    """Arrays for some layers' experts on each device, and which experts' weights are in them.

    Slots and experts go by number: slots from 0, experts from 0 to P - 1. room: rows of a slot on a
    device; None: one for each expert of the device. A slot gets a larger room (`make_room`) at its
    next `fit`. Two threads may use two slots at once, not one.
    """

    def __init__(
        self,
        local: LocalExperts,
        shapes: Mapping[str, tuple[int, ...]],
        num_slots: int,
        room: int | None,
    ) -> None:
        self.local, self.shapes, self.devices, self.room = (
            local,
            dict(shapes),
            local.all_devices,
            room,
        )
        self._rows = [SlotRows(local, room) for _ in range(num_slots)]
        self.stacks = [self._empty(room) for _ in range(num_slots)]
        self._present = [np.zeros(local.experts.size, np.bool_) for _ in self.stacks]
        self._layer_in: list[int | None] = [None for _ in self.stacks]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all slots on all devices."""
        expert_bytes = sum(4 * math.prod(shape) for shape in self.shapes.values())
        rows = sum(self.local.per_device if slot.room is None else slot.room for slot in self._rows)
        return rows * len(self.devices) * expert_bytes

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Return (layer, slot) of each slot that holds a layer, by layer."""
        return sorted(
            (layer, slot) for slot, layer in enumerate(self._layer_in) if layer is not None
        )

    def _empty(self, room: int | None) -> Slot:
        rows = self.local.per_device if room is None else room
        return [
            {
                name: jnp.zeros((rows, *shape), jnp.float32, device=device)
                for name, shape in self.shapes.items()
            }
            for device in self.devices
        ]

    # Which experts a slot holds

    def make_room(self, needed: int) -> None:
        """Let slots have rows for so many experts of a device from their next `fit` on, if they
        have fewer.
        """
        per_device = self.local.per_device
        if self.room is None or needed <= self.room:
            return
        self.room = larger_room(self.room, needed, per_device)
        log.warning(
            "tiers.device_experts is too small: a layer's tokens chose %d of a device's %d experts;"
            " there is room for %d from now on, and the step is compiled anew",
            *(needed, per_device, self.room),
        )

    def fit(self, slot: int) -> None:
        """Empty a slot that has fewer rows than slots now have, and give it the new ones."""
        room = self.room
        if self._rows[slot].room != room:
            self.stacks[slot] = []  # free before the new one is there
            self._rows[slot], self.stacks[slot] = SlotRows(self.local, room), self._empty(room)
            self._present[slot][:] = False

    def holds(self, slot: int, layer: int) -> bool:
        """Return whether the slot is the layer's already."""
        return self._layer_in[slot] == layer

    def assign(self, slot: int, layer: int, weights: Mapping[str, NDArray[Any]] | None) -> None:
        """Give the slot to a layer. weights: of all the layer's experts; None: none are in the
        slot yet.
        """
        self._present[slot][:] = False
        if weights is not None:
            self.stacks[slot] = [
                {name: jnp.array(w, device=device) for name, w in own.items()}
                for own, device in zip(
                    self.local.arranged(layer, weights), self.devices, strict=True
                )
            ]
            self._present[slot][:] = True
        self._layer_in[slot] = layer

    def take_rows(self, slot: int, experts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Give these experts rows of the slot; return which of them the slot has no weights of."""
        self._present[slot][self._rows[slot].take(experts)] = False
        return ~self._present[slot][experts]

    def set_present(self, slot: int, expert: int, present: bool) -> None:
        """Note whether the slot has the expert's weights as its records say."""
        self._present[slot][expert] = present

    def waves(self, slot: int, experts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Give these experts, ascending, in parts for which the slot has rows together."""
        return self._rows[slot].waves(experts)

    def chosen_rows(self, slot: int, chosen_P: NDArray[np.bool_], size: int) -> list[ChosenRows]:
        """Return, by device, which rows of the slot hold these experts, in arrays of `size`."""
        parts = self._rows[slot].chosen(chosen_P, size)
        return [
            part for part, replicas in zip(parts, self.local.devices, strict=True) for _ in replicas
        ]

    def places(self, slot: int, layer: int, expert: int) -> list[tuple[int, int]]:
        """Return where an expert lies, or is to lie: (number of the device, row there)."""
        return self._rows[slot].places(layer, expert)

    # What a slot holds

    def place(self, slot: int, layer: int, expert: int, record: Record) -> int:
        """Copy an expert's weights into its rows of the slot; return the bytes copied."""
        stacks, places = self.stacks[slot], self.places(slot, layer, expert)
        for d, row in places:
            stacks[d] = _place(
                stacks[d], np.int32(row), record.on_device(self.shapes, self.devices[d])
            )
        jax.block_until_ready([stacks[d] for d, _ in places])
        return record.data_R.nbytes * len(places)

    def update(
        self,
        slot: int,
        places: Sequence[tuple[int, int]],
        moments: tuple[Moments, Moments],
        gradient: Moments,
        missed: Iterable[MissedSteps],
        optimizer: OptimizerConfig,
    ) -> tuple[Any, Any, Any]:
        """Take the missed steps for one expert; return its (w, m, v), in the first device's memory.

        The first of the places computes; the others are sent the weights.
        """
        w: Any = None
        (m, v), g = moments, gradient
        stacks, (first, first_row) = self.stacks[slot], places[0]
        for window in missed:
            stacks[first], w, m, v = _update(
                optimizer, stacks[first], np.int32(first_row), m, v, g, window
            )
        for d, row in places[1:]:
            sent = jax.device_put(w, self.devices[d])
            stacks[d] = jax.block_until_ready(_place(stacks[d], np.int32(row), sent))
        return jax.block_until_ready((w, m, v))

    def each_weights(self, slot: int, layer: int) -> Iterator[dict[str, NDArray[np.float32]]]:
        """Give the weights of each of the layer's experts, as they stand in the slot."""
        experts = np.flatnonzero(self.local.has(layer)).tolist()
        firsts = [self.local.places(layer, expert)[0] for expert in experts]
        stacks = self.stacks[slot]
        on_host = {
            d: {name: np.asarray(w) for name, w in stacks[d].items()}
            for d in {d for d, _ in firsts}
        }
        for d, row in firsts:
            yield {name: w[row] for name, w in on_host[d].items()}
