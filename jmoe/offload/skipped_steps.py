"""Tracks the optimizer steps that each expert has skipped, and which gradients are not applied yet.

This file holds step numbers only; `expert_state.py` moves the bytes.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from jmoe.config import OptimizerConfig
from jmoe.offload.lazy_adamw import MissedSteps, ReplayState, adamw_constants


class SkippedSteps:
    """The optimizer steps that each record has skipped, by record number (`ExpertIndex`).

    now: number of steps taken. A record's pending gradient belongs to the first step it has
    skipped; in later skipped steps its gradient was zero.
    """

    def __init__(
        self, replay_state: ReplayState, num_records: int, optimizer: OptimizerConfig
    ) -> None:
        self.now, self._history = replay_state.step, replay_state.history
        # number of steps applied to each record
        self._steps_applied = np.full(num_records, self.now, np.int64)
        self._steps_applied[list(replay_state.applied)] = list(replay_state.applied.values())
        # whether the gradient of step `_steps_applied[record]` is not applied yet
        self._pending = np.zeros(num_records, np.bool_)
        self._pending[list(replay_state.pending)] = True
        self._frozen = np.zeros(num_records, np.bool_)  # records that steps do not change
        self._gradient_dtype, self._optimizer = replay_state.gradient_dtype, optimizer
        # layer -> records whose gradients this step has stored
        self._stored: dict[int, NDArray[np.int64]] = {}

    def are_behind(self, records: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        """Return bool, shaped like `records`: whether fewer than `step` steps are applied to each
        record.
        """
        behind: NDArray[np.bool_] = self._steps_applied[records] < step
        return behind

    def has_gradient(self, records: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return bool, shaped like `records`: whether each record has a gradient that is not
        applied yet.
        """
        return self._pending[records]

    def skipped_steps_of(self, record: int, now: int) -> tuple[range, bool]:
        """Return (range of the steps before `now` that a record has skipped, has_gradient).

        has_gradient: whether the record has a gradient for the first of these steps.
        """
        return range(int(self._steps_applied[record]), now), bool(self._pending[record])

    def missed_windows(self, steps: range, *, pending: bool) -> Iterator[MissedSteps]:
        """Yield learning rates and clip factors of the steps, as `catch_up` takes them.

        pending: whether the first step has a gradient.
        """
        return self._history.missed_windows(steps, pending=pending)

    def note_caught_up(self, record: int, now: int) -> None:
        """Note that all steps before `now` are applied to a record."""
        self._steps_applied[record], self._pending[record] = now, False

    # One step

    def note_gradients(self, layer: int, records: NDArray[np.int64]) -> None:
        """Note the records of a layer whose gradients this step stores."""
        self._stored[layer] = records

    def record_step(self, lr: float, clip: float) -> list[NDArray[np.int64]]:
        """Record the step: its gradients become pending. Return the records with these gradients,
        one array per layer, in the order of `note_gradients`.

        lr, clip: the step's learning rate and the factor of its gradients. Frozen records do not
        skip the step.
        """
        used = list(self._stored.values())
        for records in used:
            self._pending[records] = True
        self._stored.clear()
        self._history.add_step(lr, clip)
        self.now += 1
        self._steps_applied[self._frozen] = self.now
        return used

    def abandon_step(self) -> None:
        """End the step without an update: drop the note of its gradients."""
        self._stored.clear()

    def freeze_records(self, records: NDArray[np.int64]) -> None:
        """Exclude these records from later steps; all other records are no longer frozen."""
        self._frozen[:] = False
        self._frozen[records] = True

    # Checkpoints

    def forget_history(self, local_records: NDArray[np.int64]) -> None:
        """Drop the history of steps that are applied to all of these records."""
        self._history.forget_before(int(np.min(self._steps_applied[local_records])))

    def replay_state_of(self, records: NDArray[np.int64]) -> ReplayState:
        """Return the replay state of these records, for a checkpoint."""
        behind = records[self._steps_applied[records] < self.now].tolist()
        pending = records[self._pending[records]].tolist()
        return ReplayState(
            step=self.now,
            history=self._history.copy(),
            applied={index: int(self._steps_applied[index]) for index in behind},
            pending=frozenset(pending),
            optimizer=adamw_constants(self._optimizer),
            gradient_dtype=self._gradient_dtype,
        )
