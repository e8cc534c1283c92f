"""The reference model's log-probabilities of the answers of preferences: computed once, before the
first step, and kept in a file beside the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jmoe.config import TrainConfig
from jmoe.data.corpus import Corpus, TextSource
from jmoe.data.sample_rows import SourceRows, batches_in_order
from jmoe.data.shards import replace_content_durably
from jmoe.status import status
from jmoe.training.evaluation import split_over_devices
from jmoe.training.finetune import base_model_fingerprint
from jmoe.training.fused.preferring import PreferenceTrainer
from jmoe.training.session import Session, print_on_rank_0
from jmoe.training.state import TrainState

Report = Callable[[int, int], None]  # called with the numbers of rows done and of all rows


class ReferenceAnswers:
    """The reference log-probabilities of all training and held-out samples of a corpus.

    They are in the arrays `TextSource.reference_log_probs` after `read` returned True, or after
    `compute`.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig, folder: Path) -> None:
        assert corpus.held_out_samples is not None
        self._config, self._corpus = config, corpus
        self._sources: list[TextSource] = [*corpus.sources, corpus.held_out_samples]
        self.path = folder / f"reference-{self._identity()[:16]}.bin"

    def _identity(self) -> str:
        """Return a hash of everything that the log-probabilities depend on, but rounding."""
        config, data = self._config, self._config.data
        what = {
            "corpus": self._corpus.fingerprint,
            "model": base_model_fingerprint(config.init_from),
            "rows": [config.sequence_length, data.long_samples],
            "numbers": [config.compute_dtype, config.lora.expert_dtype, config.yarn_factor],
        }
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def read(self) -> bool:
        """Read the log-probabilities from the file; return False if it is missing or damaged."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return False
        digest, values = content[:32], np.frombuffer(content[32:], np.float32)
        sizes = [len(own) for own in self._arrays()]
        if hashlib.sha256(content[32:]).digest() != digest or values.size != sum(sizes):
            return False
        for own, part in zip(self._arrays(), np.split(values, np.cumsum(sizes)[:-1]), strict=True):
            own[:] = part
        return True

    def compute(
        self, trainer: PreferenceTrainer, state: TrainState, mesh: Mesh, report: Report
    ) -> None:
        """Compute the log-probabilities with the state of step 0; process 0 writes the file. Every
        process must call this.
        """
        config = self._config
        batch_size = config.batch_size // config.gradient_accumulation_steps
        sources = [
            SourceRows(own, config.sequence_length, self._corpus, config.data)
            for own in self._sources
        ]
        done, total = 0, sum(map(len, sources))
        for rows in sources:
            for first, batch in zip(
                range(0, len(rows), batch_size), batches_in_order(rows, batch_size), strict=True
            ):
                placed = jax.tree.map(partial(split_over_devices, mesh=mesh), batch)
                log_probs = np.asarray(trainer.answer_log_probs(state, placed))
                last = min(first + batch_size, len(rows))
                _store_answers(rows, range(first, last), log_probs)
                done += last - first
                report(done, total)
        if jax.process_index() == 0:
            self._write()

    def _write(self) -> None:
        values = np.concatenate(list(self._arrays())).tobytes()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_content_durably(self.path, hashlib.sha256(values).digest() + values)

    def _arrays(self) -> Iterator[NDArray[np.float32]]:
        for source in self._sources:
            yield from source.reference_log_probs


def read_or_compute_reference_answers(run: Session, trainer: PreferenceTrainer) -> None:
    """Fill in the reference log-probabilities of the run's corpus: from the file beside the tokens,
    or from `init_from`, which is loaded for it. Every process must call this.
    """
    answers = ReferenceAnswers(run.corpus, run.config, run.output_dir / "data")
    if answers.read():
        return
    done = [0, 0]
    doing = status(
        "computing the reference model's log-probabilities of all answers",
        print_on_rank_0,
        amount=lambda: f"{done[0]:,} of {done[1]:,} rows",
    )
    with run.watchdog.waiting_for("reference answers", progress=lambda: done[0]), doing:
        state = run.load_initial_model()

        def report(rows: int, all_rows: int) -> None:
            done[:] = rows, all_rows

        answers.compute(trainer, state, run.mesh, report)


def _store_answers(
    rows: SourceRows, numbers: Sequence[int], log_probs: NDArray[np.float32]
) -> None:
    """Store the log-probabilities [rows, N] of these rows with their samples."""
    for number, own in zip(numbers, log_probs, strict=False):
        shard, samples = rows.samples_of_row(number)
        rows.source.reference_log_probs[shard][samples] = own[: len(samples)]
