"""A model that others learn from: its hidden states of whole sequences, its experts kept in any of
the engine's ways.

Legend: B sequences, S tokens of each, D hidden, V vocabulary.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmoe.config import TrainConfig, check
from jmoe.config.engine import EngineConfig
from jmoe.inference.loading import LoadedModel
from jmoe.inference.runner import ModelRunner, TokenBatch
from jmoe.memory.closing import Closing
from jmoe.models.functional import Structure
from jmoe.models.lazy_checkpoint import LazyCheckpoint


@partial(jax.jit, static_argnums=0)
def _normed(structure: Structure, arrays: Any, x_BSD: jax.Array) -> jax.Array:
    normed: jax.Array = structure.merge(arrays).norm(x_BSD, x_BSD.dtype)
    return normed


def teacher_fingerprint(folder: str) -> str:
    """Return what identifies the teacher in a folder, by its content: see `content_identity`."""
    with LazyCheckpoint(folder) as checkpoint:
        return checkpoint.content


class Teacher(Closing):
    """The model in `distil.teacher`: `teacher(tokens_BS)` are hidden states, `hidden @ head_DV` its
    logits.

    It computes in the run's `compute_dtype` on the first device. Raises `ValueError` naming the
    field for a teacher that does not fit the run's student.
    """

    def __init__(self, config: TrainConfig) -> None:
        folder, length = Path(config.distil.teacher).expanduser(), config.sequence_length
        rows = config.batch_size // config.gradient_accumulation_steps
        processes = jax.process_count()
        check(
            processes == 1,
            "distil.teacher",
            str(folder),
            f"needs a run of one process, not of {processes}",
        )
        options = EngineConfig(
            max_batch=rows,
            max_seq_len=length,
            prefill_chunk_tokens=length,
            policy=config.distil.policy,
            ring_slots=config.distil.ring_slots,
            # float16 is refused
            dtype="float32" if config.compute_dtype == "float32" else "bfloat16",
            estimator=None,
            native="off",
        )
        self._model = LoadedModel(folder, options)
        runner = self._model.runner
        assert isinstance(runner, ModelRunner)
        self._runner = runner
        vocabulary, own = runner.config.vocab_size, config.model.vocab_size
        constraint = f"has a vocabulary of {vocabulary} tokens: must have the student's {own}"
        check(vocabulary == own, "distil.teacher", str(folder), constraint)
        self.residency = runner.residency
        self._rows = np.arange(rows, dtype=np.int32)
        self._positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        structure, arrays = runner.embed_and_head
        module = structure.merge(arrays)
        self.head_DV: jax.Array = (
            module.embedding[...].T if module.head is None else module.head[...]
        )

    def __call__(self, tokens_BS: np.ndarray) -> jax.Array:
        """Return [B, S, D] after the last norm; of as many sequences and tokens as the run's
        steps have.
        """
        runner = self._runner
        runner.residency.begin_step(whole_layers=True)
        (output,) = runner.forward([TokenBatch(tokens_BS.reshape(-1), self._rows, self._positions)])
        return _normed(*runner.embed_and_head, output.x_PCD)

    def close(self) -> None:
        self._model.close()
