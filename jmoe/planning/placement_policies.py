"""Policies that replicate experts by popularity and assign the replicas to devices: Lina's and
EPLB's. Called by `jmoe.planning.placement`.

A part is a replica, with its fraction of an expert's tokens. Axis legend:

E  experts of a layer
N  devices
P  nodes
G  groups of neighbouring experts
I  parts
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Period, in token rows, of the alternation of an expert's replicas: a quota is a multiple of 1 /
# CYCLE of an expert.
CYCLE = 120
ROUNDING = 1e-9  # relative rounding error of float sums
NOWHERE = -1


class PartsToPlace(NamedTuple):
    """The parts to assign to slots: their expert, their number of CYCLE turns, and their load, each
    an array [I].
    """

    experts: np.ndarray
    num_turns: np.ndarray
    weights: np.ndarray


def lina_parts_and_devices(
    popularity_E: np.ndarray, num_devices: int, capacity: int
) -> tuple[PartsToPlace, np.ndarray]:
    """Return Lina's parts and the device of each (section 5.2 of the paper).

    Equation 1: an expert needs n_e = N popularity_e / sum(popularity) devices. An expert with n_e
    >= 1 gets floor(n_e) parts of load 1 and one part for the rest; an expert with n_e < 1 is one
    part. Parts are packed into devices of load 1 by first-fit-decreasing. If slots are too few for
    all parts, the experts with the largest load per replica are replicated first, into equal parts.
    A part that fits nowhere goes to the least loaded device, and an expert without an estimate to
    the device with the fewest experts.
    """
    needed_E = num_devices * popularity_E / popularity_E.sum()
    wanted_E = np.clip(np.ceil(needed_E * (1 - ROUNDING)), 1, num_devices).astype(np.int64)
    copies_E = _count_replicas(needed_E, num_devices * capacity, wanted_E)
    shares = []
    for needed, copies, wanted in zip(needed_E, copies_E, wanted_E, strict=True):
        whole = np.full(copies, needed / copies)
        if 1 < copies == wanted:
            whole = np.append(np.ones(copies - 1), needed - (copies - 1))
        shares.append(whole)

    def first_fitting_device(
        weight: float, devices: np.ndarray, loads_N: np.ndarray, counts_N: np.ndarray
    ) -> int:
        if weight == 0:
            return int(devices[np.lexsort((loads_N[devices], counts_N[devices]))[0]])
        fitting = devices[loads_N[devices] + weight <= 1 + ROUNDING]
        return int(fitting[0] if fitting.size else devices[np.argmin(loads_N[devices])])

    parts = _make_parts(shares)
    return parts, _assign_devices(parts, num_devices, capacity, first_fitting_device)


def _eplb_parts_within_node(
    popularity_E: np.ndarray, num_devices: int, capacity: int
) -> tuple[PartsToPlace, np.ndarray]:
    """Return equal replicas of experts, and the device of each; replicas fill the slots, the same
    number on each device.

    Replicas are added one by one for the expert with the most load per replica. Then replicas are
    assigned, the heaviest first, to the least loaded device.
    """
    most_E = np.where(popularity_E > 0, num_devices, 1)
    copies_E = _count_replicas(popularity_E, num_devices * capacity, most_E)
    parts = _make_parts(
        [np.full(copies, popularity / copies) for popularity, copies in zip(popularity_E, copies_E)]
    )
    room = -(-len(parts.experts) // num_devices)

    def least_loaded_device(
        weight: float, devices: np.ndarray, loads_N: np.ndarray, counts_N: np.ndarray
    ) -> int:
        return int(devices[np.lexsort((counts_N[devices], loads_N[devices]))[0]])

    return parts, _assign_devices(parts, num_devices, room, least_loaded_device)


def eplb_parts_and_devices(
    popularity_E: np.ndarray, num_devices: int, capacity: int, num_nodes: int, num_groups: int
) -> tuple[PartsToPlace, np.ndarray]:
    """Return EPLB's parts and the device of each: groups of experts are packed onto nodes, equally
    many on each, then replicated inside the node.
    """
    if num_nodes == 1:
        return _eplb_parts_within_node(popularity_E, num_devices, capacity)
    experts_GE = np.arange(len(popularity_E)).reshape(num_groups, -1)
    groups = PartsToPlace(
        np.arange(num_groups), np.zeros(num_groups), popularity_E[experts_GE].sum(axis=1)
    )

    def least_loaded_node(
        weight: float, nodes: np.ndarray, loads_P: np.ndarray, counts_P: np.ndarray
    ) -> int:
        return int(nodes[np.argmin(loads_P[nodes])])

    node_G = _assign_devices(groups, num_nodes, num_groups // num_nodes, least_loaded_node)
    rows = []
    for node in range(num_nodes):
        experts = experts_GE[node_G == node].ravel()
        parts, devices = _eplb_parts_within_node(
            popularity_E[experts], num_devices // num_nodes, capacity
        )
        here = node * (num_devices // num_nodes) + devices
        rows.append((experts[parts.experts], parts.num_turns, parts.weights, here))
    experts, turns, weights, devices = (
        np.concatenate(arrays) for arrays in zip(*rows, strict=True)
    )
    return PartsToPlace(experts, turns, weights), devices


def _count_replicas(load_E: np.ndarray, num_slots: int, most_E: np.ndarray) -> np.ndarray:
    """Return int64 [E], the replicas of each expert: one each, and further ones for the expert with
    the most load per replica.

    most_E: most replicas of each expert.
    """
    copies_E = np.ones(len(load_E), np.int64)
    for _ in range(num_slots - len(load_E)):
        a_copy_E = np.where(copies_E < most_E, load_E / copies_E, -1.0)
        expert = int(np.argmax(a_copy_E))
        if a_copy_E[expert] < 0:
            break
        copies_E[expert] += 1
    return copies_E


def _make_parts(shares: list[np.ndarray]) -> PartsToPlace:
    """Return one part for each share of an expert, without shares that are too small for a single
    turn.
    """
    rows = []
    for expert, weights in enumerate(shares):
        turns = apportion_turns(weights) if len(weights) > 1 else [CYCLE]
        rows += [(expert, turns[i], weights[i]) for i in range(len(weights)) if turns[i] > 0]
    return PartsToPlace(*(np.array(column) for column in zip(*rows, strict=True)))


def apportion_turns(weights: np.ndarray) -> np.ndarray:
    """Return int64, the number of CYCLE turns of each of an expert's replicas, by the
    largest-remainder method.
    """
    total = weights.sum()
    exact = CYCLE * (weights / total if total > 0 else np.full(len(weights), 1 / len(weights)))
    turns: np.ndarray = np.floor(exact + ROUNDING).astype(np.int64)
    turns[np.argsort(turns - exact, kind="stable")[: CYCLE - turns.sum()]] += 1
    return turns


Choose = Callable[[float, np.ndarray, np.ndarray, np.ndarray], int]


def _assign_devices(
    parts: PartsToPlace, num_devices: int, capacity: int, choose_device: Choose
) -> np.ndarray:
    """Return the device of each part [I]. Parts are assigned by descending load, at most `capacity`
    per device, and no expert twice on a device.

    choose_device: called with a part's load, the devices that may take it, and the loads and counts
    of all devices; returns a device. If every device with a free slot already has the part's
    expert, another part moves to that device and frees its own slot for this part.
    """
    device_I = np.full(len(parts.experts), NOWHERE)
    loads_N, counts_N = np.zeros(num_devices), np.zeros(num_devices, np.int64)
    holds_NE = np.zeros((num_devices, int(parts.experts.max()) + 1), bool)

    def add_or_remove(part: int, device: int, sign: int = 1) -> None:
        device_I[part] = device if sign > 0 else NOWHERE
        loads_N[device] += sign * parts.weights[part]
        counts_N[device] += sign
        holds_NE[device, parts.experts[part]] = sign > 0

    for part in np.argsort(-parts.weights, kind="stable").tolist():
        expert = parts.experts[part]
        devices = np.flatnonzero((counts_N < capacity) & ~holds_NE[:, expert])
        if devices.size:
            add_or_remove(
                part, choose_device(float(parts.weights[part]), devices, loads_N, counts_N)
            )
            continue
        # A device with a free slot has this expert, so at most capacity - 2 others. A device
        # without it has `capacity` others, at least one of which is not on the former device. Of
        # all such moves, take the one with the smallest resulting maximum load.
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
        add_or_remove(other, device, -1)
        add_or_remove(other, roomy)
        add_or_remove(part, device)
    return device_I
