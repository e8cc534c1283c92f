"""Tools and reasoning through the real `openai` client. The model is scripted: its tokens are given
by their position, so that it calls tools as a trained one would.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import AddedToken, Tokenizer

from jmoe.data.tokenizer import train_bpe
from jmoe.models.chat_template import ChatTemplate
from tests.http_servers import LIMIT_S, HttpProcess
from tests.scripted_model import describe, save_scripted_model

TEMPLATE = Path(__file__).parent.parent / "fixtures/chat_templates/qwen3/chat_template.jinja"
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
SIZES = (
    "--max-batch",
    1,
    "--max-seq-len",
    512,
    "--prefill-chunk-tokens",
    64,
    "--policy",
    "resident",
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
USER = {"role": "user", "content": "Weather in Zürich and Oslo?"}
REASONING, CONTENT = "I need both.", "Let me look."
CALLS = [("weather", '{"city": "Zürich 🎉"}'), ("weather", '{"city": "Oslo"}')]
RESULTS = ["21", "12"]
ANSWER = "21 and 12 °C."
SAID = (
    f"<think>\n{REASONING}\n</think>\n\n{CONTENT}\n"
    + "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in CALLS
    )
    + "<|im_end|>"
)


def history() -> list[dict[str, Any]]:
    """The conversation after both calls, as the template gets it."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
        for name, arguments in CALLS
    ]
    said = {"role": "assistant", "content": CONTENT, "reasoning_content": REASONING}
    results = [{"role": "tool", "content": result} for result in RESULTS]
    return [USER, said | {"tool_calls": calls}, *results]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = TEMPLATE.read_text() + json.dumps(WEATHER) + SAID
    tokenizer = train_bpe([text] * 3, 600)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    tokenizer.add_special_tokens([AddedToken(text) for text in CONTROL])
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model that calls the tool twice after `USER`, and answers after the results."""
    folder = tmp_path_factory.mktemp("models") / "scripted"
    template = ChatTemplate({"default": TEMPLATE.read_text()}, {}, "test")
    prompts = [
        tokenizer.encode(template.render(messages, tools=[WEATHER])).ids
        for messages in ([USER], history())
    ]
    calls, answer = (tokenizer.encode(text).ids for text in (SAID, f"{ANSWER}<|im_end|>"))
    first, second = map(len, prompts)
    assert len(calls) < second - first
    filler = calls[-1:] * (second - first - len(calls))
    save_scripted_model(folder, tokenizer, first, [*calls, *filler, *answer], positions=512)
    settings = {
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE.read_text(),
        "added_tokens_decoder": {},
    }
    describe(folder, settings, {"eos_token_id": 0, "top_k": 1})
    return folder


@pytest.fixture(scope="module")
def server(serve: Callable[..., HttpProcess], folder: Path) -> HttpProcess:
    return serve(*SIZES, folder=folder)


@pytest.fixture(scope="module")
def client(server: HttpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0
    ) as client:
        yield client


BODY: dict[str, Any] = {"model": "scripted", "messages": [USER], "tools": [WEATHER]}


def test_the_start_says_the_formats(server: HttpProcess) -> None:
    assert "tool calls: hermes, reasoning: qwen3" in server.log.read_text()


def test_calls_and_reasoning(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    completion = client.chat.completions.create(**BODY)
    (choice,) = completion.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls" and message.content == CONTENT
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == REASONING
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert calls == CALLS and len({call.id for call in message.tool_calls or ()}) == 2
    assert completion.usage is not None
    details = completion.usage.completion_tokens_details
    reasoning = tokenizer.encode(SAID.partition("\n\n")[0]).ids
    assert details is not None and details.reasoning_tokens == len(reasoning)


def test_streamed_pieces_add_up(client: openai.OpenAI) -> None:
    """To the answer that is not streamed; the name comes at once, the arguments in pieces."""
    chunks = list(client.chat.completions.create(**BODY, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == CONTENT
    for name in ("reasoning", "reasoning_content"):
        assert "".join((delta.model_extra or {}).get(name, "") for delta in deltas) == REASONING
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert all(piece.function is not None for piece in pieces)
    for index, (name, arguments) in enumerate(CALLS):
        first, *more = [piece for piece in pieces if piece.index == index]
        assert first.id and first.type == "function" and first.function.name == name  # type: ignore[union-attr]
        assert not any(piece.id or piece.function.name for piece in more)  # type: ignore[union-attr]
        written = [piece.function.arguments or "" for piece in (first, *more)]  # type: ignore[union-attr]
        assert "".join(written) == arguments and len(written) > 3
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_a_loop_of_tools_to_the_end(client: openai.OpenAI) -> None:
    """The client's own objects go back as the history, reasoning too."""
    messages: list[Any] = [USER]
    results = iter(RESULTS)
    for _ in range(3):
        (choice,) = client.chat.completions.create(**(BODY | {"messages": messages})).choices
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls or ():
            assert call.type == "function" and json.loads(call.function.arguments)["city"]
            message: ChatCompletionMessageParam = {
                "role": "tool",
                "tool_call_id": call.id,
                "content": next(results),
            }
            messages.append(message)
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWER)
    assert len(messages) == 5 and choice.message.tool_calls is None


