"""Training on images: no layout and no mesh changes a loss, and no task moves what is another's.

Legend: A tasks, N layers routed per token, E experts.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import CommConfig, RouterConfig, TaskConfig, VisionModelConfig, VisionTrainConfig
from jmoe.data.image_batches import ImageBatch, ImageBatches, held_out_batches
from jmoe.data.images import ImageTask, Split
from jmoe.mesh import BATCH
from jmoe.training.task_layouts import layout_of
from jmoe.training.vision_step import VisionTrainer
from tests.arrays import on_host
from tests.model_configs import OPTIMIZER, mesh_of, spread_over

pytestmark = pytest.mark.usefixtures("quick_compilation")
COMM = {"schedule": "none"}
CONFIG = VisionTrainConfig(
    model=VisionModelConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(0,),
        task_layers=(2,),
        position="learned",
        router=RouterConfig(kind="sigmoid", aux_loss_coef=0.0, z_loss_coef=0.01, bias_update_speed=0.01),
    ),
    tasks={
        "large": TaskConfig("large", batch_size=16, path=(0,)),
        "middle": TaskConfig("middle", batch_size=8, path=(1,)),
        "small": TaskConfig("small", batch_size=4, path=(0,)),
        "other": TaskConfig("other", batch_size=4, path=(3,), loss_weight=0.5),
    },
    optimizer=OPTIMIZER,
    comm=CommConfig(**COMM),
    num_steps=10,
    compute_dtype="float32",
)


def split_of(seed: int, images: int, classes: int) -> Split:
    rng = np.random.default_rng(seed)
    labels = np.arange(images, dtype=np.int32) % classes
    pixels = rng.integers(0, 256, (images, 8, 8, 1)) * (labels[:, None, None, None] + 1) // classes
    return Split(pixels.astype(np.uint8), labels)


TASKS = tuple(
    ImageTask(name, tuple("abcdef"[: i + 2]), split_of(i, 20, i + 2), split_of(10 + i, 6, i + 2))
    for i, name in enumerate(CONFIG.tasks)
)
CLASSES = {task.name: len(task.classes) for task in TASKS}


def put(batch: ImageBatch, trainer: VisionTrainer) -> ImageBatch:
    sharding = NamedSharding(trainer.model.mesh, BATCH)
    return jax.tree.map(lambda a: jax.device_put(a, sharding), batch)


def trainer_of(shape: tuple[int, int, int], **changes: Any) -> tuple[VisionTrainer, ImageBatches]:
    comm = {name: changes.pop(name) for name in ("shard_dense", "fuse_dense") if name in changes}
    config: Any = spread_over(dataclasses.replace(CONFIG, **changes), *shape, **COMM, **comm)
    devices = int(np.prod(shape))
    layout = layout_of(config, devices)
    return VisionTrainer(config, CLASSES, mesh_of(*shape), layout), ImageBatches(TASKS, config, layout, 0, devices)


def run(shape: tuple[int, int, int], num_steps: int = 4, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Losses [steps, A] of the tasks, and [3, A] of what is held out at the end."""
    trainer, batches = trainer_of(shape, **changes)
    state, losses = trainer.init(), []
    for _ in range(num_steps):
        batch = put(next(batches), trainer)
        state, metrics = trainer.step(state, batch)
        if metrics["overflow"]:
            state, metrics = trainer.step(state, batch, full_capacity=True)
        assert metrics["ok"]
        losses.append([float(metrics["task_loss"][name]) for name in CONFIG.tasks])
    held_out = [put(batch, trainer) for batch in held_out_batches(TASKS, trainer.model.mesh.size, 8)]
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
    losses, _ = run((1, 1, 1), num_steps=10)
    assert (losses[-2:].mean(axis=0) < losses[0]).any()
