"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders make of bytes that are not UTF-8, also of a character not yet complete
# Prompt tokens that the first text is decoded behind: decoders strip the first space of a text.
CONTEXT_TOKENS = 5
# So many tokens without a complete character at their end are no character: one has at most 4 bytes.
MAX_PENDING_TOKENS = 16


class Detokenizer:
    """Makes text streams with one tokenizer. skip_special_tokens: special tokens give no text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of whole sequences."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)
        return text

    def stream(
        self, prompt_token_ids: Sequence[int] = (), *, stop: Sequence[str] = (), min_new_tokens: int = 0
    ) -> TextStream:
        """A stream for the output that follows `prompt_token_ids`."""
        return TextStream(self, prompt_token_ids, stop, min_new_tokens)


class TextStream:
    """One request's text, piece by piece: what `push` and at last `flush` return, joined, is the whole of it.

    Text that may still change is held back: a character of which bytes are missing, and an end that could be the
    beginning of a stop string. At a stop string the text ends, right before it; `matched_stop` is that string, and
    further tokens are ignored. Of several it is the one that is complete first, then the longest, so the text does
    not depend on how it is cut into tokens. The text of the first `min_new_tokens` tokens is not searched.

    (`tokenizers.decoders.DecodeStream` cannot be flushed, waits without limit for bytes that never become a character,
    and raises an error where a run of byte tokens turns out not to be text.)
    """

    def __init__(
        self, detokenizer: Detokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str], min_new_tokens: int
    ) -> None:
        self.matched_stop: str | None = None
        self._decode = detokenizer.decode
        self._stop, self._min_new_tokens = tuple(stop), min_new_tokens
        self._num_tokens = 0
        self._context = list(prompt_token_ids[-CONTEXT_TOKENS:])  # tokens whose text is out already
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []  # tokens whose text is not
        self._held = ""  # text that could be the beginning of a stop string

    def push(self, token_ids: Iterable[int]) -> str:
        """The new text after these tokens, possibly empty."""
        text = ""
        for token in token_ids:
            if self.matched_stop is not None:
                break
            self._pending.append(token)
            self._num_tokens += 1
            text += self._search(self._decode_pending())
        return text

    def flush(self) -> str:
        """The rest of the text: the request has ended. An incomplete character becomes U+FFFD."""
        if self.matched_stop is not None:
            return ""
        text = self._search(self._release(len(self._pending)))
        held, self._held = self._held, ""
        return text + held

    def _decode_pending(self) -> str:
        """Text of the pending tokens that later ones cannot change."""
        text = self._decode(self._context + self._pending)
        if not text.endswith(REPLACEMENT) and text != self._context_text:
            return self._release(len(self._pending))
        if len(self._pending) >= MAX_PENDING_TOKENS:
            # A character that the last 3 tokens can still complete begins in them: 4 bytes would be complete.
            return self._release(len(self._pending) - 3)
        return ""

    def _release(self, count: int) -> str:
        """Text of the first `count` pending tokens, which become the context of the others."""
        released, self._pending = self._pending[:count], self._pending[count:]
        text = self._decode(self._context + released)
        if text.startswith(self._context_text):
            text = text[len(self._context_text) :]
        else:  # byte tokens with others before them that were text, and together are not
            text = self._decode(released)
        self._context, self._context_text = released, self._decode(released)
        return text

    def _search(self, text: str) -> str:
        """`text` behind what was held back: what can go out, up to a stop string or the possible beginning of one."""
        text = self._held + text
        self._held = ""
        if not self._stop or self._num_tokens <= self._min_new_tokens:
            return text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched_stop = min(found)
            return text[:at]
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
