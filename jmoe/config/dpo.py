"""Settings of direct preference optimization: training on pairs of answers."""

from __future__ import annotations

from dataclasses import dataclass

from jmoe.config.checks import check_field, check_field_types, check_positive_or_none, check_unset


@dataclass(frozen=True)
class DpoConfig:
    """The loss of DPO (arXiv 2305.18290) on preferences, in place of cross-entropy.

    With r = beta x (log-probability of an answer - the same of the reference model, the one that
    training starts from) and d = r of the chosen - r of the rejected answer, the loss of a pair is
    -(1 - label_smoothing) x log sigmoid(d) - label_smoothing x log sigmoid(-d).
    """

    beta: float | None = None  # None: no preferences
    # probability that a pair's answers are swapped (conservative DPO)
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.beta is None:
            check_unset(self, "dpo", ["label_smoothing"], "without dpo.beta")
        check_positive_or_none(self, "beta")
        half = 0 <= self.label_smoothing < 0.5
        check_field(half, self, "dpo.label_smoothing", "must be in [0, 0.5)")
