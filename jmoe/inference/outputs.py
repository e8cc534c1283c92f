"""What comes out of an engine."""

from dataclasses import dataclass, field

from jmoe.inference.scheduler import FinishReason


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model, and the most likely tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Output:
    """What one step added to a request; `finish_reason` is None until its end.

    prompt_logprobs: of all the prompt, with the first token; empty after it.
    """

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class Completion:
    """A finished request. text: "" without a tokenizer. prompt_logprobs: from the second prompt token on."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
