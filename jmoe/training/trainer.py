"""Trainers of a run's model, for experts on the device and off it.

Legend: A accumulation steps, B batch, S sequence, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jmoe.config import TrainConfig
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.offload.expert_state import ReadExperts
from jmoe.training.bandwidth import links_of, measured_chunk_bytes
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.state import Batch, TrainState
from jmoe.training.streamed.step import StreamedTrainer


class Trainer(Protocol):
    """The compiled functions of one run."""

    saved_shape: TrainState  # of what `save_state` returns
    # with all experts, which are no part of the state where they are streamed
    full_shape: TrainState
    records: RecordCheckpoints | None  # what a checkpoint holds in files of its own
    evaluation_batches: int  # how many batches `evaluate` is best given at once

    @property
    def config(self) -> TrainConfig:
        """Return the configuration of the run."""

    @property
    def notes(self) -> list[str]:
        """Return sentences on what was planned, and why."""

    @property
    def progress(self) -> Callable[[], object] | None:
        """Changes as long as records are moved, for limits on waits."""

    def init(self) -> TrainState:
        """Draw step 0."""

    def step(
        self, state: TrainState, tokens_ABS: Any, /, full_capacity: bool = False
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one step on tokens [A, B, S + 1]; the state's memory is used again.

        `metrics["ok"]` is False, and the state unchanged, if the loss or gradient norm is not
        finite or a dropless buffer overflowed (`overflow`; the step is then repeated with
        `full_capacity`, which has room for every token). With float16 a gradient that is not finite
        halves the state's loss scale (`skipped`; the step is then repeated), unless it is 1.
        """

    def evaluate(self, state: TrainState, batches: Sequence[Batch]) -> list[jax.Array]:
        """Return the summed negative log-likelihood of each batch in nats."""

    def save_state(self, state: TrainState) -> TrainState:
        """Return what a checkpoint holds, the same whatever the mesh; streamed experts are
        records then.
        """

    def load_state(
        self,
        saved: TrainState,
        weights: ReadExperts | None = None,
        moments: ReadExperts | None = None,
    ) -> TrainState:
        """Return the state from a saved one; experts that it lacks are read, or are in their
        records already.
        """

    def expert_stats(self) -> Any:
        """Return what moved between tiers (`ExpertStats`); None where nothing does."""

    def close(self) -> None:
        """End the run's threads."""


class LanguageTrainer(Trainer, Protocol):
    """A `Trainer` of a language model, which can be asked for the next token."""

    def next_logits(
        self, state: TrainState, tokens_BS: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits [V] after the token at `position` of the first sequence."""


def make_trainer(config: TrainConfig, mesh: Mesh, run: str = "run") -> LanguageTrainer:
    """Make the trainer of a run on `mesh`, with experts where `config.tiers` wants them.

    Compiles nothing yet, but may measure the network. run: names the folder of the experts' records
    in `tiers.path`.
    """
    chunk_bytes = measured_chunk_bytes(config.comm, mesh)
    links = links_of(config, mesh)
    if config.tiers.on_device:
        return FusedTrainer(config, mesh, chunk_bytes, links)
    return StreamedTrainer(config, mesh, chunk_bytes, run, links)
