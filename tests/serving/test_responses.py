"""`/v1/responses` through the real `openai` client, with the scripted model of `test_tools`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from test_tools import (
    ANSWER,
    CALLS,
    CONTENT,
    REASONING,
    RESULTS,
    SAID,
    SIZES,
    USER,
    WEATHER,
    folder,  # noqa: F401
    tokenizer,  # noqa: F401
)
from tokenizers import Tokenizer

from jmoe.inference.output_events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from jmoe.serving.responses import ItemBuilder, make_chat_messages, make_chat_request
from jmoe.serving.responses_schemas import ResponsesRequest
from tests.http_servers import LIMIT_S, HttpProcess

TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"]}
BODY: dict[str, Any] = {"model": "scripted", "input": [USER], "tools": [TOOL]}


@pytest.fixture(scope="module")
def server(serve: Callable[..., HttpProcess], folder: Path) -> HttpProcess:  # noqa: F811
    return serve(*SIZES, folder=folder)


@pytest.fixture(scope="module")
def client(server: HttpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0
    ) as client:
        yield client


def calls_of(response: Response) -> list[ResponseFunctionToolCall]:
    return [item for item in response.output if item.type == "function_call"]


def plain_items(response: Response) -> list[dict[str, Any]]:
    """The items without their ids, which differ between answers."""
    items = [item.model_dump() for item in response.output]
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


def test_items_of_an_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:  # noqa: F811
    response = client.responses.create(**BODY, metadata={"a": "b"}, store=True)
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert [part.text for part in reasoning.content] == [REASONING]
    assert message.type == "message" and response.output_text == CONTENT
    assert [(call.name, call.arguments) for call in calls_of(response)] == CALLS
    assert len({item.id for item in response.output}) == 4 == len(calls) + 2
    assert {item.status for item in response.output} == {"completed"}  # type: ignore[union-attr]
    assert (response.status, response.store, response.metadata) == ("completed", False, {"a": "b"})  # type: ignore[attr-defined]
    assert response.tools[0].name == "weather"  # type: ignore[union-attr]
    usage = response.usage
    assert usage is not None and usage.input_tokens + usage.output_tokens == usage.total_tokens
    count = len(tokenizer.encode(SAID.partition("\n\n")[0]).ids)
    assert usage.output_tokens_details.reasoning_tokens == count


def test_a_stream_adds_up(client: openai.OpenAI) -> None:
    """To the answer that is not streamed, in the client's own accumulator and by the deltas."""
    whole = client.responses.create(**BODY)
    with client.responses.stream(**BODY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == CONTENT and kinds[-1] == "response.completed"
    assert [(call.name, call.arguments) for call in calls_of(final)] == CALLS
    raw = list(client.responses.create(**BODY, stream=True))
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert raw[-1].type == "response.completed"
    assert plain_items(raw[-1].response) == plain_items(whole)
    pieces: dict[tuple[int, str], str] = {}
    done: dict[tuple[int, str], str] = {}
    for event in raw:
        name, _, what = event.type.removeprefix("response.").rpartition(".")
        if what == "delta":
            at = event.output_index, name  # type: ignore[union-attr]
            pieces[at] = pieces.get(at, "") + event.delta  # type: ignore
        elif what == "done" and name not in ("content_part", "output_item"):
            at = event.output_index, name  # type: ignore[union-attr]
            done[at] = event.arguments if "arguments" in name else event.text  # type: ignore
    assert (
        pieces
        == done
        == {
            (0, "reasoning_text"): REASONING,
            (1, "output_text"): CONTENT,
            (2, "function_call_arguments"): CALLS[0][1],
            (3, "function_call_arguments"): CALLS[1][1],
        }
    )
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    )


