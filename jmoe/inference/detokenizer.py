"""Incremental detokenization: text from tokens as they arrive, cut off before a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tokenizers import Tokenizer

# the text that decoders produce for invalid UTF-8, including a character that is not complete yet
REPLACEMENT = "\ufffd"
# The first output is decoded together with this many prompt tokens: decoders strip the leading
# space of a text.
CONTEXT_TOKENS = 5
# Pending tokens are released at this number even if no character is complete: a character has at
# most 4 bytes, so these are invalid.
MAX_PENDING_TOKENS = 16


class TextStream:
    """Decodes output tokens into text; the pieces from `push` and finally `flush` join to the whole
    text.

    Holds back text that may still change: an incomplete character, and an end that may begin a stop
    string. The text ends right before the first complete stop string (of several that end at the
    same character, the longest), however the text is split into tokens; `matched_stop` is then that
    string, and further tokens are ignored. The text of the first `min_new_tokens` tokens is not
    searched.

    `tokenizers.decoders.DecodeStream` does not serve here: it cannot be flushed, waits without
    limit for bytes that never become a character, and raises an error if a run of byte tokens is
    not UTF-8.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._decode: Callable[[list[int]], str] = tokenizer.decode  # special tokens give no text
        self._search, self._min_new_tokens = StopSearch(stop), min_new_tokens
        self._num_tokens = 0
        self._context = list(prompt_token_ids[-CONTEXT_TOKENS:])  # tokens whose text was returned
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []  # tokens whose text was not returned yet

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._search.matched_stop

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete, possibly ""."""
        text = ""
        for token in token_ids:
            if self.matched_stop is not None:
                break
            self._pending.append(token)
            self._num_tokens += 1
            text += self._cut_before_stop(self._decode_pending())
        return text

    def flush(self) -> str:
        """Return the rest of the text at the end of a request; an incomplete character becomes
        U+FFFD.
        """
        if self.matched_stop is not None:
            return ""
        return (
            self._cut_before_stop(self._decode_first_pending(len(self._pending)))
            + self._search.release_held_text()
        )

    def flush_incomplete_characters(self) -> str:
        """Return the text of the pending tokens, before something else such as a special token.

        An incomplete character becomes U+FFFD. Text that may begin a stop string stays held.
        """
        return (
            self._cut_before_stop(self._decode_first_pending(len(self._pending)))
            if self._pending
            else ""
        )

    def _decode_pending(self) -> str:
        """Return the text of the pending tokens, or "" if later tokens could change it."""
        text = self._decode(self._context + self._pending)
        if not text.endswith(REPLACEMENT) and text != self._context_text:
            return self._decode_first_pending(len(self._pending))
        if len(self._pending) >= MAX_PENDING_TOKENS:
            # A character has at most 4 bytes, so an incomplete one begins in the last 3 tokens.
            return self._decode_first_pending(len(self._pending) - 3)
        return ""

    def _decode_first_pending(self, count: int) -> str:
        """Return the text of the first `count` pending tokens; these become the context of later
        ones.
        """
        released, self._pending = self._pending[:count], self._pending[count:]
        text = self._decode(self._context + released)
        if text.startswith(self._context_text):
            text = text[len(self._context_text) :]
        else:  # byte tokens that are valid text alone, but not after the context's
            text = self._decode(released)
        self._context, self._context_text = released, self._decode(released)
        return text

    def _cut_before_stop(self, text: str) -> str:
        """Return the part of held text and `text` before a stop string, or before the start of a
        possible one.
        """
        return (
            text if self._num_tokens <= self._min_new_tokens else self._search.cut_before_stop(text)
        )


class StopSearch:
    """Looks for the first stop string in text that arrives in pieces.

    matched_stop: the stop string that was found, or None.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.matched_stop: str | None = None
        self._state = self._start = _build_stop_automaton(tuple(stop))
        self._held = ""  # text that may begin a stop string

    def cut_before_stop(self, text: str) -> str:
        """Return the part of held text and `text` before a stop string, or before the start of a
        possible one, which is held.
        """
        text, begin = self._held + text, len(self._held)
        state = self._state
        for at in range(begin, len(text)):
            state = state.next_state(text[at])
            if state.match is not None:
                self.matched_stop, self._held = state.match, ""
                return text[: at + 1 - len(state.match)]
        self._state, self._held = state, text[len(text) - state.depth :]
        return text[: len(text) - state.depth]

    def release_held_text(self) -> str:
        """Return the held text, at the end of the text or before a pause in it.

        No stop string spans a pause.
        """
        held, self._held, self._state = self._held, "", self._start
        return held


@dataclass(eq=False)
class _State:
    """A state of the Aho-Corasick automaton: the longest suffix of the text that begins a stop
    string.

    depth: the length of that suffix.
    match: the longest stop string that the text ends with.
    longer: the next state by character.
    shorter: the state of the next shorter suffix (the failure link); None for the root.
    """

    depth: int = 0
    match: str | None = None
    longer: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None

    def next_state(self, char: str) -> _State:
        """Return the state after one more character."""
        state = self
        while (longer := state.longer.get(char)) is None:
            if state.shorter is None:
                return state
            state = state.shorter
        return longer


@lru_cache(maxsize=64)
def _build_stop_automaton(stop: tuple[str, ...]) -> _State:
    """Return the root of an Aho-Corasick automaton of stop strings.

    The cost per character does not grow with the number of strings. Libraries search complete texts
    only; a stream also needs to know whether its end may begin a stop string.
    """
    root = _State()
    for string in stop:
        state = root
        for char in string:
            state = state.longer.setdefault(char, _State(state.depth + 1))
        state.match = string
    states = [root]
    for state in states:  # in the order of their depth
        for char, child in state.longer.items():
            child.shorter = root if state.shorter is None else state.shorter.next_state(char)
            child.match = child.match or child.shorter.match
            states.append(child)
    return root
