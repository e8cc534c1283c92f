"""Rows of samples in a training step: their documents for the model, and what their losses are
divided by.

Legend: A accumulation steps, B batch, S sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmoe.config import DataConfig
from jmoe.data.sample_rows import AnyRows, SampleRows
from jmoe.layers.context import ContextGroup, SplitSequences, split_sequences
from jmoe.layers.documents import Documents
from jmoe.training.state import Batch
from jmoe.training.update import sum_over_mesh
from jmoe.types import PyTree


class SampleTotals(NamedTuple):
    """Sums over all tokens of a step, of all devices, by which its losses are divided: at least 1.

    weight: of all targets' weights. tokens: the number of targets with a weight. Both float32.
    """

    weight: jax.Array
    tokens: jax.Array


def sample_totals_local(batch: AnyRows, num_devices: int) -> SampleTotals:
    """Return the totals of a step's batch [A, B, ...], of which this device has a part."""
    weights = jnp.asarray(batch.weights)
    own = weights.sum(), (weights > 0).sum(dtype=jnp.float32)
    weight, tokens = sum_over_mesh(num_devices, own)
    # a step without a token to learn has loss 0
    return SampleTotals(jnp.where(tokens > 0, weight, 1.0), jnp.maximum(tokens, 1.0))


def documents_of(
    batch: AnyRows | Batch, config: DataConfig, group: ContextGroup | None = None
) -> Documents | None:
    """Return the `Documents` of rows of samples [B, ...]: which tokens go to experts (those with a
    target in their sample), which the routers' losses count (those whose target is to learn) and
    which belong to one sample or document. None for windows of text without documents.

    group: of devices that share the rows; the result is then of this device's tokens.
    """
    if not isinstance(batch, AnyRows):
        return None
    numbers_BS = jnp.asarray(batch.documents)
    if group is not None:
        numbers_BS = group.own_positions(numbers_BS)
    return Documents(
        numbers_BS > 0,
        jnp.asarray(batch.weights) > 0,
        numbers_BS if config.pack_samples else None,
    )


def split_of(
    batch: SampleRows | Batch | jax.Array, config: DataConfig, group: ContextGroup | None
) -> SplitSequences | None:
    """Return the `SplitSequences` of a batch [B, ...] of a group's rows; None without a group."""
    if group is None:
        return None
    numbers_BK = None
    if isinstance(batch, SampleRows) and config.pack_samples:
        numbers_BK = jnp.asarray(batch.documents)
    return split_sequences(group, jax.tree.leaves(batch)[0].shape[-1] - 2, numbers_BK)


def inputs_and_targets(tokens_BS: jax.Array, split: SplitSequences | None) -> PyTree:
    """Return (inputs, targets) [B, S] of rows of tokens as `ContextRows.divide` returns them."""
    if split is None:
        return tokens_BS[:, :-1], tokens_BS[:, 1:]
    chunks = tokens_BS.reshape(tokens_BS.shape[0], 2, -1)
    sides = chunks[..., :-1], chunks[..., 1:]
    return tuple(side.reshape(tokens_BS.shape[0], -1) for side in sides)
