"""One request from HTTP to text: its parameters, its progress and its output. Imports no JAX."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from jmoe.inference.detokenizer import TextStream
from jmoe.inference.output_events import OpenStream, OutputEvent, OutputStream
from jmoe.inference.sampling_params import Constraint, SamplingParams
from jmoe.inference.speculation import Drafter

log = logging.getLogger("jmoe")
FinishReason = Literal["stop", "length", "abort", "error"]
# a request's own code that may raise: its constraint, and the decoding of its text
FailureSource = Literal["constraint", "decoding"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model, and the most likely tokens at its position.

    top: (token id, log-probability), most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Sequence:
    """A prompt on its way to its output.

    The caller sets the fields that are listed above `noise_seed`; of the others, each is written
    by the part of the engine that the comment above it names.

    prompt_token_ids: at least one token.
    constraint: restricts the output; not shared with other sequences.
    priority: lower ones run first, and are the last to give their blocks back.
    client, request, index: the client, its request, and this sequence's number within that request.
    adapter: name of the LoRA adapter that the model runs with; "" for the model as it is.
    noise_seed: seeds the sampling noise, in [0, 2^63): a hash of the sampling parameters' seed and
        the prompt, so that two prompts with one seed get different samples; random without a seed.
    """

    prompt_token_ids: list[int]  # at least one
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    prompt_text: str = ""  # returned before the output if the client asks for an echo
    open_stream: OpenStream | None = None  # turns the output into events; None for plain text
    priority: int = 0
    client: Hashable = None
    request: Hashable = None
    index: int = 0
    adapter: str = ""
    noise_seed: int = field(init=False)
    # Written by the scheduler
    status: Literal["waiting", "prefill", "decode", "finished"] = field(
        default="waiting", init=False
    )
    # row of the sampler's state; None while the sequence waits and after it has finished
    row: int | None = field(default=None, init=False)
    # blocks of the cache that have its tokens, in order; empty without a row
    block_ids: array[int] = field(default_factory=lambda: array("i"), init=False)
    # digests of its first full blocks of tokens, as many as were needed
    # (`BlockPool.find_cached_prefix`)
    block_digests: list[bytes] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)  # tokens in the cache
    # position of the first token that it computed since it got its row
    first_position: int = field(default=0, init=False)
    # pairs (block, block of its own) to be copied before its first chunk
    copies: tuple[tuple[int, int], ...] = field(default=(), init=False)
    num_preemptions: int = field(default=0, init=False)  # how often it had to give its row back
    # drafts its next tokens; None without speculation
    drafter: Drafter | None = field(default=None, init=False)
    # prompt tokens that the cache had when the sequence first got a row
    num_reused_tokens: int = field(default=0, init=False)
    # includes the end-of-text or stop token that ended the sequence
    output_token_ids: list[int] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    # Written by the engine
    # excluded from the next step because its constraint is not ready
    is_paused: bool = field(default=False, init=False)
    # which of the request's own code has raised; the engine then ends the sequence with "error"
    failed: FailureSource | None = field(default=None, init=False)
    text: TextStream | OutputStream | None = field(default=None, init=False)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    # False if a requested log-probability of the prompt is not finite
    is_finite: bool = field(default=True, init=False)
    # Written by the server's engine thread: when it first left the queue
    started_s: float = field(default=0.0, init=False)
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

    @cached_property
    def prefix_root(self) -> bytes:
        """The digest before the first token: blocks of the cache are shared within an adapter."""
        if not self.adapter:
            return b""
        return hashlib.blake2b(self.adapter.encode(), digest_size=16).digest()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def known_token_ids(self) -> list[int]:
        """The prompt and the output so far; not to be changed."""
        if not self.output_token_ids:
            return self.prompt_token_ids
        return self.prompt_token_ids + self.output_token_ids

    def token_ids_between(self, start: int, end: int) -> list[int]:
        """Return the tokens of prompt and output at the positions `start` to `end` - 1."""
        length = len(self.prompt_token_ids)
        output = self.output_token_ids[max(0, start - length) : max(0, end - length)]
        return self.prompt_token_ids[start:end] + output

    @contextlib.contextmanager
    def catch_errors(self, source: FailureSource) -> Iterator[None]:
        """Log any exception of the block and set `failed` instead of raising."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException:  # a panic of tokenizers, which is written in Rust, is no Exception
            log.exception("the %s of a request failed; the other requests go on", source)
            self.failed = source


@dataclass(frozen=True)
class Output:
    """The tokens and text that one step added to a sequence.

    finish_reason: None until the sequence ends; "error", without a token, if the model's logits are
        not finite, or the sequence's constraint or the decoding of its text raised.
    prompt_logprobs: those of the whole prompt, with the first output only.
    events: the text and what else the output says, if the sequence has `open_stream`; `text` is
        then that of the answer alone.
    num_reasoning_tokens: how many of the tokens belong to the reasoning.
    """

    sequence: Sequence
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    events: list[OutputEvent] = field(default_factory=list)
    num_reasoning_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """A finished request.

    text: "" without a tokenizer.
    prompt_logprobs: one entry for each prompt token from the second on.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]

    @classmethod
    def from_outputs(cls, sequence: Sequence, outputs: list[Output]) -> Completion:
        """Return a finished sequence and all its outputs as one completion."""
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
    """Return a hash of the seed and the prompt, in [0, 2^63)."""
    words = array("q", [seed, *prompt_token_ids])
    return int.from_bytes(hashlib.blake2b(words.tobytes(), digest_size=8).digest(), "little") >> 1
