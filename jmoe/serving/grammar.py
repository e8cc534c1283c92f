"""Answers that follow a JSON schema: llguidance says which tokens may come next."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from jmoe.config import check

# Between the tokens of JSON: room for lines and indentation, but not for a model to go on with for ever.
MAX_SCHEMA_BYTES = 64 << 10
WHITESPACE = r"\n? {0,32}"


class JsonConstraint:
    """The `Constraint` of one output. error: why the matcher gave up; the output then ends, and is not to be used."""

    def __init__(self, matcher: LLMatcher, eos_token_id: int) -> None:
        self._matcher, self._eos_token_id = matcher, eos_token_id
        self.error = ""

    def fill(self, words_W: np.ndarray) -> None:
        fill_next_token_bitmask(self._matcher, words_W[None])
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            words_W[:] = 0
            word, bit = divmod(self._eos_token_id, 32)
            words_W[word] = np.uint32(1 << bit).astype(np.int32)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class Grammars:
    """Makes constraints for one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)

    def constraints(self, schema: dict[str, Any], count: int) -> list[JsonConstraint]:
        """Return one for each of `count` outputs; `ValueError` for a schema that cannot be followed."""
        check(bool(self._eos_token_ids), "response_format", "json_schema", "the model has no end-of-text token")
        text = json.dumps(schema)
        constraint = f"must have at most {MAX_SCHEMA_BYTES} bytes"
        check(len(text) <= MAX_SCHEMA_BYTES, "len(response_format.json_schema)", len(text), constraint)
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
        matcher = LLMatcher(self._tokens, grammar)
        if matcher.is_error():
            raise ValueError(f"response_format.json_schema: {matcher.get_error()}")
        return [JsonConstraint(matcher.deep_copy(), self._eos_token_ids[0]) for _ in range(count)]
