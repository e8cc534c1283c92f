"""An image run apart from its steps: batches by layout, changes of layout, evaluation per task,
final table and picture. `train.py` calls the methods of `VisionSession`.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax
import numpy as np
from jax.sharding import NamedSharding

from jmoe.cluster.coordinator import result_from_rank_0
from jmoe.cluster.signals import RequestSignal
from jmoe.config import VisionTrainConfig, check
from jmoe.data.image_batches import ImageBatch, all_train_batches, held_out_batches
from jmoe.data.images import ImageTask
from jmoe.mesh import BATCH, first_devices, make_mesh
from jmoe.run.metrics import read_events, read_step_records
from jmoe.run.planner import tier_totals, tier_totals_text
from jmoe.status import status
from jmoe.training.expert_packing import max_over_processes, move_state
from jmoe.training.session import Session, print_on_rank_0
from jmoe.training.state import TrainState
from jmoe.training.tasks.experts import has_same_slots
from jmoe.training.tasks.layouts import LayoutController
from jmoe.training.tasks.run import state_from_run
from jmoe.training.tasks.step import VisionTrainer
from jmoe.training.tasks.summary import TaskResult, linear_baseline_accuracy, print_task_summary
from jmoe.training.tasks.trainer import ImageTrainer
from jmoe.types import PyTree

DEVICES_FILE = "devices"  # in the output folder: the number of devices to use after a SIGUSR2
EVALUATION_IMAGES = 128  # per batch over all devices, at least one per device


@dataclass
class IdleTime:
    """Sums of the wall-clock seconds of one layout's steps and of this process's CPU seconds in
    them.
    """

    step_s: float = 0.0
    processor_s: float = 0.0

    def add(self, step_s: float, processor_s: float) -> None:
        """Add one step's wall-clock and CPU seconds."""
        self.step_s += step_s
        self.processor_s += processor_s

    def fraction_by_device(self, num_devices: int) -> list[float]:
        """Return, for each device, the fraction of the steps' time in which its process did not
        compute.

        This is 1 - CPU time / (wall-clock time x devices of the process), the same for all devices
        of a process; nan on accelerators, where CPU time says nothing. Every process must call
        this.
        """
        processes, each = jax.process_count(), num_devices // jax.process_count()
        own = [0.0] * processes
        known = self.step_s > 0 and jax.default_backend() == "cpu"
        own[jax.process_index()] = (
            max(0.0, 1 - self.processor_s / (self.step_s * each)) if known else math.nan
        )
        return [share for share in max_over_processes(own) for _ in range(each)]


