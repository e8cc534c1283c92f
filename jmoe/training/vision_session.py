"""A run on images but for its steps: batches by its layout, accuracies of its tasks, table and picture."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jmoe.config import VisionTrainConfig
from jmoe.data.image_batches import held_out_batches
from jmoe.data.images import ImageTask
from jmoe.mesh import BATCH
from jmoe.run.metrics import read_events, read_metrics
from jmoe.run.task_report import TaskResult, linear_accuracy, print_task_summary, write_task_report
from jmoe.status import status
from jmoe.training.session import Session, say
from jmoe.training.state import TrainState
from jmoe.training.task_layouts import layout_of
from jmoe.training.vision_run import state_from_run
from jmoe.training.vision_step import VisionTrainer

EVALUATION_IMAGES = 128  # at once, on all devices together, or one a device


@dataclass
class VisionSession(Session):
    """A `Session` whose corpus is the images of its tasks."""

    corpus: tuple[ImageTask, ...]

    def first_state(self) -> TrainState:
        """Return step 0: drawn, or with what the run in `init_from` has learned."""
        if not self.config.init_from:
            return self.trainer.init()
        assert isinstance(self.trainer, VisionTrainer)
        return state_from_run(self.trainer, self.corpus)

    def next_batch(self) -> Any:
        """Return this process's images as its part of the global batch, [devices, micro-batches, images, ...]."""
        sharding = NamedSharding(self.mesh, BATCH)
        return jax.tree.map(lambda a: jax.make_array_from_process_local_data(sharding, a), next(self.batches))

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Say, log and return the share of each task's held-out images whose class is right."""
        step, begun, devices = int(state.step), time.perf_counter(), self.mesh.size
        images = sum(len(task.held_out.labels) for task in self.corpus)
        doing = status(f"evaluating on {images:,} held-out images", say)
        sums_3A = np.zeros((3, len(self.corpus)))
        sharding = NamedSharding(self.mesh, BATCH)
        with self.watchdog.waiting_for("evaluation after step", step), doing:
            for batch in held_out_batches(self.corpus, devices, -(-EVALUATION_IMAGES // devices)):
                put = lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])  # noqa: E731
                sums_3A += np.asarray(self.trainer.evaluate(state, [jax.tree.map(put, batch)])[0])
        nll_A, accuracy_A = sums_3A[0] / sums_3A[2], sums_3A[1] / sums_3A[2]
        names = [task.name for task in self.corpus]
        loss, accuracy = dict(zip(names, nll_A.tolist())), dict(zip(names, accuracy_A.tolist()))
        listed = ", ".join(f"{name} {value:.1%}" for name, value in accuracy.items())
        say(f"held-out accuracy after {step} steps: {listed} ({time.perf_counter() - begun:.1f} s)")
        if self.log is not None:
            self.log.write_event("evaluation", step, task_loss=loss, task_accuracy=accuracy)
        return accuracy

    def evaluate_first(self, state: TrainState) -> dict[str, float] | None:
        """Return the accuracies of step 0: measured now, or by the run that began in this folder."""
        if int(state.step) == 0:
            return self.evaluate(state)
        events = read_events(self.log.path) if self.log is not None else []
        first = [event for event in events if event["event"] == "evaluation" and event["step"] == 0]
        return first[0]["task_accuracy"] if first else None

    def report(self) -> Path:
        """Draw the run so far and return the picture's path."""
        assert isinstance(self.config, VisionTrainConfig)
        return write_task_report(self.output_dir, self.config, layout_of(self.config, self.mesh.size))

    def finish(self, state: TrainState, before: dict[str, float] | None) -> None:
        """Evaluate, then print what the run learned and where its files are."""
        accuracy = self.evaluate(state)
        if self.log is None:
            return
        assert isinstance(self.config, VisionTrainConfig)
        with status("fitting a linear model to each task's pixels", say):
            linear = {task.name: linear_accuracy(task) for task in self.corpus}
        with status("drawing the report", say):
            path = self.report()
        measured = [line for line in read_metrics(self.log.path) if not line.get("compiled")]
        step_s = median(line["step_s"] for line in measured) if measured else float("nan")
        results = [
            TaskResult(
                name=task.name,
                num_classes=len(task.classes),
                before=None if before is None else before[task.name],
                accuracy=accuracy[task.name],
                linear=linear[task.name],
                images_per_s=self.config.tasks[task.name].batch_size / step_s,
            )
            for task in self.corpus
        ]
        print_task_summary(results, path)
