"""Device slots for the expert weights of the layers that a training step is using.

`expert_state.py` decides which layers and experts are in the slots.

Legend:
  P  experts of this process in a layer
  L  experts of one device in a layer
  M  rows of a slot on a device, M <= L
"""

import logging
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jmoe.config import OptimizerConfig
from jmoe.offload.expert_index import LocalExperts
from jmoe.offload.lazy_adamw import MissedSteps, catch_up
from jmoe.offload.slot_arrays import put_record, put_records, zero_arrays
from jmoe.offload.slot_rows import ChosenRows, SlotRows, grown_num_rows
from jmoe.offload.weight_staging import ExpertGroup, Transfer

log = logging.getLogger(__name__)

# by parameter, [L, ...] or [M, ...], on one device
DeviceStacks = dict[str, jax.Array]
Slot = list[DeviceStacks]  # one entry per device of this process
Moments = Mapping[str, jax.Array | np.ndarray]  # by parameter


class SlotPlace(NamedTuple):
    """An expert of a layer in a slot. expert: position among the process's experts."""

    slot: int
    layer: int
    expert: int


class WeightSource(Protocol):
    """One expert's weights in host memory, such as a `Record`."""

    def copy_to_device(self, names: Collection[str], device: jax.Device, /) -> dict[str, jax.Array]:
        """Return arrays, by name, in the device's memory, after the transfer has ended.

        On CPU they may alias the host memory.
        """


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _catch_up_row(
    config: OptimizerConfig,
    stacks: DeviceStacks,
    row: jax.Array,
    m: Mapping[str, jax.Array],
    v: Mapping[str, jax.Array],
    g: Mapping[str, jax.Array],
    missed: MissedSteps,
) -> tuple[DeviceStacks, dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """Return (slot arrays, w, m, v) after `catch_up` of one row; donates the slot arrays."""
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
    """Slots on each device, each for some experts of one layer, and a note of which weights are
    present.

    Slots are numbered from 0, experts from 0 to P - 1. num_rows: rows of a slot on a device; None
    means one row for each of the device's experts. After `request_slot_size` a slot takes its
    larger size at its next `grow_if_requested`. dtypes: of the weights, by parameter; None means
    float32.

    Several threads may write experts at once (`write_weights`, `write_group`, `catch_up_expert`);
    of the other methods only those of different slots may run at once.
    """

    def __init__(
        self,
        local: LocalExperts,
        shapes: Mapping[str, tuple[int, ...]],
        num_slots: int,
        num_rows: int | None,
        dtypes: Mapping[str, np.dtype] | None = None,
    ) -> None:
        self.local, self.shapes, self.devices, self.num_rows = (
            local,
            dict(shapes),
            local.all_devices,
            num_rows,
        )
        wide = dict.fromkeys(shapes, np.dtype(np.float32))
        self._fields = {n: (shape, (dtypes or wide)[n]) for n, shape in self.shapes.items()}
        self._rows = [SlotRows(local, num_rows) for _ in range(num_slots)]
        self.stacks = [self._make_empty_slot(num_rows) for _ in range(num_slots)]
        self._present = [np.zeros(local.experts.size, np.bool_) for _ in self.stacks]
        self._layer_in: list[int | None] = [None for _ in self.stacks]
        # a write donates the arrays, so no other may take them meanwhile
        self._locks = [threading.Lock() for _ in self.devices]
        self._on_cpu = self.devices[0].platform == "cpu"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all slots on all devices of this process."""
        expert_bytes = sum(
            dtype.itemsize * math.prod(shape) for shape, dtype in self._fields.values()
        )
        rows = sum(
            self.local.max_experts_per_device if slot.num_rows is None else slot.num_rows
            for slot in self._rows
        )
        return rows * len(self.devices) * expert_bytes

    @property
    def layers_and_slots(self) -> list[tuple[int, int]]:
        """Return (layer, slot) of each slot that holds a layer, ascending."""
        return sorted(
            (layer, slot) for slot, layer in enumerate(self._layer_in) if layer is not None
        )

    def _make_empty_slot(self, num_rows: int | None) -> Slot:
        rows = self.local.max_experts_per_device if num_rows is None else num_rows
        return [zero_arrays(rows, self._fields, device) for device in self.devices]

    # Experts of a slot

    def request_slot_size(self, needed: int) -> None:
        """Request slots that hold `needed` experts of a device; a slot grows at its next
        `grow_if_requested`. A smaller number than before changes nothing.
        """
        per_device = self.local.max_experts_per_device
        if self.num_rows is None or needed <= self.num_rows:
            return
        self.num_rows = grown_num_rows(self.num_rows, needed, per_device)
        log.warning(
            "tiers.device_experts is too small: a layer's tokens chose %d of a device's %d experts;"
            " there is room for %d from now on, and the step is compiled anew",
            *(needed, per_device, self.num_rows),
        )

    def grow_if_requested(self, slot: int) -> None:
        """Replace the slot by an empty one if `request_slot_size` has asked for more rows than it
        has.
        """
        num_rows = self.num_rows
        if self._rows[slot].num_rows != num_rows:
            self.stacks[slot] = []  # free the old arrays before allocating the new ones
            self._rows[slot] = SlotRows(self.local, num_rows)
            self.stacks[slot] = self._make_empty_slot(num_rows)
            self._present[slot][:] = False

    def holds_layer(self, slot: int, layer: int) -> bool:
        """Return True if the slot holds this layer."""
        return self._layer_in[slot] == layer

    def assign_layer(self, slot: int, layer: int, weights: Mapping[str, np.ndarray] | None) -> None:
        """Give the slot to a layer.

        weights: float32 of all the layer's local experts, by parameter; None marks all experts as
        absent.
        """
        self._present[slot][:] = False
        if weights is not None:
            self.stacks[slot] = [
                {name: jnp.array(w, device=device) for name, w in own.items()}
                for own, device in zip(
                    self.local.expert_rows_by_device(layer, weights), self.devices, strict=True
                )
            ]
            self._present[slot][:] = True
        self._layer_in[slot] = layer

    def assign_rows_and_find_absent(
        self, slot: int, experts: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Give these experts rows of the slot; return bool, which of them lack weights there."""
        self._present[slot][self._rows[slot].assign_rows_and_list_evicted(experts)] = False
        return ~self._present[slot][experts]

    def set_present(self, slot: int, expert: int, present: bool) -> None:
        """Note whether the slot's weights of an expert agree with its records."""
        self._present[slot][expert] = present

    def groups_that_fit(self, slot: int, experts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield these experts, ascending, in groups that fit the slot at once."""
        return self._rows[slot].groups_that_fit(experts)

    def chosen_rows(
        self, slot: int, chosen_P: NDArray[np.bool_], size: int
    ) -> list[ChosenRows[np.ndarray]]:
        """Return, by device, the rows of the slot that hold the chosen experts, in arrays of `size`
        entries.
        """
        parts = self._rows[slot].chosen_rows(chosen_P, size)
        return [
            part for part, replicas in zip(parts, self.local.devices, strict=True) for _ in replicas
        ]

    def replica_rows(self, place: SlotPlace) -> list[tuple[int, int]]:
        """Return (position of the device, row) of every replica of an expert."""
        return self._rows[place.slot].replica_rows(place.layer, place.expert)

    def groups_by_device(
        self, slot: int, layer: int, experts: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        """Return the positions in `experts` of the experts that the same devices hold, one array
        for each set of devices.
        """
        held: dict[tuple[int, ...], list[int]] = {}
        for position, expert in enumerate(experts.tolist()):
            rows = self.replica_rows(SlotPlace(slot, layer, expert))
            held.setdefault(tuple(d for d, _ in rows), []).append(position)
        return [np.array(positions) for positions in held.values()]

    # Weights of a slot

    def first_device(self, place: SlotPlace) -> jax.Device:
        """Return the first of the devices that hold an expert."""
        return self.devices[self.replica_rows(place)[0][0]]

    def write_weights(self, place: SlotPlace, source: WeightSource) -> int:
        """Copy an expert's weights into its rows of the slot; return the bytes sent."""
        stacks, rows, num_bytes = self.stacks[place.slot], self.replica_rows(place), 0
        for d, row in rows:
            sent = source.copy_to_device(self.shapes, self.devices[d])
            num_bytes += sum(w.nbytes for w in sent.values())
            with self._locks[d]:
                stacks[d] = put_record(stacks[d], sent, np.int32(row))
                if self._on_cpu:  # `sent` may be the source's memory
                    jax.block_until_ready(stacks[d])
        return num_bytes

    def write_group(
        self, slot: int, layer: int, experts: Sequence[int], group: ExpertGroup
    ) -> list[Transfer]:
        """Begin to copy the weights of a group into the slot's rows of these experts; return the
        transfer to each device.

        The same devices must hold all the experts.
        """
        rows = [dict(self.replica_rows(SlotPlace(slot, layer, expert))) for expert in experts]
        assert all(own.keys() == rows[0].keys() for own in rows), (layer, experts)
        stacks, transfers = self.stacks[slot], list[Transfer]()
        for d in rows[0]:
            sent, transfer = group.send(self.devices[d])
            transfers.append(transfer)
            with self._locks[d]:
                stacks[d] = put_records(stacks[d], sent, np.array([r[d] for r in rows], np.int32))
        return transfers

    def finish_writes(self, slot: int) -> None:
        """Wait on CPU devices until a slot is written, before a program with collectives reads it.

        An accelerator runs its programs in order.
        """
        if self._on_cpu:
            jax.block_until_ready(self.stacks[slot])

    def catch_up_expert(
        self,
        place: SlotPlace,
        moments: tuple[Moments, Moments],
        gradient: Moments,
        missed: Iterable[MissedSteps],
        optimizer: OptimizerConfig,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
        """Apply the missed steps to one expert; return its (w, m, v) by parameter, on the first
        device.

        The first of the devices that hold the expert computes, and sends the weights to the others.
        moments: (m, v) before the steps.
        """
        w: Any = None
        (m, v), g = moments, gradient
        places = self.replica_rows(place)
        stacks, (first, first_row) = self.stacks[place.slot], places[0]
        with self._locks[first]:
            for window in missed:
                stacks[first], w, m, v = _catch_up_row(
                    optimizer, stacks[first], np.int32(first_row), m, v, g, window
                )
        for d, row in places[1:]:
            sent = jax.device_put(w, self.devices[d])
            with self._locks[d]:
                stacks[d] = put_record(stacks[d], sent, np.int32(row))
        return jax.block_until_ready((w, m, v))

    def iterate_weights(self, slot: int, layer: int) -> Iterator[dict[str, NDArray[np.float32]]]:
        """Yield the weights in the slot of each of the layer's local experts, by parameter, on the
        host.
        """
        experts = np.flatnonzero(self.local.local_mask(layer)).tolist()
        firsts = [self.local.replica_rows(layer, expert)[0] for expert in experts]
        stacks = self.stacks[slot]
        on_host = {
            d: {name: np.asarray(w) for name, w in stacks[d].items()}
            for d in {d for d, _ in firsts}
        }
        for d, row in firsts:
            yield {name: w[row] for name, w in on_host[d].items()}
