"""Grammars of tool calls: whatever they allow, the format's parser reads back as calls that follow
the schemas.
"""

import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from jmoe.data.tokenizer import train_bpe
from jmoe.inference.harmony import ChannelStream, HarmonyTokens
from jmoe.inference.output_events import (
    OutputEvent,
    OutputStream,
    ToolCallArguments,
    ToolCallBegin,
    join_content,
)
from jmoe.serving.output_parsers import deepseek, keyed, kimi, mistral
from jmoe.serving.output_parsers.formats import OPENAI, TOOL_FORMATS
from jmoe.serving.output_parsers.grammars import CallGrammar, GrammarWriter
from jmoe.serving.output_parsers.output_format import OutputFormat
from jmoe.serving.output_parsers.parser import ParserSettings
from tests.scripted_model import harmony_tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Zürich", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "place": {"enum": [{"at": [1, None]}]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
ADDED = {
    "kimi_k2": (kimi.BEGIN, *kimi.KimiParser.markers),
    "deepseek_v3": (deepseek.BEGIN, *deepseek.DeepSeekParser.markers),
    "deepseek_v31": (deepseek.BEGIN, *deepseek.DeepSeekParser.markers),
    "mistral": (mistral.BEGIN, mistral.ARGUMENTS),
    "glm45": (keyed.BEGIN, *keyed.GlmParser.markers),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}


def tokenizer_of(form: str) -> Tokenizer:
    if form == OPENAI:
        return harmony_tokenizer()
    tokenizer = train_bpe(["x"], 300)
    tokenizer.add_special_tokens([AddedToken(name) for name in ADDED.get(form, ())])
    return tokenizer


def matcher(tokenizer: Tokenizer, grammar: str) -> LLMatcher:
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    tokens = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[0])
    return LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)


