"""Which optimizer steps each expert has skipped, and whose gradients are not applied yet.
Numbers alone, no bytes.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from jmoe.config import OptimizerConfig
from jmoe.offload.lazy_adamw import MissedSteps, ReplayState, constants


class SkippedSteps:
    """The optimizer steps that each record is behind the run, by the records' numbers in
    `ExpertIndex`.

    `now` is the number of steps taken. A gradient that waits is that of the first step that its
    record has skipped; in the steps after that one the record's gradient was zero.
    """

    def __init__(
        self, replay_state: ReplayState, num_records: int, optimizer: OptimizerConfig
    ) -> None:
        self.now, self._history = replay_state.step, replay_state.history
        # steps that a record has behind it
        self._applied = np.full(num_records, self.now, np.int64)
        self._applied[list(replay_state.applied)] = list(replay_state.applied.values())
        # whether the gradient of step `_applied` waits
        self._pending = np.zeros(num_records, np.bool_)
        self._pending[list(replay_state.pending)] = True
        self._frozen = np.zeros(num_records, np.bool_)  # records that stay as they are
        self._gradient_dtype, self._optimizer = replay_state.gradient_dtype, optimizer
        # layer -> records whose gradients this step has stored
        self._stored: dict[int, NDArray[np.int64]] = {}

    def are_behind(self, records: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        """Return which of these records have fewer than `step` steps behind them."""
        behind: NDArray[np.bool_] = self._applied[records] < step
        return behind

    def has_gradient(self, records: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these records have a gradient that is not applied yet."""
        return self._pending[records]

    def steps_of(self, record: int, now: int) -> tuple[range, bool]:
        """Return the steps before `now` that a record has skipped, and whether it has a gradient
        for the first.
        """
        return range(int(self._applied[record]), now), bool(self._pending[record])

    def windows(self, steps: range, *, pending: bool) -> Iterator[MissedSteps]:
        """Give learning rates and clip factors of these steps, as `catch_up` takes them."""
        return self._history.windows(steps, pending=pending)

    def note_caught_up(self, record: int, now: int) -> None:
        """Note that a record has been brought up to step `now`."""
        self._applied[record], self._pending[record] = now, False

    # A step

    def note_gradients(self, layer: int, records: NDArray[np.int64]) -> None:
        """Note the records of a layer whose gradients the present step stores."""
        self._stored[layer] = records

    def commit(self, lr: float, clip: float) -> list[NDArray[np.int64]]:
        """Take the step: all records are one step further behind. Return, by layer, those that
        have its gradients.
        """
        used = list(self._stored.values())
        for records in used:
            self._pending[records] = True
        self._stored.clear()
        self._history.add(lr, clip)
        self.now += 1
        self._applied[self._frozen] = self.now
        return used

    def abandon(self) -> None:
        """Do not take the step: forget its gradients."""
        self._stored.clear()

    def freeze(self, records: NDArray[np.int64]) -> None:
        """Let these records skip no steps from now on: they stay as they are; all others are no
        longer frozen.
        """
        self._frozen[:] = False
        self._frozen[records] = True

    # What is saved

    def forget_history(self, own: NDArray[np.int64]) -> None:
        """Forget the steps that none of the process's own records has skipped."""
        self._history.forget_before(int(np.min(self._applied[own])))

    def state(self, own: NDArray[np.int64]) -> ReplayState:
        """Return how far the process's own records are behind, for a checkpoint."""
        behind = own[self._applied[own] < self.now].tolist()
        pending = own[self._pending[own]].tolist()
        return ReplayState(
            step=self.now,
            history=self._history.copy(),
            applied={index: int(self._applied[index]) for index in behind},
            pending=frozenset(pending),
            optimizer=constants(self._optimizer),
            gradient_dtype=self._gradient_dtype,
        )
