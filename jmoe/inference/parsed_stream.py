"""Streams of events from the tokens of an output: text that a parser reads, up to a stop string in
its content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from jmoe.inference.detokenizer import StopSearch, TextStream
from jmoe.inference.output_events import ContentDelta, OutputEvent, ToolCallBegin, ToolCallEnd


class EventParser(Protocol):
    """Turns the text of one output into events.

    in_reasoning: the text so far ends inside the reasoning.
    """

    in_reasoning: bool

    def feed(self, text: str) -> list[OutputEvent]:
        """Return the events that this text completes."""

    def finish(self) -> list[OutputEvent]:
        """Return the last events at the end of the output."""


class EventFilter:
    """Cuts the events of an output at a stop string in its content, and after a number of calls.

    has_ended: an end has been reached; no further event passes.
    """

    def __init__(self, stop: Sequence[str], max_calls: int | None) -> None:
        self._search, self._max_calls = StopSearch(stop), max_calls
        self.has_ended = False

    @property
    def matched_stop(self) -> str | None:
        """The stop string that has come, or None."""
        return self._search.matched_stop

    def filter_events(
        self, events: Iterable[OutputEvent], *, searches_stop: bool = True
    ) -> list[OutputEvent]:
        """Return the events before the end of the output, and set `has_ended` there.

        searches_stop: search content for stop strings.
        """
        passed: list[OutputEvent] = []
        for event in events:
            if self.has_ended:
                break
            if isinstance(event, ContentDelta) and searches_stop:
                text = self._search.cut_before_stop(event.text)
                self.has_ended = self._search.matched_stop is not None
                passed += [ContentDelta(text)] if text else []
                continue
            if isinstance(event, ToolCallBegin):
                passed += self.release_held_content()
            passed.append(event)
            if isinstance(event, ToolCallEnd) and self._max_calls is not None:
                self.has_ended = event.index + 1 >= self._max_calls
        return passed

    def release_held_content(self) -> list[OutputEvent]:
        """Return content that was held because it could have begun a stop string."""
        text = self._search.release_held_text()
        return [ContentDelta(text)] if text else []


class ParsedStream:
    """An `OutputStream` of a parser that reads text.

    Special tokens give no text, but for those in `visible`: delimiters of the parser's format.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: EventParser,
        visible: Mapping[int, str],
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
        max_calls: int | None = None,
    ) -> None:
        """Begin after a prompt.

        visible: text of special tokens by id.
        max_calls: the output ends after so many tool calls; None: it may have any number.
        """
        self._parser, self._visible = parser, visible
        self._text = TextStream(tokenizer, prompt_token_ids)
        self._filter, self._min_new_tokens = EventFilter(stop, max_calls), min_new_tokens
        self._num_tokens = self.num_reasoning_tokens = 0

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
            self._num_tokens += 1
            marker = self._visible.get(token)
            text = (
                self._text.push([token])
                if marker is None
                else self._text.flush_incomplete_characters() + marker
            )
            events += self._feed(text)
        return events

    def flush(self) -> list[OutputEvent]:
        """Return the rest of the events at the end of the output."""
        if self.has_ended:
            return []
        events = self._feed_text(self._text.flush()) + self._filter_events(self._parser.finish())
        return events if self.has_ended else events + self._filter.release_held_content()

    def _feed(self, text: str) -> list[OutputEvent]:
        """Return the events of one token's text; count the token if it belongs to the reasoning."""
        before = self._parser.in_reasoning
        events = self._feed_text(text)
        self.num_reasoning_tokens += before or self._parser.in_reasoning
        return events

    def _feed_text(self, text: str) -> list[OutputEvent]:
        """Return the events of a piece of text before the end of the output."""
        return self._filter_events(self._parser.feed(text)) if text else []

    def _filter_events(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """Return the events before a stop string and the last allowed call."""
        searches = self._num_tokens > self._min_new_tokens
        return self._filter.filter_events(events, searches_stop=searches)


def special_token_texts_by_id(tokenizer: Tokenizer, texts: Collection[str]) -> dict[int, str]:
    """Return the special tokens of `tokenizer` among `texts`, by id: decoding would drop them."""
    return {
        token_id: token.content
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content in texts
    }
