"""Paths that are learned: a planted preference is found, no layout changes a loss, and a task
decides for itself.
"""

import dataclasses
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import TaskConfig, VisionTrainConfig
from jmoe.config.vision import PathLearningConfig
from jmoe.data.image_batches import ImageBatches
from jmoe.mesh import BATCH
from jmoe.models.vision import PathNoise, VisionTransformer, draw_path_noise, likeliest_experts
from jmoe.training.state import TrainState
from jmoe.training.tasks.layouts import plan_task_layout
from jmoe.training.tasks.step import VisionTrainer, draw_step_paths
from tests.arrays import on_host
from tests.model_configs import mesh_of
from tests.vision_tasks import CLASSES, CONFIG, TASKS

PATHS = {"large": (1, 1), "middle": (2, 2), "small": (3, 3), "other": (1, 3)}
LEARNED = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(
        CONFIG.model, mlp_only_layers=(0,), task_layers=(1, 2), learn_paths=True
    ),
    tasks={
        name: dataclasses.replace(task, path=PATHS[name]) for name, task in CONFIG.tasks.items()
    },
    layout="elastic",
)


def trainer_of(num_devices: int, **changes: Any) -> tuple[VisionTrainer, ImageBatches]:
    config: VisionTrainConfig = dataclasses.replace(LEARNED, **changes)
    layout = plan_task_layout(config, num_devices)
    trainer = VisionTrainer(config, CLASSES, mesh_of(num_devices, 1, 1), layout)
    return trainer, ImageBatches(TASKS, config, layout, 0, num_devices)


def train(
    trainer: VisionTrainer, batches: ImageBatches, state: TrainState, steps: int
) -> tuple[TrainState, Any]:
    sharding, losses = NamedSharding(trainer.model.mesh, BATCH), []
    for _ in range(steps):
        batch = jax.tree.map(lambda a: jax.device_put(a, sharding), next(batches))
        state, metrics = trainer.step(state, batch)
        assert metrics["ok"]
        losses.append([float(metrics["task_loss"][name]) for name in CLASSES])
    return state, np.array(losses)


@pytest.mark.slow
def test_a_planted_preference_is_learned() -> None:
    """Logits learn to compute what the same network does on a path that is not the one they
    begin with.
    """
    config = dataclasses.replace(LEARNED.model, initializer_range=0.3)
    network = VisionTransformer(config, CLASSES, list(PATHS.values()), rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(network, nnx.PathContains("path_logits"), ...)
    undecided = nnx.to_pure_dict(params)["path_logits"]
    planted = {"large": (1, 0), "middle": (0, 2), "small": (3, 3), "other": (0, 0)}
    teacher = {name: jnp.where(np.array(planted[name]) > 0, 1.0, -1.0) for name in undecided}
    pixels = jnp.asarray(np.random.default_rng(0).random((16, 8, 8, 1), np.float32))
    numbers = jnp.arange(16, dtype=jnp.int32) % len(CLASSES)

    def outputs(logits: Any, draw: PathNoise | None) -> jax.Array:
        own = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(logits))
        scores, _ = nnx.merge(graph, own, rest)(pixels, numbers, draw=draw)
        return jnp.where(jnp.isfinite(scores), scores, 0.0)

    wanted = outputs(teacher, None)

    @jax.jit
    def step(logits: Any, number: jax.Array) -> Any:
        draw = draw_path_noise(
            jax.random.fold_in(jax.random.key(0), number), (len(CLASSES), 2), jnp.float32(1.0)
        )
        grads = jax.grad(lambda logits: jnp.square(outputs(logits, draw) - wanted).sum())(logits)
        return jax.tree.map(lambda w, g: w - jnp.clip(g, -0.1, 0.1), logits, grads)

    logits = undecided
    for number in range(100):
        logits = step(logits, jnp.int32(number))
    assert {
        name: likeliest_experts(path, undecided[name]) for name, path in PATHS.items()
    } == dict.fromkeys(PATHS, (0, 0))
    assert {name: likeliest_experts(path, logits[name]) for name, path in PATHS.items()} == planted
    np.testing.assert_array_equal(outputs(logits, None), wanted)


