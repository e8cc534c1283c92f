"""Incremental scanning of text that arrives in pieces: the base of all parsers of this package.

A parser is a generator that yields whenever it needs more text. Its result does not depend on how
the text is cut into pieces, because each decision waits until the text that it needs has come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable
from typing import NoReturn, TypeVar

from jmoe.types import Json

Emit = Callable[[str], None]
T = TypeVar("T")
Steps = Generator[None, None, T]  # yields for more text; returns a T
SPACE = " \t\r\n"


class Trimmer:
    """Passes text on without some leading and trailing characters; trailing ones wait until other
    text follows.

    lead, trail: the characters to leave out at either end.
    """

    def __init__(self, emit: Emit, lead: str = "", trail: str = "") -> None:
        self._emit, self._lead, self._trail = emit, lead, trail
        self._held: list[str] = []

    def push(self, text: str) -> None:
        """Pass text on, but for leading and possibly trailing characters."""
        if self._lead:
            text = text.lstrip(self._lead)
            if text:
                self._lead = ""
        kept = text.rstrip(self._trail) if self._trail else text
        if kept:
            self._emit("".join(self._held) + kept)
            self._held.clear()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def release_held(self) -> None:
        """Pass on the trailing characters that were held back."""
        if self._held:
            self._emit("".join(self._held))
        self._held.clear()

    def strip_before_next(self, lead: str) -> None:
        """Leave out these characters before the next text."""
        self._lead = lead


class Scanner:
    """The text that has come and was not consumed, and the steps by which parsers consume it."""

    def __init__(self) -> None:
        self._text, self._at_end = "", False
        self._recorded: list[str] | None = None  # consumed text since `start_recording`

    def start_recording(self, prefix: str) -> None:
        """Record the text that is consumed from now on, after `prefix`."""
        self._recorded = [prefix]

    def stop_recording(self) -> str:
        """Return the prefix and the text consumed since `start_recording`; record no more."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def emit_until(self, markers: tuple[str, ...], emit: Emit) -> Steps[str]:
        """Emit text as it comes up to the first of `markers`; consume and return the marker, or
        return "" at the end of the output.
        """
        while True:
            at, marker = _first_marker(self._text, markers)
            if marker:
                self._emit_consumed(at, emit)
                return self._consume(len(marker))
            held = 0 if self._at_end else _possible_marker_length(self._text, markers)
            self._emit_consumed(len(self._text) - held, emit)
            if self._at_end:
                return ""
            yield

    def read_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Return (text before the first of `markers`, the marker); the marker is "" at the end."""
        pieces: list[str] = []
        marker = yield from self.emit_until(markers, pieces.append)
        return "".join(pieces), marker

    def consume_if_next(self, marker: str) -> Steps[bool]:
        """Consume `marker` if the text begins with it; return whether it does."""
        while len(self._text) < len(marker) and marker.startswith(self._text) and not self._at_end:
            yield
        if not self._text.startswith(marker):
            return False
        self._consume(len(marker))
        return True

    def skip_characters(self, characters: str = SPACE) -> Steps[str]:
        """Consume leading characters; return the next one, "" at the end of the output."""
        while True:
            self._consume(len(self._text) - len(self._text.lstrip(characters)))
            if self._text or self._at_end:
                return self._text[:1]
            yield

    def emit_json_value(self, emit: Emit, ends: tuple[str, ...] = ()) -> Steps[bool]:
        """Emit one JSON value as it comes; return whether it is complete.

        Follows brackets and quotes alone; the text between them is not checked.

        ends: markers that end the value where they stand outside of strings; not consumed.
        """
        state = _JsonState()
        while True:
            at = state.advance(self._text, ends, self._at_end)
            self._emit_consumed(at, emit)
            if state.is_done or state.is_broken:
                return state.is_done
            if self._at_end:
                return state.is_scalar
            yield

    def read_json_value(self, ends: tuple[str, ...] = ()) -> Steps[Json]:
        """Return the next JSON value, None if it is broken."""
        pieces: list[str] = []
        yield from self.emit_json_value(pieces.append, ends)
        return parse_json("".join(pieces))

    def _consume(self, count: int) -> str:
        """Remove the first `count` characters, record them if asked to, and return them."""
        text, self._text = self._text[:count], self._text[count:]
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def _emit_consumed(self, count: int, emit: Emit) -> None:
        """Consume `count` characters and emit them."""
        if text := self._consume(count):
            emit(text)


def parse_json(text: str) -> Json:
    """Return the JSON value of a text; None if the text is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON lacks."""
    raise ValueError(name)


class _JsonState:
    """Where in a JSON value the text stands.

    is_scalar: the value is a number or a word, which only what follows ends.
    """

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped, self._began = 0, False, False, False
        self.is_done = self.is_broken = self.is_scalar = False

    def advance(self, text: str, ends: Iterable[str], at_end: bool) -> int:
        """Return how many characters of `text` belong to the value; fewer than there are if it is
        done or broken, or if an end marker may begin.
        """
        for at, char in enumerate(text):
            if self._in_string:
                self._step_in_string(char)
            elif any(text.startswith(end, at) for end in ends):
                self.is_broken = not self.is_scalar
                self.is_done = self.is_scalar
                return at
            elif not at_end and any(end.startswith(text[at:]) for end in ends):
                return at
            elif self.is_scalar and char in ",}] \t\r\n":
                self.is_done = True
                return at
            else:
                self._step(char)
            self._began = True
            if self.is_done:
                return at + 1
        return len(text)

    def _step_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.is_done = not self._depth

    def _step(self, char: str) -> None:
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth <= 0
        elif not self._began:
            self.is_scalar = True


def _first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str]:
    """Return (position, marker) of the first marker in the text, the longest of several there;
    (-1, "") without one.
    """
    where = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    at, _, marker = min(where, default=(-1, 0, ""))
    return at, marker


def _possible_marker_length(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the text's longest end that may begin a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0
