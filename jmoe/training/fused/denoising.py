"""The trainer of an encoder and a decoder, which learn to write left-out spans of text
(`model.num_encoder_layers`).

Legend: A accumulation steps, B batch, S sequence, M positions of the encoder, T positions of the
decoder.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.layers.context import SplitSequences
from jmoe.layers.span_corruption import CorruptedRows, corrupt_spans
from jmoe.mesh import ALL
from jmoe.training.fused.step import FusedTrainer, Metrics
from jmoe.training.state import TrainState
from jmoe.training.update import num_dropped_assignments
from jmoe.types import PyTree


class DenoisingTrainer(FusedTrainer):
    """A `FusedTrainer` whose loss is the mean cross-entropy of what the decoder writes: the tokens
    of the spans, and the sentinels after them.

    Other spans are left out in every step. Evaluation leaves out the same ones each time.
    """

    def gradients_local(
        self, state: TrainState, batch: PyTree, *, full_capacity: bool, **constants: PyTree
    ) -> tuple[PyTree, Metrics]:
        """Return this device's addends to (gradients, metrics). batch: tokens [A, B, S + 1], whose
        first is left out.
        """
        key = jax.random.fold_in(jax.random.key(self.config.seed), state.step)
        tokens_ABS = jnp.asarray(batch)[..., 1:]
        rows = self._corrupt(tokens_ABS.reshape(-1, tokens_ABS.shape[-1]), key)
        micro_batches = jax.tree.map(lambda x: x.reshape(*tokens_ABS.shape[:2], -1), rows)
        return super().gradients_local(
            state, micro_batches, full_capacity=full_capacity, **constants
        )

    def _corrupt(self, tokens_BS: jax.Array, key: jax.Array) -> CorruptedRows:
        return corrupt_spans(tokens_BS, key, self.config.denoising, self.config.model.vocab_size)

    def examples_local(
        self, micro_batch: CorruptedRows, split: SplitSequences | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return (inputs [B, M + T] of encoder and decoder, targets [B, T], weights [B, T]): a
        sequence's targets have the weight of all its tokens together.
        """
        targets_BT = micro_batch.targets_BT
        share = self.config.sequence_length / self.config.text_parts.decoder
        return _inputs_of_both(micro_batch), targets_BT, jnp.full(targets_BT.shape, share)

    def _summed_nll_local(
        self, state: TrainState, batch: PyTree, *, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return (summed negative log-likelihood, dropped assignments), both over all devices; the
        mean over a sequence's targets stands for each of its tokens that has a weight.
        """
        tokens_BS, weights_BS, *_ = batch
        rows = self._corrupt(tokens_BS[:, 1:], jax.random.key(self.config.seed))
        hidden, head, stats = self._hidden_states_local(
            state, _inputs_of_both(rows), full_capacity=full_capacity
        )
        weights_B1 = weights_BS.sum(axis=1, keepdims=True) / rows.targets_BT.shape[1]
        nll = self.model.head.cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            rows.targets_BT.reshape(-1),
            jnp.broadcast_to(weights_B1, rows.targets_BT.shape).reshape(-1),
        )
        return lax.psum(nll, ALL), num_dropped_assignments(stats)


def _inputs_of_both(rows: CorruptedRows) -> jax.Array:
    """Return [B, M + T], the encoder's inputs and the decoder's behind them."""
    return jnp.concatenate([rows.encoder_inputs_BM, rows.decoder_inputs_BT], axis=1)
