"""Settings of training an encoder and a decoder by span corruption (T5), and what such a run
refuses. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_refused,
    check_unset,
)

TrainConfig = Any  # `config.train`, which imports this module
ModelConfig = Any  # `config.model`, which imports this module


class TextParts(NamedTuple):
    """The positions that an encoder and a decoder have for a sequence of text. encoder: 0 for a
    decoder alone, which has them all.
    """

    encoder: int
    decoder: int


@dataclass(frozen=True)
class DenoisingConfig:
    """Spans of text that are left out, which a model with `model.num_encoder_layers` learns to
    write (T5, arXiv 1910.10683).

    In the encoder's text a sentinel stands for each span. The decoder writes every span after its
    sentinel, and one more sentinel at the end. Sentinels are the last ids of the vocabulary, which
    no text has: the first span has the very last one.
    """

    share: float = 0.15  # of a sequence's tokens, those in spans
    span_length: float = 3.0  # tokens of a span, in the mean

    def __post_init__(self) -> None:
        check_field_types(self)
        share, length = self.share, self.span_length
        check(0 < share < 1, "denoising.share", share, "must be between 0 and 1")
        check(length >= 1, "denoising.span_length", length, "must be at least 1")

    def num_tokens(self, sequence_length: int) -> int:
        """Return the number of tokens of a sequence that are in spans: at least 1, and not all."""
        return min(max(1, round(self.share * sequence_length)), sequence_length - 1)

    def num_spans(self, sequence_length: int) -> int:
        """Return the number of spans of a sequence, at least 1; text precedes each."""
        tokens = self.num_tokens(sequence_length)
        return min(max(1, round(tokens / self.span_length)), sequence_length - tokens)

    def num_sentinels(self, sequence_length: int) -> int:
        """Return the number of ids that stand for spans, and for their end."""
        return self.num_spans(sequence_length) + 1

    def parts(self, sequence_length: int) -> TextParts:
        """Return the positions of a sequence's two texts: the text with sentinels for its spans,
        and the spans with a sentinel before each.
        """
        tokens, spans = self.num_tokens(sequence_length), self.num_spans(sequence_length)
        return TextParts(sequence_length - tokens + spans, tokens + spans)


def check_encoder(config: ModelConfig) -> None:
    """Raise ValueError naming an option that a model with an encoder does not support."""
    layers = config.num_encoder_layers
    check(layers >= 0, "num_encoder_layers", layers, "must not be negative")
    if not layers:
        return
    supported = {
        "bidirectional": False,
        "position": "rope",
        "kv_lora_rank": None,
        "sliding_window": None,
        "layer_types": (),
        "attention_sinks": False,
        "attention_gate": False,
        "qk_norm": "none",
        "clip_qkv": None,
        "first_k_dense_replace": 0,
        "mlp_only_layers": (),
    }
    for name, value in supported.items():
        unset = getattr(config, name) == value
        check_field(unset, config, name, f"must be {value!r} with num_encoder_layers")
    step = config.decoder_sparse_step
    fits = not config.num_experts or step <= layers
    check(fits, "decoder_sparse_step", step, f"must not exceed num_encoder_layers = {layers}")


def check_may_train_encoder_decoder(config: TrainConfig) -> None:
    """Raise ValueError naming a setting that a run of an encoder and a decoder does not support; or
    a setting of span corruption in another run.
    """
    if not config.model.num_encoder_layers:
        unset = ["share", "span_length"]
        check_unset(config.denoising, "denoising", unset, "without model.num_encoder_layers")
        return
    refused = {
        "init_from": bool(config.init_from),
        "dpo.beta": config.dpo.beta is not None,
        "lora.rank": config.lora.rank is not None,
        "distil.teacher": bool(config.distil.teacher),
        "tiers.experts": not config.tiers.all_on_device,
        "comm.packing": config.comm.packing != 1,
        "data.mask_documents": config.data.mask_documents,
        "evaluation.sample_tokens": config.evaluation.sample_tokens > 0,
        "plan": config.plan,
    }
    check_refused(config, refused, "with model.num_encoder_layers")
    length = config.sequence_length
    check(length > 1, "sequence_length", length, "must be at least 2 with model.num_encoder_layers")
    sentinels, size = config.denoising.num_sentinels(length), config.model.vocab_size
    words = f"must exceed the {sentinels} ids that stand for spans (denoising)"
    check(size > sentinels, "model.vocab_size", size, words)
