"""One request from HTTP to text: what it asks for, how far it is, and what comes out. No JAX."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from jmoe.inference.detokenizer import TextStream
from jmoe.inference.harmony import ChannelStream, Harmony
from jmoe.inference.sampling_params import Constraint, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model, and the most likely tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Sequence:
    """One prompt on its way to its output. Every field has one writer; who asks for it writes the
    first ones.

    constraint: of the output, used by this sequence alone. client, request, index: whose it is, of
    which request, and its number among that request's sequences. noise_seed: what its draws depend
    on beside their positions, a hash of the seed in the sampling parameters and of the prompt, so
    that two prompts with one seed are two samples; without a seed a random number.
    """

    prompt_token_ids: list[int]  # at least one
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    prompt_text: str = ""  # for an echo
    harmony: Harmony | None = None  # the format whose channels the output is to be split into
    client: Hashable = None
    request: Hashable = None
    index: int = 0
    noise_seed: int = field(init=False)
    # Written by the scheduler
    status: Literal["waiting", "prefill", "decode", "finished"] = field(
        default="waiting", init=False
    )
    # of the cache; None while it waits and once it has finished
    row: int | None = field(default=None, init=False)
    num_computed_tokens: int = field(default=0, init=False)  # whose keys and values are in the row
    # of these, what was there before or was copied
    num_reused_tokens: int = field(default=0, init=False)
    # the row that the reused tokens are copied from
    copy_from: int | None = field(default=None, init=False)
    # with the stop token, if one ended it
    output_token_ids: list[int] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    # Written by the engine
    # has no part in the next step: its constraint is not ready
    rests: bool = field(default=False, init=False)
    text: TextStream | ChannelStream | None = field(default=None, init=False)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    # all logits of the prompt that were asked for are numbers
    is_finite: bool = field(default=True, init=False)
    # Written by the server's event loop
    arrived_s: float = field(default=0.0, init=False)
    first_token_s: float = field(default=0.0, init=False)
    last_token_s: float = field(default=0.0, init=False)
    num_delivered_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.noise_seed = (
            secrets.randbits(63) if seed is None else _noise_seed(seed, self.prompt_token_ids)
        )

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True)
class Output:
    """The tokens and text that one step added to a sequence; `finish_reason` is None until its end.

    finish_reason: "error", without a token, where the model's logits were not finite.
    prompt_logprobs: of all the prompt, with the first token; empty after it. reasoning: text of
    channels beside the answer's.
    """

    sequence: Sequence
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoning: str = ""


@dataclass(frozen=True)
class Completion:
    """A finished request. text: "" without a tokenizer. prompt_logprobs: from the second prompt
    token on.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]

    @classmethod
    def join(cls, sequence: Sequence, outputs: list[Output]) -> Completion:
        """Return a finished sequence with all its outputs as one."""
        assert sequence.finish_reason is not None
        return cls(
            sequence.prompt_token_ids,
            sequence.output_token_ids,
            "".join(output.text for output in outputs),
            sequence.finish_reason,
            [logprob for output in outputs for logprob in output.logprobs],
            sequence.prompt_logprobs,
        )


def _noise_seed(seed: int, prompt_token_ids: list[int]) -> int:
    """Return a number in [0, 2^63) made of both."""
    words = array("q", [seed, *prompt_token_ids])
    return int.from_bytes(hashlib.blake2b(words.tobytes(), digest_size=8).digest(), "little") >> 1
