"""The interface between a run and its task: language modeling, or image tasks.

`train.py` sets a run up and takes its steps. A `Task` reads the data and makes the trainer and the
session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from jax.sharding import Mesh

from jmoe.cluster.watchdog import Watchdog
from jmoe.config import TrainConfig
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.compatibility import FINGERPRINT
from jmoe.run.prometheus import RunMetrics
from jmoe.run.run_folder import RunFolder
from jmoe.run.snapshots import Snapshots
from jmoe.training.expert_packing import PackingController
from jmoe.training.session import Session
from jmoe.training.trainer import Trainer
from jmoe.types import JsonObject

S = TypeVar("S", bound=Session)


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run that exist before its data is read.

    resolved: the configuration in the form that checkpoints store. exporter: on process 0, if
    `metrics.port` is set. stack: closes the parts at the end of the run.
    """

    config: TrainConfig
    resolved: JsonObject
    mesh: Mesh
    watchdog: Watchdog
    folder: RunFolder
    expert_packing: PackingController
    exporter: RunMetrics | None
    stack: contextlib.ExitStack


@dataclass(frozen=True)
class TrainingData:
    """The data of a run.

    corpus: a `Corpus`, or the images of each task. batches: an iterator with `get_state`,
    `set_state` and `close`. fingerprint: a hash of the data. files: copied into every checkpoint:
    the tokenizer and its companion files, or the names of classes. publish: process 0 calls this
    once the training state is ready.
    """

    corpus: Any
    batches: Any
    fingerprint: str
    files: dict[str, bytes]
    publish: Callable[[], None] = lambda: None


class Task(Protocol):
    """A run's objective: provides the data, the trainer, and the session around its steps."""

    def plan_report(self) -> tuple[str, bool]:
        """Return (text for `--plan`, whether the run fits in memory)."""

    def prepare_on_mesh(self, mesh: Mesh, stack: contextlib.ExitStack) -> None:
        """Plan the work on `mesh` and install signal handlers; called before the run waits for
        anything.

        stack: restores the handlers at the end of the run.
        """

    def read_data(self, setup: RunSetup) -> TrainingData:
        """Return the training data. Every process must call this."""

    def make_trainer(self, setup: RunSetup, data: TrainingData) -> Trainer:
        """Return the trainer: the model on the mesh and its compiled step."""

    def make_session(
        self,
        setup: RunSetup,
        data: TrainingData,
        trainer: Trainer,
        checkpoints: Checkpoints,
        snapshots: Snapshots | None,
    ) -> Session:
        """Return the session, which owns batches, evaluation, checkpoints and reports."""


def open_session(
    session_class: type[S],
    setup: RunSetup,
    data: TrainingData,
    trainer: Trainer,
    checkpoints: Checkpoints,
    snapshots: Snapshots | None,
) -> S:
    """Return a session of class `session_class` made from the parts of a run."""
    return session_class(
        config=setup.config,
        resolved=setup.resolved | {FINGERPRINT: data.fingerprint},
        mesh=setup.mesh,
        corpus=data.corpus,
        batches=data.batches,
        trainer=trainer,
        checkpoints=checkpoints,
        watchdog=setup.watchdog,
        folder=setup.folder,
        files=data.files,
        expert_packing=setup.expert_packing,
        snapshots=snapshots,
        exporter=setup.exporter,
    )
