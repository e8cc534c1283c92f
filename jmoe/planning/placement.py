"""Where the experts of a layer are in inference: replicas on devices by popularity, and which one takes a token.

Legend: E experts (logical), N devices, S slots of a device, C = CYCLE rows after which replicas repeat. A replica's
physical number is device * S + slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from jmoe.config.checks import check
from jmoe.config.engine import PlacementPolicy

# Rows of tokens after which an expert's replicas take turns anew: a quota is a multiple of 1 / CYCLE of an expert.
CYCLE = 64
EMPTY = -1
NO_WORSE = 1 + 1e-9  # of one sum of floats against another


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert is in each slot of each device, and which replica takes the token of a row.

    physical_to_logical: int32 [N, S], EMPTY for an empty slot; no device holds an expert twice. turns: int32 [E, C],
    the physical number of the replica that takes the rows r with r % C at that place: a constant of fixed shape, so
    that a program that looks replicas up in it is compiled once. popularity_E: float64, what the plan was made from,
    in tokens or any other unit.
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

        rows, experts: integers of shapes that broadcast, the number of a token's row in the step and one of its
        experts. The answer depends on nothing else, neither on other tokens nor on the device that asks: every expert's
        replicas take turns over CYCLE rows, each as many as its quota says, evenly spread.
        """
        return self.turns[experts, rows % CYCLE]

    @property
    def quotas(self) -> np.ndarray:
        """Return float64 [N, S], the part of an expert's popularity that each replica takes if all rows are alike."""
        taken = np.bincount(self.turns.ravel(), minlength=self.physical_to_logical.size)
        share = taken.reshape(self.physical_to_logical.shape) / CYCLE
        return np.where(self.physical_to_logical == EMPTY, 0.0, self.popularity_E[self.physical_to_logical] * share)

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
    """A placement with its slots in the order that keeps most in place, and what has to be loaded to get there."""

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
    """Return where the experts of a layer should be; the even placement if the policy's makes the largest load larger.

    popularity_E: tokens that each expert will get, or any multiple of it; 0 for an expert without an estimate.
    max_packed: the most experts of a device. nodes, num_groups: of eplb: where the groups of neighbouring experts
    divide by the nodes, the replicas of a group stay on one node.
    """
    raise NotImplementedError


def place_as(physical_to_logical: np.ndarray, popularity_E: np.ndarray) -> Placement:
    """Return the placement of experts that are where this says, an expert's replicas equally busy.

    physical_to_logical: integers [N, S], EMPTY for an empty slot. Raise `ValueError` unless every expert is there and
    none twice on a device.
    """
    raise NotImplementedError


def changes(held: np.ndarray, new: Placement) -> Changes:
    """Return what to load, and where, to get from what devices hold to a new placement.

    held: integers [N, S], the expert that each slot's weights are of, EMPTY for none: `old.physical_to_logical` at
    first. The new placement's slots are reordered within their device: an expert that is there already stays in its
    slot.
    """
    raise NotImplementedError
