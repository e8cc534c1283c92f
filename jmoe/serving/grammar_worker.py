"""The fork's side of `grammar`: computes masks of the tokens that a JSON schema or a grammar allows
next, with llguidance.

This module must not import numpy, whose threads a fork would lack.
"""

import json
import struct
import time
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jmoe.serving.json_whitespace import WHITESPACE

# Forms of grammars: a JSON schema, or llguidance's form of Lark.
SCHEMA, LARK = "schema", "lark"
# A question after the first: number of an output, and the token drawn for it.
TOKEN = struct.Struct("!II")
# Head of an answer: number of an output, seconds taken, kind (mask or error text follows).
MASK, WRONG = b"=", b"!"
HEAD = struct.Struct("!Idc")


class _MatcherSession:
    """The llguidance matchers of one request's outputs."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self._tokens = tokens
        # llguidance's masks have one extra bit, i.e. an extra word if 32 divides the vocab size
        self._mask_bytes = 4 * -(-tokens.vocab_size // 32)
        self._matchers: list[LLMatcher] = []

    def answer(self, question: bytes) -> bytes:
        """Return the packed `HEAD` and the next mask of one output, or an error message.

        The first question is the JSON `{"form": ..., "text": ..., "count": ...}`: a schema or a
        grammar, as `form` says; each later one is a packed `TOKEN`: the number of an output and the
        token drawn for it.
        """
        begun_s = time.perf_counter()
        index = 0
        if not self._matchers:
            try:
                self._begin_matchers(**json.loads(question))
            except ValueError as error:  # e.g. a lone surrogate
                return HEAD.pack(index, 0.0, WRONG) + str(error).encode("utf-8", "replace")
        else:
            index, token = TOKEN.unpack(question)
            self._matchers[index].consume_token(token)
        matcher = self._matchers[index]
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()[: self._mask_bytes]
        wrong = matcher.is_error()
        said = matcher.get_error().encode() if wrong else mask
        return HEAD.pack(index, time.perf_counter() - begun_s, WRONG if wrong else MASK) + said

    def _begin_matchers(self, form: str, text: str, count: int) -> None:
        """Compile a grammar, and make a matcher for each of `count` outputs."""
        grammar = (
            LLMatcher.grammar_from_lark(text)
            if form == LARK
            else LLMatcher.grammar_from_json_schema(
                text, overrides={"whitespace_pattern": WHITESPACE}
            )
        )
        matcher = LLMatcher(
            self._tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # fills caches that the copies inherit
        self._matchers = [matcher, *(matcher.deep_copy() for _ in range(count - 1))]


def make_mask_answerer(
    tokenizer: str, vocab_size: int, eos_token_ids: list[int]
) -> Callable[[bytes], bytes]:
    """Return the function that answers a fork's questions (the `begin` of a `ForkServer`).

    A mask has one bit per token, in 32-bit words.

    tokenizer: the contents of tokenizer.json.
    vocab_size: rows of the model's output layer.
    """
    return _MatcherSession(
        LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)
    ).answer
