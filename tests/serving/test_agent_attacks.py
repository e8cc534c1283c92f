"""Requests of agents that are made to stop the server, on each route that takes tools: templates,
tools and histories that need too much, and bodies that are no requests.

The answers are errors in the route's own form, everyone else is served meanwhile, and the log has
no error of the server.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from test_connection import GROWTH_BYTES, TIMEOUT_S, Watch, connect, until_closed

from tests.agent_model import POSITIONS, Scene, save_agent_model
from tests.http_servers import LIMIT_S, HttpProcess

JSON_TYPE = {"content-type": "application/json"}
SIZES = ("--max-batch", 2, "--max-seq-len", POSITIONS, "--prefill-chunk-tokens", 256)
LIMITS = (
    *("--header-timeout-s", TIMEOUT_S, "--body-timeout-s", TIMEOUT_S),
    *("--max-body-bytes", 16 << 20),
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
# what a model's template may do where a message has the word, and words of the answer
TEMPLATES = {
    "endless": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "needs more than",
    ),
    "padded": ("{{ '%2000000000d' % 1 }}", "needs more than"),
    "endless-text": (
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "needs more than",
    ),
    "power": (
        "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
        "needs more than",
    ),
    "recursion": (
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "cannot render them",
    ),
    "attribute": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "function": ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
    "change": ("{{ messages.append(1) }}", "is unsafe"),
    "undefined": ("{{ absent.field }}", "undefined"),
    "list": ("{{ range(10 ** 9) | list }}", "cannot render them"),
}

SECONDS = {"endless", "power"}  # take all of a rendering's processor time
# writes what is long, which the agent's template leaves out
WHOLE = (
    "{% if (tools | string | length) + (messages | string | length) > 100000 %}"
    "{{ tools }}{{ messages }}{% endif %}"
)


@dataclass(frozen=True)
class Route:
    """A route that takes tools, and the form of its tools and of a history with a call.

    limit: the field that bounds the answer's tokens.
    """

    path: str
    history: str
    limit: str

    def tool(self, name: str, schema: Any, description: Any = "d") -> dict[str, Any]:
        named = {"name": name, "description": description}
        if self.path == "/v1/messages":
            return named | {"input_schema": schema}
        function = named | {"parameters": schema}
        if self.path == "/v1/responses":
            return {"type": "function"} | function
        return {"type": "function", "function": function}

    def turns(self, text: str, count: int = 1) -> dict[str, Any]:
        return {self.history: [{"role": "user", "content": text}] * count}

    def call(self, arguments: Any) -> dict[str, Any]:
        """A history in which the assistant called a tool with these arguments."""
        user = {"role": "user", "content": "x"}
        if self.path == "/v1/messages":
            use = {"type": "tool_use", "id": "a", "name": "f", "input": arguments}
            result = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
            turns = [user, {"role": "assistant", "content": [use]}]
            return {self.history: [*turns, {"role": "user", "content": [result]}]}
        function = {"name": "f", "arguments": arguments}
        if self.path == "/v1/responses":
            use = {"type": "function_call", "call_id": "a"} | function
            result = {"type": "function_call_output", "call_id": "a", "output": "1"}
            return {self.history: [user, use, result]}
        use = {"id": "a", "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": "a", "content": "1"}
        return {self.history: [user, {"role": "assistant", "tool_calls": [use]}, result]}

    def body(self, model: str, **fields: Any) -> dict[str, Any]:
        return {"model": model, self.limit: 2} | self.turns("x") | fields


ROUTES = (
    Route("/v1/chat/completions", "messages", "max_tokens"),
    Route("/v1/responses", "input", "max_output_tokens"),
    Route("/v1/messages", "messages", "max_tokens"),
)
ALL_ROUTES = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., HttpProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpProcess]:
    """Has a template that attacks where a message says so; after all tests it still serves, and
    has logged no error of its own.
    """
    folder = tmp_path_factory.mktemp("models") / "agent"
    save_agent_model(folder, [Scene("true", "Hello.")])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    attacks = (
        f"{{% if 'attack:{name};' in (messages | string) %}}{text}{{% endif %}}"
        for name, (text, _) in TEMPLATES.items()
    )
    settings["chat_template"] = "".join(attacks) + WHOLE + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    server = serve(*SIZES, *LIMITS, "--policy", "resident", folder=folder)
    for route in ROUTES:
        assert send(server, route, route.body("agent")).status_code == 200
    yield server
    for route in ROUTES:
        assert send(server, route, route.body("agent")).status_code == 200
    until_closed(server)
    assert server.terminate() == 0
    assert "Traceback" not in server.log.read_text()


def send(server: HttpProcess, route: Route, body: dict[str, Any] | bytes) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + route.path, content=content, headers=JSON_TYPE, timeout=LIMIT_S)


def message_of(answer: httpx.Response, route: Route) -> str:
    """The words of an error of status 400 in the route's form; they are few."""
    assert answer.status_code == 400, (route.path, answer.status_code, answer.text[:500])
    body = answer.json()
    assert len(answer.content) < 4000
    if route.path == "/v1/messages":
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


