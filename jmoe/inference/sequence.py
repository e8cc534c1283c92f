"""What the engine gives back: tokens as they come, finished requests, log-probabilities."""

from dataclasses import dataclass, field

import numpy as np

from jmoe.inference import sampler
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

    finish_reason: "error", without a token, where the model's logits were not finite. prompt_logprobs: of all the
    prompt, with the first token; empty after it.
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


def token_logprobs(
    tokens: list[int], logprobs: sampler.Logprobs | None, wanted: list[int | None]
) -> list[TokenLogprob | None]:
    """Those of each token, with as many of the most likely ones as are `wanted` of it; None where none are."""
    if logprobs is None:
        return [None] * len(tokens)
    chosen, ids, top = (np.asarray(a).tolist() for a in (logprobs.chosen_B, logprobs.top_ids_BK, logprobs.top_BK))
    return [
        None if n is None else TokenLogprob(token, chosen[i], tuple(zip(ids[i][:n], top[i][:n], strict=True)))
        for i, (token, n) in enumerate(zip(tokens, wanted, strict=True))
    ]
