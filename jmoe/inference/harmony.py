"""gpt-oss's output format "harmony": separate the final answer from the reasoning before it.

An output is a series of messages, `<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`. The
last message ends with `<|return|>`, a tool call with `<|call|>`; the prompt ends inside the first
message's header. The delimiters are special tokens without text, so a plain decoder would join
header, reasoning and answer. Source: https://github.com/openai/harmony
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from jmoe.inference.detokenizer import TextStream
from jmoe.inference.sampling_params import Constraint

FINAL = "final"
TURN_ENDS = ("<|return|>", "<|call|>")
# A header with this many tokens is none: the model has left the format.
MAX_HEADER_TOKENS = 32


@dataclass(frozen=True)
class HarmonyTokens:
    """The ids of the special tokens of gpt-oss's output format.

    ends: the tokens that end a message.
    """

    start: int
    channel: int
    message: int
    ends: frozenset[int]

    @classmethod
    def detect(cls, tokenizer: Tokenizer) -> HarmonyTokens | None:
        """Return the ids of a tokenizer's harmony tokens, or None if it lacks one of them."""
        special = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", *TURN_ENDS)
        if not all(name in special for name in names):
            return None
        start, channel, message, *ends = (special[name] for name in names)
        return cls(start, channel, message, frozenset(ends))

    def is_answer_header(self, tokenizer: Tokenizer, header: list[int]) -> bool:
        """Return whether a message with this header is for the user: its channel is `final`, or it
        has none.
        """
        if self.channel not in header:
            return True
        return tokenizer.decode(header[header.index(self.channel) + 1 :]).split()[:1] == [FINAL]

    def last_message(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the prompt's tokens from the start of its last message on; [] if there is no
        message.
        """
        if self.start not in prompt_token_ids:
            return []
        return list(
            prompt_token_ids[
                len(prompt_token_ids) - 1 - list(reversed(prompt_token_ids)).index(self.start) :
            ]
        )


class ChannelStream:
    """A `TextStream` that returns only the text of the channel `final`.

    `take_reasoning` returns the text of the other channels. Only `final` is searched for stop
    strings. Text outside of the format counts as the answer, so that nothing is lost.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        harmony: HarmonyTokens,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._tokenizer, self._harmony = tokenizer, harmony
        self._stop, self._min_new_tokens = tuple(stop), min_new_tokens
        self._num_tokens = 0  # output tokens so far
        self._header: list[int] | None = None  # tokens of an incomplete header
        self._num_prompt_tokens = 0  # tokens of that header that belong to the prompt
        # whether the header began with <|start|>; `flush` then drops it instead of returning it
        self._expects_role = False
        self._body = TextStream(
            tokenizer, prompt_token_ids, stop=stop, min_new_tokens=min_new_tokens
        )
        self._is_answer, self._began = True, {True: False, False: False}
        self._reasoning = ""
        if begun := harmony.last_message(prompt_token_ids):
            self.push(begun)
            self._num_tokens, self._num_prompt_tokens, self._expects_role = (
                0,
                len(self._header or ()),
                False,
            )
            self.take_reasoning()

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._body.matched_stop if self._is_answer else None

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the answer's text that these tokens complete, possibly ""."""
        return "".join(map(self._push_token, token_ids))

    def flush(self) -> str:
        """Return the rest of the answer's text at the end of a request."""
        text = (
            "" if self._header is None or self._expects_role else self._begin_answer_with_header()
        )
        return text + self._divert_reasoning(self._body.flush())

    def take_reasoning(self) -> str:
        """Return the text of channels other than `final` since the last call."""
        text, self._reasoning = self._reasoning, ""
        return text

    def _push_token(self, token: int) -> str:
        if self.matched_stop is not None:
            return ""
        self._num_tokens += 1
        if token == self._harmony.start or token in self._harmony.ends:
            text = self.flush()
            self._header, self._num_prompt_tokens = [], 0
            self._expects_role = token == self._harmony.start
            return text
        if self._header is None:
            return self._divert_reasoning(self._body.push([token]))
        if token == self._harmony.message:
            return self._begin_message(
                is_answer=self._harmony.is_answer_header(self._tokenizer, self._header)
            )
        self._header.append(token)
        return self._begin_answer_with_header() if len(self._header) >= MAX_HEADER_TOKENS else ""

    def _begin_message(self, is_answer: bool) -> str:
        """Start a message; return the newline that separates it from an earlier one, else ""."""
        self._header, self._is_answer = None, is_answer
        least = max(0, self._min_new_tokens - self._num_tokens)
        self._body = TextStream(
            self._tokenizer, stop=self._stop if is_answer else (), min_new_tokens=least
        )
        is_next, self._began[is_answer] = self._began[is_answer], True
        return self._divert_reasoning("\n") if is_next else ""

    def _begin_answer_with_header(self) -> str:
        """Begin an answer with the tokens of a malformed header; return their text.

        "" if the header names a channel: an output that ends there has no answer.
        """
        assert self._header is not None
        outside = (
            [] if self._harmony.channel in self._header else self._header[self._num_prompt_tokens :]
        )
        return self._begin_message(is_answer=True) + self._body.push(outside) if outside else ""

    def _divert_reasoning(self, text: str) -> str:
        """Return text of the answer; collect other text for `take_reasoning` and return ""."""
        if self._is_answer:
            return text
        self._reasoning += text
        return ""


class AnswerConstraint(Constraint):
    """A constraint that applies to the answer alone; other channels are free, but may not end the
    turn.
    """

    def __init__(
        self,
        answer: Constraint,
        tokenizer: Tokenizer,
        harmony: HarmonyTokens,
        prompt_token_ids: Sequence[int],
        end_token_ids: Iterable[int],
    ) -> None:
        """Begin inside the header that the prompt ends with; without one, the whole output is the
        answer.

        answer: the constraint of the answer's text.
        end_token_ids: tokens that end the turn.
        """
        self.answer, self._tokenizer, self._harmony = answer, tokenizer, harmony
        self._end_token_ids = list(end_token_ids)
        self._header: list[int] | None = None  # tokens of an incomplete header
        begun = harmony.last_message(prompt_token_ids)
        self._is_answer = not begun
        for token in begun:
            self._track_header(token)
        self._at_prompt = self._header_lacks_channel()

    def is_ready(self) -> bool:
        return not self._is_answer or self.answer.is_ready()

    def wait(self, limit_s: float) -> None:
        if self._is_answer:
            self.answer.wait(limit_s)

    def fill(self, words_W: np.ndarray) -> None:
        if self._is_answer:
            self.answer.fill(words_W)
        elif self._at_prompt:  # the prompt's header must continue with a channel
            words_W[:] = 0
            _set_mask_bits(words_W, [self._harmony.channel], True)
        else:
            words_W[:] = -1
            _set_mask_bits(words_W, self._end_token_ids, False)

    def accept(self, token_id: int) -> None:
        self._at_prompt = False
        if self._is_answer:
            self.answer.accept(token_id)
        else:
            self._track_header(token_id)

    def _header_lacks_channel(self) -> bool:
        """Return whether a header is incomplete and names no channel yet."""
        return self._header is not None and self._harmony.channel not in self._header

    def _track_header(self, token: int) -> None:
        """Advance the state by one token of the headers and channels before the answer."""
        harmony = self._harmony
        if token == harmony.start or token in harmony.ends:
            self._header = []
        elif self._header is not None and token == harmony.message:
            self._is_answer, self._header = (
                harmony.is_answer_header(self._tokenizer, self._header),
                None,
            )
        elif self._header is not None:
            self._header.append(token)


def _set_mask_bits(words_W: np.ndarray, token_ids: Iterable[int], allowed: bool) -> None:
    """Set (`allowed`) or clear the bits of tokens in a mask of int32 words."""
    bits = words_W.view(np.uint32)
    for word, bit in (divmod(token, 32) for token in token_ids):
        mask = np.uint32(1 << bit)
        bits[word] = bits[word] | mask if allowed else bits[word] & ~mask
