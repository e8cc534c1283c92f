"""Grammars of outputs in a model's own format, for llguidance: calls of tools, whose arguments
follow the tools' JSON schemas, beside or in place of an answer.

Source: https://github.com/guidance-ai/llguidance (docs/syntax.md)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from jmoe.config import check
from jmoe.serving.grammar import MAX_GRAMMAR_BYTES
from jmoe.serving.json_whitespace import WHITESPACE
from jmoe.serving.output_parsers import deepseek, hermes, keyed, kimi, mistral
from jmoe.serving.output_parsers.formats import OPENAI
from jmoe.serving.output_parsers.keyed import allows_only_strings
from jmoe.types import Json, JsonObject

# keys by which a schema limits a string; text without quotes can follow none of them
STRING_LIMITS = ("pattern", "format", "minLength", "maxLength")


@dataclass(frozen=True)
class CallGrammar:
    """The rules for an output with tool calls.

    schemas: JSON schemas of arguments by the names of the functions that may be called, at least
        one.
    required: the output is calls alone. Otherwise it may be text, with calls anywhere, or an answer
        by `answer_schema` in place of calls.
    several: more than one call is allowed.
    answer_schema: the JSON schema of an answer; None: any text.
    """

    schemas: Mapping[str, JsonObject]
    required: bool
    several: bool
    answer_schema: JsonObject | None = None


class GrammarWriter:
    """Writes the grammar of one request. `quote_terms` writes text as tokens of the model."""

    def __init__(self, tokenizer: Tokenizer, template: str, tool_format: str) -> None:
        """template: the text of the chat template, which tells variants of a format apart."""
        self._template, self._tool_format = template, tool_format
        self._added = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        by_length = sorted(self._added, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, by_length)) or "(?!)")
        self._rules: list[str] = []
        self._size = 0  # of the rules for schemas

    def write(self, call_grammar: CallGrammar) -> str:
        """Return the grammar in llguidance's form of Lark.

        Raises ValueError for a schema that the format cannot follow, for too long a grammar,
        and if calls begin with a text that is no token where text may come before them.
        """
        self._rules, self._size = ["TEXT: /(?s:.*)/"], 0
        if self._tool_format == OPENAI:
            start = self._write_harmony_messages(call_grammar)
        else:
            start = self._write_calls_and_text(call_grammar)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _write_calls_and_text(self, call_grammar: CallGrammar) -> str:
        """Add the rules for calls in the model's format; return the terms of the whole output."""
        begin, calls, between, end = _LAYOUTS[self._tool_format](self, call_grammar.schemas)
        self._rules.append("call: " + " | ".join(calls))
        more = f"({self.quote_terms(between)} call)*" if call_grammar.several else ""
        self._rules.append(f"calls: {self.quote_terms(begin)} call {more} {self.quote_terms(end)}")
        if call_grammar.required:
            return "calls"
        if call_grammar.answer_schema is not None:
            return f"calls | {self.add_json_rule(call_grammar.answer_schema)}"
        marker = _MARKERS.get(self._tool_format)
        if marker is None:  # Llama: an answer that begins like a call is one
            self._rules.append("ANSWER: /[^{](?s:.*)/")
            return "calls | ANSWER"
        words = "must be false: the model's tokenizer has no such token, by which calls are known"
        check(marker in self._added, f"tools: strict, with {marker}", True, words)
        return f"TEXT (calls TEXT){'*' if call_grammar.several else '?'}"

    def _write_harmony_messages(self, call_grammar: CallGrammar) -> str:
        """Return the terms of gpt-oss's messages after `<|start|>assistant`: one call at most,
        which ends the turn.
        """
        head = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        calls = [
            f"{self.quote_terms(head.replace('NAME', name))} {self.add_arguments_rule(schema)}"
            for name, schema in call_grammar.schemas.items()
        ]
        end = self.quote_terms("<|end|><|start|>assistant")
        self._rules.append(
            f'thought: {self.quote_terms("<|channel|>")} ("analysis" | "commentary")'
            f" {self.quote_terms('<|message|>')} TEXT {end}"
        )
        self._rules.append("call: " + " | ".join(calls))
        if call_grammar.required:
            return "thought* call"
        schema = call_grammar.answer_schema
        answer = "TEXT" if schema is None else self.add_json_rule(schema)
        return f"thought* (call | {self.quote_terms('<|channel|>final<|message|>')} {answer})"

    def quote_terms(self, text: str) -> str:
        """Return the grammar's terms for `text`: ids of control tokens, and quoted text."""
        terms, at = list[str](), 0
        for match in self._tokens.finditer(text):
            terms += [json.dumps(text[at : match.start()])] if match.start() > at else []
            terms.append(f"<[{self._added[match[0]]}]>")
            at = match.end()
        return " ".join(terms + ([json.dumps(text[at:])] if at < len(text) else []))

    def add_json_rule(self, schema: Json) -> str:
        """Return the name of a new rule for JSON values of a schema."""
        if schema in ({}, True) or not isinstance(schema, dict):
            schema = {}
        limited = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return self._add_rule(f"%json {json.dumps(limited)}")

    def add_arguments_rule(self, schema: JsonObject) -> str:
        """Return the name of a new rule for the JSON object of a call's arguments."""
        return self.add_json_rule({"type": "object", **schema})

    def terms_up_to(self, end: str) -> str:
        """Return the terms of any text followed by `end`."""
        if end in self._added:
            return f"TEXT {self.quote_terms(end)}"
        return self._add_rule(f"/(?s:.*)/ {json.dumps(end)}", "[lazy]")

    def template_contains(self, text: str) -> bool:
        """Return whether the model's chat template contains `text`."""
        return text in self._template

    def _add_rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name. Raises ValueError once the rules are too long."""
        self._size += len(body)
        words = f"must have at most {MAX_GRAMMAR_BYTES} bytes"
        check(self._size <= MAX_GRAMMAR_BYTES, "len(tools)", self._size, words)
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name


# (text before the first call, terms of each tool's call, text between calls, text after the last)
Layout = tuple[str, list[str], str, str]


def _json_layout(
    head: str, tail: str, begin: str = "", between: str = "", end: str = ""
) -> Callable[[GrammarWriter, Mapping[str, JsonObject]], Layout]:
    """Return the layout of calls that are JSON arguments between `head`, with `NAME` for the
    function's name, and `tail`.
    """

    def lay_out(writer: GrammarWriter, schemas: Mapping[str, JsonObject]) -> Layout:
        calls = [
            f"{writer.quote_terms(head.replace('NAME', name))} {writer.add_arguments_rule(schema)}"
            f" {writer.quote_terms(tail)}"
            for name, schema in schemas.items()
        ]
        return begin, calls, between, end

    return lay_out


def _mistral_layout(writer: GrammarWriter, schemas: Mapping[str, JsonObject]) -> Layout:
    """Return the layout of Mistral's calls, in the form that the chat template shows."""
    if writer.template_contains(mistral.ARGUMENTS):
        head = f"{mistral.BEGIN}NAME{mistral.ARGUMENTS}"
        return _json_layout(head, "")(writer, schemas)
    inner = '{"name": "NAME", "arguments": ', "}"
    return _json_layout(*inner, f"{mistral.BEGIN} [", ", ", "]")(writer, schemas)


