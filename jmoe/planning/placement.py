"""Where the experts of a layer are in inference: replicas on devices by popularity, and which one
takes a token.

Legend: E experts (logical), N devices, S slots of a device, C = CYCLE rows after which replicas
repeat. A replica's physical number is device * S + slot.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from jmoe.config.checks import check
from jmoe.config.engine import PlacementPolicy
from jmoe.planning.placement_policies import CYCLE, ROUNDING, ExpertParts, apportion, eplb, lina

EMPTY = -1


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert is in each slot of each device, and which replica takes the token of a row.

    physical_to_logical: int32 [N, S], EMPTY for an empty slot; no device holds an expert twice.
    turns: int32 [E, C], the physical number of the replica that takes the rows r with r % C at that
    place: a constant of fixed shape, so that a program that looks replicas up in it is compiled
    once. popularity_E: float64, what the plan was made from, in tokens or any other unit.
    """

    physical_to_logical: np.ndarray
    turns: np.ndarray
    popularity_E: np.ndarray

    @property
    def num_experts(self) -> int:
        return len(self.turns)

    @property
    def num_devices(self) -> int:
        return len(self.physical_to_logical)

    @property
    def slots_per_device(self) -> int:
        return int(self.physical_to_logical.shape[1])

    def replicas_of(self, expert: int) -> np.ndarray:
        """Return the physical numbers of an expert's replicas, ascending."""
        return np.flatnonzero(self.physical_to_logical == expert)

    def physical(self, rows: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Return int32, the physical number of the replica that takes each token.

        rows, experts: integers of shapes that broadcast, the number of a token's row in the step
        and one of its experts. The answer depends on nothing else, neither on other tokens nor on
        the device that asks: every expert's replicas take turns over CYCLE rows, each as many as
        its quota says, evenly spread.
        """
        return self.turns[experts, rows % CYCLE]

    @property
    def quotas(self) -> np.ndarray:
        """Return float64 [N, S], the part of an expert's popularity that each replica takes if
        all rows are alike.
        """
        taken = np.bincount(self.turns.ravel(), minlength=self.physical_to_logical.size)
        share = taken.reshape(self.physical_to_logical.shape) / CYCLE
        return np.where(
            self.physical_to_logical == EMPTY,
            0.0,
            self.popularity_E[self.physical_to_logical] * share,
        )

    @property
    def loads(self) -> np.ndarray:
        """Return float64 [N], the popularity that each device takes."""
        loads: np.ndarray = self.quotas.sum(axis=1)
        return loads

    @property
    def balancedness(self) -> float:
        """Return the mean load of a device over the largest: 1 if all are equal."""
        return balancedness(self.loads)


def balancedness(loads: np.ndarray) -> float:
    """Return the mean load over the largest; 1 if there is none."""
    largest = float(loads.max(initial=0.0))
    return float(loads.mean()) / largest if largest > 0 else 1.0


class Fill(NamedTuple):
    """Weights that a device has to load: of an expert, into a slot."""

    device: int
    slot: int
    expert: int


class Changes(NamedTuple):
    """A placement with its slots in the order that keeps most in place, and what has to be
    loaded to get there.
    """

    placement: Placement
    fills: tuple[Fill, ...]


def place(
    popularity_E: np.ndarray,
    num_devices: int,
    *,
    slots_per_device: int,
    max_packed: int = 4,
    nodes: int | None = None,
    num_groups: int = 1,
    policy: PlacementPolicy = "lina",
) -> Placement:
    """Return where the experts of a layer should be; the even placement where the policy's has a
    larger largest load.

    popularity_E: tokens that each expert will get, or any multiple of it; 0 for an expert without
    an estimate.
    max_packed: the most experts of a device. nodes, num_groups: of eplb: where the groups of
    neighbouring experts divide by the nodes, the replicas of a group stay on one node. Raise
    `ValueError` if the experts do not fit once.
    """
    popularity_E = np.asarray(popularity_E, np.float64)
    size, capacity = len(popularity_E), min(slots_per_device, max_packed)
    check(
        policy in get_args(PlacementPolicy),
        "policy",
        policy,
        f"must be one of {', '.join(get_args(PlacementPolicy))}",
    )
    usable = (
        popularity_E.ndim == 1
        and size > 0
        and bool(np.all(np.isfinite(popularity_E) & (popularity_E >= 0)))
    )
    check(
        usable,
        "popularity",
        popularity_E,
        "must be finite numbers that are not negative, one an expert",
    )
    check(0 < num_devices <= CYCLE, "num_devices", num_devices, f"must be in [1, {CYCLE}]")
    for name, slots in (("slots_per_device", slots_per_device), ("max_packed", max_packed)):
        enough = (
            f"must be at least {-(-size // num_devices)} for {size} experts on {num_devices}"
            " devices"
        )
        check(slots * num_devices >= size, name, slots, enough)
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

    shape, in_order = (num_devices, slots_per_device), np.arange(size) * num_devices // size
    largest = np.max(np.bincount(in_order, popularity_E))
    if policy != "even" and popularity_E.any():
        if policy == "lina":
            parts, devices = lina(popularity_E, num_devices, capacity)
        else:
            split = num_nodes if num_groups % num_nodes == 0 else 1
            parts, devices = eplb(popularity_E, num_devices, capacity, split, num_groups)
        planned = _placement(parts, devices, shape, popularity_E)
        if planned.loads.max() <= largest * (1 + ROUNDING):
            return planned
    parts = ExpertParts(np.arange(size), np.full(size, CYCLE), popularity_E)
    return _placement(parts, in_order, shape, popularity_E)


def place_as(physical_to_logical: np.ndarray, popularity_E: np.ndarray) -> Placement:
    """Return the placement of experts that are where this says, an expert's replicas equally busy.

    physical_to_logical: integers [N, S], EMPTY for an empty slot. Raise `ValueError` unless every
    expert is there and none twice on a device.
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
    turns_NS = np.zeros(experts_NS.shape, np.int64)
    for expert in range(size):
        turns_NS[experts_NS == expert] = apportion(np.ones(copies[expert]))
    return Placement(
        experts_NS, _take_turns(experts_NS, turns_NS, size), np.asarray(popularity_E, np.float64)
    )


def shared_rows(devices_of_layers: Sequence[Set[int]]) -> list[int]:
    """Return the row of slots that each layer takes, in which layers on other devices have theirs
    too.

    A row has slots on every device. devices_of_layers: the devices that have experts of each layer,
    for good.
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


def slot_rows(placements: Sequence[Placement]) -> tuple[list[int], list[int]]:
    """Return (the row of each layer as `shared_rows` says, the slots of each row) of layers that
    stay.
    """
    on_NS = [placement.physical_to_logical != EMPTY for placement in placements]
    rows = shared_rows([set(np.flatnonzero(on.any(axis=1)).tolist()) for on in on_NS])
    slots = dict(zip(rows, (placement.slots_per_device for placement in placements), strict=True))
    return rows, [slots[row] for row in range(len(slots))]


def changes(held: np.ndarray, new: Placement) -> Changes:
    """Return what to load, and where, to get from what devices hold to a new placement.

    held: integers [N, S], the expert that each slot's weights are of, EMPTY for none:
    `old.physical_to_logical` at first. The new placement's slots are reordered within their device:
    an expert that is there already stays in its slot, others come into slots that hold nothing
    before they replace one.
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
                fills.append(Fill(device, places[expert], expert))
            ordered_NS[device, places[expert]] = expert
            moved_to[device * slots + slot] = device * slots + places[expert]
    return Changes(Placement(ordered_NS, moved_to[new.turns], new.popularity_E), tuple(fills))


def _placement(
    parts: ExpertParts, device_I: np.ndarray, shape: tuple[int, int], popularity_E: np.ndarray
) -> Placement:
    """Return the placement of parts on devices, each device's experts in ascending order."""
    experts_NS, turns_NS = np.full(shape, EMPTY, np.int32), np.zeros(shape, np.int64)
    order = np.lexsort((parts.experts, device_I))
    slots = np.arange(len(order)) - np.searchsorted(device_I[order], device_I[order])
    experts_NS[device_I[order], slots] = parts.experts[order]
    turns_NS[device_I[order], slots] = parts.turns[order]
    return Placement(experts_NS, _take_turns(experts_NS, turns_NS, len(popularity_E)), popularity_E)


def _take_turns(experts_NS: np.ndarray, turns_NS: np.ndarray, num_experts: int) -> np.ndarray:
    """Return int32 [E, C], the replica of each turn, every replica's turns at equal distances
    (about).
    """
    experts, turns = experts_NS.ravel(), turns_NS.ravel()
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
