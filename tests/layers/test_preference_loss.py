"""The loss of pairs: sums over the samples of a row, and DPO's formula."""

import numpy as np
import pytest

from jmoe.config import DpoConfig
from jmoe.layers.preference_loss import dpo_losses, max_samples_of_row, sums_of_samples


def test_sums_of_samples() -> None:
    """Of rows with gaps between samples, without samples, and as full as possible."""
    documents = np.array(
        [[1, 1, 0, 2, 0, 3, 3, 3, 0, 4, 0], [0] * 11, [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6]], np.int32
    )
    number = max_samples_of_row(11)
    assert number == 6
    values = np.random.default_rng(0).normal(size=documents.shape).astype(np.float32)
    values[documents == 0] = 0
    wanted = [[row[own == n].sum() for n in range(1, 7)] for row, own in zip(values, documents)]
    sums = sums_of_samples(values, documents, number)
    np.testing.assert_allclose(sums, wanted, atol=1e-6)


def test_losses_of_pairs() -> None:
    ratios, config = np.array([[1.0, -1.0, 0.5, 2.0]], np.float32), DpoConfig(0.5, 0.2)
    losses = dpo_losses(ratios, np.array([2]), config)
    margin = 0.5 * 2.0
    wanted = 0.8 * np.log1p(np.exp(-margin)) + 0.2 * np.log1p(np.exp(margin))
    np.testing.assert_allclose(losses.loss, [[wanted, 0]], rtol=1e-6)
    np.testing.assert_allclose(losses.rewards, [[[0.5, -0.5], [0, 0]]], rtol=1e-6)
    assert losses.exists.tolist() == [[True, False]]
    both = dpo_losses(ratios, np.array([4]), DpoConfig(0.5))
    assert both.loss[0, 1] == pytest.approx(np.log1p(np.exp(0.75)), rel=1e-6)
