"""Assigns the rows of a training slot to experts if the slot holds only a part of a device's
experts.

`training_slots.py` calls this.

Legend:
  P  experts of this process in a layer
  L  experts of one device in a layer
  M  rows of a slot on a device
"""

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.offload.expert_index import LocalExperts

NOWHERE = -1


ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array)


class ChosenRows(NamedTuple, Generic[ArrayT]):
    """The chosen experts of one device, ascending, and their rows of the slot; int32 [M] each.

    ids_M: expert numbers on the device, L for a padding entry, whose row may hold any finite
    values. The arrays are numpy, or JAX (of all devices) as arguments of programs.
    """

    ids_M: ArrayT
    rows_M: ArrayT


def grown_num_rows(num_rows: int, needed: int, per_device: int) -> int:
    """Return the rows for `needed` experts of a device.

    The result is `num_rows` if that suffices. Otherwise it is `needed` rounded up to a multiple of
    an eighth of `per_device`, at most `per_device`, so that slots seldom grow.
    """
    eighth = -(-per_device // 8)
    return num_rows if needed <= num_rows else min(per_device, -(-needed // eighth) * eighth)


class SlotRows:
    """The row of each expert in one slot, on every device.

    num_rows: rows per device; None means one permanent row per expert.
    """

    def __init__(self, local: LocalExperts, num_rows: int | None) -> None:
        self._local, self.num_rows = local, num_rows
        self._row_P = np.full(local.experts.size, NOWHERE, np.int32)

    def replica_rows(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """Return (position of the device, row) of every replica of an expert."""
        fixed = self._local.replica_rows(layer, expert)
        return (
            fixed
            if self.num_rows is None
            else [(device, int(self._row_P[expert])) for device, _ in fixed]
        )

    def groups_that_fit(self, experts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield these experts, ascending, in groups that fit the slot at once."""
        if self.num_rows is None:
            yield experts
            return
        device_of = experts // self._local.max_experts_per_device
        wave = (np.arange(experts.size) - np.searchsorted(device_of, device_of)) // self.num_rows
        for number in range(int(np.max(wave, initial=-1)) + 1):
            yield experts[wave == number]

    def assign_rows_and_list_evicted(self, experts: NDArray[np.int64]) -> list[int]:
        """Give each of these experts a row; return the experts that were evicted."""
        if self.num_rows is None:
            return []
        left: list[int] = []
        for first in range(0, self._row_P.size, self._local.max_experts_per_device):
            rows_L = self._row_P[first : first + self._local.max_experts_per_device]  # a view
            needed = np.isin(np.arange(rows_L.size) + first, experts)
            new = np.flatnonzero(needed & (rows_L == NOWHERE))
            free = np.setdiff1d(np.arange(self.num_rows), rows_L)
            leaving = np.flatnonzero(~needed & (rows_L != NOWHERE))[: max(0, new.size - free.size)]
            free = np.concatenate([free, rows_L[leaving]])
            assert new.size <= free.size, f"{needed.sum()} experts for {self.num_rows} rows"
            rows_L[leaving] = NOWHERE
            rows_L[new] = free[: new.size]
            left += (leaving + first).tolist()
        return left

    def chosen_rows(self, chosen_P: NDArray[np.bool_], size: int) -> list[ChosenRows[np.ndarray]]:
        """Return, for each part of this process's experts, the chosen experts and their rows.

        Every chosen expert must have a row. size: length of the arrays, at least the number of
        chosen experts of a part.
        """
        parts = []
        for first in range(0, self._row_P.size, self._local.max_experts_per_device):
            ids = np.flatnonzero(chosen_P[first : first + self._local.max_experts_per_device])
            ids_M = np.full(size, self._local.max_experts_per_device, np.int32)
            rows_M = np.zeros(size, np.int32)
            ids_M[: ids.size], rows_M[: ids.size] = ids, self._row_P[first + ids]
            parts.append(ChosenRows(ids_M, rows_M))
        return parts
