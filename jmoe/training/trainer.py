"""The `Trainer` protocol, and the choice of a language model's trainer: `FusedTrainer` with all
experts on the devices, else `StreamedTrainer`.

Legend: A accumulation steps, B batch, S sequence, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from jax.sharding import Mesh

from jmoe.config import TrainConfig
from jmoe.data.sample_rows import SampleRows
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.offload.expert_state import ReadExperts
from jmoe.training.bandwidth import measure_chunk_bytes, read_or_measure_links
from jmoe.training.exchange_choice import with_faster_exchange
from jmoe.training.fused.masking import fused_trainer_class
from jmoe.training.state import Batch, TrainState
from jmoe.training.streamed.step import StreamedTrainer
from jmoe.types import PyTree


class Trainer(Protocol):
    """The compiled functions of one run: initial state, step, evaluation, and conversion to and
    from checkpoints.
    """

    saved_shape: TrainState  # the shape of the state that `prepare_state_for_save` returns
    # the same with all experts, also if they are streamed and no part of the state
    full_shape: TrainState
    records: RecordCheckpoints | None  # the experts' files in a checkpoint; None without tiers
    evaluation_batches: int  # the most efficient number of batches per call of `evaluate_batches`

    @property
    def config(self) -> TrainConfig:
        """The configuration of the run."""

    @property
    def notes(self) -> list[str]:
        """Sentences that describe the plan and its reasons, to print at the start."""

    @property
    def progress_counters(self) -> Callable[[], object] | None:
        """A function whose result changes while records are moving between tiers, so that a
        watchdog can tell slow from stuck. None if nothing moves.
        """

    def init(self) -> TrainState:
        """Return the state of step 0 with random parameters."""

    def step(
        self, state: TrainState, batch: PyTree, /, full_capacity: bool = False
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return (new state, metrics) after one step on tokens [A, B, S + 1], or on `SampleRows`;
        `state` is donated.

        `metrics["ok"]` is False, and the state unchanged, if the loss or the gradient norm is not
        finite, or if a dropless buffer overflowed. After `metrics["overflow"]` the caller repeats
        the step with `full_capacity`, whose buffers hold every token. In float16 a gradient that is
        not finite halves the loss scale and sets `metrics["skipped"]`, and the caller repeats the
        step; at the smallest loss scale the step fails instead.
        """

    def evaluate_batches(
        self, state: TrainState, batches: Sequence[Batch | SampleRows]
    ) -> list[jax.Array]:
        """Return the summed negative log-likelihood of each batch, scalars in nats."""

    def prepare_state_for_save(self, state: TrainState) -> TrainState:
        """Return the state that a checkpoint stores, with the same shapes for every mesh.

        Streamed experts are not part of this state: their records are written to files of their
        own.
        """

    def restore_state(
        self,
        saved: TrainState,
        weights: ReadExperts | None = None,
        moments: ReadExperts | None = None,
    ) -> TrainState:
        """Return the training state for a checkpoint's state.

        weights, moments: functions that read the experts that `saved` lacks; None if `saved` has
        all experts or their records are already in place.
        """

    def expert_stats(self) -> PyTree:
        """Return the traffic between tiers as `ExpertStats`; None if all experts stay on the
        devices.
        """

    def close(self) -> None:
        """Stop the trainer's threads and release its files."""


class LanguageTrainer(Trainer, Protocol):
    """A `Trainer` of a language model that can also return next-token logits."""

    def next_logits(
        self, state: TrainState, tokens_BS: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Return logits [V] after the token at `position` of the first sequence of `tokens_BS`."""


def make_trainer(config: TrainConfig, mesh: Mesh, run: str = "run") -> LanguageTrainer:
    """Return the trainer of a text run on `mesh`, with experts on the tiers that `config.tiers`
    names.

    Compiles no step yet, but may measure the network, so every process must call this. run: the
    folder name of the experts' records below `tiers.path`.
    """
    chunk_bytes = measure_chunk_bytes(config.comm, mesh)
    links = read_or_measure_links(config, mesh)
    if config.tiers.all_on_device:
        config, notes = with_faster_exchange(config, mesh)
        trainer = fused_trainer_class(config)(config, mesh, chunk_bytes, links)
        trainer.notes = [*notes, *trainer.notes]
        return trainer
    return StreamedTrainer(config, mesh, chunk_bytes, run, links)
