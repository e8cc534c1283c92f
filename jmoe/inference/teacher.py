"""The teacher model of distillation: its hidden states for whole sequences.

Its experts may be resident or streamed, as in the inference engine. `DistillingTrainer` uses it.

Legend:
B sequences
S tokens of a sequence
D hidden
V vocabulary
"""

from functools import partial
from pathlib import Path

import jax
import numpy as np

from jmoe.config import TrainConfig, check
from jmoe.config.engine import EngineConfig
from jmoe.inference.cached_layers import Arrays
from jmoe.inference.kv_cache import tables_of_consecutive_blocks
from jmoe.inference.loading import LoadedModel
from jmoe.inference.runner import ModelRunner
from jmoe.inference.runner_protocol import TokenBatch
from jmoe.layers.loss import HeadWeight
from jmoe.memory.closing import Closing
from jmoe.models.functional import ModuleStructure
from jmoe.models.lazy_checkpoint import LazyCheckpoint


@partial(jax.jit, static_argnums=0)
def _apply_final_norm(structure: ModuleStructure, arrays: Arrays, x_BSD: jax.Array) -> jax.Array:
    """Return the hidden states after the norm before the head."""
    normed: jax.Array = structure.merge(arrays).norm(x_BSD, x_BSD.dtype)
    return normed


def teacher_fingerprint(folder: str) -> str:
    """Return a hash of the teacher's configuration and weights in a folder; see
    `LazyCheckpoint.content_hash`.
    """
    with LazyCheckpoint(folder) as checkpoint:
        return checkpoint.content_hash


class Teacher(Closing):
    """The model in `distil.teacher`: `teacher(tokens_BS)` returns hidden states.

    head: the output head; the teacher's logits are `head.logits(hidden)`.

    Computes on the first device, in bfloat16, or in float32 if `compute_dtype` is float32. Raises
    ValueError naming the field if the teacher does not fit the student, or the run has several
    processes.
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
            # engines do not support float16
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
        runner.config.check_one_attention_chunk("sequence_length", length, "a teacher")
        self.residency = runner.residency
        self._blocks = tables_of_consecutive_blocks(rows, length)
        self._positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        has_states = runner.config.has_linear_attention
        self._rows = np.arange(rows, dtype=np.int32) if has_states else None
        structure, arrays = runner.embed_and_head
        module = structure.merge(arrays)
        w_DV = module.embedding[...].T if module.head is None else module.head[...]
        self.head = HeadWeight(w_DV, None if module.head_bias is None else module.head_bias[...])

    def __call__(self, tokens_BS: np.ndarray) -> jax.Array:
        """Return hidden states [B, S, D] after the last norm.

        tokens_BS: int32, of a micro-batch: B = batch_size / gradient_accumulation_steps sequences.
        """
        runner = self._runner
        runner.begin_step(whole_layers=True)
        (output,) = runner.forward(
            [TokenBatch(tokens_BS.reshape(-1), self._blocks, self._positions, rows_P=self._rows)]
        )
        return _apply_final_norm(*runner.embed_and_head, output.x_PCD)

    def close(self) -> None:
        self._model.close()