def _kimi_layout(writer: GrammarWriter, schemas: Mapping[str, JsonObject]) -> Layout:
    """Return the layout of Kimi's calls, whose ids have the function's name and a number."""
    calls = [
        f"{writer.quote_terms(kimi.CALL_BEGIN + 'functions.' + name + ':')} /[0-9]{{1,4}}/"
        f" {writer.quote_terms(kimi.ARGUMENTS)} {writer.add_arguments_rule(schema)}"
        f" {writer.quote_terms(kimi.CALL_END)}"
        for name, schema in schemas.items()
    ]
    return kimi.BEGIN, calls, "", kimi.END


def _keyed_layout(
    head: str, key: tuple[str, str], end: str, tail: str
) -> Callable[[GrammarWriter, Mapping[str, JsonObject]], Layout]:
    """Return the layout of calls with tags for arguments.

    key: text before and after an argument's name. end: text after its value.
    """

    def lay_out(writer: GrammarWriter, schemas: Mapping[str, JsonObject]) -> Layout:
        calls = []
        for name, schema in schemas.items():
            terms = [writer.quote_terms(head.replace("NAME", name))]
            required, properties, shared = _read_object_schema(name, schema)
            for argument, one in properties.items():
                before = writer.quote_terms(f"{key[0]}{argument}{key[1]}")
                one = {**shared, **one} if isinstance(one, dict) else one
                term = f"{before} {_keyed_value_terms(writer, f'{name}.{argument}', one, end)}"
                terms.append(term if argument in required else f"({term})?")
            calls.append(" ".join([*terms, writer.quote_terms(tail)]))
        return "", calls, "\n", ""

    return lay_out


