"""Training on images: no layout and no mesh changes a loss, and no task moves what is another's.

Legend: A tasks, N layers routed per token, E experts.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.data.image_batches import ImageBatch, ImageBatches, held_out_batches
from jmoe.mesh import BATCH
from jmoe.training.state import TrainState
from jmoe.training.tasks.layouts import plan_task_layout
from jmoe.training.tasks.step import VisionTrainer
from tests.arrays import differing, on_host
from tests.model_configs import mesh_of, spread_over
from tests.vision_tasks import CLASSES, COMM, CONFIG, TASKS


def put(batch: ImageBatch, trainer: VisionTrainer) -> ImageBatch:
    sharding = NamedSharding(trainer.model.mesh, BATCH)
    return jax.tree.map(lambda a: jax.device_put(a, sharding), batch)


def trainer_of(shape: tuple[int, int, int], **changes: Any) -> tuple[VisionTrainer, ImageBatches]:
    comm = {name: changes.pop(name) for name in ("shard_dense", "fuse_dense") if name in changes}
    config: Any = spread_over(dataclasses.replace(CONFIG, **changes), *shape, **COMM, **comm)
    devices = int(np.prod(shape))
    layout = plan_task_layout(config, devices)
    return VisionTrainer(config, CLASSES, mesh_of(*shape), layout), ImageBatches(
        TASKS, config, layout, 0, devices
    )


def run(
    shape: tuple[int, int, int], steps: int = 4, **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Losses [steps, A] of the tasks, and [3, A] of what is held out at the end."""
    trainer, batches = trainer_of(shape, **changes)
    state, losses = trainer.init(), []
    for _ in range(steps):
        batch = put(next(batches), trainer)
        state, metrics = trainer.step(state, batch)
        if metrics["overflow"]:
            state, metrics = trainer.step(state, batch, full_capacity=True)
        assert metrics["ok"]
        losses.append([float(metrics["task_loss"][name]) for name in CONFIG.tasks])
    held_out = [
        put(batch, trainer)
        for batch in held_out_batches(TASKS, trainer.homes, trainer.model.mesh.size, 8)
    ]
    return np.array(losses), sum(
        np.asarray(values, np.float64) for values in trainer.evaluate_batches(state, held_out)
    )


