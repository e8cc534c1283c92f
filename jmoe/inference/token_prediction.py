"""Draft tokens with the layer with which a model predicts further tokens (multi-token prediction).

After a step, the model's prediction layer runs on the hidden states of the step's tokens, each with
the token that follows it, and predicts the token after the latest one. For longer drafts it runs
again on its own hidden state and its own token, as vLLM and SGLang run it. It has a cache of its
own, with the blocks of the model's: shared prefixes, preemption and dropped drafts need nothing
more. The steps that verify a draft sample its tokens from the model's logits, so what
the layer predicts never changes an answer.

Legend:
P rows of a step
C tokens a row
W blocks of a table
D hidden
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config.engine import EngineConfig
from jmoe.inference.cached_layers import Arrays
from jmoe.inference.kv_cache import LayerCache, cache_value_dtype, empty_caches
from jmoe.inference.runner import ModelRunner
from jmoe.inference.runner_protocol import BatchOutput, TokenBatch
from jmoe.inference.sampling import greedy
from jmoe.inference.scheduler import ChunkGroup
from jmoe.inference.sequence import Sequence as RunningSequence
from jmoe.inference.speculation import PredictedDraft
from jmoe.models.functional import ModuleStructure
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.prediction_layer import PredictionLayer
from jmoe.offload.residency import open_experts
from jmoe.planning.memory_plan import MemoryPlan, ModelBytes
from jmoe.planning.roofline import ExpertWeightSizes


@partial(jax.jit, static_argnums=0)
def _apply_last_norm(structure: ModuleStructure, arrays: Arrays, x_PCD: jax.Array) -> jax.Array:
    """Return the hidden states that a model's head multiplies, in the shape of `x_PCD`."""
    return structure.merge(arrays).norm(x_PCD, x_PCD.dtype)  # type: ignore[no-any-return]


