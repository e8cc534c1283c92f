"""`/v1/messages`, with the scripted model of `test_tools`: requests and answers in the shapes of
Anthropic's client, which is not installed for the tests.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_tools import (
    ANSWER,
    CALLS,
    CONTENT,
    REASONING,
    RESULTS,
    SAID,
    SIZES,
    TEMPLATE,
    USER,
    WEATHER,
    folder,  # noqa: F401
    history,
    tokenizer,  # noqa: F401
)
from tokenizers import Tokenizer

from jmoe.inference.output_events import ToolCallArguments, ToolCallBegin, ToolCallEnd
from jmoe.models.chat_template import ChatTemplate
from jmoe.serving.messages import BlockBuilder
from jmoe.serving.messages_schemas import TurnMessage
from tests.http_servers import LIMIT_S, HttpProcess

FUNCTION = WEATHER["function"]
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
BODY: dict[str, Any] = {
    "model": "scripted",
    "messages": [USER],
    "tools": [TOOL],
    "max_tokens": 400,
    "metadata": {"user_id": "u"},
}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("sk-1\n")
    return path


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., HttpProcess],
    folder: Path,  # noqa: F811
    key_file: Path,
) -> HttpProcess:
    return serve(*SIZES, "--api-key-file", key_file, folder=folder)


Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def post(server: HttpProcess) -> Post:
    """`post(body, path)` as Anthropic's client does it."""

    def post(body: dict[str, Any], path: str = "/v1/messages", key: str = "sk-1") -> httpx.Response:
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        content = {"content": json.dumps(body), "timeout": LIMIT_S}
        headers["content-type"] = "application/json"
        return httpx.post(server.url + path, headers=headers, **content)  # type: ignore[arg-type]

    return post


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each has its type as its name."""
    events = []
    for block in answer.text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


CONTENTS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": REASONING, "signature": ""},
    {"type": "text", "text": CONTENT},
    *(
        {"type": "tool_use", "name": name, "input": json.loads(arguments)}
        for name, arguments in CALLS
    ),
]


def test_blocks_of_an_answer(post: Post, tokenizer: Tokenizer) -> None:  # noqa: F811
    message = post(BODY).json()
    assert without_ids(message["content"]) == CONTENTS
    assert (message["type"], message["role"], message["model"]) == (
        "message",
        "assistant",
        "scripted",
    )
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage = message["usage"]
    assert usage["output_tokens"] == len(tokenizer.encode(SAID).ids)
    count = post({name: BODY[name] for name in ("model", "messages", "tools")}, COUNT).json()
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


COUNT = "/v1/messages/count_tokens"


def test_the_count_of_a_prompt_that_does_not_fit(post: Post) -> None:
    """By which a client learns that it has to shorten the conversation."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "7 3 " * 200}]}
    refused = post(body | {"max_tokens": 1})
    assert refused.status_code == 400 and "tokens" in refused.json()["error"]["message"]
    assert post(body, COUNT).json()["input_tokens"] > 512


def test_a_count_needs_no_place_in_the_queue(server: HttpProcess, post: Post) -> None:
    chat = {"messages": [USER], "n": 65, "stream": True, "ignore_eos": True}
    headers = {"authorization": "Bearer sk-1"}
    with (
        server.client(headers=headers) as client,
        client.stream("POST", "/v1/chat/completions", json=chat) as stream,
    ):
        lines = stream.iter_lines()  # the client leaves when nothing refers to it
        assert stream.status_code == 200 and next(lines)
        assert post(BODY).status_code == 429
        counted = post({name: BODY[name] for name in ("model", "messages", "tools")}, COUNT)
        assert counted.status_code == 200, counted.text


def test_a_stream_adds_up(post: Post) -> None:
    start, *middle, delta, stop = events_of(post(BODY | {"stream": True}))
    assert start["type"] == "message_start" and start["message"]["content"] == []
    blocks: list[dict[str, Any]] = []
    written: list[str] = []
    for event in middle:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            written.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            kind, field = {
                "thinking": ("thinking_delta", "thinking"),
                "text": ("text_delta", "text"),
                "tool_use": ("input_json_delta", "partial_json"),
            }[blocks[-1]["type"]]
            assert event["delta"]["type"] == kind
            written[-1] += event["delta"][field]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    assert written == [REASONING, CONTENT, *(arguments for _, arguments in CALLS)]
    assert [block["type"] for block in blocks] == [block["type"] for block in CONTENTS]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] > 0 and stop == {"type": "message_stop"}


def test_a_loop_of_tools_to_the_end(post: Post) -> None:
    """The answer's own content goes back, thinking too."""
    messages: list[dict[str, Any]] = [USER]
    results = iter(RESULTS)
    for _ in range(3):
        answer = post(BODY | {"messages": messages}).json()
        messages.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        if answer["stop_reason"] != "tool_use":
            break
        content = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": next(results)}
            for call in calls
        ]
        messages.append({"role": "user", "content": content})
    assert answer["content"] == [{"type": "text", "text": ANSWER}]
    assert answer["stop_reason"] == "end_turn" and len(messages) == 4


def test_prompts_are_the_templates(post: Post, tokenizer: Tokenizer) -> None:  # noqa: F811
    template = ChatTemplate({"default": TEMPLATE.read_text()}, {}, "test")
    system = {"role": "system", "content": "Be brief."}
    asked = {**{name: BODY[name] for name in ("model", "tools")}, "system": "Be brief."}
    uses = [block | {"id": str(number)} for number, block in enumerate(CONTENTS[2:])]
    results = [
        {"type": "tool_result", "tool_use_id": str(number), "content": result}
        for number, result in enumerate(RESULTS)
    ]
    asked["messages"] = [
        USER,
        {"role": "assistant", "content": [*CONTENTS[:2], *uses]},
        {"role": "user", "content": results},
    ]
    for thinking in (True, False):
        kind = {"type": "adaptive" if thinking else "disabled"}
        used = post(asked | {"thinking": kind}, COUNT).json()["input_tokens"]
        rendered = template.render([system, *history()], tools=[WEATHER], enable_thinking=thinking)
        assert used == len(tokenizer.encode(rendered).ids)


