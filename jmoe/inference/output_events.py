"""The events of a chat's output: reasoning, content and tool calls; and the protocol of the streams
that turn tokens into these events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ContentDelta:
    """Text that is added to the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """Text that is added to the reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A tool call begins; index: its number in the output, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """Text that is added to the arguments of a call: a piece of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A tool call is complete, or the output has ended inside it."""

    index: int


OutputEvent = ContentDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallEnd


class OutputStream(Protocol):
    """Turns the tokens of one output into events.

    num_reasoning_tokens: tokens so far that belong to the reasoning, its delimiters included.
    """

    num_reasoning_tokens: int

    @property
    def has_ended(self) -> bool:
        """Whether the stream wants no more tokens: a stop string has come, or the last call that
        the request allows is complete.
        """

    @property
    def matched_stop(self) -> str | None:
        """The stop string that has come, or None."""

    def push(self, token_ids: Iterable[int]) -> list[OutputEvent]:
        """Return what these tokens complete, in order."""

    def flush(self) -> list[OutputEvent]:
        """Return the rest at the end of the output; every call that has begun then ends."""


# (prompt's token ids, stop strings of the content, number of tokens that are not searched for them)
OpenStream = Callable[[list[int], tuple[str, ...], int], OutputStream]


def join_content(events: Iterable[OutputEvent]) -> str:
    """Return the answer's text in `events`."""
    return "".join(event.text for event in events if isinstance(event, ContentDelta))
