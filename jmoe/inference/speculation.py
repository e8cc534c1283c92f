"""Drafts of a sequence's next tokens: by prompt lookup, or from a prediction layer.

Prompt lookup needs no model. Where the latest tokens occur earlier in the sequence, the tokens that
followed them there are the draft. One step runs the draft behind the latest token, and samples a
token after each. A drafted token that equals the one sampled in its place is accepted, so a step
adds up to one token more than it drafts; the others are dropped. Tokens thus are sampled as without
drafts, at the same positions from the same logits, save for rounding in programs of another width.

Texts that repeat what they were given gain most: edits of code, extracts, summaries, JSON. As
vLLM's `ngram` method and llama.cpp's lookup decoding, this takes the longest run of tokens first;
as llama.cpp's, its last occurrence. Source: https://github.com/apoorvumang/prompt-lookup-decoding

`Scheduler` calls the drafters. Imports the standard library alone.
"""

from __future__ import annotations

from array import array
from typing import Protocol

ITEM = array("i").itemsize  # bytes of a token
MAX_PAUSE = 32  # tokens
MISS_PAUSE = 3  # tokens
# places between two tokens whose bytes equal those looked up; a prompt can be made of such places
MAX_FALSE_MATCHES = 64


class Drafter(Protocol):
    """Drafts the next tokens of one sequence; `Scheduler` asks it before each step."""

    def is_paused(self, num_tokens: int) -> bool:
        """Return whether nothing is drafted for a sequence of this many tokens."""

    def draft_tokens(self, prompt: list[int], output: list[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that may follow prompt and output; [] for none."""

    def record_acceptance(self, num_tokens: int, drafted: int, accepted: int) -> None:
        """Record how many tokens of a draft were accepted, in a sequence that now has
        `num_tokens`.
        """

    def pause_after_miss(self, num_tokens: int) -> None:
        """Record that a sequence of `num_tokens` got no draft."""


class PredictedDraft:
    """Holds the draft that a prediction layer (`token_prediction.py`) has computed."""

    def __init__(self) -> None:
        self._num_tokens, self._draft = 0, list[int]()

    def offer(self, num_tokens: int, draft: list[int]) -> None:
        """Set the draft for a sequence of `num_tokens`, in place of earlier ones."""
        self._num_tokens, self._draft = num_tokens, draft

    def is_paused(self, num_tokens: int) -> bool:
        """Return False: a step must not begin before its draft is known."""
        return False

    def draft_tokens(self, prompt: list[int], output: list[int], max_tokens: int) -> list[int]:
        """Return the first `max_tokens` tokens of the draft; [] if it is of another length of the
        sequence.
        """
        is_current = len(prompt) + len(output) == self._num_tokens
        return self._draft[: max(0, max_tokens)] if is_current else []

    def record_acceptance(self, num_tokens: int, drafted: int, accepted: int) -> None:
        """Change nothing: the layer runs after every step anyway."""

    def pause_after_miss(self, num_tokens: int) -> None:
        """Change nothing: the next step has a draft again."""


class PromptLookup:
    """Drafts the next tokens of one sequence from its earlier ones.

    It backs off by itself. After a draft of which not every token was accepted, the next one is as
    long as the accepted part; after one that was accepted, twice as long. After each further draft
    without an accepted token it waits for twice as many tokens, up to `MAX_PAUSE`.
    """

    def __init__(self, max_draft_tokens: int, longest_match: int, shortest_match: int) -> None:
        """Start without tokens.

        longest_match, shortest_match: numbers of latest tokens that are looked up, the longest
            first.
        """
        self._max_tokens = max_draft_tokens
        self._sizes = range(longest_match, shortest_match - 1, -1)
        self._tokens = bytearray()
        self._length = max_draft_tokens
        self._pause = 0
        self._resume_at = 0

    def is_paused(self, num_tokens: int) -> bool:
        """Return whether nothing is drafted for a sequence of this many tokens."""
        return num_tokens < self._resume_at

    def draft_tokens(self, prompt: list[int], output: list[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that may follow prompt and output; [] for none.

        prompt, output: those of the last call, or longer.
        """
        num_tokens, length = len(prompt) + len(output), min(max_tokens, self._length)
        if length < 1 or self.is_paused(num_tokens):
            return []
        done = len(self._tokens) // ITEM
        new = prompt[done:] + output[max(0, done - len(prompt)) :]
        self._tokens += array("i", new).tobytes()
        start = self._find_continuation()
        if start is None:
            return []
        following = array("i", self._tokens[start : start + length * ITEM])
        # what goes on to the end repeats itself, and may go on so
        return [following[i % len(following)] for i in range(length)]

    def record_acceptance(self, num_tokens: int, drafted: int, accepted: int) -> None:
        """Set the next draft's length, and a pause before it, by how many tokens were accepted.

        num_tokens: of the sequence after the step.
        """
        if accepted == drafted:
            self._length = min(2 * drafted, self._max_tokens)
        else:
            self._length = max(1, accepted)
        self._pause = 0 if accepted else min(2 * self._pause + 1, MAX_PAUSE)
        self._resume_at = num_tokens + self._pause

    def pause_after_miss(self, num_tokens: int) -> None:
        """Draft nothing for the next `MISS_PAUSE` tokens, so that steps can begin ahead.

        num_tokens: of the sequence after the step, for which nothing was drafted.
        """
        self._resume_at = max(self._resume_at, num_tokens + MISS_PAUSE)

    def _find_continuation(self) -> int | None:
        """Return the byte behind the last earlier occurrence of the latest tokens, or None."""
        tokens, end = self._tokens, len(self._tokens)
        for size in self._sizes:
            latest = tokens[end - size * ITEM :]
            if len(latest) < size * ITEM:
                continue
            before = end - ITEM
            for _ in range(MAX_FALSE_MATCHES + 1):
                at = tokens.rfind(latest, 0, before)
                if at < 0:
                    break
                if at % ITEM == 0:
                    return at + len(latest)
                before = at + len(latest) - 1  # between two tokens: search further on the left
        return None
