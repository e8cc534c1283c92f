"""A request's sampling parameters and constraints. Imports no JAX, so requests are checked
early.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol, TypeGuard

import numpy as np

from jmoe.config import check

# lower temperatures count as 0: logits / temperature would overflow float32
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
MAX_IDS = 1000  # entries of logit_bias, and of stop_token_ids
MAX_STOP, MAX_STOP_CHARS = 64, 256  # strings of stop, and characters of each


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are sampled and when it ends. Names and meanings follow vLLM
    and OpenAI.

    The logits are changed in this order: `logit_bias`, penalties, `min_new_tokens`, `temperature`,
    `top_k`, `top_p`, `min_p`. Each filter sees the renormalized probabilities that the one before
    it left, as in transformers. Among tokens of equal logits, the lowest id ranks first.

    max_new_tokens: maximum number of output tokens; the request also ends when its row of the cache
        is full.
    temperature: divides the logits; 0 (or below 1e-5) takes the most likely token.
    top_k: keeps the k most likely tokens; 0 or -1 keeps all.
    top_p: keeps the smallest set of most likely tokens whose probabilities sum to at least top_p; 1
        keeps all.
    min_p: keeps tokens at least min_p times as likely as the most likely one; 0 keeps all.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
        output.
    presence_penalty: subtracted from the logit of each token in the output.
    frequency_penalty: subtracted from a token's logit once per occurrence in the output.
    logit_bias: {token id: number added to its logit}.
    seed: a token depends on seed, prompt and position alone; None uses a random seed.
    stop_token_ids: tokens that end the request like the end-of-text token; the output ids include
        the token.
    stop: one or several strings that end the request; the text ends before them. At most 64 of at
        most 256 characters.
    ignore_eos: the end-of-text token does not end the request; stop_token_ids still do.
    min_new_tokens: the first so many output tokens are neither end-of-text nor stop_token_ids, and
        are not searched for `stop`.
    logprobs: n, to return the log-probability of each output token and of the n most likely ones at
        its position, before any parameter is applied (vLLM's `raw_logprobs`); None for none.
    prompt_logprobs: likewise for the prompt's tokens from the second on; disables the reuse of
        prefixes.

    Raises ValueError naming field, value and constraint. `check_vocabulary` checks token ids
    against a model.

    Sources: https://docs.vllm.ai/en/latest/api/vllm/sampling_params and
    https://platform.openai.com/docs/api-reference/completions/create; min_p arXiv:2407.01082;
    repetition_penalty arXiv:1909.05858.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        check(
            isinstance(self.ignore_eos, bool),
            "ignore_eos",
            self.ignore_eos,
            "must be True or False",
        )

        stop: Any = self.stop
        stop = (stop,) if isinstance(stop, str) else stop
        ok = isinstance(stop, list | tuple) and all(isinstance(s, str) and s for s in stop)
        check(ok, "stop", self.stop, "must be a string or a list of strings, none of them empty")
        check(len(stop) <= MAX_STOP, "len(stop)", len(stop), f"must be at most {MAX_STOP}")
        longest = max(map(len, stop), default=0)
        check(
            longest <= MAX_STOP_CHARS,
            "the longest of stop",
            longest,
            f"must have at most {MAX_STOP_CHARS} characters",
        )
        object.__setattr__(self, "stop", tuple(stop))

        ids = self.stop_token_ids
        ok = isinstance(ids, list | tuple) and _are_token_ids(ids) and len(ids) <= MAX_IDS
        check(
            ok,
            "stop_token_ids",
            ids,
            f"must be a list of at most {MAX_IDS} integers, none negative",
        )
        object.__setattr__(self, "stop_token_ids", tuple(ids))

        bias = self.logit_bias
        ok = isinstance(bias, Mapping) and _are_token_ids(bias) and len(bias) <= MAX_IDS
        check(
            ok,
            "logit_bias",
            bias,
            f"must map at most {MAX_IDS} token ids, none negative, to numbers",
        )
        for token, value in bias.items():
            check(
                _is_number(value) and -100 <= value <= 100,
                f"logit_bias[{token}]",
                value,
                "must be in [-100, 100]",
            )
        object.__setattr__(self, "logit_bias", dict(bias))  # the caller may change its own later

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            constraint = (
                f"must be in [{low:g}, {high:g}]" if high < math.inf else "must be 0 or greater"
            )
            check(_is_number(value) and low <= value <= high, name, value, constraint)
        for name, high in (("top_p", 1.0), ("repetition_penalty", math.inf)):
            value = getattr(self, name)
            constraint = (
                f"must be in (0, {high:g}]" if high < math.inf else "must be greater than 0"
            )
            check(_is_number(value) and 0 < value <= high, name, value, constraint)
        for name, least in (("max_new_tokens", 1), ("top_k", -1)):
            value = getattr(self, name)
            check(
                _is_integer(value) and value >= least,
                name,
                value,
                f"must be an integer, at least {least}",
            )
        most = self.max_new_tokens
        fits = _is_integer(self.min_new_tokens) and 0 <= self.min_new_tokens <= most
        constraint = f"must be an integer, at least 0 and at most max_new_tokens = {most}"
        check(fits, "min_new_tokens", self.min_new_tokens, constraint)
        counts = (0, MAX_LOGPROBS)
        for name, bounds in (
            ("logprobs", counts),
            ("prompt_logprobs", counts),
            ("seed", (-(2**63), 2**63 - 1)),
        ):
            value = getattr(self, name)
            fits = value is None or (_is_integer(value) and bounds[0] <= value <= bounds[1])
            check(fits, name, value, f"must be None or an integer in {list(bounds)}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the argmax of the model's own logits, and no log-probability is
        needed.
        """
        return self.is_greedy and self.uses_logits_as_they_are

    @property
    def uses_logits_as_they_are(self) -> bool:
        """Whether no penalty, bias or ban changes the logits, and no log-probability is needed."""
        return (
            self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
            and not self.min_new_tokens
            and self.logprobs is None
        )

    def check_vocabulary(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Raise ValueError if a token id of `logit_bias` or `stop_token_ids` is not below
        `vocab_size`, or if `min_new_tokens` leaves no token to take.

        eos_token_ids: the model's end-of-text tokens.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                check(
                    token < vocab_size,
                    f"a token of {name}",
                    token,
                    f"must be below vocab_size = {vocab_size}",
                )
        every = self.min_new_tokens and len({*eos_token_ids, *self.stop_token_ids}) >= vocab_size
        words = "must be 0, because every token of the vocabulary ends the text"
        check(not every, "min_new_tokens", self.min_new_tokens, words)


class Constraint(Protocol):
    """Restricts the tokens of one output; also usable as a base class.

    Legend:
    W words of 32 tokens, ceil(V / 32) for a vocabulary of V
    """

    def is_ready(self) -> bool:
        """Return whether the next mask is there; until then the engine runs other sequences."""
        return True

    def wait(self, limit_s: float) -> None:
        """Block until the constraint is ready, at most `limit_s` seconds.

        Called only if the engine has nothing else to run.
        """
        return

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        """Write the mask of the next token to `words_W`, int32: one bit a token, lowest first.

        Sets at least one bit: the end-of-text token's if nothing else can follow.
        """

    def accept(self, token_id: int) -> None:
        """Advance by the token that was sampled."""


class Unconstrained(Constraint):
    """A constraint that allows every token."""

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        words_W[:] = -1

    def accept(self, token_id: int) -> None:
        pass


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _is_integer(value: object) -> TypeGuard[int]:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _are_token_ids(values: Iterable[object]) -> bool:
    return all(_is_integer(value) and value >= 0 for value in values)
