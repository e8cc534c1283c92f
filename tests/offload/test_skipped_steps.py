"""Which steps records have skipped, and what a checkpoint is told about it."""

import numpy as np
import pytest

from jmoe.config import OptimizerConfig
from jmoe.offload.lazy_adamw import ReplayState, adamw_constants
from jmoe.offload.skipped_steps import SkippedSteps

CONFIG = OptimizerConfig()
LAYERS = {0: np.arange(0, 4), 1: np.arange(4, 8)}
ALL = np.arange(8)


def fresh(step: int = 0) -> SkippedSteps:
    return SkippedSteps(ReplayState.up_to_date(step, CONFIG, "float32"), ALL.size, CONFIG)


def take(steps: SkippedSteps, lr: float, *used: int) -> list[int]:
    """Take a step that gives these records gradients; return those that now have its gradients."""
    for layer, records in LAYERS.items():
        steps.note_gradients(layer, records[np.isin(records, used)])
    return np.concatenate(steps.record_step(lr, 1.0)).tolist()


def test_records_skip_steps_until_they_catch_up() -> None:
    steps = fresh()
    assert take(steps, 0.1, 1, 5) == [1, 5]
    assert take(steps, 0.2, 5) == [5]
    assert steps.now == 2 and steps.are_behind(ALL, 2).all() and not steps.are_behind(ALL, 0).any()
    assert steps.has_gradient(ALL).nonzero()[0].tolist() == [1, 5]
    skipped, pending = steps.skipped_steps_of(1, 2)
    assert (skipped, pending) == (range(2), True)
    (window,) = steps.missed_windows(skipped, pending=pending)
    assert (
        window.gradient_at == 0
        and window.num_steps == 2
        and window.lr_W[:2].tolist() == pytest.approx([0.1, 0.2])
    )
    steps.note_caught_up(1, 2)
    assert steps.skipped_steps_of(1, 2) == (range(2, 2), False)
    assert not steps.are_behind(np.array([1]), 2).any() and steps.skipped_steps_of(0, 2) == (
        range(2),
        False,
    )


def test_a_step_that_is_not_taken_leaves_no_gradient() -> None:
    steps = fresh()
    steps.note_gradients(0, np.array([2]))
    steps.abandon_step()
    assert steps.record_step(0.1, 1.0) == [] and not steps.has_gradient(ALL).any()


def test_frozen_records_skip_nothing() -> None:
    steps = fresh()
    steps.freeze_records(np.array([3]))
    take(steps, 0.1)
    assert steps.are_behind(ALL, 1).tolist() == [n != 3 for n in ALL]
    steps.freeze_records(np.array([4]))
    take(steps, 0.1)
    assert [steps.skipped_steps_of(record, 2)[0] for record in (0, 3, 4)] == [
        range(2),
        range(1, 2),
        range(2, 2),
    ]


def test_a_checkpoint_is_told_of_its_own_records_alone() -> None:
    steps, own = fresh(7), np.array([0, 1, 5])
    take(steps, 0.1, 1, 6)
    take(steps, 0.2, 5)
    steps.note_caught_up(0, 9)
    state = steps.replay_state_of(own)
    assert (state.step, state.applied, state.pending) == (9, {1: 7, 5: 7}, frozenset({1, 5}))
    assert state.optimizer == adamw_constants(CONFIG) and (
        state.history.first,
        state.history.lr,
    ) == (
        7,
        [0.1, 0.2],
    )
    again = SkippedSteps(state, ALL.size, CONFIG)
    assert [again.skipped_steps_of(record, 9) for record in (0, 1, 5)] == [
        steps.skipped_steps_of(record, 9) for record in (0, 1, 5)
    ]
    for record in (1, 5):
        steps.note_caught_up(record, 9)
    steps.forget_history(own)
    assert steps.replay_state_of(own).history.lr == [] and state.history.lr == [0.1, 0.2]
