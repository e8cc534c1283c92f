"""What clients send without being asked to: values that change nothing are taken, the others are
refused by name.
"""

from typing import Any

import pytest

from tests.http_servers import HttpProcess

USER = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
BODY = {"max_tokens": 3, "temperature": 0.7, "seed": 5}
# Both kinds of request, and what vLLM, llama.cpp, Ollama and LiteLLM let their clients add.
ANYWHERE: list[dict[str, Any]] = [
    {"stream": False, "stream_options": {"include_usage": True}},
    {"service_tier": "auto"},
    {"prompt_cache_key": "a"},
    {"prompt_cache_retention": "24h"},
    {"safety_identifier": "a"},
    {"user": "me"},
    {"num_ctx": 4096, "keep_alive": "5m"},
    {"keep_alive": -1},
    {"skip_special_tokens": True},
    {"stop": ""},
    {"stop": [""]},
    {"stop": []},
    {"temperature": "0.7"},
    {"max_tokens": "3", "seed": 5.0, "n": "1"},
    {"metadata": {"a": 1, "b": [None]}},
    {"store": False},
]
TOOL = {"type": "function", "function": {"name": "f"}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
NAMED = {"type": "function", "function": {"name": "g"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto"},
    {"tools": [], "tool_choice": "none"},
    {"functions": [], "function_call": "auto"},
    {"parallel_tool_calls": False},
    {"parallel_tool_calls": True},
    {"modalities": ["text"]},
    {"add_special_tokens": False},
    {"top_logprobs": 0, "logprobs": False},
    {"messages": [USER | {"tool_calls": [], "annotations": [], "refusal": ""}]},
    {"messages": [USER | {"cache_control": {"type": "ephemeral"}}]},
    {"messages": [{"role": "user", "content": [PART]}]},
    {"messages": [USER | {"reasoning_content": ""}]},
]
COMPLETION: list[dict[str, Any]] = [{"suffix": ""}, {"best_of": 1}, {"logprobs": False}]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("store", {"store": True}),
    ("skip_special_tokens", {"skip_special_tokens": False}),
    ("stop.text", {"stop": 5}),
    ("temperature", {"temperature": "warm"}),
    ("temperature", {"temperature": "nan"}),
    ("max_tokens", {"max_tokens": "five"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": -2}),
    ("seed", {"seed": 2**64}),
    ("priority", {"priority": 1}),
    ("prompt_logprobs", {"prompt_logprobs": 1}),
    ("stream_options.padding", {"stream_options": {"padding": 1}}),
]
REFUSED_CHAT: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [TOOL]}),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("tools.0.type", {"tools": [TOOL | {"type": "custom"}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools.0.function.returns", {"tools": [{"type": "function", "function": {"returns": {}}}]}),
    ("tools.function.name", {"tools": [TOOL, TOOL]}),
    ("tool_choice", {"tools": [], "tool_choice": "required"}),
    ("tool_choice.word", {"tools": [TOOL], "tool_choice": "any"}),
    ("tool_choice.named.function", {"tool_choice": {"type": "function"}}),
    ("tool_choice.function.name", {"tools": [TOOL], "tool_choice": NAMED}),
    ("min_tokens", {"tools": [TOOL], "tool_choice": "required", "min_tokens": 2}),
    ("min_tokens", {"tools": [STRICT], "min_tokens": 2}),
    ("min_tokens", {"thinking_token_budget": 5, "min_tokens": 2}),
    ("ignore_eos", {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("reasoning_effort", {"reasoning_effort": "none"}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("messages.0.tool_calls.0.function", {"messages": [USER | {"tool_calls": [{"id": "1"}]}]}),
    ("messages.0", {"messages": [USER | {"tool_calls": [CALL]}]}),
    ("messages.0", {"messages": [USER | {"tool_call_id": "1"}]}),
    ("messages.0.annotations", {"messages": [USER | {"annotations": [{"type": "url_citation"}]}]}),
    ("messages.0.refusal", {"messages": [USER | {"refusal": "no"}]}),
]
REFUSED_COMPLETION: list[tuple[str, dict[str, Any]]] = [
    ("suffix", {"suffix": "x"}),
    ("best_of", {"best_of": 2}),
    ("logprobs", {"logprobs": True}),
]


@pytest.mark.parametrize(
    ("path", "body", "harmless", "refused"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, ANYWHERE + CHAT, REFUSED + REFUSED_CHAT),
        ("/v1/completions", {"prompt": "x"}, ANYWHERE + COMPLETION, REFUSED + REFUSED_COMPLETION),
    ],
    ids=["chat", "completion"],
)
def test_what_changes_nothing_is_accepted_and_the_rest_refused_by_name(
    server: HttpProcess,
    path: str,
    body: dict[str, Any],
    harmless: list[dict[str, Any]],
    refused: list[tuple[str, dict[str, Any]]],
) -> None:
    plain = server.post(path, **BODY, **body).json()["choices"]
    for extra in harmless:
        answer = server.post(path, **(BODY | body | extra))
        assert answer.status_code == 200, (extra, answer.text)
        assert answer.json()["choices"] == plain, extra
    for name, extra in refused:
        answer = server.post(path, **(BODY | body | extra))
        assert answer.status_code == 400, extra
        error = answer.json()["error"]
        assert error["param"] == name and name in error["message"], (extra, error)


def test_values_at_the_ends_of_their_ranges(server: HttpProcess) -> None:
    """Any 64 bits are a seed; -1 token is as many as fit, and so is more than fits: the answer
    is cut.
    """
    body = {"prompt": "x", "max_tokens": 3, "temperature": 1}
    seeds = [
        server.post("/v1/completions", **body, seed=seed).json()["choices"]
        for seed in (2**64 - 1, -1)
    ]
    assert seeds[0] == seeds[1]
    for asked in (-1, 100_000):
        answer = server.post(
            "/v1/completions", prompt=[1] * 250, max_tokens=asked, min_tokens=3, ignore_eos=True
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 6
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        chat = {
            "messages": [USER],
            "max_tokens": asked,
            "max_completion_tokens": asked,
            "ignore_eos": True,
        }
        answer = server.post("/v1/chat/completions", **chat)
        assert answer.json()["usage"]["total_tokens"] == 256, answer.text


def test_streams_take_the_options_of_streams(server: HttpProcess) -> None:
    """include_obfuscation asks for padding that no answer depends on."""
    for wanted in (False, True):
        with server.stream(
            max_tokens=2, stream_options={"include_obfuscation": wanted, "include_usage": True}
        ) as all_:
            *_, last, done = all_
        assert done == "[DONE]" and last["usage"]["completion_tokens"] == 2


def test_reasoning_of_earlier_answers_reaches_the_template(server: HttpProcess) -> None:
    """Whatever the client calls it; `show_reasoning` is the tests' template's."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = [{"role": "assistant", "content": "y", name: "because"}]
        body = {
            "messages": messages,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"show_reasoning": True},
        }
        answer = server.post("/tokenize", **body)
        tokens = answer.json()["tokens"]
        assert (
            server.post("/detokenize", tokens=tokens).json()["prompt"] == "<|assistant|>because|y\n"
        ), name


# As the programs send them that measure and evaluate servers; `openai` dumps a message with all its
# fields.
DUMPED = {
    "role": "assistant",
    "content": "y",
    "refusal": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench": (
        "/v1/completions",
        {"repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True} | STREAMED,
    ),
    "vllm bench, chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "max_completion_tokens": 3,
        }
        | STREAMED,
    ),
    "sglang bench": ("/v1/completions", {"best_of": 1, "ignore_eos": True, "stream": True}),
    "guidellm": (
        "/v1/completions",
        STREAMED
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stop": None},
    ),
    "lm-eval, generate": (
        "/v1/completions",
        {"prompt": [[1, 2, 3]], "stop": ["\n", "Q:"], "seed": 1234},
    ),
    "lm-eval, loglikelihood": (
        "/v1/completions",
        {"prompt": [[1, 2, 3]], "echo": True, "logprobs": 1, "max_tokens": 1},
    ),
    "Continue, edit": (
        "/v1/chat/completions",
        {"prediction": {"type": "content", "content": "x = 1"}, "stop": ["```"], "stream": True},
    ),
    "openai, history": (
        "/v1/chat/completions",
        {"messages": [USER, DUMPED | {"annotations": []}, USER]},
    ),
    "openai, developer": (
        "/v1/chat/completions",
        {"messages": [{"role": "developer", "content": "Be brief."}, USER | {"name": "me"}]},
    ),
    "Qwen3": ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_known_programs(server: HttpProcess, name: str) -> None:
    path, body = BODIES[name]
    base: dict[str, Any] = {"prompt": "x"} if path == "/v1/completions" else {"messages": [USER]}
    limit = {} if "max_completion_tokens" in body else {"max_tokens": 3}
    answer = server.post(path, **(base | {"model": "tiny-moe", "temperature": 0} | limit | body))
    assert answer.status_code == 200, answer.text
    assert "[DONE]" in answer.text if body.get("stream") else answer.json()["choices"]


def test_an_answer_is_taken_back_as_history(server: HttpProcess) -> None:
    """With every field that the server gave it."""
    answer = server.post("/v1/chat/completions", messages=[USER], max_tokens=3).json()["choices"][
        0
    ]["message"]
    again = server.post("/v1/chat/completions", messages=[USER, answer, USER], max_tokens=3)
    assert again.status_code == 200, again.text