def walk(tokenizer: Tokenizer, grammar: str, seed: int) -> list[int]:
    """Tokens that the grammar allows, drawn evenly among the allowed ones until it may end."""
    follows, draw = matcher(tokenizer, grammar), random.Random(seed)
    assert not follows.is_error(), follows.get_error()
    drawn: list[int] = []
    added = tokenizer.get_added_tokens_decoder()
    while len(drawn) < 2000:
        mask = np.frombuffer(follows.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, tokenizer.decode(drawn, skip_special_tokens=False)
        if 0 in allowed:
            return drawn
        ends = [token for token in allowed if token in added]  # texts would go on for long
        drawn.append(draw.choice(ends if ends and draw.random() < 0.2 else allowed))
        assert follows.consume_token(drawn[-1])
    raise AssertionError("the grammar does not end")


def parse(form: str, tokenizer: Tokenizer, drawn: list[int]) -> list[OutputEvent]:
    settings = ParserSettings(parameters=SCHEMAS)
    stream: OutputStream
    if form == OPENAI:
        harmony = HarmonyTokens.detect(tokenizer)
        assert harmony is not None
        prompt = tokenizer.encode("<|start|>assistant").ids
        stream = ChannelStream(tokenizer, harmony, prompt, has_tools=True)
    else:
        output_format = OutputFormat.choose(tokenizer, "", form, "none")
        stream = output_format.open_stream("", settings, None)([], (), 0)
    return stream.push(drawn) + stream.flush()


def check_calls(events: list[OutputEvent]) -> int:
    """Check that calls are of the functions and follow their schemas; return how many there are."""
    calls = [event for event in events if isinstance(event, ToolCallBegin)]
    for call in calls:
        pieces = [
            event.text
            for event in events
            if isinstance(event, ToolCallArguments) and event.index == call.index
        ]
        arguments = json.loads("".join(pieces))
        if call.name == "now":
            assert arguments == {}
        else:
            assert call.name == "weather" and {"city", "days"} <= {*arguments}
            assert arguments["city"] in ("Zürich", "Oslo") and arguments["days"] in range(1, 10)
            assert arguments.get("place", {"at": [1, None]}) == {"at": [1, None]}
    return len(calls)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_required_calls_are_read_back(form: str) -> None:
    """One or several; content has at most white space."""
    tokenizer = tokenizer_of(form)
    for template in ("", mistral.ARGUMENTS) if form == "mistral" else ("",):
        for several in (False, True):
            asked = CallGrammar(SCHEMAS, required=True, several=several)
            grammar = GrammarWriter(tokenizer, template, form).write(asked)
            for seed in range(3):
                drawn = walk(tokenizer, grammar, seed)
                events = parse(form, tokenizer, drawn)
                assert check_calls(events) >= 1, tokenizer.decode(drawn, skip_special_tokens=False)
                assert not join_content(events).strip()


OUTPUTS = {
    "hermes": 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "glm45": "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    OPENAI: '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}',
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_a_strict_tool_leaves_text_free(form: str) -> None:
    """A call in it must follow the schema, an answer without a call may say anything."""
    tokenizer = tokenizer_of(form)
    grammar = GrammarWriter(tokenizer, "", form).write(CallGrammar(SCHEMAS, False, True))
    answer = "<|channel|>final<|message|>No { tool." if form == OPENAI else "No { tool.\n"
    wrong = OUTPUTS[form].replace("Oslo", "Rome")
    for text, fits in ((OUTPUTS[form], True), (answer, True), (wrong, False)):
        ids, follows = tokenizer.encode(text).ids, matcher(tokenizer, grammar)
        assert (follows.try_consume_tokens(ids) == len(ids)) == fits, text
        assert follows.is_accepting() == fits, text


def test_an_answer_by_a_schema_in_place_of_calls() -> None:
    tokenizer = tokenizer_of("hermes")
    asked = CallGrammar(SCHEMAS, False, True, {"const": {"a": 4}})
    grammar = GrammarWriter(tokenizer, "", "hermes").write(asked)
    call = OUTPUTS["hermes"].removeprefix("I look.\n")
    for text, fits in (('{"a": 4}', True), (call, True), ('{"a": 5}', False), ("so", False)):
        ids, follows = tokenizer.encode(text).ids, matcher(tokenizer, grammar)
        assert (follows.try_consume_tokens(ids) == len(ids)) == fits, text


def test_arguments_by_definitions_of_the_schema() -> None:
    """As pydantic writes them, in a format with a rule for each argument."""
    schema = {
        "properties": {"a": {"$ref": "#/$defs/Day"}},
        "required": ["a"],
        "$defs": {"Day": {"type": "integer", "enum": [1, 2]}},
    }
    tokenizer = tokenizer_of("glm45")
    grammar = GrammarWriter(tokenizer, "", "glm45").write(CallGrammar({"f": schema}, True, False))
    for value, fits in ((1, True), (3, False)):
        text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
        ids, follows = tokenizer.encode(text).ids, matcher(tokenizer, grammar)
        assert (follows.try_consume_tokens(ids) == len(ids)) == fits, value


def test_what_a_format_cannot_follow_is_named() -> None:
    limited = {"f": {"properties": {"a": {"type": "string", "pattern": "x+"}}}}
    with pytest.raises(ValueError, match=r"tools: parameters of f.a = .*no pattern holds"):
        GrammarWriter(tokenizer_of("glm45"), "", "glm45").write(CallGrammar(limited, True, True))
    for field, value, words in (
        ("required", 5, "must be a list of names"),
        ("properties", ["a"], "must be an object"),
    ):
        asked = CallGrammar({"f": {field: value}}, True, True)
        with pytest.raises(ValueError, match=f"tools: parameters of f: {field} = .*: {words}"):
            GrammarWriter(tokenizer_of("glm45"), "", "glm45").write(asked)
    many = {"f": {"properties": {f"p{i}": {"type": "integer"} for i in range(9999)}}}
    with pytest.raises(ValueError, match=r"len\(tools\) = \d+: must have at most 262144 bytes"):
        GrammarWriter(tokenizer_of("glm45"), "", "glm45").write(CallGrammar(many, True, True))
    plain = train_bpe(["x"], 300)
    with pytest.raises(ValueError, match=r"tools: strict, with <tool_call> = True: must be false"):
        GrammarWriter(plain, "", "hermes").write(CallGrammar(SCHEMAS, False, True))
    assert "start: calls" in GrammarWriter(plain, "", "hermes").write(
        CallGrammar(SCHEMAS, True, True)
    )
