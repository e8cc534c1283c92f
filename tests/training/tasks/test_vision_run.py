"""A run on images begins with what another has learned: with a task more, the others compute bit
for bit the same.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import TaskConfig, TiersConfig, VisionTrainConfig
from jmoe.data.images import ImageSplit, ImageTask
from jmoe.training.tasks.layouts import plan_task_layout
from jmoe.training.tasks.run import state_from_run
from jmoe.training.tasks.trainer import ImageTrainer, make_vision_trainer
from tests.arrays import differing, full_state
from tests.model_configs import mesh_of
from tests.vision_runs import CLASS_NAMES, CONFIG, saved_run

NO_IMAGES = ImageSplit(np.zeros((0, 8, 8, 1), np.uint8), np.zeros(0, np.int32))
# The new task comes first in its number, second in the alphabet.
CLASSES = {"emoji": ["x", "y"], **CLASS_NAMES}
TASKS = {"emoji": TaskConfig("more", path=(2, 2)), **CONFIG.tasks}


def begun(run: Path, classes: dict[str, list[str]], **changes: Any) -> tuple[ImageTrainer, Any]:
    config: VisionTrainConfig = dataclasses.replace(
        CONFIG, **({"tasks": TASKS, "init_from": str(run)} | changes)
    )
    counts = {name: len(names) for name, names in classes.items()}
    trainer = make_vision_trainer(config, counts, mesh_of(1, 1, 1), plan_task_layout(config, 1))
    tasks = tuple(
        ImageTask(name, tuple(names), NO_IMAGES, NO_IMAGES) for name, names in classes.items()
    )
    return trainer, state_from_run(trainer, tasks)


@pytest.mark.slow
def test_a_further_task_changes_no_bit_of_the_others(tmp_path: Path) -> None:
    network = saved_run(tmp_path)
    trainer, state = begun(tmp_path, CLASSES)
    grown = trainer.model.model_with_params(state.params, state.router_bias)
    pixels, first = jnp.asarray(np.random.default_rng(0).random((5, 8, 8, 1), np.float32)), 0
    for number, (task, names) in enumerate(CLASS_NAMES.items()):
        before, _ = network(pixels, jnp.full(5, number, jnp.int32), full_capacity=True)
        after, _ = grown(pixels, jnp.full(5, number + 1, jnp.int32), full_capacity=True)
        own = slice(first, first + len(names))
        np.testing.assert_array_equal(after[:, 2:][:, own], before[:, own], err_msg=task)
        assert np.isneginf(after[:, :2]).all()
        first += len(names)
    new, _ = grown(pixels, jnp.zeros(5, jnp.int32), full_capacity=True)
    assert np.isfinite(new[:, :2]).all() and np.isneginf(new[:, 2:]).all()
    assert int(state.step) == 0 and not np.any(state.m["norm"]["scale"])


@pytest.mark.slow
def test_a_run_with_experts_on_tiers_begins_with_the_same(tmp_path: Path) -> None:
    saved_run(tmp_path)
    expected = full_state(*begun(tmp_path, CLASSES))
    trainer, state = begun(tmp_path, CLASSES, tiers=TiersConfig(experts="host", optimizer="host"))
    with contextlib.closing(trainer):
        assert differing(full_state(trainer, state), expected) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": dataclasses.replace(CONFIG.model, num_hidden_layers=5)},
            "model.num_hidden_layers = 5: must be 4",
        ),
        (
            {"tasks": TASKS | {"digits": TaskConfig("digits", path=(1, 2))}},
            r"tasks.digits.path = \(1, 2\): must be",
        ),
        (
            {"classes": CLASSES | {"digits": ["1", "3"]}},
            "tasks.digits.source = 'digits': must have the classes",
        ),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved_run(tmp_path)
    with pytest.raises(ValueError, match=message):
        begun(tmp_path, **({"classes": CLASSES} | changes))