def test_one_call_at_most(client: openai.OpenAI) -> None:
    """The answer ends with the first call, and draws no second one."""
    both = client.chat.completions.create(**BODY)
    one = client.chat.completions.create(**BODY, parallel_tool_calls=False)
    (choice,) = one.choices
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == CALLS[0]
    assert choice.finish_reason == "tool_calls" and both.usage is not None
    assert one.usage is not None and one.usage.completion_tokens < both.usage.completion_tokens


def test_a_cut_call_ends_by_length(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    cut = SAID.index("Oslo")
    limit = len(tokenizer.encode(SAID[:cut]).ids)
    (choice,) = client.chat.completions.create(**BODY, max_tokens=limit).choices
    assert choice.finish_reason == "length"
    _, call = choice.message.tool_calls or ()
    assert call.type == "function" and CALLS[1][1].startswith(call.function.arguments)


CITY = {**WEATHER["function"]["parameters"], "properties": {"city": {"enum": ["Bern", "Basel"]}}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": CITY}}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"other"}),
        ({"type": "function", "function": {"name": "other"}}, {"other"}),
    ],
)
def test_calls_by_a_grammar(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    """The model reasons as it likes, then it calls what it never would, by the schema."""
    tools = [OTHER] if choice == "required" else [WEATHER, OTHER]
    # after the longer prompt of two tools this model would reason without end
    budget = {"thinking_token_budget": 40}
    body = BODY | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = client.chat.completions.create(**body, extra_body=budget).choices
    assert whole.finish_reason == "tool_calls", whole
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function" and call.function.name in names
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Basel")
    assert whole.message.content is None


def test_a_strict_tool(client: openai.OpenAI) -> None:
    """The same model is held to the tool's schema once it calls it by itself."""
    strict = json.loads(json.dumps(WEATHER))
    strict["function"]["strict"] = True
    strict["function"]["parameters"]["properties"]["city"] = {"enum": ["Bern"]}
    body = BODY | {"tools": [strict], "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(**body, max_tokens=200).choices
    for call in choice.message.tool_calls or ():
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Bern"}


def test_a_schema_binds_after_the_reasoning(client: openai.OpenAI) -> None:
    """Which the model may write before; a budget ends it early."""
    schema = {"name": "n", "strict": True, "schema": {"const": {"a": 4}}}
    body = BODY | {"response_format": {"type": "json_schema", "json_schema": schema}}
    del body["tools"]
    for budget in (None, 3):
        extra = {} if budget is None else {"thinking_token_budget": budget}
        (choice,) = client.chat.completions.create(
            **body, max_tokens=200, extra_body=extra, temperature=0
        ).choices
        assert json.loads(choice.message.content or "") == {"a": 4}
    used = client.chat.completions.create(
        **BODY, extra_body={"thinking_token_budget": 3}, max_tokens=20
    ).usage
    assert used is not None and used.completion_tokens_details is not None
    assert used.completion_tokens_details.reasoning_tokens == 5, "with both tags"


def test_many_schemas_block_nobody(server: HttpProcess) -> None:
    """One client's hundred tools, again and again, while another asks for /health.

    The limit is for a machine that does much else; test_many_tools.py has that of an idle one.
    """
    properties = {f"p{i}": {"type": "string", "pattern": f"^a{i}+b*$"} for i in range(8)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    tools = [
        {"type": "function", "function": function | {"name": f"f{i}", "strict": True}}
        for i in range(100)
    ]
    body = {"messages": [USER], "tools": tools, "tool_choice": "required", "max_tokens": 1}
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(server.post, "/v1/chat/completions", **body) for _ in range(8)]
        waited: list[float] = []
        while not all(answer.done() for answer in answers):
            begun = time.monotonic()
            assert server.get("/health").status_code == 200
            waited.append(time.monotonic() - begun)
    # too long for this model's context, or for the limits of a fork; never an error of the server
    assert {answer.result().status_code for answer in answers} <= {200, 400}
    assert max(waited) < 20.0


def test_prompts_are_the_templates(server: HttpProcess, tokenizer: Tokenizer) -> None:
    """With tools, and with the reasoning switched off by either name."""
    template = ChatTemplate({"default": TEMPLATE.read_text()}, {}, "test")
    rendered = template.render(history(), tools=[WEATHER])
    calls = [
        {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in CALLS
    ]
    messages = history()
    messages[1]["tool_calls"] = calls
    body = {"messages": messages, "tools": [WEATHER]}
    assert server.post("/tokenize", **body).json()["tokens"] == tokenizer.encode(rendered).ids
    used = server.post(
        "/v1/chat/completions", **body, reasoning_effort="none", max_tokens=1
    ).json()["usage"]["prompt_tokens"]
    off = template.render(history(), tools=[WEATHER], enable_thinking=False)
    assert used == len(tokenizer.encode(off).ids)


@pytest.mark.parametrize(
    ("arguments", "words"), [("[1]", "'[1]': must be a JSON object"), ("{", "'{': must be a JSON")]
)
def test_arguments_that_the_template_cannot_read(
    server: HttpProcess, arguments: str, words: str
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = server.post(
        "/v1/chat/completions", messages=[USER, {"role": "assistant", "tool_calls": [call]}]
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"]
    assert error["param"] == "messages: arguments of a tool call"
