"""The parser of one output: reasoning between tags, then content with tool calls. The formats of
calls are its subclasses.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from jmoe.inference.output_events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from jmoe.serving.output_parsers.scanner import SPACE, Emit, Scanner, Steps, Trimmer, parse_json
from jmoe.types import Json, JsonObject

NAME_KEYS, ARGUMENT_KEYS = ("name", "function"), ("arguments", "parameters")
OTHER_KEYS = ("id", "type")
_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around the reasoning of one output.

    is_open: the prompt ends after `begin`. can_begin: the output itself may begin with `begin`.
    """

    begin: str
    end: str
    is_open: bool = False
    can_begin: bool = True


@dataclass(frozen=True)
class ParserSettings:
    """The settings of an output's parser, from a request and its prompt.

    reasoning: None if the model writes no reasoning, or the prompt has closed it.
    parameters: by name of the tool, the JSON schema of its arguments; None: the output has no tool
        calls, whatever it says.
    num_earlier_calls: tool calls in the conversation so far; some formats number calls through.
    """

    reasoning: ReasoningTags | None = None
    parameters: Mapping[str, JsonObject] | None = None
    num_earlier_calls: int = 0


@dataclass
class _Call:
    """A call that has begun. has_arguments: some text of them was emitted."""

    index: int
    has_arguments: bool = field(default=False)


