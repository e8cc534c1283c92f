"""Image tasks as the `Task` of a run, which `train.py` sets up."""

from __future__ import annotations

import contextlib
import json

import jax
from jax.sharding import Mesh

from jmoe.cluster.signals import RequestSignal
from jmoe.config import VisionTrainConfig
from jmoe.data.image_batches import ImageBatches
from jmoe.data.images import load_task
from jmoe.planning.elastic import TaskLayout
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.compatibility import has_compatible_checkpoint
from jmoe.run.snapshots import Snapshots
from jmoe.training.session import print_on_rank_0
from jmoe.training.task import RunSetup, TrainingData, open_session
from jmoe.training.tasks.layouts import layout_plan_lines, plan_task_layout
from jmoe.training.tasks.run import CLASSES
from jmoe.training.tasks.session import VisionSession
from jmoe.training.tasks.trainer import ImageTrainer, make_vision_trainer
from jmoe.training.trainer import Trainer


class ImageTraining:
    """Trains one model on several image tasks, each with a classifier or a contrastive loss."""

    def __init__(self, config: VisionTrainConfig) -> None:
        self.config = config
        self._layout: TaskLayout | None = None
        self._resizing: RequestSignal | None = None

    @property
    def layout(self) -> TaskLayout:
        """The layout of the first step; call `prepare_on_mesh` first."""
        assert self._layout is not None, "open() comes first"
        return self._layout

    def plan_report(self) -> tuple[str, bool]:
        """Return (the planned layout as text, True). Raises ValueError if device memory is too
        small.
        """
        return "\n".join(layout_plan_lines(self.config)), True

    def prepare_on_mesh(self, mesh: Mesh, stack: contextlib.ExitStack) -> None:
        """Plan the layout, and install the handler of SIGUSR2, which asks for another number of
        devices.
        """
        self._layout = plan_task_layout(self.config, mesh.size)
        self._resizing = stack.enter_context(RequestSignal())

    def read_data(self, setup: RunSetup) -> TrainingData:
        """Return the images of all tasks. Every process reads all of them."""
        config = self.config
        with setup.watchdog.waiting_for("images", timeout_s=config.distributed.start_timeout_s):
            has_compatible_checkpoint(config, setup.resolved)
            tasks = tuple(
                load_task(name, task.source, config.model, config.images)
                for name, task in config.tasks.items()
            )
        for task in tasks:
            print_on_rank_0(
                f"task {task.name}: {len(task.classes)} classes, {len(task.train.labels):,} images"
                f" to train on, {len(task.held_out.labels):,} held out"
            )
        each = jax.device_count() // jax.process_count()
        first = jax.process_index() * each
        batches = ImageBatches(tasks, config, self.layout, first, first + each)
        files = {CLASSES: json.dumps({task.name: task.classes for task in tasks}).encode()}
        return TrainingData(tasks, batches, batches.fingerprint, files)

    def make_trainer(self, setup: RunSetup, data: TrainingData) -> ImageTrainer:
        """Return the trainer of a vision transformer with one head per task."""
        num_classes = {task.name: len(task.classes) for task in data.corpus}
        return make_vision_trainer(
            self.config, num_classes, setup.mesh, self.layout, setup.folder.run_name
        )

    def make_session(
        self,
        setup: RunSetup,
        data: TrainingData,
        trainer: Trainer,
        checkpoints: Checkpoints,
        snapshots: Snapshots | None,
    ) -> VisionSession:
        """Return the session, which may change the layout between steps."""
        session = open_session(VisionSession, setup, data, trainer, checkpoints, snapshots)
        session.resizing = self._resizing
        return session
