"""The loss of direct preference optimization (DPO, arXiv 2305.18290) on rows of preferences.

Legend: B rows, S sequence, N samples of a row (two of each pair), P pairs of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.config import DpoConfig


class PairLosses(NamedTuple):
    """Losses and rewards of the pairs in rows, float32; 0 for places without a pair.

    loss: [B, P]. rewards: of the chosen and of the rejected answer, [B, P, 2]. exists: bool [B, P].
    """

    loss: jax.Array
    rewards: jax.Array
    exists: jax.Array


def max_samples_of_row(sequence_length: int) -> int:
    """Return the largest number of samples of preferences in a row: a pair has at least four of its
    tokens.
    """
    return 2 * ((sequence_length + 1) // 4)


def sums_of_samples(values_BS: jax.Array, documents_BS: jax.Array, number: int) -> jax.Array:
    """Return the sum of `values_BS` over each sample of a row, [B, number]; 0 for missing samples.

    documents_BS: as in `SampleRows`; values outside of samples must be 0. The order of additions is
    fixed, on a GPU too.
    """
    sample_BS = lax.cummax(documents_BS, axis=1)
    is_first_BS = jnp.diff(sample_BS, axis=1, prepend=0) > 0

    def add(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple:
        (a, a_begins), (b, b_begins) = left, right
        return jnp.where(b_begins, b, a + b), a_begins | b_begins

    totals_BS, _ = lax.associative_scan(add, (values_BS, is_first_BS), axis=1)
    numbers_N = jnp.arange(1, number + 1, dtype=sample_BS.dtype)
    ends_BN = jax.vmap(lambda row_S: jnp.searchsorted(row_S, numbers_N, side="right"))(sample_BS)
    sums_BN = jnp.take_along_axis(totals_BS, jnp.maximum(ends_BN - 1, 0), axis=1)
    return jnp.where(numbers_N <= sample_BS[:, -1:], sums_BN, 0.0)


def dpo_losses(log_ratios_BN: jax.Array, num_samples_B: jax.Array, config: DpoConfig) -> PairLosses:
    """Return the losses of pairs. log_ratios_BN: log-probability of each answer minus that of the
    reference model. num_samples_B: the number of samples of each row.
    """
    assert config.beta is not None
    exists_BP = 2 * jnp.arange(log_ratios_BN.shape[1] // 2) < num_samples_B[:, None]
    rewards = config.beta * log_ratios_BN.reshape(*exists_BP.shape, 2)
    margin_BP, swapped = rewards[..., 0] - rewards[..., 1], config.label_smoothing
    loss_BP = -(1 - swapped) * jax.nn.log_sigmoid(margin_BP)
    if swapped:
        loss_BP -= swapped * jax.nn.log_sigmoid(-margin_BP)
    return PairLosses(
        jnp.where(exists_BP, loss_BP, 0.0),
        jnp.where(exists_BP[..., None], rewards, 0.0),
        exists_BP,
    )
