"""How many replicas experts get and which devices hold them: Lina's policy and EPLB's, a few
hundred parts to pack.

Legend: E experts of a layer, N devices, P nodes, G groups of neighbouring experts, I parts.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Rows of tokens after which an expert's replicas take turns anew: a quota is a multiple of 1 /
# CYCLE of an expert.
CYCLE = 120
ROUNDING = 1e-9  # of sums of floats, relative
NOWHERE = -1


class ExpertParts(NamedTuple):
    """The parts to pack, each into a slot: an expert, how many of CYCLE rows it takes, and how
    much that weighs.
    """

    experts: np.ndarray
    turns: np.ndarray
    weights: np.ndarray


def lina(
    popularity_E: np.ndarray, num_devices: int, capacity: int
) -> tuple[ExpertParts, np.ndarray]:
    """Return Lina's parts of experts and their devices (section 5.2).

    Equation 1: an expert needs n_e = N popularity / sum devices. For n_e >= 1 it gets floor(n_e)
    whole ones, and what is left is a part like an expert with n_e < 1: first-fit-decreasing into
    the devices, in units of one. Where slots are too few for all parts, the most loaded experts are
    replicated first and their replicas are equal. What fits nowhere goes to the least loaded
    device; experts without an estimate to those with the fewest experts.
    """
    needed_E = num_devices * popularity_E / popularity_E.sum()
    wanted_E = np.clip(np.ceil(needed_E * (1 - ROUNDING)), 1, num_devices).astype(np.int64)
    copies_E = _replicate(needed_E, num_devices * capacity, wanted_E)
    shares = []
    for needed, copies, wanted in zip(needed_E, copies_E, wanted_E, strict=True):
        whole = np.full(copies, needed / copies)
        if 1 < copies == wanted:
            whole = np.append(np.ones(copies - 1), needed - (copies - 1))
        shares.append(whole)

    def choose(
        weight: float, devices: np.ndarray, loads_N: np.ndarray, counts_N: np.ndarray
    ) -> int:
        if weight == 0:
            return int(devices[np.lexsort((loads_N[devices], counts_N[devices]))[0]])
        fitting = devices[loads_N[devices] + weight <= 1 + ROUNDING]
        return int(fitting[0] if fitting.size else devices[np.argmin(loads_N[devices])])

    parts = _parts(shares)
    return parts, _pack(parts, num_devices, capacity, choose)


def _eplb_of_node(
    popularity_E: np.ndarray, num_devices: int, capacity: int
) -> tuple[ExpertParts, np.ndarray]:
    """Return equal replicas of experts, and their devices: as many as there are slots, an equal
    number on each.

    Copies go one by one to the expert with most load a copy; then all, the heaviest first, to the
    least loaded device.
    """
    most_E = np.where(popularity_E > 0, num_devices, 1)
    copies_E = _replicate(popularity_E, num_devices * capacity, most_E)
    parts = _parts(
        [np.full(copies, popularity / copies) for popularity, copies in zip(popularity_E, copies_E)]
    )
    room = -(-len(parts.experts) // num_devices)

    def choose(
        weight: float, devices: np.ndarray, loads_N: np.ndarray, counts_N: np.ndarray
    ) -> int:
        return int(devices[np.lexsort((counts_N[devices], loads_N[devices]))[0]])

    return parts, _pack(parts, num_devices, room, choose)


def eplb(
    popularity_E: np.ndarray, num_devices: int, capacity: int, num_nodes: int, num_groups: int
) -> tuple[ExpertParts, np.ndarray]:
    """Return what `_eplb_of_node` makes of each node and the groups of experts packed on it,
    equally many on each.
    """
    if num_nodes == 1:
        return _eplb_of_node(popularity_E, num_devices, capacity)
    experts_GE = np.arange(len(popularity_E)).reshape(num_groups, -1)
    groups = ExpertParts(
        np.arange(num_groups), np.zeros(num_groups), popularity_E[experts_GE].sum(axis=1)
    )

    def choose(weight: float, nodes: np.ndarray, loads_P: np.ndarray, counts_P: np.ndarray) -> int:
        return int(nodes[np.argmin(loads_P[nodes])])

    node_G = _pack(groups, num_nodes, num_groups // num_nodes, choose)
    rows = []
    for node in range(num_nodes):
        experts = experts_GE[node_G == node].ravel()
        parts, devices = _eplb_of_node(popularity_E[experts], num_devices // num_nodes, capacity)
        here = node * (num_devices // num_nodes) + devices
        rows.append((experts[parts.experts], parts.turns, parts.weights, here))
    experts, turns, weights, devices = (
        np.concatenate(arrays) for arrays in zip(*rows, strict=True)
    )
    return ExpertParts(experts, turns, weights), devices


def _replicate(load_E: np.ndarray, num_slots: int, most_E: np.ndarray) -> np.ndarray:
    """Return int64 [E], copies of experts: one of each, then one by one of that with most load a
    copy.
    """
    copies_E = np.ones(len(load_E), np.int64)
    for _ in range(num_slots - len(load_E)):
        a_copy_E = np.where(copies_E < most_E, load_E / copies_E, -1.0)
        expert = int(np.argmax(a_copy_E))
        if a_copy_E[expert] < 0:
            break
        copies_E[expert] += 1
    return copies_E


def _parts(shares: list[np.ndarray]) -> ExpertParts:
    """Return a part for each share of each expert but those that are too small for a turn."""
    rows = []
    for expert, weights in enumerate(shares):
        turns = apportion(weights) if len(weights) > 1 else [CYCLE]
        rows += [(expert, turns[i], weights[i]) for i in range(len(weights)) if turns[i] > 0]
    return ExpertParts(*(np.array(column) for column in zip(*rows, strict=True)))


def apportion(weights: np.ndarray) -> np.ndarray:
    """Return int64, how many of CYCLE turns each of an expert's replicas gets, by largest
    remainders.
    """
    total = weights.sum()
    exact = CYCLE * (weights / total if total > 0 else np.full(len(weights), 1 / len(weights)))
    turns: np.ndarray = np.floor(exact + ROUNDING).astype(np.int64)
    turns[np.argsort(turns - exact, kind="stable")[: CYCLE - turns.sum()]] += 1
    return turns


Choose = Callable[[float, np.ndarray, np.ndarray, np.ndarray], int]


def _pack(parts: ExpertParts, num_devices: int, capacity: int, choose: Choose) -> np.ndarray:
    """Return the device of each part, the heaviest first; at most `capacity` a device, and no
    expert twice on one.

    choose: gets a part's weight, the devices that may take it, and loads and numbers of parts of
    all. If only devices with a copy of the part's expert have room, another part moves there and
    leaves its place to this one.
    """
    device_I = np.full(len(parts.experts), NOWHERE)
    loads_N, counts_N = np.zeros(num_devices), np.zeros(num_devices, np.int64)
    holds_NE = np.zeros((num_devices, int(parts.experts.max()) + 1), bool)

    def put(part: int, device: int, sign: int = 1) -> None:
        device_I[part] = device if sign > 0 else NOWHERE
        loads_N[device] += sign * parts.weights[part]
        counts_N[device] += sign
        holds_NE[device, parts.experts[part]] = sign > 0

    for part in np.argsort(-parts.weights, kind="stable").tolist():
        expert = parts.experts[part]
        devices = np.flatnonzero((counts_N < capacity) & ~holds_NE[:, expert])
        if devices.size:
            put(part, choose(float(parts.weights[part]), devices, loads_N, counts_N))
            continue
        # A device with room has this expert, so at most capacity - 2 others; one without it has
        # `capacity` others. One of these is therefore not on the former. Of all such moves that
        # which leaves the smaller larger load.
        moves = []
        for roomy in np.flatnonzero(counts_N < capacity).tolist():
            others = (
                (device_I != NOWHERE)
                & ~holds_NE[device_I, expert]
                & ~holds_NE[roomy, parts.experts]
            )
            for other in np.flatnonzero(others).tolist():
                loads = loads_N[roomy], loads_N[device_I[other]]
                weight = parts.weights[other]
                moves.append(
                    (max(loads[0] + weight, loads[1] - weight + parts.weights[part]), other, roomy)
                )
        _, other, roomy = min(moves)
        device = int(device_I[other])
        put(other, device, -1)
        put(other, roomy)
        put(part, device)
    return device_I