def test_why_an_answer_stops(post: Post, tokenizer: Tokenizer) -> None:  # noqa: F811
    limit = len(tokenizer.encode(SAID[: SAID.index("Oslo")]).ids)
    cut = post(BODY | {"max_tokens": limit}).json()
    assert cut["stop_reason"] == "max_tokens"
    (text,) = cut["content"][-1]["input"].values()
    assert cut["content"][-1]["input"] == {"INVALID_JSON": text} and CALLS[1][1].startswith(text)
    stop = BODY | {"stop_sequences": ["xyz", " look"]}
    stopped = post(stop).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " look")
    assert stopped["content"][-1] == {"type": "text", "text": "Let me"}
    *_, delta, _ = events_of(post(stop | {"stream": True}))
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " look"}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(post(BODY | {"tool_choice": choice}).json()["content"]) == 3


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "other"}])
def test_calls_by_a_grammar(post: Post, choice: dict[str, Any]) -> None:
    schema = {**TOOL["input_schema"], "properties": {"city": {"enum": ["Bern"]}}}
    tool = {"name": "other", "input_schema": schema}
    once = choice | {"disable_parallel_tool_use": True}
    thinking = {"type": "enabled", "budget_tokens": 40}
    body = BODY | {"tools": [tool], "tool_choice": once, "thinking": thinking}
    answer = post(body).json()
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"][-1]["input"] == {"city": "Bern"}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def test_a_request_of_claude_code(post: Post, tokenizer: Tokenizer) -> None:  # noqa: F811
    """The fields that Claude Code 2.1 sends, with a system's message after the user's."""
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": text} | ephemeral for text in ("You help.", "Be brief.")]
    reminder = {"type": "text", "text": "<system-reminder>\nNone.\n</system-reminder>"}
    asked = {"type": "text", "text": "Write 33 to answer.txt"} | ephemeral
    body = {
        "model": "scripted",
        "messages": [
            {"role": "user", "content": [reminder, asked]},
            {"role": "system", "content": "Available agent types: claude"},
        ],
        "system": system,
        "tools": [TOOL],
        "metadata": {"user_id": '{"device_id": "a"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": False,
    }
    answer = post(body | {"max_tokens": 1}, "/v1/messages?beta=true")
    assert answer.status_code == 200, answer.text
    template = ChatTemplate({"default": TEMPLATE.read_text()}, {}, "test")
    text = template.render(
        [
            {"role": "system", "content": "You help.\nBe brief."},
            {"role": "user", "content": f"{reminder['text']}\n{asked['text']}"},
            {"role": "system", "content": "Available agent types: claude"},
        ],
        tools=[WEATHER],
    )
    counted = post({name: body[name] for name in ("model", "messages", "system", "tools")}, COUNT)
    assert counted.json()["input_tokens"] == len(tokenizer.encode(text).ids), counted.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages must end with"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    ({"tool_choice": {"type": "tool", "name": "absent"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice.type = 'any': needs tools"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits",
    ),
    (
        {
            "context_management": {
                "edits": [
                    {
                        "type": "clear_thinking_20251015",
                        "keep": {"type": "thinking_turns", "value": 1},
                    }
                ]
            }
        },
        "context_management.edits.0.keep",
    ),
    ({"messages": [{"role": "system", "content": [USE]}]}, "messages"),
    ({"container": "a"}, "container"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_bad_input_is_named(post: Post, fields: dict[str, Any], words: str) -> None:
    answer = post(BODY | fields)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(words), body


def test_other_errors(post: Post) -> None:
    """In Anthropic's format too, whoever writes them."""
    for answer, status, kind in (
        (post(BODY, key="wrong"), 401, "authentication_error"),
        (post(BODY | {"model": "other"}), 404, "not_found_error"),
        (post(BODY, path="/v1/messages/other"), 404, "not_found_error"),
        (post({"a": "a" * (17 << 20)}), 413, "request_too_large"),
    ):
        assert answer.status_code == status, answer.text
        assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind


@pytest.mark.parametrize("depth", [200, 400, 900])
def test_deep_inputs(post: Post, depth: int) -> None:
    use = {"role": "assistant", "content": [USE | {"input": nested(depth)}]}
    answer = post(BODY | {"messages": [USER, use, USER], "max_tokens": 1})
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": 1e999}', '{"a": "\\ud800"}', "NaN"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    builder = BlockBuilder()
    events = [ToolCallBegin(0, "a", "f"), ToolCallArguments(0, arguments), ToolCallEnd(0)]
    sent = list(builder.push(events))
    (block,) = builder.blocks
    assert block.model_dump()["input"] == {"INVALID_JSON": arguments}
    assert [event["type"] for event in sent] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]


@pytest.mark.parametrize(("role", "kind"), [("user", "thinking"), ("assistant", "tool_result")])
def test_blocks_are_of_their_role(role: str, kind: str) -> None:
    blocks = {
        "thinking": {"type": "thinking", "thinking": "a"},
        "tool_result": {"type": "tool_result", "tool_use_id": "a"},
    }
    with pytest.raises(ValueError, match=f"{kind} must not be given with role = '{role}'"):
        TurnMessage.model_validate({"role": role, "content": [blocks[kind]]})