@ALL_ROUTES
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SECONDS)) for n in TEMPLATES]
)
def test_templates(server: HttpProcess, route: Route, name: str) -> None:
    body = route.body("agent") | route.turns(f"attack:{name};")
    with Watch(server) as watch:
        answer = send(server, route, body)
    words = message_of(answer, route)
    assert TEMPLATES[name][1] in words and "template" in words, words
    watch.check()


def nested(depth: int) -> Any:
    return json.loads('{"a":' * depth + "0" + "}" * depth)


TAKEN = {"a deep schema", "a deep field"}  # by a route that passes them on, or ignores them
LARGE: dict[str, Callable[[Route], dict[str, Any]]] = {
    "descriptions of 10 MB": lambda r: {"tools": [r.tool("f", SCHEMA, "d" * (10 << 20))]},
    "many tools": lambda r: {"tools": [r.tool(f"f{i}", SCHEMA) for i in range(50_000)]},
    "tools of one name": lambda r: {"tools": [r.tool("f", SCHEMA)] * 50_000},
    "a schema of 10 MB": lambda r: {
        "tools": [r.tool("f", {"type": "object", "description": "d" * (10 << 20)})]
    },
    "many properties": lambda r: {
        "tools": [r.tool("f", {"properties": {f"p{i}": {} for i in range(100_000)}})]
    },
    "a deep schema": lambda r: {"tools": [r.tool("f", nested(400))]},
    "a long name": lambda r: {"tools": [r.tool("f" * 1_000_000, SCHEMA)]},
    "a name that is none": lambda r: {"tools": [r.tool("a b", SCHEMA)]},
    "a description that is no text": lambda r: {"tools": [r.tool("f", SCHEMA, 1)]},
    "a schema that is no object": lambda r: {"tools": [r.tool("f", [1])]},
    "tools that are none": lambda r: {"tools": [1] * 100_000},
    "tools that are no list": lambda r: {"tools": {"a": 1}},
    "10,000 messages": lambda r: r.turns("x", 10_000),
    "a long message": lambda r: r.turns("x" * (4 << 20)),
    "messages of no role": lambda r: {r.history: [{"role": "x", "content": "x"}] * 4000},
    "messages that are numbers": lambda r: {r.history: [1] * 100_000},
    "no text": lambda r: {r.history: [{"role": "user", "content": {"a": 1}}]},
    "arguments that are a list": lambda r: r.call([1]),
    "arguments that are a number": lambda r: r.call(1),
    "deep arguments": lambda r: r.call("[" * 100_000),
    "arguments of a list's text": lambda r: r.call("[1]"),
    "arguments that are no JSON": lambda r: r.call("{"),
    "a choice that is none": lambda r: {"tool_choice": [1]},
    "a choice without tools": lambda r: {"tool_choice": {"type": "tool", "name": "f"}},
    "unknown fields": lambda r: {f"k{i}": 1 for i in range(100_000)},
    "a limit that is none": lambda r: {r.limit: 10**400},
    "a limit that is a text": lambda r: {r.limit: "2x"},
    "a deep field": lambda r: {"metadata": nested(400)},
}


# tokenized, or scanned, in seconds: one route does it quickly enough
SLOW_TEXTS = {"descriptions of 10 MB", "a schema of 10 MB", "a long message"}


@pytest.mark.parametrize(
    ("route", "name"),
    [
        pytest.param(
            route,
            name,
            id=f"{route.path}-{name}",
            marks=[pytest.mark.slow] * (name in SLOW_TEXTS and route is not ROUTES[0]),
        )
        for route in ROUTES
        for name in LARGE
    ],
)
def test_requests(server: HttpProcess, route: Route, name: str) -> None:
    """Refused in a few words, before work that grows with them."""
    body = route.body("agent", **LARGE[name](route))
    with Watch(server) as watch:
        answer = send(server, route, body)
    assert (name in TAKEN and answer.status_code == 200) or message_of(answer, route)
    watch.check(growth_bytes=2 * GROWTH_BYTES)


