"""Settings of training an encoder on masked tokens, and what such a run refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_refused,
    check_unset,
)

TrainConfig = Any  # `config.train`, which imports this module
ModelConfig = Any  # `config.model`, which imports this module


@dataclass(frozen=True)
class MaskingConfig:
    """Masked tokens, which a model with `model.bidirectional` learns to predict (BERT, arXiv
    1810.04805).

    The last id of the vocabulary stands for a masked token; no text has it.
    """

    share: float = 0.15  # of a sequence's tokens, those to predict
    as_mask: float = 0.8  # of the tokens to predict, those that the mask's id replaces
    as_random: float = 0.1  # of the tokens to predict, those that a random id replaces

    def __post_init__(self) -> None:
        check_field_types(self)
        share, both = self.share, self.as_mask + self.as_random
        check(0 < share <= 1, "masking.share", share, "must be greater than 0 and at most 1")
        for name in ("as_mask", "as_random"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"masking.{name}", value, "must be between 0 and 1")
        check(both <= 1, "masking.as_mask + masking.as_random", both, "must be at most 1")

    def num_predicted(self, sequence_length: int) -> int:
        """Return the number of tokens of a sequence that are predicted, at least 1."""
        return max(1, round(self.share * sequence_length))


def check_bidirectional(config: ModelConfig) -> None:
    """Raise ValueError naming an option that attention in both directions does not support."""
    if not config.bidirectional:
        return
    causal = {
        "kv_lora_rank": None,
        "sliding_window": None,
        "layer_types": (),
        "attention_sinks": False,
    }
    for name, value in causal.items():
        unset = getattr(config, name) == value
        check_field(unset, config, name, f"must be {value!r} with bidirectional")


def check_may_train_bidirectional(config: TrainConfig) -> None:
    """Raise ValueError naming a setting that a run on masked tokens does not support; or a setting
    of masked tokens in another run.
    """
    if not config.model.bidirectional:
        unset = ["share", "as_mask", "as_random"]
        check_unset(config.masking, "masking", unset, "without model.bidirectional")
        return
    refused = {
        "init_from": bool(config.init_from),
        "dpo.beta": config.dpo.beta is not None,
        "lora.rank": config.lora.rank is not None,
        "distil.teacher": bool(config.distil.teacher),
        "tiers.experts": not config.tiers.all_on_device,
        "data.mask_documents": config.data.mask_documents,
        "evaluation.sample_tokens": config.evaluation.sample_tokens > 0,
    }
    check_refused(config, refused, "with model.bidirectional")