def test_a_loop_of_tools_to_the_end(client: openai.OpenAI) -> None:
    """The client's own objects go back as the input, reasoning too."""
    items: list[Any] = [USER]
    results = iter(RESULTS)
    for _ in range(3):
        response = client.responses.create(**(BODY | {"input": items}), store=False)
        items += response.output
        calls = calls_of(response)
        if not calls:
            break
        for call in calls:
            assert json.loads(call.arguments)["city"]
            output = {"type": "function_call_output", "call_id": call.call_id}
            items.append(output | {"output": next(results)})
    assert response.output_text == ANSWER and response.status == "completed"
    assert [getattr(item, "type", "") for item in items[-1:]] == ["message"]


def test_an_answer_that_is_cut(client: openai.OpenAI, tokenizer: Tokenizer) -> None:  # noqa: F811
    limit = len(tokenizer.encode(SAID[: SAID.index("Oslo")]).ids)
    response = client.responses.create(**BODY, max_output_tokens=limit)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    first, second = calls_of(response)
    assert (first.status, second.status) == ("completed", "incomplete")
    *_, last = client.responses.create(**BODY, max_output_tokens=limit, stream=True)
    assert last.type == "response.incomplete"
    assert plain_items(last.response) == plain_items(response)


def test_sampling_parameters_of_vllm(client: openai.OpenAI) -> None:
    """A stop string ends the answer; all others reach the chat that the request stands for."""
    stop = CONTENT[len(CONTENT) // 2 :]
    answer = client.responses.create(**BODY, extra_body={"stop": [stop], "seed": 3, "top_k": 1})
    assert answer.output_text == CONTENT.removesuffix(stop) and not calls_of(answer)
    given: dict[str, Any] = {
        "top_k": 4,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -1.0},
        "seed": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
    }
    chat = make_chat_request(ResponsesRequest.model_validate({"input": "Hi", **given}))
    assert chat.model_dump(include=set(given)) == given
    assert chat._requested_sampling_fields.keys() >= {"top_k", "min_p", "repetition_penalty"}
    plain = make_chat_request(ResponsesRequest.model_validate({"input": "Hi"}))
    assert plain._requested_sampling_fields == {}, "the model's own defaults hold"


def test_a_schema(client: openai.OpenAI) -> None:
    """Binds after the reasoning."""
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": {"const": {"a": 4}}}
    response = client.responses.create(
        model="scripted",
        input="Weather in Zürich and Oslo?",
        text={"format": form},  # type: ignore[typeddict-item]
        temperature=0,
        reasoning={"effort": "none"},
        max_output_tokens=100,
    )
    assert json.loads(response.output_text) == {"a": 4}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "other"}])
def test_calls_by_a_grammar(client: openai.OpenAI, choice: Any) -> None:
    schema = {**TOOL["parameters"], "properties": {"city": {"enum": ["Bern"]}}}
    other = {"type": "function", "name": "other", "parameters": schema}
    response = client.responses.create(
        **BODY | {"tools": [other]},
        tool_choice=choice,
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
    )
    (call,) = calls_of(response)
    assert (call.name, json.loads(call.arguments)) == ("other", {"city": "Bern"})