def with_text(route: Route, text: str) -> bytes:
    """A body with a text of JSON in place of the history."""
    return json.dumps(route.body("agent") | {route.history: "?"}).replace('"?"', text).encode()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"thinking": {"type": "disabled"}},
            "thinking.type = 'disabled': must be left out: the model's chat template reads no such"
            " variable",
        ),
        (
            {"tools": [ROUTES[2].tool("f", {"enum": []})], "tool_choice": {"type": "any"}},
            "tools: failed to compile JSON schema: Unsatisfiable schema: anyOf is empty",
        ),
    ],
)
def test_errors_say_what_the_client_wrote(
    server: HttpProcess, fields: dict[str, Any], words: str
) -> None:
    """Neither the value of the chat that a message stands for, nor the grammar made of a schema."""
    answer = send(server, ROUTES[2], ROUTES[2].body("agent", **fields))
    assert message_of(answer, ROUTES[2]) == words


NO_JSON: dict[str, Callable[[Route], bytes]] = {
    "truncated": lambda r: json.dumps(r.body("agent")).encode()[:-4],
    "empty": lambda r: b"",
    "no object": lambda r: b"[1]",
    "null": lambda r: b"null",
    "a name twice": lambda r: json.dumps(r.body("agent"))[:-1].encode() + b', "model": "agent"}',
    "NaN": lambda r: with_text(r, "NaN"),
    "an infinity": lambda r: with_text(r, "1e999"),
    "a number of 100,000 digits": lambda r: with_text(r, "1" * 100_000),
    "nested lists": lambda r: with_text(r, "[" * 100_000),
    "nested objects": lambda r: with_text(r, '{"a":' * 100_000),
    "no UTF-8": lambda r: json.dumps(r.body("agent")).encode().replace(b'"x"', b'"\xff"'),
    "a control character": lambda r: with_text(r, '[{"role": "user", "content": "\n\x01"}]'),
    "more after it": lambda r: json.dumps(r.body("agent")).encode() + b"{}",
    "UTF-16": lambda r: json.dumps(r.body("agent")).encode("utf-16"),
}


@ALL_ROUTES
@pytest.mark.parametrize("name", NO_JSON)
def test_bodies_that_are_no_requests(server: HttpProcess, route: Route, name: str) -> None:
    with Watch(server) as watch:
        answer = send(server, route, NO_JSON[name](route))
    assert message_of(answer, route)
    watch.check()


def read_all(connection: Any) -> bytes:
    answer = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


@ALL_ROUTES
def test_chunks(server: HttpProcess, route: Route) -> None:
    """A body in chunks of one byte is taken; lengths that are none are refused."""
    head = f"POST {route.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += "connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    content = json.dumps(route.body("agent")).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    for body, status in (
        (chunks + b"0\r\n\r\n", b"200"),
        (b"zz\r\n{}\r\n0\r\n\r\n", b"400"),
        (b"-1\r\n{}\r\n0\r\n\r\n", b"400"),
    ):
        with connect(server) as connection:
            connection.sendall(head.encode() + body)
            assert read_all(connection).split(b" ")[1] == status, body[:20]


@ALL_ROUTES
def test_clients_that_stop(server: HttpProcess, route: Route) -> None:
    """A body that stops half way ends with 408, and leaving clients, before or within a stream,
    leave nothing that runs.
    """
    content = json.dumps(route.body("agent", stream=True) | {route.limit: 500}).encode()
    head = f"POST {route.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    whole = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
    with connect(server) as slow:
        slow.sendall(whole[:-5])
        for _ in range(4):
            with connect(server) as leaving:
                leaving.sendall(whole[:-5])
            with connect(server) as leaving:
                leaving.sendall(whole)
            with connect(server) as leaving:
                leaving.sendall(whole)
                assert leaving.recv(1024).startswith(b"HTTP/1.1 200 ")
        begun_s = time.monotonic()
        assert read_all(slow).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() < begun_s + LIMIT_S / 2
    server.until(
        "/live", lambda r: r.json()["requests_running"] == r.json()["requests_waiting"] == 0
    )
