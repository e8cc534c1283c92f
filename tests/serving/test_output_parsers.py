"""Outputs as the models write them, by format: split anywhere, malformed, nested, in other scripts,
several calls.
"""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple, get_args

import pytest

from jmoe.config.serving import ReasoningParserName, ToolParserName
from jmoe.inference.output_events import (
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    join_content,
)
from jmoe.serving.output_parsers.formats import (
    AUTO,
    HARMONY,
    NONE,
    OPENAI,
    REASONING_FORMATS,
    THINK,
    TOOL_FORMATS,
    detect_reasoning_format,
    detect_tool_format,
    reasoning_tags_after_prompt,
)
from jmoe.serving.output_parsers.parser import OutputParser, ParserSettings, ReasoningTags
from jmoe.types import JsonObject

SCHEMAS: dict[str, JsonObject] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["°C", "°F"]},
            "place": {"type": "object"},
            "rain": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
ZURICH = '{"city": "Zürich \\"日本\\" }{ 🎉", "place": {"at": [1, {"b": null}]}}'
OSLO = '{"city":"Oslo"}'
V3_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
V3_NEXT, V3_END = (
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
KIMI_BEGIN = "<|tool_calls_section_begin|><|tool_call_begin|>"
KIMI_NEXT, KIMI_END = (
    "<|tool_call_end|><|tool_call_begin|>",
    "<|tool_call_end|><|tool_calls_section_end|>",
)
KIMI_ARGS = "<|tool_call_argument_begin|>"


class Said(NamedTuple):
    """What an output says."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def called(*calls: tuple[str, str], content: str = "", reasoning: str = "") -> Said:
    return Said(content, reasoning, list(calls))


# (name of the case, format, output, what it says)
CASES: list[tuple[str, str, str, Said]] = [
    # Hermes and Qwen3
    (
        "two calls after reasoning",
        "hermes",
        f'<think>\nWhere?\n\nThere.\n</think>\n\nI look.\n<tool_call>\n{{"name": "weather", "arguments": {ZURICH}}}\n</tool_call>\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        called(
            ("weather", ZURICH), ("weather", OSLO), content="I look.", reasoning="Where?\n\nThere."
        ),
    ),
    (
        "arguments first, and as text",
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call><tool_call>{"name": "g", "arguments": "{\\"a\\": 2}"}</tool_call>',
        called(("f", '{"a": 1}'), ("g", '{"a": 2}')),
    ),
    ("no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', called(("now", "{}"))),
    (
        "two objects between one pair of tags",
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>',
        called(("f", "{}"), ("g", "{}")),
    ),
    (
        "an end of a tag in a string",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        called(("f", '{"a": "</tool_call>"}')),
    ),
    (
        "cut off",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1, "x',
        called(("f", '{"a": [1, "x')),
    ),
    (
        "a bracket is missing",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so',
        called(("f", '{"a": 1'), content="so"),
    ),
    (
        "no call",
        "hermes",
        'a <tool_call>{"nam": 1}</tool_call> b <tool_call> c',
        called(content='a <tool_call>{"nam": 1}</tool_call> b <tool_call> c'),
    ),
    (
        "no JSON",
        "hermes",
        "<tool_call>f(1)</tool_call>\n",
        called(content="<tool_call>f(1)</tool_call>\n"),
    ),
    ("text alone", "hermes", " <b>x</b> <tool \n\n", called(content=" <b>x</b> <tool \n\n")),
    ("reasoning alone", "hermes", "<think>\nhm", called(reasoning="hm")),
    ("empty", "hermes", "", called()),
    # Mistral
    (
        "an array",
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ZURICH}}}, {{"name": "now", "arguments": {{}}, "id": "VvvODy9mT"}}]',
        called(("weather", ZURICH), ("now", "{}")),
    ),
    (
        "names and arguments",
        "mistral",
        f"[THINK]Why?[/THINK]Well.[TOOL_CALLS]weather[ARGS]{ZURICH}[TOOL_CALLS]now[CALL_ID]VvvODy9mT[ARGS]{{}}",
        called(("weather", ZURICH), ("now", "{}"), content="Well.", reasoning="Why?"),
    ),
    (
        "without a marker of arguments",
        "mistral",
        '[TOOL_CALLS]f{"a": 1}',
        called(("f", '{"a": 1}')),
    ),
    ("no call", "mistral", "[TOOL_CALLS] [1]", called(content="[TOOL_CALLS] [1]")),
    # DeepSeek
    (
        "Markdown blocks",
        "deepseek_v3",
        f"Sure.{V3_BEGIN}function<｜tool▁sep｜>weather\n```json\n{ZURICH}\n```{V3_NEXT}function<｜tool▁sep｜>now\n```json\n{{}}\n```{V3_END}",
        called(("weather", ZURICH), ("now", "{}"), content="Sure."),
    ),
    (
        "bare arguments after open reasoning",
        "deepseek_v31",
        f"<think>Where{V3_BEGIN}weather<｜tool▁sep｜>{ZURICH}{V3_NEXT}now<｜tool▁sep｜>{{}}{V3_END}",
        called(("weather", ZURICH), ("now", "{}"), reasoning="Where"),
    ),
    ("cut off", "deepseek_v31", f'{V3_BEGIN}f<｜tool▁sep｜>{{"a', called(("f", '{"a'))),
    ("no call", "deepseek_v31", f"{V3_BEGIN} f", called(content=f"{V3_BEGIN} f")),
    # Kimi-K2
    (
        "ids of the model",
        "kimi_k2",
        f"Let me see. {KIMI_BEGIN}functions.weather:3{KIMI_ARGS}{ZURICH}{KIMI_NEXT}functions.now:4{KIMI_ARGS}{{}}{KIMI_END}",
        called(("weather", ZURICH), ("now", "{}"), content="Let me see."),
    ),
    (
        "reasoning left open",
        "kimi_k2",
        f"<think>hm {KIMI_BEGIN}functions.now:0{KIMI_ARGS} {{}} {KIMI_END}",
        called(("now", "{}"), reasoning="hm "),
    ),
    ("a name alone", "kimi_k2", f"{KIMI_BEGIN}now{KIMI_ARGS}{{}}{KIMI_END}", called(("now", "{}"))),
    (
        "no call",
        "kimi_k2",
        f"{KIMI_BEGIN}now{KIMI_END}",
        called(content=f"{KIMI_BEGIN}now{KIMI_END}"),
    ),
    # GLM-4.5
    (
        "keys and values",
        "glm45",
        '\n<think>Q</think>\nOn it.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zü"rich\n日</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>place</arg_key>\n<arg_value>{"at": [1]}</arg_value>\n<arg_key>units</arg_key>\n<arg_value>°C</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
        called(
            (
                "weather",
                '{"city": "Zü\\"rich\\n日", "days": 2, "place": {"at": [1]}, "units": "°C"}',
            ),
            ("now", "{}"),
            content="On it.",
            reasoning="Q",
        ),
    ),
    (
        "a string of digits, and no number",
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>12</arg_value><arg_key>days</arg_key><arg_value>two</arg_value></tool_call>",
        called(("weather", '{"city": "12", "days": "two"}')),
    ),
    (
        "digits where a string or null may stand",
        "glm45",
        "<tool_call>weather<arg_key>note</arg_key><arg_value>12</arg_value></tool_call><tool_call>weather<arg_key>note</arg_key><arg_value>null</arg_value></tool_call>",
        called(("weather", '{"note": "12"}'), ("weather", '{"note": null}')),
    ),
    (
        "cut off in a value",
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zü",
        called(("weather", '{"city": "Zü"}')),
    ),
    (
        "markup that is explained",
        "glm45",
        "Write `<tool_call>` and `</tool_call>`.",
        called(content="Write `<tool_call>` and `</tool_call>`."),
    ),
    ("no call", "glm45", "<tool_call>", called(content="<tool_call>")),
    # Qwen3-Coder
    (
        "parameters on lines of their own",
        "qwen3_coder",
        "Yes:\n\n<tool_call>\n<function=weather>\n<parameter=city>\n a\n\tb\n</parameter>\n<parameter=rain>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        called(("weather", '{"city": " a\\n\\tb", "rain": true}'), ("now", "{}"), content="Yes:"),
    ),
    (
        "the outer tag is missing",
        "qwen3_coder",
        "<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        called(("weather", '{"days": 3}')),
    ),
    (
        "parameters that are not closed",
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\na <parameter=b> </function>\n</parameter>\n</function>\n</tool_call>",
        called(
            ("weather", '{"city": "Oslo", "days": 3}'),
            ("weather", '{"city": "a <parameter=b> </function>"}'),
        ),
    ),
    (
        "markup that is explained",
        "qwen3_coder",
        "Write <function=NAME> or <tool_call><function=a b>.",
        called(content="Write <function=NAME> or <tool_call><function=a b>."),
    ),
    ("no call", "qwen3_coder", "<tool_call>\n<b>", called(content="<tool_call>\n<b>")),
    (
        "one brace too many",
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}}}\n</tool_call>',
        called(("weather", OSLO)),
    ),
    (
        "no name of a function",
        "mistral",
        'The [TOOL_CALLS] marker, as in {"a": 1}',
        called(content='The [TOOL_CALLS] marker, as in {"a": 1}'),
    ),
    (
        "no name of a function",
        "deepseek_v31",
        f"{V3_BEGIN}function<｜tool▁sep｜>\n{{}}{V3_END}",
        called(content=f"{V3_BEGIN}function<｜tool▁sep｜>\n{{}}{V3_END}"),
    ),
    (
        "cut off",
        "mistral",
        '[TOOL_CALLS]weather[ARGS]{"city": "Zü',
        called(("weather", '{"city": "Zü')),
    ),
    (
        "cut off in a Markdown block",
        "deepseek_v3",
        f'{V3_BEGIN}function<｜tool▁sep｜>weather\n```json\n{{"city": "Zü',
        called(("weather", '{"city": "Zü')),
    ),
    (
        "no call",
        "deepseek_v3",
        f"{V3_BEGIN}function",
        called(content=f"{V3_BEGIN}function"),
    ),
    (
        "cut off",
        "kimi_k2",
        f'{KIMI_BEGIN}functions.weather:0{KIMI_ARGS}{{"city": "Zü',
        called(("weather", '{"city": "Zü')),
    ),
    (
        "nested values and other scripts",
        "qwen3_coder",
        '<tool_call>\n<function=weather>\n<parameter=city>\nZürich "日本" }{ 🎉\n</parameter>\n<parameter=place>\n{"at": [1, {"b": null}]}\n</parameter>\n</function>\n</tool_call>',
        called(
            ("weather", '{"city": "Zürich \\"日本\\" }{ 🎉", "place": {"at": [1, {"b": null}]}}')
        ),
    ),
    (
        "cut off in a value",
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nZü",
        called(("weather", '{"city": "Zü"}')),
    ),
    (
        "cut off",
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Zü',
        called(("weather", '{"city": "Zü')),
    ),
    # Llama
    (
        "two objects",
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {ZURICH}}}; {{"type": "function", "name": "now", "parameters": {{}}}}',
        called(("weather", ZURICH), ("now", "{}")),
    ),
    (
        "an answer in JSON",
        "llama4_json",
        '{"answer": {"name": "x"}} ',
        called(content='{"answer": {"name": "x"}} '),
    ),
    (
        "an answer in JSON that has a name",
        "llama3_json",
        '{"name": "Alice", "parameters": {"age": 3}, "id": 7}',
        called(content='{"name": "Alice", "parameters": {"age": 3}, "id": 7}'),
    ),
    (
        "a call later in the text",
        "llama3_json",
        'Use {"name": "f", "parameters": {}}',
        called(content='Use {"name": "f", "parameters": {}}'),
    ),
]
NAMES = [f"{form}: {name}" for name, form, _, _ in CASES]


def tags_of(form: str) -> ReasoningTags:
    tags = REASONING_FORMATS["mistral"] if form == "mistral" else THINK
    assert tags is not None
    return tags


def parse(
    form: str, pieces: Iterable[str], tags: ReasoningTags | None = None, tools: bool = True
) -> list[OutputEvent]:
    parser_class = TOOL_FORMATS[form].parser
    assert parser_class is not None
    parser = parser_class(ParserSettings(tags or tags_of(form), SCHEMAS if tools else None))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def said(events: list[OutputEvent]) -> Said:
    """Join events; check that calls begin, grow and end in order."""
    calls: list[list[str]] = []
    ended: list[int] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            assert event.index == len(calls) == len(ended) and event.id
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(calls) - 1 == len(ended) and event.text
            calls[-1][1] += event.text
        elif isinstance(event, ToolCallEnd):
            ended.append(event.index)
    assert ended == list(range(len(calls)))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return Said(join_content(events), reasoning, [(name, text) for name, text in calls])


@pytest.mark.parametrize(("_", "form", "text", "expected"), CASES, ids=NAMES)
def test_outputs(_: str, form: str, text: str, expected: Said) -> None:
    """The same however the text is cut: whole, in single characters, in two or three anywhere."""
    assert said(parse(form, [text])) == expected
    assert said(parse(form, text)) == expected
    for at in range(len(text) + 1):
        assert said(parse(form, [text[:at], text[at:]])) == expected, at
        assert said(parse(form, [text[:at], text[at : at + 3], text[at + 3 :]])) == expected, at


@pytest.mark.parametrize(("_", "form", "text", "expected"), CASES, ids=NAMES)
def test_without_tools_all_is_content(_: str, form: str, text: str, expected: Said) -> None:
    """The markup too, but for the reasoning before it."""
    found = said(parse(form, text, tools=False))
    assert found.calls == [] and text.endswith(found.content)
    if not expected.calls:
        assert (found.content, found.reasoning) == (expected.content, expected.reasoning)


def test_arguments_are_streamed_as_they_come() -> None:
    """A long string goes out before its end, in every format."""
    for form, begun in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "'),
        ("deepseek_v31", f'{V3_BEGIN}weather<｜tool▁sep｜>{{"city": "'),
        ("kimi_k2", f'{KIMI_BEGIN}functions.weather:0{KIMI_ARGS}{{"city": "'),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>"),
        ("qwen3_coder", "<function=weather><parameter=city>"),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "'),
    ):
        parser_class = TOOL_FORMATS[form].parser
        assert parser_class is not None
        parser = parser_class(ParserSettings(None, SCHEMAS))
        parser.feed(begun)
        events = parser.feed("Zürich and")
        assert events[-1] == ToolCallArguments(0, "Zürich and"), form


def test_reasoning_by_the_prompt() -> None:
    """A prompt that opens it, one that closes it, and one that leaves it to the model."""
    opened = reasoning_tags_after_prompt(THINK, "<|im_start|>assistant\n<think>\n")
    assert opened is not None and opened.is_open
    assert said(parse("hermes", "so\n</think>\n\n4", opened)) == called(content="4", reasoning="so")
    assert said(parse("hermes", "<think>so</think>4", opened)) == called(
        content="4", reasoning="so"
    )
    assert reasoning_tags_after_prompt(THINK, "assistant\n<think>\n\n</think>\n\n") is None
    left = reasoning_tags_after_prompt(THINK, "<think>?</think> assistant\n")
    assert left is not None and not left.is_open
    assert said(parse("hermes", "4 </think>", left)) == called(content="4 </think>")
    parser = OutputParser(ParserSettings(opened))
    assert parser.in_reasoning and parser.feed("a</think>b") and not parser.in_reasoning


def test_ids_of_calls() -> None:
    """In the form that each family's template reads in later turns."""

    def ids(form: str, text: str) -> list[str]:
        return [event.id for event in parse(form, [text]) if isinstance(event, ToolCallBegin)]

    arguments = f"{KIMI_ARGS}{{}}"
    written = f"{KIMI_BEGIN}functions.a:3{arguments}{KIMI_NEXT}b{arguments}{KIMI_END}"
    assert ids("kimi_k2", written) == ["functions.a:3", "functions.b:1"]
    twice = f"{KIMI_BEGIN}functions.a:0{arguments}{KIMI_NEXT}functions.a:0{arguments}{KIMI_END}"
    assert ids("kimi_k2", twice) == ["functions.a:0", "functions.a:1"]
    (made,) = ids("mistral", "[TOOL_CALLS]f[ARGS]{}")
    assert re.fullmatch("[a-zA-Z0-9]{9}", made)
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{}") == ["VvvODy9mT"]
    (other,) = ids("hermes", '<tool_call>{"name": "f"}</tool_call>')
    assert re.fullmatch("call_[0-9a-f]{24}", other)


def test_complete_arguments_are_json() -> None:
    for name, form, text, _ in CASES:
        if "cut off" not in name and "missing" not in name:
            for _, arguments in said(parse(form, [text])).calls:
                assert isinstance(json.loads(arguments), dict)


def test_each_format_has_every_kind_of_case() -> None:
    """Two calls, nested arguments, other scripts, an output that is cut, and one that is no call;
    llama4_json is llama3_json's parser.
    """
    for form in {*TOOL_FORMATS} - {OPENAI}:
        same = {form} | ({"llama3_json", "llama4_json"} if form.startswith("llama") else set())
        cases = [case for case in CASES if case[1] in same]
        calls = [arguments for *_, one in cases for _, arguments in one.calls]
        assert any(len(one.calls) > 1 for *_, one in cases), form
        assert any('{"at": [' in arguments for arguments in calls), form
        assert any("日" in arguments for arguments in calls), form
        assert any(name.startswith("cut off") for name, *_ in cases), form
        assert any(text and not one.calls for _, _, text, one in cases), form


def test_options_name_the_rows_of_the_tables() -> None:
    assert {*get_args(ToolParserName)} == {AUTO, NONE, *TOOL_FORMATS}
    assert {*get_args(ReasoningParserName)} == {AUTO, NONE, *REASONING_FORMATS}


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<|start|>assistant<|channel|>commentary to=functions.", OPENAI, HARMONY),
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2", NONE),
        (
            "'<｜tool▁calls▁begin｜>' ~ '<｜tool▁sep｜>' + name + '\\n' + '```json'",
            "deepseek_v3",
            NONE,
        ),
        ("'<｜tool▁calls▁begin｜>' ~ '<｜tool▁sep｜>' </think>", "deepseek_v31", "deepseek_v3"),
        ("{{ '[TOOL_CALLS][' }}", "mistral", NONE),
        ("[THINK] [TOOL_CALLS]", "mistral", "mistral"),
        ("<tool_call> <arg_key> <think>", "glm45", "glm45"),
        ("<tool_call>\n<function=example>", "qwen3_coder", NONE),
        ("<tool_call> </think>", "hermes", "qwen3"),
        ("<|python_tag|>", "llama3_json", NONE),
        ('{"name": function name, "parameters": dictionary', "llama3_json", NONE),
        ("<think>", NONE, "deepseek_r1"),
        ("{{ messages }}", NONE, NONE),
    ],
)
def test_templates_show_formats(template: str, tools: str, reasoning: str) -> None:
    assert detect_tool_format(template) == tools
    assert detect_reasoning_format(template, tools) == reasoning