@pytest.mark.slow
def test_no_layout_changes_a_loss_or_a_path() -> None:
    results = []
    for num_devices in (1, 4):
        trainer, batches = trainer_of(num_devices)
        state, losses = train(trainer, batches, trainer.init(), 4)
        results.append((losses, on_host(state.params["path_logits"])))
    (losses, logits), (other_losses, other_logits) = results
    np.testing.assert_allclose(other_losses, losses, rtol=0, atol=1e-5)
    for name in CLASSES:
        assert np.any(logits[name])
        np.testing.assert_allclose(other_logits[name], logits[name], rtol=0, atol=1e-4)


def test_what_is_drawn_depends_on_step_and_task_alone() -> None:
    (one, _), (four, _) = trainer_of(1), trainer_of(4)
    draws = [
        draw_step_paths(trainer.config, jnp.int32(step))
        for trainer, step in ((one, 0), (four, 0), (one, 5), (one, 10))
    ]
    np.testing.assert_array_equal(draws[0].noise_AN, draws[1].noise_AN)
    assert len(np.unique(np.stack([draw.noise_AN for draw in draws[1:]]))) == 3 * 4 * 2
    assert [float(draw.temperature) for draw in draws[1:]] == pytest.approx([2.0, 0.4**0.5, 0.2])


@pytest.mark.slow
def test_a_task_decides_for_itself_and_reads_its_logits_without_noise() -> None:
    trainer, batches = trainer_of(1)
    state = trainer.init()
    logits = state.params["path_logits"] | {"small": jnp.array([2.0, -1.0])}
    state = dataclasses.replace(state, params=state.params | {"path_logits": logits})
    assert trainer.task_paths(state) == {
        "large": (0, 0),
        "middle": (0, 0),
        "small": (3, 0),
        "other": (0, 0),
    }
    model = trainer.model.model_with_params(state.params, state.router_bias)
    given = dataclasses.replace(LEARNED.model, learn_paths=False)
    tasks = {name: dataclasses.replace(task, path=(0, 0)) for name, task in LEARNED.tasks.items()}
    tasks["small"] = dataclasses.replace(tasks["small"], path=(3, 0))
    fixed, _ = trainer_of(1, model=given, tasks=tasks)
    same = {name: tree for name, tree in state.params.items() if name != "path_logits"}
    expected = fixed.model.model_with_params(same, state.router_bias)
    pixels = jnp.asarray(np.random.default_rng(0).random((4, 8, 8, 1), np.float32))
    numbers = jnp.arange(4, dtype=jnp.int32)
    np.testing.assert_array_equal(model(pixels, numbers)[0], expected(pixels, numbers)[0])
    gradients = jax.jit(
        lambda batch: trainer.gradients_local(state, batch, full_capacity=True)[0]["path_logits"]
    )
    batch = jax.tree.map(jnp.asarray, next(batches))
    moved = on_host(gradients(batch._replace(weight=(batch.task == 2).astype(np.float32))))
    assert [name for name in CLASSES if np.any(moved[name])] == ["small"]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LEARNED, {"tasks": CONFIG.tasks}, r"tasks.large.path = \(0,\): must name an expert for 2"),
        (
            LEARNED,
            {"tasks": {"large": TaskConfig("x", path=(0, 1))}},
            r"path = \(0, 1\): must lie between 1 and .* = 3",
        ),
        (LEARNED.model, {"task_layers": ()}, "learn_paths = True: needs task_layers"),
        (
            LEARNED.model,
            {"num_experts": 1, "num_experts_per_tok": 1},
            "num_experts = 1: must be greater than 1 for lea",
        ),
        (PathLearningConfig(), {"temperature": 0.0}, r"temperature = 0.0: must be greater than 0"),
        (
            PathLearningConfig(),
            {"final_temperature": 3.0},
            r"paths.final_temperature = 3.0: must not exceed .* = 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)
