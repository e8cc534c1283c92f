"""Training on images with experts on other tiers than the device: the same training, whatever lies
where.

Legend: A tasks, N layers with experts, E experts.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures.thread import _WorkItem
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import CheckpointConfig, TiersConfig, VisionTrainConfig
from jmoe.data.image_batches import ImageBatch, ImageBatches, all_train_batches, held_out_batches
from jmoe.mesh import BATCH
from jmoe.offload.expert_state import ExpertState
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.resume import restore_checkpoint
from jmoe.training.tasks.layouts import allocated_bytes_per_device, plan_task_layout
from jmoe.training.tasks.step import VisionTrainer
from jmoe.training.tasks.streamed import StreamedVisionTrainer
from jmoe.training.tasks.trainer import ImageTrainer, make_vision_trainer
from tests.arrays import differing, full_state
from tests.model_configs import mesh_of, spread_over, stored_in
from tests.vision_tasks import CLASSES, COMM, CONFIG, TASKS

DEVICE = TiersConfig()
HOST = TiersConfig(experts="host", optimizer="host", device_layers=1)
MIXED = TiersConfig(experts="device", optimizer="host")
NVME = TiersConfig(experts="nvme", optimizer="nvme", gradients="nvme")
HALF = TiersConfig(experts="host", optimizer="nvme")
UPDATED = dataclasses.replace(HALF, update="host")
TIERS = {"device": DEVICE, "mixed": MIXED, "host": HOST, "half": HALF, "nvme": NVME}
TIERS |= {"updated on the host": UPDATED}
# Every kind of layer, those with experts in turn; two contrastive tasks.
MODEL = dataclasses.replace(
    CONFIG.model, num_hidden_layers=4, task_layers=(1, 3), mlp_only_layers=(0,)
)
TASK_CONFIGS = {
    "large": dataclasses.replace(CONFIG.tasks["large"], path=(0, 1)),
    "middle": dataclasses.replace(
        CONFIG.tasks["middle"], path=(1, 2), head="contrastive", embedding_size=4
    ),
    "small": dataclasses.replace(
        CONFIG.tasks["small"], path=(0, 3), head="contrastive", embedding_size=6
    ),
    "other": dataclasses.replace(CONFIG.tasks["other"], path=(3, 3)),
}
MANY = dataclasses.replace(CONFIG, model=MODEL, tasks=TASK_CONFIGS)
# Tokens choose no experts: a device has those that its tasks name. In both layers two tasks share
# an expert.
BY_TASK = dataclasses.replace(
    MANY, model=dataclasses.replace(MODEL, mlp_only_layers=(0, 2)), layout="elastic"
)
LEARNED = dataclasses.replace(
    MANY,
    model=dataclasses.replace(MODEL, learn_paths=True),
    tasks={
        name: dataclasses.replace(task, path=(1 + i % 3, 3))
        for i, (name, task) in enumerate(TASK_CONFIGS.items())
    },
)


def put(batch: ImageBatch, trainer: ImageTrainer) -> Any:
    sharding = NamedSharding(trainer.model.mesh, BATCH)
    return jax.tree.map(lambda a: jax.device_put(a, sharding), batch)


@dataclasses.dataclass
class Run:
    """A trainer and its batches; `train` and `evaluate` give what every task had."""

    trainer: ImageTrainer
    batches: ImageBatches
    state: Any = None

    def train(self, steps: int) -> dict[str, np.ndarray]:
        """Losses and accuracies [steps, A]."""
        self.state = self.trainer.init() if self.state is None else self.state
        values: dict[str, list[Any]] = {"task_loss": [], "task_accuracy": []}
        for _ in range(steps):
            batch = put(next(self.batches), self.trainer)
            self.state, metrics = self.trainer.step(self.state, batch)
            if metrics["overflow"]:
                self.state, metrics = self.trainer.step(self.state, batch, full_capacity=True)
            assert metrics["ok"]
            for name, of_steps in values.items():
                of_steps.append([float(value) for value in metrics[name].values()])
        return {name: np.array(of_steps) for name, of_steps in values.items()}

    def evaluate(self) -> np.ndarray:
        """[3, A] of what is held out."""
        trainer, devices = self.trainer, self.trainer.model.mesh.size
        homes, numbers = trainer.homes, np.flatnonzero(trainer.is_contrastive).tolist()
        images = all_train_batches(TASKS, numbers, homes, devices, 8) if numbers else iter(())
        means = trainer.class_mean_embeddings(self.state, (put(batch, trainer) for batch in images))
        held_out = [put(batch, trainer) for batch in held_out_batches(TASKS, homes, devices, 8)]
        total: np.ndarray = sum(
            np.asarray(v, np.float64) for v in trainer.evaluate_batches(self.state, held_out, means)
        )
        return total


@contextlib.contextmanager
def opened(
    config: VisionTrainConfig, tiers: TiersConfig, folder: Path, *shape: int, step: int = 0
) -> Iterator[Run]:
    """A run with experts on these tiers, on a mesh of this shape."""
    tiers = stored_in(tiers, folder / "records")
    config = dataclasses.replace(config, tiers=tiers, output_dir=str(folder))
    spread: Any = spread_over(config, *shape, **COMM)
    devices = int(np.prod(shape))
    layout = plan_task_layout(spread, devices, step=step)
    with contextlib.closing(
        make_vision_trainer(spread, CLASSES, mesh_of(*shape), layout)
    ) as trainer:
        yield Run(trainer, ImageBatches(TASKS, spread, layout, 0, devices))


def assert_alike(
    config: VisionTrainConfig, tiers: TiersConfig, folder: Path, *shape: int, steps: int = 3
) -> None:
    """With these tiers every task has the losses and accuracies of the device, and so do images
    held out.
    """
    with opened(config, DEVICE, folder, *shape) as run:
        assert isinstance(run.trainer, VisionTrainer)
        expected, held_out = run.train(steps), run.evaluate()
        parameters = full_state(run.trainer, run.state)
    with opened(config, tiers, folder, *shape) as run:
        assert isinstance(run.trainer, StreamedVisionTrainer)
        values, evaluated = run.train(steps), run.evaluate()
        assert run.trainer.expert_stats().updates > 0
        ours = full_state(run.trainer, run.state)
    np.testing.assert_allclose(values["task_loss"], expected["task_loss"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(values["task_accuracy"], expected["task_accuracy"])
    np.testing.assert_allclose(evaluated[0], held_out[0], rtol=0, atol=1e-4)  # sums of six images
    np.testing.assert_array_equal(evaluated[1:], held_out[1:])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
        ours.params,
        parameters.params,
    )


@pytest.mark.slow
def test_experts_in_host_memory_change_no_loss(tmp_path: Path) -> None:
    """Devices take 4, 2, 1 and 1 micro-batches; a task is contrastive; a layer of every kind."""
    contrastive = dataclasses.replace(CONFIG.tasks["middle"], head="contrastive", embedding_size=4)
    config = dataclasses.replace(
        CONFIG, layout="elastic", tasks=CONFIG.tasks | {"middle": contrastive}
    )
    assert_alike(config, HOST, tmp_path, 4, 1, 1, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "changes"),
    [
        ("host", (1, 1, 1), {}),
        ("nvme", (1, 1, 1), {"gradient_accumulation_steps": 2, "remat": "layer"}),
        ("mixed", (2, 1, 2), {}),  # experts apart: tokens are exchanged; two replicas of each
        ("half", (2, 1, 2), {"gradient_accumulation_steps": 2}),
        ("updated on the host", (2, 1, 2), {"gradient_accumulation_steps": 2}),
        ("nvme", (2, 1, 1), {"layout": "elastic"}),  # 2 | 1 + 1 + ...
        ("host", (8, 1, 1), {"layout": "elastic"}),  # 4 / 2 / 1 / 1
        ("mixed", (4, 1, 1), {"layout": "elastic"}),
        ("host", (4, 1, 1), {"layout": "elastic"}),
    ],
)
def test_no_tier_and_no_layout_changes_a_loss(
    tmp_path: Path, name: str, shape: tuple[int, ...], changes: dict[str, Any]
) -> None:
    assert_alike(dataclasses.replace(MANY, **changes), TIERS[name], tmp_path, *shape, steps=6)


@pytest.mark.parametrize(
    ("name", "num_devices", "num_slots"),
    [
        # the expert that no task names is with one device's own
        pytest.param("host", 4, 2, marks=pytest.mark.slow),
        pytest.param("nvme", 2, 3, marks=pytest.mark.slow),
        pytest.param("mixed", 8, 2, marks=pytest.mark.slow),
        pytest.param("updated on the host", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_experts_on_tiers_lie_where_their_tasks_run(
    tmp_path: Path, name: str, num_devices: int, num_slots: int
) -> None:
    assert_alike(BY_TASK, TIERS[name], tmp_path, num_devices, 1, 1, steps=2)
    with opened(BY_TASK, TIERS[name], tmp_path / "slots", num_devices, 1, 1) as run:
        assert isinstance(run.trainer, StreamedVisionTrainer)
        run.train(1)
        assert run.trainer.slots is not None and run.trainer.slots.num_slots == num_slots
        assert run.trainer.experts is not None
        for slot in run.trainer.experts.slots.stacks:
            assert {w.shape[0] for stacks in slot for w in stacks.values()} == {num_slots}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host", "mixed", "updated on the host"])
def test_paths_are_learned_alike_where_tasks_run(tmp_path: Path, name: str) -> None:
    model = dataclasses.replace(LEARNED.model, mlp_only_layers=(0, 2))
    config = dataclasses.replace(LEARNED, model=model, layout="elastic")
    assert_alike(config, TIERS[name], tmp_path, 4, 1, 1, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host", "mixed"])
@pytest.mark.parametrize(("shape", "layout"), [((1, 1, 1), "even"), ((4, 1, 1), "elastic")])
def test_paths_are_learned_alike(
    tmp_path: Path, name: str, shape: tuple[int, ...], layout: Any
) -> None:
    assert_alike(
        dataclasses.replace(LEARNED, layout=layout), TIERS[name], tmp_path, *shape, steps=6
    )


@pytest.mark.slow
def test_fifty_steps_on_every_tier_are_alike(tmp_path: Path) -> None:
    """Losses and accuracies of every task, in four layouts, each with experts on another tier
    than the others.
    """
    config = dataclasses.replace(CONFIG, num_steps=50)
    with opened(config, DEVICE, tmp_path, 1, 1, 1) as run:
        expected = run.train(50)
    assert (
        expected["task_loss"][-10:].mean(axis=0) < expected["task_loss"][:10].mean(axis=0)
    ).all()
    for name, devices in (("host", 1), ("nvme", 2), ("half", 4), ("mixed", 8)):
        layout: Any = "elastic" if devices > 1 else "even"
        with opened(
            dataclasses.replace(config, layout=layout), TIERS[name], tmp_path / name, devices, 1, 1
        ) as run:
            values = run.train(50)
        np.testing.assert_allclose(values["task_loss"], expected["task_loss"], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(values["task_accuracy"], expected["task_accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "layout"), [((4, 1, 1), "elastic"), ((1, 1, 2), "even")])
def test_bfloat16_is_rounded_alike(tmp_path: Path, shape: tuple[int, ...], layout: Any) -> None:
    """Products and the gradients that wait, both in bfloat16: of relative precision 2**-8."""
    config = dataclasses.replace(MANY, compute_dtype="bfloat16", layout=layout)
    losses = []
    both = [dataclasses.replace(t, gradient_dtype="bfloat16") for t in (NVME, UPDATED)]
    for tiers in (DEVICE, *both):
        # JAX's own attention promotes bfloat16 without a word
        with jax.numpy_dtype_promotion("standard"), opened(config, tiers, tmp_path, *shape) as run:
            losses.append(run.train(3)["task_loss"])
    for ours in losses[1:]:
        np.testing.assert_allclose(ours, losses[0], rtol=0.02, atol=0.02)


def save(run: Run, folder: Path, step: int) -> None:
    with Checkpoints(
        folder / "checkpoints", CheckpointConfig(), records=run.trainer.records
    ) as checkpoints:
        checkpoints.save(
            step,
            run.trainer.prepare_state_for_save(run.state),
            run.batches.get_state(),
            run.trainer.config.to_json(),
        )


def restore(run: Run, folder: Path, step: int) -> None:
    with Checkpoints(
        folder / "checkpoints", CheckpointConfig(), records=run.trainer.records
    ) as checkpoints:
        run.state, data = restore_checkpoint(run.trainer, checkpoints, step)
        run.batches.set_state(data)


# Two layers compile in a third of the time.
SMALL_MODEL = dataclasses.replace(
    CONFIG.model, num_hidden_layers=2, mlp_only_layers=(0,), task_layers=(1,)
)
SMALL = dataclasses.replace(CONFIG, model=SMALL_MODEL)


@pytest.mark.parametrize("name", ["host", pytest.param("nvme", marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    with opened(SMALL, TIERS[name], tmp_path / "whole", 1, 1, 1) as run:
        expected = run.train(4)["task_loss"]
        whole = full_state(run.trainer, run.state)
    with opened(SMALL, TIERS[name], tmp_path, 1, 1, 1) as run:
        run.train(2)
        save(run, tmp_path, 2)
    with opened(SMALL, TIERS[name], tmp_path, 1, 1, 1) as run:
        restore(run, tmp_path, 2)
        np.testing.assert_array_equal(run.train(2)["task_loss"], expected[2:])
        assert differing(full_state(run.trainer, run.state), whole) == []


@pytest.mark.slow
@pytest.mark.parametrize("before", ["device", "host", "nvme"])
@pytest.mark.parametrize("after", ["device", "mixed", "nvme"])
def test_experts_of_images_move_to_other_tiers(tmp_path: Path, before: str, after: str) -> None:
    """From one device to a layout of four, and with every kind of layer; what is restored is
    what was saved.
    """
    with opened(MANY, TIERS[before], tmp_path, 1, 1, 1) as run:
        run.train(2)
        save(run, tmp_path, 2)
        expected = full_state(run.trainer, run.state)
    with opened(
        dataclasses.replace(MANY, layout="elastic"), TIERS[after], tmp_path, 4, 1, 1
    ) as run:
        restore(run, tmp_path, 2)
        assert differing(full_state(run.trainer, run.state), expected) == []
        assert np.isfinite(run.train(1)["task_loss"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host", "nvme"])
def test_experts_move_with_their_tasks(tmp_path: Path, name: str) -> None:
    """From four devices to two, to one and back; what is restored is what was saved, and the
    same layout goes on.
    """
    with opened(BY_TASK, TIERS[name], tmp_path / "whole", 4, 1, 1) as run:
        losses = run.train(3)["task_loss"]
    with opened(BY_TASK, TIERS[name], tmp_path, 4, 1, 1) as run:
        run.train(2)
        save(run, tmp_path, 2)
        expected = full_state(run.trainer, run.state)
    with opened(BY_TASK, TIERS[name], tmp_path, 4, 1, 1) as run:
        restore(run, tmp_path, 2)
        np.testing.assert_array_equal(run.train(1)["task_loss"], losses[2:])
    for step, devices, tiers in (
        (2, 2, name),
        (3, 1, name),
        (4, 2, "device"),
        (5, 4, name),
        (6, 4, name),
    ):
        with opened(BY_TASK, TIERS[tiers], tmp_path, devices, 1, 1) as run:
            restore(run, tmp_path, step)
            assert differing(full_state(run.trainer, run.state), expected) == [], (step, devices)
            save(run, tmp_path, step + 1)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("mixed", 1),
        *(pytest.param("host", devices, marks=pytest.mark.slow) for devices in (1, 4)),
    ],
)
def test_a_device_has_as_many_bytes_of_experts_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_devices: int
) -> None:
    """Whenever a layer has been fetched, or its gradients go to their tier: stacks of weights
    and gradients. A thread that has written some may keep its arguments a while, on a busy machine.
    """
    run_work = _WorkItem.run

    def run_and_linger(item: Any) -> None:
        run_work(item)
        time.sleep(0.02)

    monkeypatch.setattr(_WorkItem, "run", run_and_linger)
    model = dataclasses.replace(
        SMALL_MODEL, num_hidden_layers=4, mlp_only_layers=(), task_layers=(0, 1, 2, 3)
    )
    tasks = {
        task: dataclasses.replace(config, path=4 * config.path)
        for task, config in CONFIG.tasks.items()
    }
    config = dataclasses.replace(
        CONFIG, model=model, tasks=tasks, layout="elastic" if num_devices > 1 else "even"
    )
    first, known, most = jax.devices()[0], list(jax.live_arrays()), [0]
    known_ids = {id(array) for array in known}
    with opened(config, TIERS[name], tmp_path, num_devices, 1, 1) as run:
        assert isinstance(run.trainer, StreamedVisionTrainer)
        num_slots = 4 if run.trainer.slots is None else run.trainer.slots.num_slots
        shapes = {
            (num_slots, *shape) for shape in run.trainer.streamed.modules.expert_shapes.values()
        }

        def stack_bytes() -> int:
            """Bytes of stacks on the first device; looks again if the ring's thread gave an
            array up meanwhile.
            """
            while True:
                new = [a for a in jax.live_arrays() if id(a) not in known_ids]
                try:
                    parts = [
                        shard.data
                        for a in new
                        for shard in a.addressable_shards
                        if shard.device == first
                    ]
                    stacks = {
                        part.unsafe_buffer_pointer(): part.nbytes
                        for part in parts
                        if part.shape in shapes
                    }
                    return sum(stacks.values())
                except RuntimeError:
                    if not any(a.is_deleted() for a in new):
                        raise

        def watched(method: Any) -> Any:
            def call(*args: Any) -> Any:
                result = method(*args)
                most[0] = max(most[0], stack_bytes())
                return result

            return call

        for method in ("fetch_layer", "store_gradients"):
            monkeypatch.setattr(ExpertState, method, watched(getattr(ExpertState, method)))
        run.train(2)
        layout = run.trainer.layout
    here, device = (
        allocated_bytes_per_device(dataclasses.replace(config, tiers=tiers), layout)
        for tiers in (TIERS[name], DEVICE)
    )
    of_layer = num_slots * model.parameters_per_expert
    planned = 16 * 4 * of_layer - (device - here)
    gradients = 2 if num_devices == 1 else 3  # the third one before its sum over devices
    assert planned == of_layer * (4 * (1 if name == "host" else 4) + 4 * gradients)
    # gradients of the layer before may be written by now
    assert planned - 4 * of_layer <= most[0] <= planned
