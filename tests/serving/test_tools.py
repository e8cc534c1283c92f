"""Tools and reasoning through the real `openai` client. The model is scripted: its tokens are given
by their position, so that it calls tools as a trained one would.
"""

import json
from collections.abc import Callable, Iterator
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