@jax.jit
def _most_likely_and_hidden(
    logits_PV: jax.Array, x_PCD: jax.Array, at_P: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (the most likely tokens [P], the hidden states of tokens `at_P` [P, 1, D])."""
    return greedy(logits_PV), x_PCD[jnp.arange(x_PCD.shape[0]), at_P][:, None]


class _Rows(NamedTuple):
    """The prediction layer's input for a group of sequences, as host arrays.

    sequences: those that get a draft, by row. positions_P: of each row's last token, for the rows
        that get a draft; S for the others.
    """

    batch: TokenBatch
    at_P: np.ndarray
    positions_P: np.ndarray
    sequences: dict[int, RunningSequence]


class TokenPredictor:
    """Runs a prediction layer after each step, and gives its tokens to the sequences' drafts."""

    def __init__(
        self,
        model: ModelRunner,
        layer: ModelRunner,
        max_drafted: int,
        *,
        joins_normed: bool = False,
    ) -> None:
        """Start without hidden states.

        model: the runner of the decoder. layer: that of the layer, whose `embed_and_head` is a
        `JoinAndHead`. joins_normed: whether the layer joins its own hidden states behind its last
        norm.
        """
        self._model, self._layer, self._max_drafted = model, layer, max_drafted
        self._joins_normed = joins_normed
        self._step: list[tuple[ChunkGroup, jax.Array]] = []

    def record_hidden_states(
        self, groups: Sequence[ChunkGroup], outputs: Sequence[BatchOutput]
    ) -> None:
        """Keep the hidden states of a step until its tokens are known."""
        self._step = [(g, output.x_PCD) for g, output in zip(groups, outputs, strict=True)]

    def close(self) -> None:
        """Free the layer's experts."""
        self._layer.residency.close()

    def copy_cache_blocks(self, copies: Sequence[tuple[int, int]], count: int) -> None:
        """Copy blocks of the layer's cache; see `ModelRunner.copy_cache_blocks`."""
        self._layer.copy_cache_blocks(copies, count)

    def draft_tokens(self) -> None:
        """Run the layer on the recorded step, whose tokens the sequences have by now, and give each
        decoding sequence its next draft. Waits for the device.
        """
        step, self._step = self._step, []
        drafts = []
        for group, x_PCD in step:
            rows = self._make_rows(group)
            if rows is not None:
                drafts.append((rows.sequences, self._predict(rows, x_PCD)))
        for sequences, tokens_P in drafts:
            read = [np.asarray(tokens) for tokens in tokens_P]
            for row, sequence in sequences.items():
                draft = [int(tokens[row]) for tokens in read]
                # a layer whose logits are not finite drafts nothing
                valid = next((i for i, token in enumerate(draft) if token < 0), len(draft))
                assert isinstance(sequence.drafter, PredictedDraft)
                sequence.drafter.offer(sequence.num_tokens, draft[:valid])

    def warm_up(self, num_rows: int, width: int) -> None:
        """Compile the programs that run after a step with a group of this shape."""
        group = ChunkGroup((), num_rows, width)
        shape = (num_rows, width, self._model.config.hidden_size)
        x_PCD = jax.device_put(np.zeros(shape, self._model.dtype), jax.devices()[0])
        at_P = np.zeros(num_rows, np.int32)
        rows = _Rows(self._layer.make_batch(group), at_P, at_P + self._end, {})
        jax.block_until_ready(self._predict(rows, x_PCD))

    @property
    def _end(self) -> int:
        """S, the position that marks padding."""
        return self._layer.num_table_positions

    def _make_rows(self, group: ChunkGroup) -> _Rows | None:
        """Return the rows of a group's sequences that still run; None if there are none."""
        batch = self._layer.make_batch(ChunkGroup((), group.num_rows, group.width))
        tokens_PC = batch.tokens_T.reshape(group.num_rows, group.width)
        at_P = np.zeros(group.num_rows, np.int32)
        positions_P = np.full(group.num_rows, self._end, np.int32)
        sequences: dict[int, RunningSequence] = {}
        is_empty = True
        for row, chunk in enumerate(group.chunks):
            sequence = chunk.sequence
            if sequence.row is None:
                continue
            is_empty = False
            size, table = sequence.num_computed_tokens - chunk.start, sequence.block_ids
            following = sequence.token_ids_between(chunk.start + 1, chunk.start + 1 + size)
            tokens_PC[row, :size] = following
            batch.blocks_PW[row, : len(table)] = table
            batch.positions_PC[row, :size] = np.arange(chunk.start, chunk.start + size)
            at_P[row] = size - 1
            if sequence.status == "decode":
                positions_P[row] = chunk.start + size - 1
                sequences[row] = sequence
        return None if is_empty else _Rows(batch, at_P, positions_P, sequences)

    def _predict(self, rows: _Rows, x_PCD: jax.Array) -> list[jax.Array]:
        """Return the drafted tokens of each row, an array [P] for each token of a draft; does not
        wait. After a chunk of a prompt a draft has one token.
        """
        batch, at_P = rows.batch, rows.at_P
        hidden_PCD = _apply_last_norm(*self._model.embed_and_head, x_PCD)
        is_prompt = batch.positions_PC.shape[1] > 1 + self._max_drafted
        drafted: list[jax.Array] = []
        for n in range(1 if is_prompt else self._max_drafted):
            if n:
                batch, at_P = self._continue_batch(rows, drafted[-1], n), np.zeros_like(at_P)
            (output,) = self._layer.forward([batch._replace(previous_PCD=hidden_PCD)])
            logits_PV = self._layer.logits(output, at_P)
            tokens_P, hidden_PCD = _most_likely_and_hidden(logits_PV, output.x_PCD, at_P)
            if self._joins_normed:
                hidden_PCD = _apply_last_norm(*self._layer.embed_and_head, hidden_PCD)
            drafted.append(tokens_P)
        return drafted

    def _continue_batch(self, rows: _Rows, tokens_P: jax.Array, n: int) -> TokenBatch:
        """Return a batch of one drafted token a row, `n` positions behind the row's last token;
        rows without a draft, or without a block there, are padding.
        """
        positions_P = rows.positions_P + n
        num_blocks_P = np.zeros_like(positions_P)
        for row, sequence in rows.sequences.items():
            num_blocks_P[row] = len(sequence.block_ids)
        is_there_P = positions_P < num_blocks_P * (self._end // rows.batch.blocks_PW.shape[1])
        positions_P = np.where(is_there_P, positions_P, self._end).astype(np.int32)
        return rows.batch._replace(tokens_T=tokens_P, positions_PC=positions_P[:, None])


def open_prediction_layer(
    checkpoint: LazyCheckpoint, options: EngineConfig
) -> PredictionLayer | None:
    """Open the layer that drafts tokens, or return None if these options use none.

    Raises ValueError if the checkpoint has no such layer.
    """
    if options.speculation != "mtp":
        return None
    return PredictionLayer(checkpoint.folder, options.dtype, options.expert_dtype)


def prediction_bytes(layer: PredictionLayer, options: EngineConfig) -> tuple[int, int]:
    """Return the bytes of a layer on the device, with its experts, and of its cache."""
    caches = jax.eval_shape(lambda: _empty_caches(layer, options))
    sizes = (math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(caches))
    return layer.resident_bytes, sum(sizes)


def _empty_caches(layer: PredictionLayer, options: EngineConfig) -> list[LayerCache]:
    """Return the layer's cache, of as many blocks as the model's."""
    value_dtype = cache_value_dtype(options, layer.dtype)
    return empty_caches(layer.config, options.num_cache_blocks(), value_dtype)


def load_predictor(
    layer: PredictionLayer, model: ModelRunner, options: EngineConfig
) -> TokenPredictor:
    """Return the predictor of a layer behind a loaded model. The layer's experts stay on the
    device, whatever the policy.
    """
    assert options.max_seq_len is not None, "the model's positions say it"
    layer.fix_sequence_length(options.max_seq_len)
    config = layer.config
    weights = ExpertWeightSizes(
        1, config.num_experts, config.num_experts_per_tok, layer.expert_bytes
    )
    plan = MemoryPlan("resident", None, ModelBytes(weights, 0, 0, 0), config.num_experts, 0, 0, 0)
    residency, _ = open_experts(
        layer,
        plan,
        cache_dir=None,
        bandwidth_limit_bytes_per_s=None,
        native=model.native,
        activations=options.expert_activations,
    )
    structure, arrays = model.embed_and_head
    around, layers = layer.load_beside(structure.merge(arrays))
    caches = jax.device_put(_empty_caches(layer, options), jax.devices()[0])
    runner = ModelRunner(
        config,
        around,
        layers,
        residency,
        (caches, model.table_width),
        layer.dtype,
        native=model.native,
        draft_width=options.draft_width,
    )
    drafted = options.draft_width - 1
    return TokenPredictor(model, runner, drafted, joins_normed=layer.is_beside_decoder)
