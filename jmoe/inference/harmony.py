"""gpt-oss's output format "harmony": separate the final answer from the reasoning before it.

An output is a series of messages, `<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`. The
last message ends with `<|return|>`, a tool call with `<|call|>`; the prompt ends inside the first
message's header. The delimiters are special tokens without text, so a plain decoder would join
header, reasoning and answer. Source: https://github.com/openai/harmony
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from jmoe.inference.detokenizer import TextStream
from jmoe.inference.output_events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from jmoe.inference.parsed_stream import EventFilter
from jmoe.inference.sampling_params import Constraint

FINAL = "final"
TURN_ENDS = ("<|return|>", "<|call|>")
# A header with this many tokens is none: the model has left the format.
MAX_HEADER_TOKENS = 32
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_Kind = Literal["content", "reasoning", "call"]


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

    def last_message_tokens(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the tokens from the start of the prompt's last message on; [] without one."""
        if self.start not in prompt_token_ids:
            return []
        return list(
            prompt_token_ids[
                len(prompt_token_ids) - 1 - list(reversed(prompt_token_ids)).index(self.start) :
            ]
        )


class ChannelStream:
    """An `OutputStream` of gpt-oss's messages: content is the channel `final`, a message to a
    function is a tool call, and the other messages are reasoning.

    Text outside of the format counts as content, so that nothing is lost. Messages of one kind are
    separated by newlines.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        harmony: HarmonyTokens,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
        has_tools: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """Begin after a prompt, inside its last message.

        has_tools: messages to functions are tool calls, not reasoning.
        max_calls: the output ends after so many tool calls; None: it may have any number.
        """
        self._tokenizer, self._harmony, self._has_tools = tokenizer, harmony, has_tools
        self._filter, self._min_new_tokens = EventFilter(stop, max_calls), min_new_tokens
        self._num_tokens = self.num_reasoning_tokens = 0  # of the output so far
        self._header: list[int] | None = None  # tokens of an incomplete header
        self._num_prompt_tokens = 0  # tokens of that header that belong to the prompt
        # whether the header began with <|start|>; `flush` then drops it instead of returning it
        self._expects_role = False
        self._body = TextStream(tokenizer, prompt_token_ids)
        self._kind: _Kind = "content"
        self._began: set[_Kind] = set()
        self._num_calls, self._call_is_empty = 0, True
        if begun := harmony.last_message_tokens(prompt_token_ids):
            for token in begun:
                self._push_token(token)
            self._num_tokens = self.num_reasoning_tokens = 0
            self._num_prompt_tokens, self._expects_role = len(self._header or ()), False

    @property
    def has_ended(self) -> bool:
        """Whether a stop string or the last allowed call has come."""
        return self._filter.has_ended

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the output, or None."""
        return self._filter.matched_stop

    def push(self, token_ids: Iterable[int]) -> list[OutputEvent]:
        """Return the events that these tokens complete."""
        events: list[OutputEvent] = []
        for token in token_ids:
            if self.has_ended:
                break
            events += self._filter_events(self._push_token(token))
        return events

    def flush(self) -> list[OutputEvent]:
        """Return the rest of the events at the end of the output."""
        if self.has_ended:
            return []
        events = self._filter_events(self._end_message())
        return events if self.has_ended else events + self._filter.release_held_content()

    def _filter_events(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """Return the events before a stop string and the last allowed call."""
        searches = self._num_tokens > self._min_new_tokens
        return self._filter.filter_events(events, searches_stop=searches)

    def _push_token(self, token: int) -> list[OutputEvent]:
        """Return the events that one token completes, before the search for stop strings."""
        self._num_tokens += 1
        self.num_reasoning_tokens += self._kind == "reasoning" and self._header is None
        if token == self._harmony.start or token in self._harmony.ends:
            events = self._end_message()
            self._header, self._num_prompt_tokens = [], 0
            self._expects_role = token == self._harmony.start
            return events
        if self._header is None:
            return self._text_events(self._body.push([token]))
        if token == self._harmony.message:
            return self._begin_message(*self._read_header(self._header))
        self._header.append(token)
        return self._begin_answer_with_header() if len(self._header) >= MAX_HEADER_TOKENS else []

    def _read_header(self, header: list[int]) -> tuple[_Kind, str]:
        """Return (kind of a message with this header, name of the function that it calls)."""
        if self._harmony.is_answer_header(self._tokenizer, header):
            return "content", ""
        written = self._tokenizer.decode(header, skip_special_tokens=False)
        function = _RECIPIENT.search(written) if self._has_tools else None
        return ("call", function[1]) if function else ("reasoning", "")

    def _begin_message(self, kind: _Kind, name: str = "") -> list[OutputEvent]:
        """Start a message; a newline separates it from an earlier one of its kind."""
        self._header, self._kind, self._body = None, kind, TextStream(self._tokenizer)
        if kind == "call":
            index, self._num_calls, self._call_is_empty = self._num_calls, self._num_calls + 1, True
            return [ToolCallBegin(index, f"call_{secrets.token_hex(12)}", name)]
        is_next = kind in self._began
        self._began.add(kind)
        return self._text_events("\n") if is_next else []

    def _end_message(self) -> list[OutputEvent]:
        """Return the rest of the current message, or an incomplete header's text as an answer."""
        if self._header is not None:
            return [] if self._expects_role else self._begin_answer_with_header()
        events = self._text_events(self._body.flush())
        if self._kind == "call":
            index = self._num_calls - 1
            events += [ToolCallArguments(index, "{}")] if self._call_is_empty else []
            events.append(ToolCallEnd(index))
            self._kind = "reasoning"  # the call has ended: only a header can follow
        self._body = TextStream(self._tokenizer)
        return events

    def _begin_answer_with_header(self) -> list[OutputEvent]:
        """Begin an answer with the tokens of a malformed header; return their text.

        Nothing if the header names a channel: an output that ends there has no answer.
        """
        assert self._header is not None
        outside = (
            [] if self._harmony.channel in self._header else self._header[self._num_prompt_tokens :]
        )
        if not outside:
            return []
        events = self._begin_message("content")
        return events + self._text_events(self._body.push(outside))

    def _text_events(self, text: str) -> list[OutputEvent]:
        """Return text of the current message as one event of its kind; [] for no text."""
        if not text:
            return []
        if self._kind == "content":
            return [ContentDelta(text)]
        if self._kind == "reasoning":
            return [ReasoningDelta(text)]
        self._call_is_empty = False
        return [ToolCallArguments(self._num_calls - 1, text)]


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
        begun = harmony.last_message_tokens(prompt_token_ids)
        self._is_answer = not begun
        for token in begun:
            self._track_header(token)
        self._at_prompt = self._header_lacks_channel()

    def is_ready(self) -> bool:
        return not self._is_answer or self.answer.is_ready()

    def wait(self, limit_s: float) -> None:
        if self._is_answer:
            self.answer.wait(limit_s)

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        if self._is_answer:
            self.answer.fill_next_token_bitmask(words_W)
        elif self._at_prompt:  # the prompt's header must continue with a channel
            words_W[:] = 0
            set_mask_bits(words_W, [self._harmony.channel], True)
        else:
            words_W[:] = -1
            set_mask_bits(words_W, self._end_token_ids, False)

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


def set_mask_bits(words_W: np.ndarray, token_ids: Iterable[int], allowed: bool) -> None:
    """Set (`allowed`) or clear the bits of tokens in a mask of int32 words."""
    bits = words_W.view(np.uint32)
    for word, bit in (divmod(token, 32) for token in token_ids):
        mask = np.uint32(1 << bit)
        bits[word] = bits[word] | mask if allowed else bits[word] & ~mask
