"""Direct preference optimization (DPO): a `FusedTrainer` whose loss compares the answers of pairs
with a reference model, the one that training starts from.

`train.py` makes this trainer if `dpo.beta` is set. `reference_answers.py` computes the
log-probabilities of the reference model, once.

Legend: A accumulation steps, B batch, S sequence, T = B S local tokens, N samples of a row, P pairs
of a row, D hidden, V vocabulary.
"""

from __future__ import annotations

from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.config import TrainConfig
from jmoe.data.sample_rows import PreferenceRows
from jmoe.layers.loss import HeadWeight
from jmoe.layers.preference_loss import (
    PairLosses,
    dpo_losses,
    max_samples_of_row,
    sums_of_samples,
)
from jmoe.mesh import ALL, BATCH
from jmoe.training.bandwidth import measure_chunk_bytes, read_or_measure_links
from jmoe.training.fused.adapting import AdapterTrainer
from jmoe.training.fused.step import FusedTrainer, Metrics
from jmoe.training.sample_batch import documents_of
from jmoe.training.state import TrainState
from jmoe.training.update import (
    evaluation_program,
    num_dropped_assignments,
    run_without_drops,
    sum_over_mesh,
)
from jmoe.types import PyTree


class PreferenceTrainer(FusedTrainer):
    """A `FusedTrainer` that trains on preferences (`PreferenceRows`).

    The metric `loss` is the mean loss of the step's pairs. `reward_chosen` and `reward_rejected`
    are means of `dpo.beta` x (log-probability of the answer - that of the reference model),
    `reward_margin` is their difference, and `reward_accuracy` the share of pairs whose chosen
    answer has the higher reward. `evaluate_batches` returns summed losses of pairs.
    """

    @cached_property
    def _answers(self) -> PyTree:
        """The compiled program of `answer_log_probs`."""
        local = self._answer_log_probs_local
        return evaluation_program(self.shard_over_mesh, local, self.state_specs, BATCH)

    def gradients_local(
        self, state: TrainState, batch: PreferenceRows, *, full_capacity: bool, **constants: PyTree
    ) -> tuple[PyTree, Metrics]:
        own = (_num_samples_of_rows(batch.documents) // 2).sum(dtype=jnp.float32)
        num_pairs = jnp.maximum(sum_over_mesh(self.model.mesh.size, own), 1.0)
        return super().gradients_local(
            state, batch, full_capacity=full_capacity, num_pairs=num_pairs, **constants
        )

    def token_loss_local(  # type: ignore[override]
        self,
        hidden_TD: jax.Array,
        head: HeadWeight,
        labels_T: jax.Array,
        weights_T: jax.Array,
        micro_batch: PreferenceRows,
        *,
        num_pairs: jax.Array,
    ) -> tuple[jax.Array, Metrics]:
        """Return this device's addends to (the mean loss of the step's `num_pairs` pairs, metrics).

        The logits are computed twice: for the log-probabilities of whole answers, on which the
        weight of each token's gradient depends, and for the gradients.
        """
        nll_T = self.model.head.token_nll(hidden_TD, head, labels_T)

        def mean_loss(log_ratios_BN: jax.Array) -> tuple[jax.Array, PairLosses]:
            pairs = self._pair_losses(log_ratios_BN, micro_batch)
            return pairs.loss.sum() / num_pairs, pairs

        log_ratios_BN = self._log_ratios(nll_T, micro_batch)
        differentiate = jax.value_and_grad(mean_loss, has_aux=True)
        (loss, pairs), per_sample_BN = differentiate(log_ratios_BN)
        sample_BS = jnp.maximum(micro_batch.documents - 1, 0)
        per_token_BS = jnp.take_along_axis(per_sample_BN, sample_BS, axis=1) * micro_batch.weights
        # a constant weight for each token: the gradient of the pairs' loss, not its value
        surrogate = self.model.head.cross_entropy(
            hidden_TD, head, labels_T, lax.stop_gradient(-per_token_BS.reshape(-1))
        )
        return loss + surrogate - lax.stop_gradient(surrogate), _metrics_of(pairs, num_pairs)

    def _pair_losses(self, log_ratios_BN: jax.Array, rows: PreferenceRows) -> PairLosses:
        num_samples_B = _num_samples_of_rows(rows.documents)
        return dpo_losses(log_ratios_BN, num_samples_B, self.config.dpo)

    def _log_ratios(self, nll_T: jax.Array, rows: PreferenceRows) -> jax.Array:
        """Return [B, N]: each answer's log-probability minus that of the reference model."""
        nll_BS = nll_T.reshape(rows.documents.shape)
        own_BS = jnp.where(rows.weights > 0, -nll_BS, 0.0)
        sums, number = (own_BS, rows.reference), max_samples_of_row(nll_BS.shape[1])
        own_BN, reference_BN = (sums_of_samples(values, rows.documents, number) for values in sums)
        return own_BN - reference_BN

    # Without gradients

    def _rows_without_gradients_local(
        self, state: TrainState, rows: PreferenceRows, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return (log ratios [B, N] of this device's rows, dropped assignments of all devices)."""
        hidden, head, stats = self._hidden_states_local(
            state,
            rows.tokens[:, :-1],
            full_capacity=full_capacity,
            documents=documents_of(rows, self.config.data),
        )
        labels_T = rows.tokens[:, 1:].reshape(-1)
        nll_T = self.model.head.token_nll(hidden.reshape(-1, hidden.shape[-1]), head, labels_T)
        return self._log_ratios(nll_T, rows), num_dropped_assignments(stats)

    def _summed_nll_local(
        self, state: TrainState, batch: PreferenceRows, *, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return (summed loss of the pairs, dropped assignments), both over all devices."""
        log_ratios_BN, dropped = self._rows_without_gradients_local(state, batch, full_capacity)
        return lax.psum(self._pair_losses(log_ratios_BN, batch).loss.sum(), ALL), dropped

    def _answer_log_probs_local(
        self, state: TrainState, batch: PreferenceRows, *, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        rows = batch._replace(reference=jnp.zeros_like(batch.reference))
        own_BN, dropped = self._rows_without_gradients_local(state, rows, full_capacity)
        return lax.all_gather(own_BN, ALL, tiled=True), dropped

    def answer_log_probs(self, state: TrainState, rows: PreferenceRows) -> jax.Array:
        """Return [rows, N], the log-probability of each answer in a global batch of rows."""
        log_probs: jax.Array = run_without_drops(partial(self._answers, state, rows))
        return log_probs


class PreferenceAdapterTrainer(PreferenceTrainer, AdapterTrainer):
    """A `PreferenceTrainer` of LoRA adapters; the reference is the model without them."""


def make_preference_trainer(config: TrainConfig, mesh: Mesh) -> PreferenceTrainer:
    """Return the trainer of a run with `dpo.beta`: of adapters if `lora.rank` is set."""
    if config.lora.rank is not None:
        return PreferenceAdapterTrainer(config, mesh)
    chunk_bytes = measure_chunk_bytes(config.comm, mesh)
    return PreferenceTrainer(config, mesh, chunk_bytes, read_or_measure_links(config, mesh))


def _num_samples_of_rows(documents: jax.Array) -> jax.Array:
    """Return the number of samples of each row [..., S]."""
    return documents.max(axis=-1)


def _metrics_of(pairs: PairLosses, num_pairs: jax.Array) -> Metrics:
    chosen, rejected = (pairs.rewards[..., i].sum() / num_pairs for i in range(2))
    right = pairs.exists & (pairs.rewards[..., 0] > pairs.rewards[..., 1])
    return {
        "loss": pairs.loss.sum() / num_pairs,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": right.sum(dtype=jnp.float32) / num_pairs,
    }
