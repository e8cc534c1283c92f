"""Compute, in a fork, the masks of tokens that a JSON schema allows next, by llguidance.

The module imports no numpy, whose threads a fork could not have.
"""

import json
import struct
import time
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# between the tokens of JSON: for lines and indentation, but nothing to go on with for ever
WHITESPACE = r"\n? {0,32}"
# A question after the first: the number of an output, and the token that has come next.
TOKEN = struct.Struct("!II")
# An answer: the number of an output, how long it took, and a mask, or what is wrong.
MASK, WRONG = b"=", b"!"
HEAD = struct.Struct("!Idc")


class _Session:
    """The matchers of one request's outputs."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self._tokens = tokens
        # llguidance's masks have a bit more than there are tokens: a word where 32 divides these
        self._mask_bytes = 4 * -(-tokens.vocab_size // 32)
        self._matchers: list[LLMatcher] = []

    def answer(self, question: bytes) -> bytes:
        """Begin with {"schema": ..., "count": ...}; then take in a token of an output, and say
        what may follow.
        """
        begun_s = time.perf_counter()
        index = 0
        if not self._matchers:
            try:
                self._begin(**json.loads(question))
            except ValueError as error:  # half of a surrogate pair, say
                return HEAD.pack(index, 0.0, WRONG) + str(error).encode("utf-8", "replace")
        else:
            index, token = TOKEN.unpack(question)
            self._matchers[index].consume_token(token)
        matcher = self._matchers[index]
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()[: self._mask_bytes]
        wrong = matcher.is_error()
        said = matcher.get_error().encode() if wrong else mask
        return HEAD.pack(index, time.perf_counter() - begun_s, WRONG if wrong else MASK) + said

    def _begin(self, schema: str, count: int) -> None:
        grammar = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE}
        )
        matcher = LLMatcher(
            self._tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # the copies begin with what it has found out
        self._matchers = [matcher, *(matcher.deep_copy() for _ in range(count - 1))]


def begin_masks(
    tokenizer: str, vocab_size: int, eos_token_ids: list[int]
) -> Callable[[bytes], bytes]:
    """Return what a fork answers: masks of a bit a token, in words of 32.

    tokenizer: the contents of tokenizer.json.
    """
    return _Session(LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)).answer
