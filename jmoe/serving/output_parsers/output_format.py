"""The format of one model's answers: which parser reads them, chosen when the server starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from tokenizers import Tokenizer

from jmoe.config import check
from jmoe.inference.harmony import ChannelStream, HarmonyTokens
from jmoe.inference.output_events import OpenStream
from jmoe.inference.parsed_stream import ParsedStream, special_token_texts_by_id
from jmoe.serving.output_parsers.formats import (
    AUTO,
    HARMONY,
    NONE,
    OPENAI,
    REASONING_FORMATS,
    TOOL_FORMATS,
    detect_reasoning_format,
    detect_tool_format,
    marker_texts_of_parsers,
    reasoning_tags_after_prompt,
)
from jmoe.serving.output_parsers.grammars import CallGrammar, GrammarWriter
from jmoe.serving.output_parsers.parser import OutputParser, ParserSettings, ReasoningTags


@dataclass(frozen=True)
class OutputFormat:
    """The formats of a model's tool calls and reasoning.

    tool_format, reasoning_format: rows of `TOOL_FORMATS` and `REASONING_FORMATS`, or `NONE`.
    template: the text of the model's chat templates.
    harmony: gpt-oss's special tokens; None for other models.
    """

    tokenizer: Tokenizer
    tool_format: str
    reasoning_format: str
    template: str
    harmony: HarmonyTokens | None = None

    @classmethod
    def choose(
        cls, tokenizer: Tokenizer, template: str, tool_parser: str, reasoning_parser: str
    ) -> Self:
        """Return the format of reasoning and tool calls.

        tool_parser, reasoning_parser: the options' values; AUTO takes what the chat template shows,
        NONE if it shows nothing. A tokenizer with the special tokens of gpt-oss's channels has the
        format of gpt-oss. Raises ValueError if an option contradicts that.
        """
        harmony = HarmonyTokens.detect(tokenizer)
        for name, value, own in (
            ("tool_parser", tool_parser, OPENAI),
            ("reasoning_parser", reasoning_parser, HARMONY),
        ):
            if harmony is None:
                words = "must be another: the tokenizer lacks gpt-oss's special tokens"
                check(value != own, name, value, words)
            else:
                words = f"must be {AUTO} or {own}: the tokenizer has gpt-oss's channels"
                check(value in (AUTO, own), name, value, words)
        if harmony is not None:
            return cls(tokenizer, OPENAI, HARMONY, template, harmony)
        tools = detect_tool_format(template) if tool_parser == AUTO else tool_parser
        tools = NONE if tools == OPENAI else tools
        reasoning = reasoning_parser
        if reasoning == AUTO:
            reasoning = detect_reasoning_format(template, tools)
            reasoning = NONE if reasoning == HARMONY else reasoning
        return cls(tokenizer, tools, reasoning, template)

    def __str__(self) -> str:
        return (
            f"tool calls: {self.tool_format}, reasoning: {self.reasoning_format}"
            " (--tool-parser and --reasoning-parser choose others)"
        )

    @property
    def tags(self) -> ReasoningTags | None:
        """The tags around reasoning; None without, or with channels."""
        return REASONING_FORMATS.get(self.reasoning_format)

    def reads_variable(self, name: str) -> bool:
        """Return whether the chat templates name a variable; a key or attribute is none."""
        return re.search(rf"(?<![\w.'\"]){name}(?!\w)", self.template) is not None

    @cached_property
    def _parser_class(self) -> type[OutputParser]:
        """The parser of the model's tool calls; one without calls if they have no format."""
        row = TOOL_FORMATS.get(self.tool_format)
        return OutputParser if row is None or row.parser is None else row.parser

    @property
    def call_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reasoning because they begin calls; () where `tags` alone end it."""
        opens = self._parser_class.opens if self._parser_class.closes_reasoning else ()
        ids = map(self.tokenizer.token_to_id, opens)
        return tuple(token for token in ids if token is not None)

    @cached_property
    def _visible_token_texts(self) -> dict[int, str]:
        """Texts of the special tokens that the parser reads, by id."""
        texts = marker_texts_of_parsers([self._parser_class], self.tags)
        return special_token_texts_by_id(self.tokenizer, texts)

    def write_grammar(self, call_grammar: CallGrammar) -> str:
        """Return the grammar of outputs with tool calls, for llguidance. Raises ValueError as
        `GrammarWriter.write`.
        """
        return GrammarWriter(self.tokenizer, self.template, self.tool_format).write(call_grammar)

    def open_stream(
        self, prompt: str, settings: ParserSettings, max_calls: int | None
    ) -> OpenStream:
        """Return what opens the streams of the outputs after a prompt.

        prompt: its text.
        settings: those of the request; the tags of the reasoning come from this format.
        max_calls: the output ends after so many tool calls; None: it may have any number.
        """
        tags = self.tags and reasoning_tags_after_prompt(self.tags, prompt)
        settings = replace(settings, reasoning=tags)

        def open_channels(
            prompt_ids: Sequence[int], stop: tuple[str, ...], min_new_tokens: int
        ) -> ChannelStream:
            assert self.harmony is not None
            return ChannelStream(
                self.tokenizer,
                self.harmony,
                prompt_ids,
                stop=stop,
                min_new_tokens=min_new_tokens,
                has_tools=settings.parameters is not None,
                max_calls=max_calls,
            )

        def open_text(
            prompt_ids: Sequence[int], stop: tuple[str, ...], min_new_tokens: int
        ) -> ParsedStream:
            return ParsedStream(
                self.tokenizer,
                self._parser_class(settings),
                self._visible_token_texts,
                prompt_ids,
                stop=stop,
                min_new_tokens=min_new_tokens,
                max_calls=max_calls,
            )

        return open_text if self.harmony is None else open_channels