@dataclass(kw_only=True)
class VisionSession(Session):
    """A `Session` whose corpus is the images of several tasks."""

    corpus: tuple[ImageTask, ...]
    resizing: RequestSignal | None = None  # a request for another number of devices

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.config, VisionTrainConfig)
        self.layouts = LayoutController(self.config, self.mesh.size)
        self.idle = IdleTime()
        # each task's path at the last evaluation
        self.paths = {name: task.path for name, task in self.config.tasks.items()}

    def initial_state(self) -> TrainState:
        """Return the state of step 0: random parameters, or those of the run in `init_from`."""
        if not self.config.init_from:
            return self.trainer.init()
        assert isinstance(self.trainer, ImageTrainer)
        return state_from_run(self.trainer, self.corpus)

    def note_step(self, step_s: float, processor_s: float, *, compiled: bool) -> None:
        """Record a step's wall-clock seconds and this process's CPU seconds, also for this layout's
        idle time.
        """
        super().note_step(step_s, processor_s, compiled=compiled)
        if not compiled:
            self.idle.add(step_s, processor_s)

    def next_batch(self) -> PyTree:
        """Return the next global batch of images, [devices, micro-batches, images, ...], from this
        process's images.
        """
        return self._place_batch(next(self.batches))

    def _place_batch(self, batch: ImageBatch) -> ImageBatch:
        """Return the global batch, split over devices, from this process's images."""
        sharding = NamedSharding(self.mesh, BATCH)
        placed: ImageBatch = jax.tree.map(
            lambda a: jax.make_array_from_process_local_data(sharding, a), batch
        )
        return placed

    def rebalance(self, step: int, state: TrainState) -> TrainState:
        """Return `state` for `step`, moved to another layout or mesh if a task has ended, a signal
        asked for another number of devices, or loads are uneven.

        Every process must call this. Replaces `trainer`, `mesh` and the batches' layout after a
        move.
        """
        trainer, layouts = self.trainer, self.layouts
        assert isinstance(trainer, ImageTrainer)
        reasons, measured = [], dict[str, float]()
        if self.resizing is not None and self.resizing.is_due(step):
            reasons.append(self._apply_requested_devices(step))
        if layouts.is_replan_due(step):
            assert isinstance(trainer, VisionTrainer)
            with (
                self.watchdog.waiting_for("what images take before step", step),
                status("timing the tasks", print_on_rank_0),
            ):
                measured = self._measure_seconds_per_image(trainer, state)
            reasons.append(layouts.replan(step, measured))
        layout, mesh = layouts.layout_at_step(step), self.mesh
        if layout.shares != trainer.layout.shares:
            if not reasons:
                ended = [
                    name
                    for name, task in trainer.config.tasks.items()
                    if not task.is_trained_at(step)
                ]
                reasons.append(f"{', '.join(ended)} ended")
            with self.watchdog.waiting_for("another layout before step", step):
                if layouts.num_devices != mesh.size:
                    mesh = make_mesh(
                        (layouts.num_devices, 1, 1), first_devices(layouts.num_devices)
                    )
                each = mesh.size // jax.process_count()
                first = jax.process_index() * each
                self.batches.set_layout(layout, first, first + each)
                self.idle = IdleTime()
                self.trainer = trainer.with_layout(mesh, layout)
                if mesh is not self.mesh or not has_same_slots(trainer.slots, self.trainer.slots):
                    state = move_state(state, trainer, self.trainer)
                self.mesh = mesh
            reasons += self.trainer.notes
        if reasons:
            print_on_rank_0(f"layout before step {step}: " + "\n".join(reasons))
            if self.log is not None:
                images = [
                    {layout.tasks[share.task].name: share.size for share in own}
                    for own in layout.shares
                ]
                self.log.write_event(
                    "layout", step, reason=reasons[0], images=images, image_s=measured
                )
        return state

    def _measure_seconds_per_image(
        self, trainer: VisionTrainer, state: TrainState
    ) -> dict[str, float]:
        """Return {task: measured seconds per image} of active tasks, the same on every process."""
        numbers = sorted({share.task for shares in trainer.layout.shares for share in shares})
        samples = [self._place_batch(self.batches.peek_micro_batch(number)) for number in numbers]
        seconds = max_over_processes(trainer.measure_seconds_per_image(state, samples))
        return {
            self.corpus[number].name: value for number, value in zip(numbers, seconds, strict=True)
        }

    def _apply_requested_devices(self, step: int) -> str:
        """Use the number of devices in the output folder's `DEVICES_FILE`; return a line that says
        so, or why nothing changed.
        """
        path = self.output_dir / DEVICES_FILE
        assert self.resizing is not None
        text, limit_s = "", self.config.distributed.step_timeout_s
        try:
            text = result_from_rank_0(
                f"{DEVICES_FILE} {self.resizing.times}", path.read_text, limit_s
            ).strip()
            check(text.isascii() and text.isdigit(), str(path), text, "must be a number of devices")
            self.layouts.set_num_devices(step, int(text))
        except (OSError, ValueError) as error:
            return f"warning: {self.resizing.name} changes nothing: {error}"
        return f"{text} devices, as {path} says"

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Compute, print and log each task's held-out accuracy; return it by task, from 0 to 1."""
        assert isinstance(self.trainer, ImageTrainer)
        step, begun, devices = int(state.step), time.perf_counter(), self.mesh.size
        images = sum(len(task.held_out.labels) for task in self.corpus)
        doing = status(f"evaluating on {images:,} held-out images", print_on_rank_0)
        sums_3A = np.zeros((3, len(self.corpus)))
        sharding = NamedSharding(self.mesh, BATCH)
        sizes = (devices, -(-EVALUATION_IMAGES // devices))
        compared = np.flatnonzero(self.trainer.is_contrastive)

        def place_batch(batch: ImageBatch) -> PyTree:
            def place_array(a: np.ndarray) -> jax.Array:
                return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])

            return jax.tree.map(place_array, batch)

        with self.watchdog.waiting_for("evaluation after step", step), doing:
            homes, numbers = self.trainer.homes, compared.tolist()
            train = all_train_batches(self.corpus, numbers, homes, *sizes) if numbers else iter(())
            means = self.trainer.class_mean_embeddings(state, map(place_batch, train))
            batches = held_out_batches(self.corpus, homes, *sizes)
            while some := [
                place_batch(batch)
                for batch in itertools.islice(batches, self.trainer.evaluation_batches)
            ]:
                sums_3A += sum(map(np.asarray, self.trainer.evaluate_batches(state, some, means)))
            idle = self.idle.fraction_by_device(devices)
        if self.log is not None and not all(map(math.isnan, idle)):
            self.log.write_event(
                "idle", step, idle=idle, planned=self.trainer.layout.idle_fractions()
            )
        nll_A, accuracy_A = sums_3A[0] / sums_3A[2], sums_3A[1] / sums_3A[2]
        names = [task.name for task in self.corpus]
        loss, accuracy = dict(zip(names, nll_A.tolist())), dict(zip(names, accuracy_A.tolist()))
        listed = ", ".join(f"{name} {value:.1%}" for name, value in accuracy.items())
        print_on_rank_0(
            f"held-out accuracy after {step} steps: {listed} ({time.perf_counter() - begun:.1f} s)"
        )
        paths = self.trainer.task_paths(state)
        if paths != self.paths:
            print_on_rank_0(
                "paths learned so far: "
                + ", ".join(f"{name} {' '.join(map(str, p))}" for name, p in paths.items())
            )
        self.paths = paths
        if self.log is not None:
            self.log.write_event(
                "evaluation", step, task_loss=loss, task_accuracy=accuracy, paths=paths
            )
        return accuracy

    def evaluate_step_0(self, state: TrainState) -> dict[str, float] | None:
        """Return {task: held-out accuracy} of step 0, computed now or read from the log of the run
        that began there; None if it was not computed.
        """
        if int(state.step) == 0:
            return self.evaluate(state) if self.config.evaluation.at_start else None
        events = read_events(self.log.path) if self.log is not None else []
        first = [event for event in events if event["event"] == "evaluation" and event["step"] == 0]
        return first[0]["task_accuracy"] if first else None

    def draw_report(self) -> Path:
        """Draw the run's plots so far and return the path of the picture."""
        # Imported here because it loads matplotlib, which only process 0 needs.
        from jmoe.training.tasks.report import draw_task_report

        assert isinstance(self.config, VisionTrainConfig) and isinstance(self.trainer, ImageTrainer)
        return draw_task_report(self.output_dir, self.config, self.trainer.layout)

    def evaluate_and_summarize(
        self, state: TrainState, first_accuracies: dict[str, float] | None
    ) -> None:
        """Evaluate, then print the table of tasks and the path of the picture.

        first_accuracies: the result of `evaluate_step_0`.
        """
        accuracy = self.evaluate(state)
        totals = {} if self.config.tiers.all_on_device else tier_totals(self.trainer.expert_stats())
        if self.log is None:
            return
        assert isinstance(self.config, VisionTrainConfig)
        with status("fitting a linear model to each task's pixels", print_on_rank_0):
            linear = {task.name: linear_baseline_accuracy(task) for task in self.corpus}
        with status("drawing the report", print_on_rank_0):
            path = self.draw_report()
        measured = [line for line in read_step_records(self.log.path) if not line.get("compiled")]
        step_s = median(line["step_s"] for line in measured) if measured else float("nan")
        results = [
            TaskResult(
                name=task.name,
                num_classes=len(task.classes),
                before=None if first_accuracies is None else first_accuracies[task.name],
                accuracy=accuracy[task.name],
                linear=linear[task.name],
                images_per_s=self.config.tasks[task.name].batch_size / step_s,
                path=self.paths[task.name],
            )
            for task in self.corpus
        ]
        print_task_summary(results, path)
        if totals:
            print_on_rank_0(tier_totals_text(totals))