class OutputParser(Scanner):
    """Turns an output's text into events; without a format of calls, all that is no reasoning is
    content.

    `feed` takes the text in any pieces, `finish` ends it; their events join to the same whatever
    the pieces are. A call that is malformed before its name is known stays content; afterwards,
    what the model wrote is its arguments.

    opens: the markers that begin tool calls in content.
    closes_reasoning: whether `opens` end a reasoning that the model has left open.
    markers: special tokens that the format needs to see in the text, other than `opens`.
    """

    opens: ClassVar[tuple[str, ...]] = ()
    closes_reasoning: ClassVar[bool] = False
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: ParserSettings) -> None:
        super().__init__()
        self.settings, self.in_reasoning = settings, False
        self._events: list[OutputEvent] = []
        self._num_calls, self._call = 0, None
        self._ids: set[str] = set()
        has_calls = settings.parameters is not None
        self._opens = self.opens if has_calls else ()
        self._content = Trimmer(self._emit_content, trail=SPACE if self._opens else "")
        self._steps = self._parse()
        self._is_done = False
        tags = settings.reasoning
        if tags is not None and tags.is_open:
            self.in_reasoning = True

    _call: _Call | None

    def feed(self, text: str) -> list[OutputEvent]:
        """Return the events that this text completes."""
        self._text += text
        return self._advance()

    def finish(self) -> list[OutputEvent]:
        """Return the last events at the end of the output."""
        self._at_end = True
        return self._advance()

    def _advance(self) -> list[OutputEvent]:
        """Run the parser until it needs more text; return the new events."""
        if not self._is_done:
            try:
                next(self._steps)
            except StopIteration:
                self._is_done = True
                self.end_call()
                if not self._num_calls:
                    self._content.release_held()
        self._events, events = [], self._events
        return events

    def _parse(self) -> Steps[None]:
        """Parse the whole output."""
        if self.settings.reasoning is not None:
            yield from self._parse_reasoning(self.settings.reasoning)
        yield from self.parse_after_reasoning()
        # a format may stop early; what follows is content
        yield from self.emit_until((), self._content.push)

    def parse_after_reasoning(self) -> Steps[None]:
        """Parse the content and tool calls after the reasoning."""
        while marker := (yield from self.emit_until(self._opens, self._content.push)):
            yield from self._parse_marked_calls(marker)

    def parse_calls(self, marker: str) -> Steps[bool]:
        """Parse the calls that `marker` begins, up to the end of their part of the output; return
        whether all text since the last call, or since `marker`, belongs to the format.
        """
        raise NotImplementedError

    def _parse_marked_calls(self, marker: str) -> Steps[None]:
        """Parse the calls after `marker`; text that is no call becomes content."""
        before = self._num_calls
        self.start_recording(marker)
        is_format = yield from self.parse_calls(marker)
        self.end_call()
        if self._num_calls > before:
            self._content.strip_before_next(SPACE)
        said = self.stop_recording()
        if not is_format:
            self._content.push(said)

    def _parse_reasoning(self, tags: ReasoningTags) -> Steps[None]:
        """Parse the reasoning that the output begins with, if there is one."""
        self.start_recording("")
        yield from self.skip_characters()
        begins = (yield from self.consume_if_next(tags.begin)) if tags.can_begin else False
        said = self.stop_recording()
        if not (begins or tags.is_open):
            self._content.push(said)
            return
        self.in_reasoning = True
        reasoning = Trimmer(self._emit_reasoning, lead="\n", trail="\n")
        ends = (tags.end, *(self._opens if self.closes_reasoning else ()))
        if not begins:
            reasoning.push(said)
        marker = yield from self.emit_until(ends, reasoning.push)
        self.in_reasoning = not marker
        self._content.strip_before_next("\n")
        if marker and marker != tags.end:
            yield from self._parse_marked_calls(marker)

    # what formats call

    def is_function_name(self, text: Json) -> bool:
        """Return whether `text` may name a function; a call with another name stays content."""
        return isinstance(text, str) and _NAME.fullmatch(text) is not None

    def is_requested_tool(self, text: Json) -> bool:
        """Return whether `text` is the name of one of the request's tools."""
        return isinstance(text, str) and text in (self.settings.parameters or {})

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call, and end the one before it. call_id: replaced if an earlier call has it."""
        self.end_call()
        self._call = _Call(self._num_calls)
        self._num_calls += 1
        if not call_id or call_id in self._ids:
            call_id = self.make_call_id(self._call.index, name)
        self._ids.add(call_id)
        self._events.append(ToolCallBegin(self._call.index, call_id, name))

    def make_call_id(self, index: int, name: str) -> str:
        """Return the id of a call to which the model gives none."""
        return f"call_{secrets.token_hex(12)}"

    def emit_arguments(self, text: str) -> None:
        """Add text to the arguments of the current call."""
        if text:
            assert self._call is not None
            self._call.has_arguments = True
            self._events.append(ToolCallArguments(self._call.index, text))

    def end_call(self) -> None:
        """End the current call, if any; one without arguments gets an empty object."""
        if self._call is not None:
            if not self._call.has_arguments:
                self.emit_arguments("{}")
            self._events.append(ToolCallEnd(self._call.index))
            self.start_recording("")
        self._call = None

    def parse_json_call(self, ends: tuple[str, ...] = ()) -> Steps[bool]:
        """Parse a call that is a JSON object with a name and arguments, in any order; return
        whether it is complete. It begins the call once its name is known.

        ends: markers that end the call where they stand outside of strings; not consumed.
        """
        if not (yield from self.consume_if_next("{")):
            return False
        call_id: str | None = None
        before, arguments = self._num_calls, list[str]()
        while (next_char := (yield from self.skip_characters(SPACE + ","))) == '"':
            key = yield from self.read_json_value(ends)
            yield from self.skip_characters()
            if not (yield from self.consume_if_next(":")):
                return False
            next_char = yield from self.skip_characters()
            begun = self._num_calls > before
            if key in NAME_KEYS and not begun:
                name = yield from self.read_json_value(ends)
                if not self.is_function_name(name):
                    return False
                assert isinstance(name, str)
                self.begin_call(name, call_id)
                self.emit_arguments("".join(arguments))
            elif key in ARGUMENT_KEYS:
                emit = self.emit_arguments if begun else arguments.append
                if not (yield from self._emit_json_arguments(next_char, emit, ends)):
                    return False
            elif begun or key in OTHER_KEYS:
                value = yield from self.read_json_value(ends)
                call_id = value if key == "id" and isinstance(value, str) else call_id
            else:
                return False
        return (yield from self.consume_if_next("}")) and self._num_calls > before

    def _emit_json_arguments(self, first: str, emit: Emit, ends: tuple[str, ...]) -> Steps[bool]:
        """Emit the arguments, an object or, as some models write it, an object in a string."""
        if first != '"':
            return (yield from self.emit_json_value(emit, ends))
        pieces: list[str] = []
        is_whole = yield from self.emit_json_value(pieces.append, ends)
        written = parse_json(text := "".join(pieces))
        emit(written if isinstance(written, str) else text)
        return is_whole

    def _emit_content(self, text: str) -> None:
        """Add text to the answer's content."""
        self._events.append(ContentDelta(text))

    def _emit_reasoning(self, text: str) -> None:
        """Add text to the reasoning."""
        self._events.append(ReasoningDelta(text))
