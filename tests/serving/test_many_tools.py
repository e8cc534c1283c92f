"""A hundred tools with schemas in each of many requests: everyone else is served meanwhile."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from test_one_client import SCHEMAS

from tests.agent_model import POSITIONS, Scene, save_agent_model
from tests.http_servers import HttpProcess

TOOLS, REQUESTS, CLIENTS = 100, 12, 4
LIMIT_S = 1.0  # for an answer of /health
BUSY = os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)


def tool(number: int) -> dict[str, Any]:
    """A tool whose schema has strings by a pattern, choices and nested objects."""
    properties: dict[str, Any] = {
        f"p{i}": {"type": "string", "pattern": f"^a{number}[b-d]{{1,8}}$"} for i in range(8)
    }
    properties["kind"] = {"enum": [f"k{number}-{i}" for i in range(20)]}
    properties["inner"] = {"type": "object", "properties": dict(properties)}
    schema = {"type": "object", "properties": properties, "required": ["kind"]}
    function = {"name": f"f{number}", "strict": True, "parameters": schema}
    return {"type": "function", "function": function | {"description": "d" * 500}}


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., HttpProcess], tmp_path_factory: pytest.TempPathFactory
) -> HttpProcess:
    folder = tmp_path_factory.mktemp("models") / "agent"
    save_agent_model(folder, [Scene("true", "Hello.")])
    sizes = ("--max-batch", CLIENTS, "--max-seq-len", POSITIONS, "--prefill-chunk-tokens", 256)
    return serve(*sizes, "--policy", "resident", folder=folder)


@pytest.mark.slow
@pytest.mark.skipif(BUSY, reason="measures times, and the machine is busy")
def test_health_never_waits_a_second(server: HttpProcess) -> None:
    """One client's hundred tools, again and again: grammars are made, and calls follow them."""
    tools = [tool(number) for number in range(TOOLS)]
    body = {
        "messages": [{"role": "user", "content": "Go."}],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 60,
        "thinking_token_budget": 0,
    }

    def ask(number: int) -> int:
        # others every time: nothing is answered by a grammar that is kept
        extra = {"type": "function", "function": {"name": f"other{number}", "strict": True}}
        answer = server.post("/v1/chat/completions", **body | {"tools": [*tools, extra]})
        if answer.status_code == 200:
            (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"]
        return answer.status_code

    waited: list[float] = []
    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = [threads.submit(ask, number) for number in range(REQUESTS)]
        while not all(answer.done() for answer in answers):
            begun = time.monotonic()
            assert server.get("/health").status_code == 200
            waited.append(time.monotonic() - begun)
    statuses = [answer.result() for answer in answers]
    print(json.dumps({"longest_s": max(waited), "asked": len(waited), "statuses": statuses}))
    assert statuses == [200] * REQUESTS
    assert len(waited) > REQUESTS and max(waited) < LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_messages(server: HttpProcess, name: str) -> None:
    """Schemas that take long, as the input of a tool that `/v1/messages` must call: refused, or
    answered while everyone else is.
    """
    inputs = {"type": "object", "properties": {"x": SCHEMAS[name]}, "required": ["x"]}
    body = {
        "model": server.get("/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "Go."}],
        "max_tokens": 40,
        "tools": [{"name": "f", "input_schema": inputs}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    longest_s = 0.0
    with ThreadPoolExecutor(CLIENTS) as threads:
        asked = [threads.submit(server.post, "/v1/messages", **body) for _ in range(CLIENTS)]
        while not all(answer.done() for answer in asked):
            begun = time.monotonic()
            assert server.get("/health").status_code == 200
            longest_s = max(longest_s, time.monotonic() - begun)
    print(f"the longest of /health took {longest_s:.3f} s")
    for answer in (answer.result() for answer in asked):
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            message = answer.json()["error"]["message"]
            assert message.startswith("tools"), message
    assert longest_s < 3.0
