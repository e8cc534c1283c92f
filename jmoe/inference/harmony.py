"""The channels of gpt-oss's answers ("harmony"): what is for the user, apart from the reasoning
before it.

An answer is a series of messages, `<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`; the
last ends in `<|return|>`, a call of a tool in `<|call|>`. The prompt ends inside the header of the
first. All of these words are special tokens, which give no text: read as one text, header,
reasoning and answer run together. https://github.com/openai/harmony
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
# So many tokens of a header without a message are no header: the model has left the format.
MAX_HEADER_TOKENS = 32


@dataclass(frozen=True)
class Harmony:
    """The ids of the format's special tokens."""

    start: int
    channel: int
    message: int
    ends: frozenset[int]

    @classmethod
    def detect(cls, tokenizer: Tokenizer) -> Harmony | None:
        """Return those of a tokenizer, None if it has not all of them."""
        special = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", *TURN_ENDS)
        if not all(name in special for name in names):
            return None
        start, channel, message, *ends = (special[name] for name in names)
        return cls(start, channel, message, frozenset(ends))

    def is_answer(self, tokenizer: Tokenizer, header: list[int]) -> bool:
        """Return whether a message with this header is for the user: in the channel `final`, or
        in none.
        """
        if self.channel not in header:
            return True
        return tokenizer.decode(header[header.index(self.channel) + 1 :]).split()[:1] == [FINAL]

    def of_message(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the end of a prompt from the begin of its last message on; nothing of another
        format's.
        """
        if self.start not in prompt_token_ids:
            return []
        return list(
            prompt_token_ids[
                len(prompt_token_ids) - 1 - list(reversed(prompt_token_ids)).index(self.start) :
            ]
        )


class ChannelStream:
    """A `TextStream` whose `push` and `flush` return the text of the channel `final` alone.

    The text of the other channels is collected for `take_reasoning`. Stop strings end an answer, so
    they are looked for in `final`. Text outside of the format is taken for an answer, so that
    nothing is lost.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        harmony: Harmony,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._tokenizer, self._harmony = tokenizer, harmony
        self._stop, self._min_new_tokens = tuple(stop), min_new_tokens
        self._num_tokens = 0  # drawn
        self._header: list[int] | None = None  # tokens of a header under way
        self._num_prompt_tokens = 0  # of the header, that the prompt ends with
        # the header was begun by the model, so that it need not be an answer
        self._expects_role = False
        self._body = TextStream(
            tokenizer, prompt_token_ids, stop=stop, min_new_tokens=min_new_tokens
        )
        self._is_answer, self._began = True, {True: False, False: False}
        self._reasoning = ""
        if begun := harmony.of_message(prompt_token_ids):
            self.push(begun)
            self._num_tokens, self._num_prompt_tokens, self._expects_role = (
                0,
                len(self._header or ()),
                False,
            )
            self.take_reasoning()

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._body.matched_stop if self._is_answer else None

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the new text of the answer after these tokens, possibly empty."""
        return "".join(map(self._push, token_ids))

    def flush(self) -> str:
        """Return the rest of the answer: the request has ended."""
        text = "" if self._header is None or self._expects_role else self._leave_header()
        return text + self._channelled(self._body.flush())

    def take_reasoning(self) -> str:
        """Return what other channels than `final` have said since the last call."""
        text, self._reasoning = self._reasoning, ""
        return text

    def _push(self, token: int) -> str:
        if self.matched_stop is not None:
            return ""
        self._num_tokens += 1
        if token == self._harmony.start or token in self._harmony.ends:
            text = self.flush()
            self._header, self._num_prompt_tokens = [], 0
            self._expects_role = token == self._harmony.start
            return text
        if self._header is None:
            return self._channelled(self._body.push([token]))
        if token == self._harmony.message:
            return self._begin(is_answer=self._harmony.is_answer(self._tokenizer, self._header))
        self._header.append(token)
        return self._leave_header() if len(self._header) >= MAX_HEADER_TOKENS else ""

    def _begin(self, is_answer: bool) -> str:
        """Begin the text of a message; of several in one place each stands on lines of its own."""
        self._header, self._is_answer = None, is_answer
        least = max(0, self._min_new_tokens - self._num_tokens)
        self._body = TextStream(
            self._tokenizer, stop=self._stop if is_answer else (), min_new_tokens=least
        )
        is_next, self._began[is_answer] = self._began[is_answer], True
        return self._channelled("\n") if is_next else ""

    def _leave_header(self) -> str:
        """Take the tokens of what is no header for an answer, but not one that ends after the
        name of a channel.
        """
        assert self._header is not None
        outside = (
            [] if self._harmony.channel in self._header else self._header[self._num_prompt_tokens :]
        )
        return self._begin(is_answer=True) + self._body.push(outside) if outside else ""

    def _channelled(self, text: str) -> str:
        """Return text of an answer; keep that of another channel."""
        if self._is_answer:
            return text
        self._reasoning += text
        return ""


class AnswerConstraint(Constraint):
    """Restricts the answer alone; what is said before it, in other channels, is free, but may
    not end the turn.
    """

    def __init__(
        self,
        answer: Constraint,
        tokenizer: Tokenizer,
        harmony: Harmony,
        prompt_token_ids: Sequence[int],
        end_token_ids: Iterable[int],
    ) -> None:
        """answer: of the text of the answer. end_token_ids: end the turn."""
        self.answer, self._tokenizer, self._harmony = answer, tokenizer, harmony
        self._end_token_ids = list(end_token_ids)
        self._header: list[int] | None = None  # of a message whose text has not begun
        begun = harmony.of_message(prompt_token_ids)
        self._is_answer = not begun
        for token in begun:
            self._follow(token)
        self._at_prompt = self._needs_channel()

    def is_ready(self) -> bool:
        return not self._is_answer or self.answer.is_ready()

    def wait(self, limit_s: float) -> None:
        if self._is_answer:
            self.answer.wait(limit_s)

    def fill(self, words_W: np.ndarray) -> None:
        if self._is_answer:
            self.answer.fill(words_W)
        elif self._at_prompt:  # the header goes on with the name of a channel
            words_W[:] = 0
            _set(words_W, [self._harmony.channel], True)
        else:
            words_W[:] = -1
            _set(words_W, self._end_token_ids, False)

    def accept(self, token_id: int) -> None:
        self._at_prompt = False
        if self._is_answer:
            self.answer.accept(token_id)
        else:
            self._follow(token_id)

    def _needs_channel(self) -> bool:
        """Return whether a header is under way that names no channel yet."""
        return self._header is not None and self._harmony.channel not in self._header

    def _follow(self, token: int) -> None:
        """Take in a token of what is said before the answer."""
        harmony = self._harmony
        if token == harmony.start or token in harmony.ends:
            self._header = []
        elif self._header is not None and token == harmony.message:
            self._is_answer, self._header = harmony.is_answer(self._tokenizer, self._header), None
        elif self._header is not None:
            self._header.append(token)


def _set(words_W: np.ndarray, token_ids: Iterable[int], allowed: bool) -> None:
    """Set or clear the bits of tokens."""
    bits = words_W.view(np.uint32)
    for word, bit in (divmod(token, 32) for token in token_ids):
        mask = np.uint32(1 << bit)
        bits[word] = bits[word] | mask if allowed else bits[word] & ~mask
