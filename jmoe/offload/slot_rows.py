"""Which rows of a slot hold which experts, where a slot has room for a part of a device's experts
only.

Legend: P experts of this process's, L on each of its devices, M of them in the rows of a slot.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jmoe.offload.expert_index import LocalExperts

NOWHERE = -1


class ChosenRows(NamedTuple):
    """A device's chosen experts, ascending, and the rows of the slot that hold them, int32 [M]
    each, or of all devices.

    ids_M: L stands for none, of which the row may hold anything finite.
    """

    ids_M: Any  # of numpy, and of JAX where a program takes them
    rows_M: Any


def larger_room(room: int, needed: int, per_device: int) -> int:
    """Return the room for so many experts of a device: `room`, or whole eighths of all, so that
    it seldom grows.
    """
    eighth = -(-per_device // 8)
    return room if needed <= room else min(per_device, -(-needed // eighth) * eighth)


class SlotRows:
    """The rows that a slot's experts have on every device. room: None: as many as experts, each
    in a row of its own.
    """

    def __init__(self, local: LocalExperts, room: int | None) -> None:
        self._local, self.room = local, room
        self._row_P = np.full(local.experts.size, NOWHERE, np.int32)

    def places(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """Return where an expert lies, or is to lie: (number of the device, row there)."""
        fixed = self._local.places(layer, expert)
        return (
            fixed
            if self.room is None
            else [(device, int(self._row_P[expert])) for device, _ in fixed]
        )

    def waves(self, experts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Give these experts, ascending, in parts for which there is room together."""
        if self.room is None:
            yield experts
            return
        device_of = experts // self._local.per_device
        wave = (np.arange(experts.size) - np.searchsorted(device_of, device_of)) // self.room
        for number in range(int(np.max(wave, initial=-1)) + 1):
            yield experts[wave == number]

    def take(self, experts: NDArray[np.int64]) -> list[int]:
        """Give each of these experts a row; return those that had to leave."""
        if self.room is None:
            return []
        left: list[int] = []
        for first in range(0, self._row_P.size, self._local.per_device):
            rows_L = self._row_P[first : first + self._local.per_device]  # a view
            needed = np.isin(np.arange(rows_L.size) + first, experts)
            new = np.flatnonzero(needed & (rows_L == NOWHERE))
            free = np.setdiff1d(np.arange(self.room), rows_L)
            leaving = np.flatnonzero(~needed & (rows_L != NOWHERE))[: max(0, new.size - free.size)]
            free = np.concatenate([free, rows_L[leaving]])
            assert new.size <= free.size, f"{needed.sum()} experts for {self.room} rows"
            rows_L[leaving] = NOWHERE
            rows_L[new] = free[: new.size]
            left += (leaving + first).tolist()
        return left

    def chosen(self, chosen_P: NDArray[np.bool_], size: int) -> list[ChosenRows]:
        """Return what each part of this process's experts has of those chosen, which have rows,
        in arrays of `size`.
        """
        parts = []
        for first in range(0, self._row_P.size, self._local.per_device):
            ids = np.flatnonzero(chosen_P[first : first + self._local.per_device])
            ids_M = np.full(size, self._local.per_device, np.int32)
            rows_M = np.zeros(size, np.int32)
            ids_M[: ids.size], rows_M[: ids.size] = ids, self._row_P[first + ids]
            parts.append(ChosenRows(ids_M, rows_M))
        return parts
