"""Calls and reasoning as the families' chat templates write them are read back by the format that
the template shows, whatever tokens the text comes in.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer

from jmoe.data.tokenizer import train_bpe
from jmoe.inference.output_events import (
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    join_content,
)
from jmoe.models.chat_template import ChatTemplate
from jmoe.serving.output_parsers.formats import AUTO, TOOL_FORMATS
from jmoe.serving.output_parsers.output_format import OutputFormat
from jmoe.serving.output_parsers.parser import ParserSettings
from jmoe.serving.schemas import Message
from jmoe.serving.service import choose_output_format
from tests.scripted_model import HARMONY

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "chat_templates"
CONVERSATIONS = json.loads((FIXTURES / "agent_conversations.json").read_text())


class Family(NamedTuple):
    """How a folder's model writes.

    special: its special tokens that an output may have; the last one ends a turn.
    thinks: whether the template writes the reasoning of the turn that is asked for.
    several: whether a turn may have two calls.
    says: whether a turn with calls may have content.
    """

    format: str
    special: tuple[str, ...]
    thinks: bool = False
    several: bool = True
    says: bool = True


DEEPSEEK = (
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end")),
    *(f"<｜tool▁{name}｜>" for name in ("call▁begin", "call▁end", "sep")),
    "</s>",
)
KIMI = (
    *(f"<|tool_calls_section_{name}|>" for name in ("begin", "end")),
    *(f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end")),
    "<|im_end|>",
)
FAMILIES = {
    "qwen3": Family("hermes", ("<|im_end|>",), thinks=True),
    "qwen3_coder": Family("qwen3_coder", ("<|im_end|>",)),
    "mistral": Family("mistral", ("[TOOL_CALLS]", "</s>"), says=False),
    "deepseek_r1": Family("deepseek_v3", DEEPSEEK),
    "deepseek_v31": Family("deepseek_v31", DEEPSEEK),
    "kimi_k2": Family("kimi_k2", KIMI),
    "glm45": Family("glm45", ("<|user|>",), thinks=True),
    "gpt_oss": Family("openai", HARMONY, thinks=True, several=False),
    "llama31": Family("llama3_json", ("<|eot_id|>",), several=False),
}


class Turn(NamedTuple):
    """An answer with tool calls: the text of its prompt and its own, without the turn's end."""

    prompt: str
    text: str


def render_turn(family: str, conversation: dict[str, Any]) -> Turn:
    """The last message as the template writes it behind the prompt that asks for it."""
    template = ChatTemplate.from_folder(FIXTURES / family)
    assert template is not None
    *before, answer = (
        Message.model_validate(as_request(message)).for_template(False, template.call_form)
        for message in conversation["messages"]
    )
    if "thinking" in conversation["messages"][-1]:
        answer["thinking"] = answer["reasoning_content"]  # as gpt-oss's template names it
    tools = conversation["tools"]
    variables = {"enable_thinking": False} if family == "deepseek_r1" else {}
    prompt = template.render(before, tools=tools, add_generation_prompt=True, **variables)
    whole = template.render([*before, answer], tools=tools, add_generation_prompt=False)
    assert whole.startswith(prompt)
    end = FAMILIES[family].special[-1]
    return Turn(prompt, whole.removeprefix(prompt).rstrip("\n").removesuffix(end))


def as_request(message: dict[str, Any]) -> dict[str, Any]:
    """The message as clients send it: arguments are text."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls") or []:
        call["function"]["arguments"] = json.dumps(
            call["function"]["arguments"], ensure_ascii=False
        )
    return message


def tokenizer_of(family: str, text: str) -> Tokenizer:
    """Tokens of one character to several words; markup is special where the family's is."""
    tokenizer = train_bpe([text] * 3, 330)
    tokenizer.add_special_tokens([AddedToken(name) for name in FAMILIES[family].special])
    return tokenizer


def read(pieces: Iterable[list[int]], opened: OutputFormat, turn: Turn, tools: Any) -> Any:
    """Content, reasoning and calls of an output whose tokens come in pieces."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    open_stream = opened.open_stream(turn.prompt, ParserSettings(parameters=schemas), None)
    stream = open_stream(opened.tokenizer.encode(turn.prompt).ids, (), 0)
    events: list[OutputEvent] = [event for piece in pieces for event in stream.push(piece)]
    events += stream.flush()
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    calls = [[event.name, ""] for event in events if isinstance(event, ToolCallBegin)]
    for event in events:
        if isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.text
    return join_content(events), reasoning, [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize("name", ["one_call", "two_calls"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_template_writes_is_read_back(family: str, name: str) -> None:
    """Token by token, whole, and cut in two at every token."""
    conversation, has = CONVERSATIONS[name], FAMILIES[family]
    if name == "two_calls" and not has.several:
        conversation = json.loads(json.dumps(conversation))
        del conversation["messages"][-1]["tool_calls"][1:]
    turn, asked = render_turn(family, conversation), conversation["messages"][-1]
    tokenizer = tokenizer_of(family, turn.text)
    opened = choose_output_format(FIXTURES / family, tokenizer, AUTO, AUTO)
    assert opened.tool_format == has.format
    expected = (
        asked["content"] if has.says and family not in ("gpt_oss", "llama31") else "",
        asked.get("reasoning_content", "") if has.thinks else "",
        [(one["function"]["name"], one["function"]["arguments"]) for one in asked["tool_calls"]],
    )
    ids = tokenizer.encode(turn.text).ids
    assert read(([token] for token in ids), opened, turn, conversation["tools"]) == expected
    for at in range(len(ids)):
        cut = [ids[:at], ids[at:]]
        assert read(cut, opened, turn, conversation["tools"]) == expected, at


def test_every_format_of_calls_has_a_family() -> None:
    tested = {family.format for family in FAMILIES.values()}
    assert tested | {"llama4_json"} == {*TOOL_FORMATS}, "llama4_json is the parser of llama3_json"
