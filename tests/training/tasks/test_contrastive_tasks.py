"""Tasks that compare images: all of a step's batch, wherever they are, so that no layout changes
a loss.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import TaskConfig, VisionTrainConfig
from jmoe.data.image_batches import ImageBatch, ImageBatches, all_train_batches, held_out_batches
from jmoe.data.images import ImageSplit, ImageTask
from jmoe.deploy.extract import extract_task, load_task_model
from jmoe.layers.contrastive import contrastive_losses, l2_normalized
from jmoe.mesh import BATCH
from jmoe.training.state import TrainState
from jmoe.training.tasks.layouts import plan_task_layout
from jmoe.training.tasks.step import VisionTrainer
from tests.arrays import on_host
from tests.model_configs import mesh_of
from tests.vision_runs import CONFIG as RUN_CONFIG
from tests.vision_runs import saved_run
from tests.vision_tasks import CLASSES, CONFIG, TASKS

COMPARED = {"head": "contrastive", "embedding_size": 8, "contrastive_temperature": 0.2}
CHANGES: dict[str, Any] = {
    name: COMPARED if name in ("large", "small") else {} for name in CONFIG.tasks
}
MODEL = dataclasses.replace(
    CONFIG.model, num_hidden_layers=2, mlp_only_layers=(0,), task_layers=(1,)
)
MIXED = dataclasses.replace(
    CONFIG,
    model=MODEL,
    tasks={name: dataclasses.replace(task, **CHANGES[name]) for name, task in CONFIG.tasks.items()},
    layout="elastic",
)


def trainer_of(
    num_devices: int, config: VisionTrainConfig = MIXED
) -> tuple[VisionTrainer, ImageBatches]:
    layout = plan_task_layout(config, num_devices)
    counts = {name: CLASSES[name] for name in config.tasks}
    trainer = VisionTrainer(config, counts, mesh_of(num_devices, 1, 1), layout)
    return trainer, ImageBatches(
        [t for t in TASKS if t.name in config.tasks], config, layout, 0, num_devices
    )


def put(batch: ImageBatch, trainer: VisionTrainer) -> ImageBatch:
    return jax.tree.map(
        lambda a: jax.device_put(a, NamedSharding(trainer.model.mesh, BATCH)), batch
    )


def train(
    trainer: VisionTrainer, batches: ImageBatches, steps: int
) -> tuple[TrainState, np.ndarray]:
    """The state, and [steps, 2, tasks] losses and accuracies."""
    state, values = trainer.init(), []
    for _ in range(steps):
        state, metrics = trainer.step(state, put(next(batches), trainer))
        assert metrics["ok"]
        values.append([list(metrics[kind].values()) for kind in ("task_loss", "task_accuracy")])
    return state, np.array(values, np.float64)


def accuracies(
    trainer: VisionTrainer, state: TrainState, tasks: tuple[ImageTask, ...]
) -> np.ndarray:
    devices = trainer.model.mesh.size
    compared = np.flatnonzero(trainer.is_contrastive).tolist()
    means = trainer.class_mean_embeddings(
        state,
        [put(b, trainer) for b in all_train_batches(tasks, compared, trainer.homes, devices, 8)],
    )
    held_out = [put(batch, trainer) for batch in held_out_batches(tasks, trainer.homes, devices, 8)]
    sums = np.sum(
        [np.asarray(v, np.float64) for v in trainer.evaluate_batches(state, held_out, means)],
        axis=0,
    )
    return sums[1] / sums[2]


@pytest.mark.slow
def test_no_layout_changes_a_loss() -> None:
    """On four devices each task has its own; on eight the task with the largest batch has four."""
    results = []
    for num_devices in (1, 4, 8):
        trainer, batches = trainer_of(num_devices)
        state, values = train(trainer, batches, 3)
        results.append((values, accuracies(trainer, state, TASKS)))
    for values, held_out in results[1:]:
        np.testing.assert_allclose(values, results[0][0], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(held_out, results[0][1])


def test_gradients_are_those_of_the_loss_of_the_whole_batch() -> None:
    """What a step differentiates in four parts, one after the other, and what one function of
    all images has.
    """
    trainer, batches = trainer_of(1, dataclasses.replace(MIXED, gradient_accumulation_steps=4))
    state, batch = trainer.init(), jax.tree.map(jnp.asarray, next(batches))
    grads = on_host(
        jax.jit(lambda b: trainer.gradients_local(state, b, full_capacity=True)[0])(batch)
    )
    rows = jax.tree.map(lambda a: a[0].reshape(-1, *a.shape[3:]), batch)
    compared = np.flatnonzero(trainer.is_contrastive)
    share = (
        np.array([t.loss_weight / t.batch_size for t in MIXED.tasks.values()], np.float32)
        * trainer.is_contrastive
    )

    def loss(params: Any) -> jax.Array:
        model = trainer.model.model_with_params(params, state.router_bias)
        pixels = rows.pixels.astype(jnp.float32) / 255
        scores, _ = model(pixels, rows.task, train=True, full_capacity=True)
        z = l2_normalized(jnp.where(jnp.isfinite(scores), scores, 0.0)[:, np.r_[0:8, 11:19]])
        weight = jnp.isin(rows.task, compared).astype(jnp.float32)
        losses, _ = contrastive_losses(
            z, rows.task, rows.label, weight, jnp.full(len(rows.task), 0.2)
        )
        return (losses * jnp.asarray(share)[rows.task]).sum()

    expected = on_host(jax.jit(jax.grad(loss))(state.params))
    for name in ("large", "small"):
        assert np.abs(grads["heads"][name]).max() > 1e-4
        np.testing.assert_allclose(grads["heads"][name], expected["heads"][name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_task_that_compares_images_learns_their_classes() -> None:
    """Bright, medium and dark images: held-out ones have the nearest mean of their own class."""
    labels = np.arange(48, dtype=np.int32) % 3
    rng = np.random.default_rng(0)
    pixels = (80 * labels[:, None, None, None] + rng.integers(0, 60, (48, 8, 8, 1))).astype(
        np.uint8
    )
    shades = ImageTask(
        "large",
        ("dark", "medium", "bright"),
        ImageSplit(pixels[:36], labels[:36]),
        ImageSplit(pixels[36:], labels[36:]),
    )
    optimizer = dataclasses.replace(CONFIG.optimizer, eps=1e-8, learning_rate=0.01)
    config = dataclasses.replace(
        MIXED, tasks={"large": MIXED.tasks["large"]}, optimizer=optimizer, num_steps=40
    )
    layout = plan_task_layout(config, 1)
    trainer = VisionTrainer(config, {"large": 3}, mesh_of(1, 1, 1), layout)
    state, values = train(trainer, ImageBatches([shades], config, layout, 0, 1), 40)
    assert values[-5:, 0].mean() < 0.7 * values[0, 0].mean()
    assert accuracies(trainer, state, (shades,)) > 0.9


def test_an_image_of_such_a_task_is_timed_too() -> None:
    trainer, batches = trainer_of(1)
    samples = [put(batches.peek_micro_batch(number), trainer) for number in range(2)]
    assert all(
        0 < seconds < 10 for seconds in trainer.measure_seconds_per_image(trainer.init(), samples)
    )


@pytest.mark.slow
def test_an_extracted_path_computes_embeddings(tmp_path: Path) -> None:
    tasks = RUN_CONFIG.tasks | {
        "digits": dataclasses.replace(RUN_CONFIG.tasks["digits"], **COMPARED)
    }
    network = saved_run(tmp_path / "run", dataclasses.replace(RUN_CONFIG, tasks=tasks))
    extract_task(tmp_path / "run", tmp_path / "digits", "digits")
    pixels = jnp.asarray(np.random.default_rng(0).random((5, 8, 8, 1), np.float32))
    expected, _ = network(pixels, jnp.ones(5, jnp.int32), full_capacity=True)
    own = l2_normalized(expected[np.isfinite(expected)].reshape(5, 8))
    np.testing.assert_allclose(load_task_model(tmp_path / "digits")(pixels), own, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "triplet"}, "head = 'triplet': must be one of classes, contrastive"),
        (
            {"head": "contrastive", "batch_size": 1},
            "batch_size = 1: must be greater than 1 to compare images",
        ),
        ({"embedding_size": 0}, "embedding_size = 0: must be greater than 0"),
        (
            {"contrastive_temperature": -1.0},
            "contrastive_temperature = -1.0: must be greater than 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskConfig("digits", **changes)