@pytest.fixture(scope="module")
def expected() -> tuple[np.ndarray, np.ndarray]:
    return run((1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        # 1 / 1 / 1 / 1: devices take 4, 2, 1 and 1 micro-batches
        ((4, 1, 1), {"layout": "elastic"}),
        ((2, 1, 1), {"layout": "elastic"}),  # 2 | 1 + 1 + ...
        ((8, 1, 1), {"layout": "elastic"}),  # 4 / 2 / 1 / 1
        ((4, 1, 1), {}),
        # experts apart: tokens are exchanged
        ((2, 1, 2), {"gradient_accumulation_steps": 2}),
    ],
)
def test_no_layout_changes_a_loss(
    shape: tuple[int, int, int], changes: dict[str, Any], expected: tuple[np.ndarray, np.ndarray]
) -> None:
    losses, held_out = run(shape, **changes)
    np.testing.assert_allclose(losses, expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(held_out[0], expected[1][0], rtol=0, atol=1e-4)  # a sum of 6 images
    np.testing.assert_array_equal(held_out[1:], expected[1][1:])


@pytest.mark.slow
def test_no_layout_changes_a_loss_in_fifty_steps() -> None:
    """On two devices large | the others, on four a task each, on eight 4 / 2 / 1 / 1, and on
    one.
    """
    alone, held_out = run((1, 1, 1), 50, num_steps=50)
    assert (alone[-10:].mean(axis=0) < 0.9 * alone[:10].mean(axis=0)).all()
    layouts = []
    for num_devices in (2, 4, 8):
        changes = {"layout": "elastic", "num_steps": 50}
        layout = trainer_of((num_devices, 1, 1), **changes)[0].layout
        layouts.append([len(layout.devices_of(task)) for task in range(4)])
        losses, values = run((num_devices, 1, 1), 50, **changes)
        np.testing.assert_allclose(losses, alone, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(values[1:], held_out[1:])  # right ones and images
    assert layouts == [[1, 1, 1, 1], [1, 1, 1, 1], [4, 2, 1, 1]]


def test_a_task_has_no_gradient_for_what_is_another_s() -> None:
    trainer, batches = trainer_of((1, 1, 1))
    state, batch = trainer.init(), put(next(batches), trainer)
    gradients = jax.jit(lambda batch: trainer.gradients_local(state, batch, full_capacity=True)[0])
    for number, (name, task) in enumerate(CONFIG.tasks.items()):
        of_task = (np.asarray(batch.task) == number).astype(np.float32)
        grads = on_host(gradients(batch._replace(weight=batch.weight * of_task)))
        experts = grads["task_layers"]["moe"]["experts"]["w_up"][0]
        assert [bool(np.any(expert)) for expert in experts] == [
            expert == task.path[0] for expert in range(4)
        ]
        assert [head for head, grad in grads["heads"].items() if np.any(grad)] == [name]
        assert np.any(grads["patch_embedding"])


# The expert of the last layer that each task alone names; large and small share expert 0.
OWN_EXPERTS = {"large": (), "middle": (1,), "small": (), "other": (3,)}


def own_parts(trainer: VisionTrainer, state: TrainState) -> dict[str, Any]:
    """Copies of each task's head and of the experts that it alone names: weights and both
    moments.
    """
    saved = trainer.prepare_state_for_save(state)
    trees = on_host({"params": saved.params, "m": saved.m, "v": saved.v})
    return {
        task: {
            name: (
                tree["heads"][task],
                {w: values[:, own] for w, values in tree["task_layers"]["moe"]["experts"].items()},
            )
            for name, tree in trees.items()
        }
        for task, own in OWN_EXPERTS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "layout"), [((1, 1, 1), "even"), ((4, 1, 1), "elastic")])
def test_labels_of_a_task_move_nothing_that_is_another_s(
    shape: tuple[int, int, int], layout: str
) -> None:
    """Two runs that differ in the labels of one task, in the last step: without a clip, which is
    by the global norm.
    """
    optimizer = dataclasses.replace(CONFIG.optimizer, clip_norm=0.0)
    trainer, batches = trainer_of(shape, layout=layout, optimizer=optimizer)
    state = trainer.init()
    for _ in range(2):
        state, _ = trainer.step(state, put(next(batches), trainer), full_capacity=True)
    batch = next(batches)
    others = batch._replace(label=np.where(batch.task == 0, 1 - batch.label, batch.label))
    moved = [
        trainer.step(jax.tree.map(jnp.copy, state), put(part, trainer), full_capacity=True)[0]
        for part in (batch, others)
    ]
    before, (one, other) = own_parts(trainer, state), [own_parts(trainer, state) for state in moved]
    for task in CONFIG.tasks:
        assert differing(before[task], one[task]) != []
        assert (differing(one[task], other[task]) == []) == (task != "large")
    shared = [
        on_host(trainer.prepare_state_for_save(state).params["patch_embedding"]) for state in moved
    ]
    assert differing(*shared) != []


@pytest.mark.parametrize("weight_decay", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_a_task_without_images_keeps_its_parameters(weight_decay: float) -> None:
    """One task has images: parameters of the others' own are as they were, or decayed; their
    moments stay zero.
    """
    optimizer = dataclasses.replace(CONFIG.optimizer, weight_decay=weight_decay)
    trainer, batches = trainer_of((1, 1, 1), optimizer=optimizer)
    state, kept = trainer.init(), 1.0
    before = own_parts(trainer, state)
    for _ in range(3):
        batch = next(batches)
        batch = batch._replace(weight=batch.weight * (batch.task == 1))
        state, metrics = trainer.step(state, put(batch, trainer), full_capacity=True)
        kept *= 1 - float(metrics["learning_rate"]) * weight_decay
    after = own_parts(trainer, state)
    assert differing(before["middle"], after["middle"]) != []
    for task in ("large", "small", "other"):
        assert not any(
            np.any(leaf) for name in ("m", "v") for leaf in jax.tree.leaves(after[task][name])
        )
        if not weight_decay:
            assert differing(before[task], after[task]) == []
    decayed = jax.tree.map(lambda w: w * kept, before["other"]["params"][1])
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6), after["other"]["params"][1], decayed
    )


def test_training_learns() -> None:
    losses, _ = run((1, 1, 1), 10)
    assert (losses[-2:].mean(axis=0) < losses[0]).any()