def test_a_request_of_codex(server: HttpProcess) -> None:
    """Codex 0.171 sends these fields, and functions in namespaces, whose calls name them."""
    schema = {**TOOL["parameters"], "properties": {"city": {"enum": ["Bern"]}}}
    function = {"type": "function", "name": "close", "description": "d", "strict": True}
    space = {"type": "namespace", "name": "agents_v1", "description": "Sub-agents."}
    call = {"type": "function_call", "namespace": "agents_v1", "name": "close", "call_id": "a"}
    text = {"type": "input_text", "text": "Be brief."}
    body = {
        "model": "scripted",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [text], "id": "msg_1"},
            {"type": "message", "role": "user", "content": [text | {"text": "Close it."}]},
            call | {"arguments": '{"city": "Bern"}'},
            {"type": "function_call_output", "call_id": "a", "output": "no"},
        ],
        "tools": [space | {"tools": [function | {"parameters": schema}]}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto", "effort": "none"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2247f",
        "client_metadata": {"x-codex-turn-metadata": "{}"},
        "service_tier": "priority",
        "stream": False,
    }
    answer = server.post("/v1/responses", **body).json()
    (found,) = [item for item in answer["output"] if item["type"] == "function_call"]
    assert (found["namespace"], found["name"]) == ("agents_v1", "close")
    assert json.loads(found["arguments"]) == {"city": "Bern"}
    twice = body["tools"] + [function | {"name": "agents_v1.close"}]  # type: ignore[operator]
    refused = server.post("/v1/responses", **body | {"tools": twice})
    assert refused.status_code == 400 and "agents_v1.close" in refused.json()["error"]["message"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": []}]}, "tools"),
    ({"tool_choice": {"type": "function", "name": "absent"}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools.name"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
        "input",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"top_k": -2}, "top_k"),
    ({"stop": ["x"] * 99}, "stop"),
    ({"include": ["file_search_call.results"]}, "include"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_bad_input_is_named(server: HttpProcess, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/responses", **BODY | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert (error["param"] or "").startswith(param), error


@pytest.mark.parametrize("stream", [False, True])
def test_values_that_cannot_be_sent_back(server: HttpProcess, stream: bool) -> None:
    """Deep lists, half a surrogate pair: 400. An infinity is no number of JSON: null."""
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    headers = {"content-type": "application/json"}

    def post(content: str) -> httpx.Response:
        url = f"{server.url}/v1/responses"
        return httpx.post(url, content=content, headers=headers, timeout=LIMIT_S)

    for bad in ({"tools": [TOOL | {"parameters": {"a": deep}}]}, {"metadata": {"a": "\ud800"}}):
        answer = post(json.dumps(BODY | bad | {"stream": stream}))
        assert answer.status_code == 400, answer.text
    body = json.dumps(BODY | {"tools": [TOOL | {"parameters": {"maximum": 1}}], "stream": stream})
    answer = post(body.replace('"maximum": 1', '"maximum": 1e999'))
    assert answer.status_code in (200, 400), answer.text
    assert "Infinity" not in answer.text


def test_messages_of_items() -> None:
    """Leading instructions are one message; an assistant's items are one, until another's."""

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}

    body = ResponsesRequest.model_validate(
        {
            "instructions": "A",
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "B"}]},
                {"role": "user", "content": "C"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "D"}]},
                {"role": "assistant", "content": "E"},
                call("1"),
                call("2"),
                {"type": "function_call_output", "call_id": "1", "output": "F"},
                {"type": "function_call_output", "call_id": "2", "output": "G"},
                {"role": "assistant", "content": "H"},
                {"role": "assistant", "content": "I"},
                {"role": "developer", "content": "J"},
            ],
        }
    )
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for name in "12"
    ]
    assert make_chat_messages(body) == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "C"},
        {"role": "assistant", "reasoning": "D", "content": "E", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "F"},
        {"role": "tool", "tool_call_id": "2", "content": "G"},
        {"role": "assistant", "content": "H"},
        {"role": "assistant", "content": "I"},
        {"role": "system", "content": "J"},
    ]


def test_items_close_in_order() -> None:
    """Text after a call is an item of its own; a cut call is incomplete."""
    builder = ItemBuilder("x")
    events = [
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        ToolCallBegin(0, "c0", "f"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
        ContentDelta("c"),
        ToolCallBegin(1, "c1", "f"),
        ToolCallEnd(1),
    ]
    sent = list(builder.push(events, True)) + list(builder.close("incomplete"))
    assert [(item.type, item.status) for item in builder.items] == [
        ("reasoning", "completed"),
        ("function_call", "completed"),
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    opened = [event["output_index"] for event in sent if event["type"].endswith("item.added")]
    closed = [event["output_index"] for event in sent if event["type"].endswith("item.done")]
    assert opened == closed == [0, 1, 2, 3]
