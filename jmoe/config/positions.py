"""Rotary positions stretched to longer contexts, with Hugging Face's field names.

`layers/rotary.py` computes their frequencies. To add a form: a subclass of `RopeScaling` here and
in `ROPE_SCALINGS`, its frequencies there, its fields in `models/families/rope.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_positive_or_none,
)


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of rotary positions differ from theta^(-2i/d).

    Every form has a field `rope_type`: its name in Hugging Face's files.
    """

    @property
    def rotary_scale(self) -> float:
        """The factor by which cos and sin are multiplied."""
        return 1.0

    @property
    def score_scale(self) -> float:
        """The factor by which latent attention multiplies its scores before the softmax."""
        return 1.0

    def max_positions(self, limit: int) -> int:
        """Return the maximum number of tokens of a sequence; `limit` is the model's
        max_position_embeddings.
        """
        return limit

    def check_rotary_dim(self, dim: int) -> None:
        """Raise ValueError if heads of which `dim` dimensions are rotated cannot have this form."""

    def at_length(self, length: int) -> RopeScaling:
        """Return the form for sequences of up to `length` tokens: itself, unless its frequencies
        depend on the length.
        """
        return self


@dataclass(frozen=True)
class LinearRopeConfig(RopeScaling):
    """Linear interpolation (arXiv:2306.15595): every frequency is divided by `factor`."""

    factor: float
    rope_type: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "factor")

    def max_positions(self, limit: int) -> int:
        return max(limit, round(self.factor * limit))


@dataclass(frozen=True)
class Llama3RopeConfig(RopeScaling):
    """The stretched positions of Llama 3.1.

    Pairs that turn more than `high_freq_factor` times within `original_max_position_embeddings`
    positions keep their frequency, those that turn less than `low_freq_factor` times have it
    divided by `factor`. Between the two, the frequency is linear in the number of turns; Llama 4
    has equal ones.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float
    rope_type: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "factor", "original_max_position_embeddings")
        check_positive(self, "low_freq_factor", "high_freq_factor")
        check_field(
            self.low_freq_factor <= self.high_freq_factor,
            self,
            "low_freq_factor",
            f"must not exceed high_freq_factor {self.high_freq_factor}",
        )

    def max_positions(self, limit: int) -> int:
        return max(limit, round(self.factor * self.original_max_position_embeddings))


@dataclass(frozen=True)
class YarnConfig(RopeScaling):
    """Rotary positions stretched to a longer context, YaRN (arXiv:2309.00071), with Hugging Face's
    field names.

    Rotations that turn more than `beta_fast` times within `original_max_position_embeddings`
    positions keep their frequency, those that turn less than `beta_slow` times are slowed by
    `factor`, and a ramp lies between them.
    attention_factor: multiplies cos and sin; None: from factor, mscale and mscale_all_dim as
    DeepSeek does.
    mscale_all_dim: latent attention multiplies its softmax scale by (0.1 mscale_all_dim ln(factor)
    + 1)^2.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ramp's ends are rounded outwards to whole dimensions
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    rope_type: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        check_not_negative(self, "mscale", "mscale_all_dim")
        check_field(
            self.beta_slow <= self.beta_fast,
            self,
            "beta_slow",
            f"must not exceed beta_fast {self.beta_fast}",
        )
        check_positive_or_none(self, "attention_factor")

    def attention_magnitude(self, mscale: float = 1.0) -> float:
        """Return 0.1 mscale ln(factor) + 1: how much longer contexts sharpen attention."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rotary_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.attention_magnitude(self.mscale) / self.attention_magnitude(
                self.mscale_all_dim
            )
        return self.attention_magnitude()

    @property
    def score_scale(self) -> float:
        return self.attention_magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def max_positions(self, limit: int) -> int:
        return max(limit, round(self.factor * self.original_max_position_embeddings))


def _check_more_than_a_pair(kind: str, dim: int) -> None:
    words = f"needs more than the {dim} rotated dimensions of a head"
    check(dim > 2, "rope_scaling.rope_type", kind, words)


@dataclass(frozen=True)
class DynamicRopeConfig(RopeScaling):
    """Dynamic NTK: theta grows with the length of sequences longer than
    `original_max_position_embeddings`, the model's positions.

    length: the sequences' length; 0 for any up to the model's positions. Engines have no longer
    ones, since the keys in a cache would be rotated unlike later queries.
    """

    factor: float
    original_max_position_embeddings: int
    length: int = 0
    rope_type: Literal["dynamic"] = "dynamic"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "factor", "original_max_position_embeddings")
        check_not_negative(self, "length")

    def check_rotary_dim(self, dim: int) -> None:
        _check_more_than_a_pair(self.rope_type, dim)

    def at_length(self, length: int) -> RopeScaling:
        longer = length > self.original_max_position_embeddings
        return replace(self, length=length if longer else 0)


@dataclass(frozen=True)
class NtkAlphaRopeConfig(RopeScaling):
    """Hunyuan's positions: theta is multiplied by alpha^(d / (d - 2)), d the rotated dimensions."""

    alpha: float
    rope_type: Literal["ntk_alpha"] = "ntk_alpha"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "alpha")

    def check_rotary_dim(self, dim: int) -> None:
        _check_more_than_a_pair(self.rope_type, dim)


@dataclass(frozen=True)
class LongRopeConfig(RopeScaling):
    """LongRoPE (arXiv:2402.13753): every frequency is divided by a factor of its own.

    short_factor, long_factor: for sequences of up to `original_max_position_embeddings` tokens, and
    for longer ones; one number for each pair of dimensions. factor: how much longer sequences may
    be, from which cos and sin are scaled. attention_factor: that scale itself; None: from `factor`.
    long_attention_factor: the scale for the long factors (Phi-3.5-MoE); None: the same.
    is_long: whether the long factors count. An engine decides it once, by its `max_seq_len`, so
    that all keys in its cache are rotated alike.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None
    long_attention_factor: float | None = None
    is_long: bool = False
    rope_type: Literal["longrope"] = "longrope"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "factor", "original_max_position_embeddings")
        check_positive_or_none(self, "attention_factor", "long_attention_factor")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            positive = len(factors) > 0 and min(factors) > 0
            check_field(positive, self, name, "must be numbers greater than 0")
        same = len(self.short_factor) == len(self.long_factor)
        words = f"must have the {len(self.short_factor)} numbers of short_factor"
        check_field(same, self, "long_factor", words)

    def check_rotary_dim(self, dim: int) -> None:
        words = f"must have {dim // 2} numbers, one for each pair of rotated dimensions"
        fits = len(self.short_factor) == dim // 2
        check(fits, "rope_scaling.short_factor", self.short_factor, words)

    @property
    def rotary_scale(self) -> float:
        if self.is_long and self.long_attention_factor is not None:
            return self.long_attention_factor
        if self.attention_factor is not None:
            return self.attention_factor
        positions = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(positions)) if self.factor > 1 else 1

    def at_length(self, length: int) -> RopeScaling:
        return replace(self, is_long=length > self.original_max_position_embeddings)


# {rope_type: class}
ROPE_SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearRopeConfig,
    "llama3": Llama3RopeConfig,
    "yarn": YarnConfig,
    "dynamic": DynamicRopeConfig,
    "ntk_alpha": NtkAlphaRopeConfig,
    "longrope": LongRopeConfig,
}