def _read_object_schema(name: str, schema: JsonObject) -> tuple[set[str], JsonObject, JsonObject]:
    """Return (names of required properties, properties, definitions that they may refer to).

    Raises ValueError for a schema with others than these types.
    """
    required, properties = schema.get("required") or [], schema.get("properties") or {}
    what = f"tools: parameters of {name}"
    is_list = isinstance(required, list) and all(isinstance(one, str) for one in required)
    check(is_list, f"{what}: required", required, "must be a list of names")
    check(isinstance(properties, dict), f"{what}: properties", properties, "must be an object")
    shared: JsonObject = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return set(required), properties, shared


def _keyed_value_terms(writer: GrammarWriter, name: str, schema: Json, end: str) -> str:
    """Return the terms of an argument's value and the text after it."""
    if not allows_only_strings(schema):
        return f"{writer.add_json_rule(schema)} {writer.quote_terms(end)}"
    assert isinstance(schema, dict)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return f"({' | '.join(map(json.dumps, values))}) {writer.quote_terms(end)}"
    limits = next((limit for limit in STRING_LIMITS if limit in schema), None)
    words = f"must not limit a string: the model writes it without quotes, and no {limits} holds"
    check(limits is None, f"tools: parameters of {name}", schema, words)
    return writer.terms_up_to(end.strip()) + (
        " " + writer.quote_terms("\n") if end.endswith("\n") else ""
    )


# the token after which a call follows in text
_MARKERS: Mapping[str, str] = {
    "hermes": hermes.BEGIN,
    "mistral": mistral.BEGIN,
    "deepseek_v3": deepseek.BEGIN,
    "deepseek_v31": deepseek.BEGIN,
    "kimi_k2": kimi.BEGIN,
    "glm45": keyed.BEGIN,
    "qwen3_coder": keyed.BEGIN,
}
_LAYOUTS: Mapping[str, Callable[[GrammarWriter, Mapping[str, JsonObject]], Layout]] = {
    "hermes": _json_layout(
        f'{hermes.BEGIN}\n{{"name": "NAME", "arguments": ', f"}}\n{hermes.END}", between="\n"
    ),
    "mistral": _mistral_layout,
    "deepseek_v3": _json_layout(
        f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}NAME\n```json\n",
        f"\n```{deepseek.CALL_END}",
        deepseek.BEGIN,
        "\n",
        deepseek.END,
    ),
    "deepseek_v31": _json_layout(
        f"{deepseek.CALL_BEGIN}NAME{deepseek.SEPARATOR}",
        deepseek.CALL_END,
        deepseek.BEGIN,
        "",
        deepseek.END,
    ),
    "kimi_k2": _kimi_layout,
    "glm45": _keyed_layout(
        f"{keyed.BEGIN}NAME\n",
        (keyed.KEY, f"{keyed.KEY_END}\n{keyed.VALUE}"),
        f"{keyed.VALUE_END}\n",
        keyed.END,
    ),
    "qwen3_coder": _keyed_layout(
        f"{keyed.BEGIN}\n{keyed.FUNCTION}NAME>\n",
        (keyed.PARAMETER, ">\n"),
        f"\n{keyed.PARAMETER_END}\n",
        f"{keyed.FUNCTION_END}\n{keyed.END}",
    ),
    "llama3_json": _json_layout('{"name": "NAME", "parameters": ', "}", between="; "),
    "llama4_json": _json_layout('{"name": "NAME", "parameters": ', "}", between="; "),
}
