"""The trainer of encoders, which predict masked tokens (`model.bidirectional`).

Legend: A accumulation steps, B batch, S sequence.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.config import TrainConfig
from jmoe.layers.context import SplitSequences
from jmoe.layers.masked_tokens import MaskedRows, mask_rows
from jmoe.mesh import ALL
from jmoe.training.fused.denoising import DenoisingTrainer
from jmoe.training.fused.step import FusedTrainer, Metrics
from jmoe.training.state import TrainState
from jmoe.training.update import num_dropped_assignments
from jmoe.types import PyTree


class MaskedTrainer(FusedTrainer):
    """A `FusedTrainer` whose loss is the mean cross-entropy of masked tokens.

    Other tokens are masked in every step. Evaluation masks the same ones each time.
    """

    def gradients_local(
        self, state: TrainState, batch: PyTree, *, full_capacity: bool, **constants: PyTree
    ) -> tuple[PyTree, Metrics]:
        """Return this device's addends to (gradients, metrics). batch: tokens [A, B, S + 1], whose
        first is left out.
        """
        key = jax.random.fold_in(jax.random.key(self.config.seed), state.step)
        tokens_ABS = jnp.asarray(batch)[..., 1:]
        rows = self._mask(tokens_ABS.reshape(-1, tokens_ABS.shape[-1]), key)
        micro_batches = jax.tree.map(lambda x: x.reshape(tokens_ABS.shape), rows)
        return super().gradients_local(
            state, micro_batches, full_capacity=full_capacity, **constants
        )

    def _mask(self, tokens_BS: jax.Array, key: jax.Array) -> MaskedRows:
        return mask_rows(tokens_BS, key, self.config.masking, self.config.model.vocab_size)

    def examples_local(
        self, micro_batch: MaskedRows, split: SplitSequences | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return (inputs, targets, weights) [B, S] of masked rows."""
        return micro_batch.inputs_BS, micro_batch.targets_BS, micro_batch.weights_BS

    def _summed_nll_local(
        self, state: TrainState, batch: PyTree, *, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return (summed negative log-likelihood, dropped assignments), both over all devices; each
        predicted token stands for all tokens of its sequence.
        """
        tokens_BS, weights_BS, *_ = batch
        rows = self._mask(tokens_BS[:, 1:], jax.random.key(self.config.seed))
        hidden, head, stats = self._hidden_states_local(
            state, rows.inputs_BS, full_capacity=full_capacity
        )
        nll = self.model.head.cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            rows.targets_BS.reshape(-1),
            (rows.weights_BS * weights_BS).reshape(-1),
        )
        return lax.psum(nll, ALL), num_dropped_assignments(stats)


def fused_trainer_class(config: TrainConfig) -> type[FusedTrainer]:
    """Return the class of the trainer of text that keeps all experts on the devices."""
    if config.model.num_encoder_layers:
        return DenoisingTrainer
    return MaskedTrainer if config.model.bidirectional else FusedTrainer
