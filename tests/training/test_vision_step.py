"""Training on images: no layout and no mesh changes a loss, and no task moves what is another's.

Legend: A tasks, N layers routed per token, E experts.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.data.image_batches import ImageBatch, ImageBatches, held_out_batches
from jmoe.mesh import BATCH
from jmoe.training.task_layouts import layout_of
from jmoe.training.vision_step import VisionTrainer
from tests.arrays import on_host
from tests.model_configs import mesh_of, spread_over
from tests.vision_tasks import CLASSES, COMM, CONFIG, TASKS

pytestmark = pytest.mark.usefixtures("quick_compilation")


def put(batch: ImageBatch, trainer: VisionTrainer) -> ImageBatch:
    sharding = NamedSharding(trainer.model.mesh, BATCH)
    return jax.tree.map(lambda a: jax.device_put(a, sharding), batch)


def trainer_of(shape: tuple[int, int, int], **changes: Any) -> tuple[VisionTrainer, ImageBatches]:
    comm = {name: changes.pop(name) for name in ("shard_dense", "fuse_dense") if name in changes}
    config: Any = spread_over(dataclasses.replace(CONFIG, **changes), *shape, **COMM, **comm)
    devices = int(np.prod(shape))
    layout = layout_of(config, devices)
    return VisionTrainer(config, CLASSES, mesh_of(*shape), layout), ImageBatches(TASKS, config, layout, 0, devices)


def run(shape: tuple[int, int, int], steps: int = 4, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
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
    held_out = [put(batch, trainer) for batch in held_out_batches(TASKS, trainer.homes, trainer.model.mesh.size, 8)]
    return np.array(losses), sum(np.asarray(values, np.float64) for values in trainer.evaluate(state, held_out))


@pytest.fixture(scope="module")
def expected() -> tuple[np.ndarray, np.ndarray]:
    jax.config.update("jax_disable_most_optimizations", True)
    result = run((1, 1, 1))
    jax.config.update("jax_disable_most_optimizations", False)
    return result


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((4, 1, 1), {"layout": "elastic"}),  # 1 / 1 / 1 / 1: devices take 4, 2, 1 and 1 micro-batches
        pytest.param((2, 1, 1), {"layout": "elastic"}, marks=pytest.mark.slow),  # 2 | 1 + 1 + ...
        pytest.param((8, 1, 1), {"layout": "elastic"}, marks=pytest.mark.slow),  # 4 / 2 / 1 / 1
        pytest.param((4, 1, 1), {}, marks=pytest.mark.slow),
        # experts apart: tokens are exchanged
        pytest.param((2, 1, 2), {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
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
    """On two devices large | the others, on four a task each, on eight 4 / 2 / 1 / 1, and on one."""
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
        assert [bool(np.any(expert)) for expert in experts] == [expert == task.path[0] for expert in range(4)]
        assert [head for head, grad in grads["heads"].items() if np.any(grad)] == [name]
        assert np.any(grads["patch_embedding"])


def test_training_learns() -> None:
    losses, _ = run((1, 1, 1), 10)
    assert (losses[-2:].mean(axis=0) < losses[0]).any()
