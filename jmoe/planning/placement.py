"""Placement of a layer's experts in inference: replicas on devices by popularity, and the replica
that takes each token.

A replica's physical number is device * S + slot. Axis legend:

E  experts of a layer (logical)
N  devices
S  slots of a device
C  CYCLE, the number of rows after which the choice of replicas repeats
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from jmoe.config.checks import check
from jmoe.config.engine import PlacementPolicy
from jmoe.planning.placement_policies import (
    CYCLE,
    ROUNDING,
    PartsToPlace,
    apportion_turns,
    eplb_parts_and_devices,
    lina_parts_and_devices,
)

EMPTY = -1


@dataclass(frozen=True, eq=False)
class Placement:
    """Assignment of experts to slots, and of token rows to replicas.

    physical_to_logical: int32 [N, S], the expert in each slot, or EMPTY; no device holds an expert
    twice. replica_of_row: int32 [E, C]; replica_of_row[e, r % C] is the physical number of the
    replica of expert e that takes row r: its index in the flattened `physical_to_logical`. The
    shape is constant, so a program that reads this array is compiled once.
    popularity_E: float64 [E], expected tokens per expert, in any unit.
    """

    physical_to_logical: np.ndarray
    replica_of_row: np.ndarray
    popularity_E: np.ndarray

    @property
    def num_experts(self) -> int:
        return len(self.replica_of_row)

    @property
    def num_devices(self) -> int:
        return len(self.physical_to_logical)

    @property
    def slots_per_device(self) -> int:
        return int(self.physical_to_logical.shape[1])

    def replicas_of(self, expert: int) -> np.ndarray:
        """Return the physical numbers of an expert's replicas, in ascending order."""
        return np.flatnonzero(self.physical_to_logical == expert)

    def replica_of_tokens(self, rows: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Return int32, the physical number of the replica that computes each token's expert.

        rows, experts: integer arrays of broadcastable shapes, with a token's row in the step and
        one of its experts. The result depends on these only, not on other tokens or the calling
        device: an expert's replicas alternate over CYCLE rows, in proportion to their
        replica_loads.
        """
        return self.replica_of_row[experts, rows % CYCLE]

    @property
    def replica_loads(self) -> np.ndarray:
        """Return float64 [N, S], the popularity that each replica takes if tokens are spread evenly
        over rows.
        """
        taken = np.bincount(self.replica_of_row.ravel(), minlength=self.physical_to_logical.size)
        share = taken.reshape(self.physical_to_logical.shape) / CYCLE
        return np.where(
            self.physical_to_logical == EMPTY,
            0.0,
            self.popularity_E[self.physical_to_logical] * share,
        )

    @property
    def device_loads(self) -> np.ndarray:
        """Return float64 [N], the popularity that each device takes."""
        loads: np.ndarray = self.replica_loads.sum(axis=1)
        return loads

    @property
    def balancedness(self) -> float:
        """Return the mean load of a device divided by the largest; 1 if all are equal."""
        return balancedness(self.device_loads)


def balancedness(loads: np.ndarray) -> float:
    """Return the mean of `loads` divided by the largest; 1 if all loads are 0."""
    largest = float(loads.max(initial=0.0))
    return float(loads.mean()) / largest if largest > 0 else 1.0


class SlotFill(NamedTuple):
    """A load of weights: device `device` loads expert `expert` into slot `slot`."""

    device: int
    slot: int
    expert: int


class PlacementChanges(NamedTuple):
    """A placement whose slots are ordered so that most experts stay in place, and the loads that
    lead to it.
    """

    placement: Placement
    fills: tuple[SlotFill, ...]


def place_experts(
    popularity_E: np.ndarray,
    num_devices: int,
    *,
    slots_per_device: int,
    max_packed: int = 4,
    nodes: int | None = None,
    num_groups: int = 1,
    policy: PlacementPolicy = "lina",
) -> Placement:
    """Return a placement of a layer's experts by `policy`, or the even placement if its largest
    device load is smaller.

    popularity_E: expected tokens per expert, in any unit; 0 for an expert without an estimate.
    max_packed: most experts on a device. nodes, num_groups: for the policy eplb; replicas of a
    group of neighbouring experts stay on one node if the groups divide by the nodes. Raises
    `ValueError` if not every expert fits once, or an argument is out of range.
    """
    popularity_E = np.asarray(popularity_E, np.float64)
    size, capacity = len(popularity_E), min(slots_per_device, max_packed)
    check(
        policy in get_args(PlacementPolicy),
        "policy",
        policy,
        f"must be one of {', '.join(get_args(PlacementPolicy))}",
    )
    _check_popularity(popularity_E)
    check(0 < num_devices <= CYCLE, "num_devices", num_devices, f"must be in [1, {CYCLE}]")
    for name, slots in (("slots_per_device", slots_per_device), ("max_packed", max_packed)):
        enough = (
            f"must be at least {-(-size // num_devices)} for {size} experts on {num_devices}"
            " devices"
        )
        check(slots * num_devices >= size, name, slots, enough)
    num_nodes = _checked_num_nodes(nodes, num_devices, num_groups, size)

    shape, in_order = (num_devices, slots_per_device), np.arange(size) * num_devices // size
    largest = np.max(np.bincount(in_order, popularity_E))
    if policy != "even" and popularity_E.any():
        if policy == "lina":
            parts, devices = lina_parts_and_devices(popularity_E, num_devices, capacity)
        else:
            split = num_nodes if num_groups % num_nodes == 0 else 1
            parts, devices = eplb_parts_and_devices(
                popularity_E, num_devices, capacity, split, num_groups
            )
        planned = _placement_of_parts(parts, devices, shape, popularity_E)
        if planned.device_loads.max() <= largest * (1 + ROUNDING):
            return planned
    parts = PartsToPlace(np.arange(size), np.full(size, CYCLE), popularity_E)
    return _placement_of_parts(parts, in_order, shape, popularity_E)


def _check_popularity(popularity_E: np.ndarray) -> None:
    """Raise `ValueError` unless the array has one finite number, not negative, for each expert."""
    usable = (
        popularity_E.ndim == 1
        and len(popularity_E) > 0
        and bool(np.all(np.isfinite(popularity_E) & (popularity_E >= 0)))
    )
    check(
        usable,
        "popularity",
        popularity_E,
        "must be finite numbers that are not negative, one an expert",
    )


def _checked_num_nodes(nodes: int | None, num_devices: int, num_groups: int, size: int) -> int:
    """Return the number of nodes. Raises `ValueError` unless nodes divide the devices and groups
    divide the experts.
    """
    num_nodes = 1 if nodes is None else nodes
    check(
        num_nodes > 0 and num_devices % num_nodes == 0,
        "nodes",
        nodes,
        f"must divide num_devices = {num_devices}",
    )
    check(
        num_groups > 0 and size % num_groups == 0,
        "num_groups",
        num_groups,
        f"must divide the {size} experts",
    )
    return num_nodes


def placement_from_slots(physical_to_logical: np.ndarray, popularity_E: np.ndarray) -> Placement:
    """Return the `Placement` with experts in the given slots; an expert's replicas get equal
    replica_loads.

    physical_to_logical: integers [N, S], EMPTY for an empty slot. Raises `ValueError` if an expert
    is missing, or twice on a device.
    """
    experts_NS, size = np.asarray(physical_to_logical, np.int32), len(popularity_E)
    known = bool(np.all((experts_NS >= EMPTY) & (experts_NS < size)))
    check(
        known,
        "physical_to_logical",
        physical_to_logical,
        f"must be below {size}, or {EMPTY} for an empty slot",
    )
    devices, slots = np.nonzero(experts_NS != EMPTY)
    experts = experts_NS[devices, slots]
    copies = np.bincount(experts, minlength=size)
    check(
        bool(copies.all()),
        "physical_to_logical",
        physical_to_logical,
        f"must have each of {size} experts",
    )
    once = len(np.unique(devices * size + experts)) == len(experts)
    check(once, "physical_to_logical", physical_to_logical, "must have no expert twice on a device")
    num_turns_NS = np.zeros(experts_NS.shape, np.int64)
    for expert in range(size):
        num_turns_NS[experts_NS == expert] = apportion_turns(np.ones(copies[expert]))
    return Placement(
        experts_NS,
        _spread_turns(experts_NS, num_turns_NS, size),
        np.asarray(popularity_E, np.float64),
    )


def assign_shared_slot_rows(devices_of_layers: Sequence[Set[int]]) -> list[int]:
    """Return the number of the row of slots that each layer uses, such that layers with disjoint
    sets of devices share a row.

    devices_of_layers: devices that hold experts of each layer, permanently. A row has slots on
    every device.
    """
    taken: list[set[int]] = []
    rows = []
    for devices in devices_of_layers:
        row = next((n for n, others in enumerate(taken) if not others & devices), len(taken))
        if row == len(taken):
            taken.append(set())
        taken[row] |= devices
        rows.append(row)
    return rows


def slot_rows_and_sizes(placements: Sequence[Placement]) -> tuple[list[int], list[int]]:
    """Return (row of each layer, slots per device of each row) for layers whose placement never
    changes; see `assign_shared_slot_rows`.
    """
    on_NS = [placement.physical_to_logical != EMPTY for placement in placements]
    rows = assign_shared_slot_rows([set(np.flatnonzero(on.any(axis=1)).tolist()) for on in on_NS])
    slots = dict(zip(rows, (placement.slots_per_device for placement in placements), strict=True))
    return rows, [slots[row] for row in range(len(slots))]


def placement_changes(held: np.ndarray, new: Placement) -> PlacementChanges:
    """Return the loads that turn the slots' current contents into a new placement.

    held: integers [N, S], the expert whose weights are in each slot, or EMPTY; initially
    `old.physical_to_logical`. The new placement's slots are reordered within a device: an expert
    that is already there keeps its slot, and others fill empty slots before they replace an expert.
    """
    wanted_NS = new.physical_to_logical
    check(
        held.shape == wanted_NS.shape,
        "held",
        held.shape,
        f"must have the shape {wanted_NS.shape} of the placement",
    )
    slots = new.slots_per_device
    ordered_NS = np.full_like(wanted_NS, EMPTY)
    # a replica's physical number after reordering
    moved_to = np.arange(wanted_NS.size, dtype=np.int32)
    fills = []
    for device, (there, wanted) in enumerate(zip(held.tolist(), wanted_NS.tolist(), strict=True)):
        places = {
            expert: there.index(expert) for expert in wanted if expert != EMPTY and expert in there
        }
        free = iter(
            sorted(
                set(range(slots)) - set(places.values()),
                key=lambda slot: (there[slot] != EMPTY, slot),
            )
        )
        for slot, expert in enumerate(wanted):
            if expert == EMPTY:
                continue
            if expert not in places:
                places[expert] = next(free)
                fills.append(SlotFill(device, places[expert], expert))
            ordered_NS[device, places[expert]] = expert
            moved_to[device * slots + slot] = device * slots + places[expert]
    return PlacementChanges(
        Placement(ordered_NS, moved_to[new.replica_of_row], new.popularity_E), tuple(fills)
    )


def _placement_of_parts(
    parts: PartsToPlace, device_I: np.ndarray, shape: tuple[int, int], popularity_E: np.ndarray
) -> Placement:
    """Return the placement of parts on devices, with each device's experts in ascending order."""
    experts_NS, num_turns_NS = np.full(shape, EMPTY, np.int32), np.zeros(shape, np.int64)
    order = np.lexsort((parts.experts, device_I))
    slots = np.arange(len(order)) - np.searchsorted(device_I[order], device_I[order])
    experts_NS[device_I[order], slots] = parts.experts[order]
    num_turns_NS[device_I[order], slots] = parts.num_turns[order]
    return Placement(
        experts_NS, _spread_turns(experts_NS, num_turns_NS, len(popularity_E)), popularity_E
    )


def _spread_turns(experts_NS: np.ndarray, num_turns_NS: np.ndarray, num_experts: int) -> np.ndarray:
    """Return int32 [E, C], the replica of each turn, with every replica's turns evenly spaced."""
    experts, turns = experts_NS.ravel(), num_turns_NS.ravel()
    replica_EC = np.zeros((num_experts, CYCLE), np.int32)
    alone = np.flatnonzero(turns == CYCLE)
    replica_EC[experts[alone]] = alone[:, None]
    shared = np.flatnonzero((turns > 0) & (turns < CYCLE))
    replica = np.repeat(shared, turns[shared])
    ends = np.cumsum(turns[shared])
    number = np.arange(len(replica)) - np.repeat(ends - turns[shared], turns[shared])
    order = np.lexsort((replica, (number + 0.5) / turns[replica], experts[replica]))
    replica_EC[np.unique(experts[shared])] = replica[order].reshape(-1, CYCLE)
    return replica_EC
