"""The interface between a run and its task: text, or the images of several tasks.

`train.py` sets a run up and takes its steps; a `Task` reads the data, makes the trainer and makes
the session, which measures what was learned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from jax.sharding import Mesh

from jmoe.cluster.distributed import Watchdog
from jmoe.config import TrainConfig
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.compatibility import FINGERPRINT
from jmoe.run.prometheus import RunMetrics
from jmoe.run.run_folder import RunFolder
from jmoe.run.snapshots import Snapshots
from jmoe.training.expert_packing import PackingController
from jmoe.training.session import Session
from jmoe.training.trainer import Trainer

S = TypeVar("S", bound=Session)


@dataclass(frozen=True)
class Setup:
    """The parts of a run that exist before its data is read.

    resolved: the configuration as checkpoints have it. exporter: of process 0, with `metrics.port`.
    stack: closes the parts when the run ends.
    """

    config: TrainConfig
    resolved: dict[str, Any]
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
    `set_state` and `close`. fingerprint: identifies the data. files: in every checkpoint: the
    tokenizer and what belongs to it, or names of classes. publish: called by process 0 when the run
    has begun.
    """

    corpus: Any
    batches: Any
    fingerprint: str
    files: dict[str, bytes]
    publish: Callable[[], None] = lambda: None


class Task(Protocol):
    """What a run trains: the data, the model's trainer, and the session that measures it."""

    def plan(self) -> tuple[str, bool]:
        """Return the plan for `--plan` as text, and whether the run fits."""

    def open(self, mesh: Mesh, stack: contextlib.ExitStack) -> None:
        """Plan the work on `mesh`, and install signal handlers, before the run waits for
        anything.
        """

    def read_data(self, setup: Setup) -> TrainingData:
        """Read the training data. Every process calls this."""

    def make_trainer(self, setup: Setup, data: TrainingData) -> Trainer:
        """Make the model on the mesh with its training step."""

    def make_session(
        self,
        setup: Setup,
        data: TrainingData,
        trainer: Trainer,
        checkpoints: Checkpoints,
        snapshots: Snapshots | None,
    ) -> Session:
        """Make the session: batches on the devices, evaluation, checkpoints and reports of the
        run.
        """


def open_session(
    kind: type[S],
    setup: Setup,
    data: TrainingData,
    trainer: Trainer,
    checkpoints: Checkpoints,
    snapshots: Snapshots | None,
) -> S:
    """Return a session of this kind with the parts of a run."""
    return kind(
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
