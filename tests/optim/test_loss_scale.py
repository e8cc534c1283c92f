"""The loss scale from step to step, and what scaling a loss does to it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import LossScaleConfig, TrainConfig
from jmoe.optim.loss_scale import LossScale, initial_loss_scale, scale_loss, undo_loss_scale

TAKEN, SKIPPED, NEITHER = (True, False), (False, True), (False, False)


def after(
    *steps: tuple[bool, bool], first: int = 1024, growth_steps: int = 3
) -> list[tuple[float, int]]:
    """Return (scale, good steps) after each of these steps, (taken, skipped)."""
    config = LossScaleConfig(first, growth_steps)
    state, seen = LossScale(jnp.float32(first), jnp.int32(0)), []
    for ok, skipped in steps:
        state = state.next_scale(jnp.bool_(ok), jnp.bool_(skipped), config)
        seen.append((float(state.scale), int(state.good_steps)))
    return seen


def test_good_steps_double_the_scale_and_a_skipped_one_halves_it() -> None:
    assert after(TAKEN, TAKEN, TAKEN, TAKEN) == [(1024, 1), (1024, 2), (2048, 0), (2048, 1)]
    assert after(TAKEN, TAKEN, SKIPPED, SKIPPED, TAKEN) == [
        (1024, 1),
        (1024, 2),
        (512, 0),
        (256, 0),
        (256, 1),
    ]


def test_a_step_that_failed_for_another_reason_changes_nothing() -> None:
    assert after(TAKEN, TAKEN, NEITHER, TAKEN) == [(1024, 1), (1024, 2), (1024, 2), (2048, 0)]


def test_the_scale_has_a_limit() -> None:
    assert after(TAKEN, TAKEN, first=2**32, growth_steps=1) == [(2.0**32, 0), (2.0**32, 0)]


def test_only_float16_scales_its_loss() -> None:
    half = TrainConfig(compute_dtype="float16")
    assert initial_loss_scale(TrainConfig()) is None
    first = initial_loss_scale(half)
    assert first is not None and (float(first.scale), int(first.good_steps)) == (65536, 0)
    given = initial_loss_scale(dataclasses.replace(half, loss_scale=LossScaleConfig(initial=8)))
    assert given is not None and float(given.scale) == 8


@pytest.mark.parametrize("scale", [1, 2**16, 2**32])
def test_scaling_rounds_nothing(scale: int) -> None:
    state = LossScale(jnp.float32(scale), jnp.int32(0))
    losses = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.float32)
    np.testing.assert_array_equal(undo_loss_scale(scale_loss(losses, state), state), losses)
    np.testing.assert_array_equal(scale_loss(losses, state), np.asarray(losses) * np.float32(scale))
    assert scale_loss(losses, None) is undo_loss_scale(losses, None) is losses
