"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tokenizers import Tokenizer

# what decoders make of bytes that are not UTF-8, also of a character not yet complete
REPLACEMENT = "\ufffd"
# Prompt tokens that the first text is decoded behind: decoders strip the first space of a text.
CONTEXT_TOKENS = 5
# So many tokens without a complete character at their end are no character: one has at most 4
# bytes.
MAX_PENDING_TOKENS = 16


class TextStream:
    """The text after a prompt, piece by piece: what `push` and at last `flush` return, joined, is
    all of it.

    Text that may still change is held back: a character of which bytes are missing, and an end that
    could be the beginning of a stop string. At a stop string the text ends, right before it;
    `matched_stop` is that string, and further tokens are ignored. Of several it is the one that is
    complete first, then the longest, so the text does not depend on how it is cut into tokens. The
    text of the first `min_new_tokens` tokens is not searched.

    (`tokenizers.decoders.DecodeStream` cannot be flushed, waits without limit for bytes that never
    become a character, and raises an error where a run of byte tokens turns out not to be text.)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self.matched_stop: str | None = None
        self._decode: Callable[[list[int]], str] = tokenizer.decode  # special tokens give no text
        self._state, self._min_new_tokens = _automaton(tuple(stop)), min_new_tokens
        self._num_tokens = 0
        self._context = list(prompt_token_ids[-CONTEXT_TOKENS:])  # tokens whose text is out already
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []  # tokens whose text is not
        self._held = ""  # text that could be the beginning of a stop string

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the new text after these tokens, possibly empty."""
        text = ""
        for token in token_ids:
            if self.matched_stop is not None:
                break
            self._pending.append(token)
            self._num_tokens += 1
            text += self._search(self._decode_pending())
        return text

    def flush(self) -> str:
        """Return the rest of the text: the request has ended. An incomplete character becomes
        U+FFFD.
        """
        if self.matched_stop is not None:
            return ""
        text = self._search(self._release(len(self._pending)))
        held, self._held = self._held, ""
        return text + held

    def _decode_pending(self) -> str:
        """Return text of the pending tokens that later ones cannot change."""
        text = self._decode(self._context + self._pending)
        if not text.endswith(REPLACEMENT) and text != self._context_text:
            return self._release(len(self._pending))
        if len(self._pending) >= MAX_PENDING_TOKENS:
            # A character that the last 3 tokens can still complete begins in them: 4 bytes would be
            # complete.
            return self._release(len(self._pending) - 3)
        return ""

    def _release(self, count: int) -> str:
        """Return text of the first `count` pending tokens, which become the context of the
        others.
        """
        released, self._pending = self._pending[:count], self._pending[count:]
        text = self._decode(self._context + released)
        if text.startswith(self._context_text):
            text = text[len(self._context_text) :]
        else:  # byte tokens with others before them that were text, and together are not
            text = self._decode(released)
        self._context, self._context_text = released, self._decode(released)
        return text

    def _search(self, text: str) -> str:
        """Return what can go out of held text and `text`, up to a stop string or the possible
        beginning of one.
        """
        if self._num_tokens <= self._min_new_tokens:
            return text
        text, begin = self._held + text, len(self._held)
        state = self._state
        for at in range(begin, len(text)):
            state = state.after(text[at])
            if state.match is not None:
                self.matched_stop, self._held = state.match, ""
                return text[: at + 1 - len(state.match)]
        self._state, self._held = state, text[len(text) - state.depth :]
        return text[: len(text) - state.depth]


@dataclass(eq=False)
class _State:
    """The longest end of a text that a stop string begins with.

    match: the longest stop string that the text ends with. shorter: the next shorter such end;
    None: of the empty one.
    """

    depth: int = 0
    match: str | None = None
    longer: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None

    def after(self, char: str) -> _State:
        state = self
        while (longer := state.longer.get(char)) is None:
            if state.shorter is None:
                return state
            state = state.shorter
        return longer


@lru_cache(maxsize=64)
def _automaton(stop: tuple[str, ...]) -> _State:
    """Build Aho and Corasick's automaton: what a character costs does not grow with the number of
    strings.

    The libraries that have one search whole texts; here a text goes on, and its end may be the
    beginning of a string.
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
            child.shorter = root if state.shorter is None else state.shorter.after(char)
            child.match = child.match or child.shorter.match
            states.append(child)
    return root
