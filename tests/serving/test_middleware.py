"""Keys, hosts, limits and time-outs."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from jmoe.serving.api_keys import ApiKeys
from tests.fakes import wait_for
from tests.http_servers import ENDLESS, LIMIT_S, LONG, HttpProcess, events, is_idle

KEYS = ("first key of all", "second-key")
HEADERS = {"authorization": f"Bearer {KEYS[1]}"}
ORIGINS = ("app://obsidian.md", "http://localhost:3000")
ROOM = 61  # sequences that run and wait
# 60 of them, of which the first ends soon enough for another request's turn to come.
MANY = {"prompt": "x", "max_tokens": 1000, "n": ROOM - 1, "ignore_eos": True}
REFUSED = {"prompt": "x", "max_tokens": 1, "n": ROOM}  # as long as one of them is left


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the server has its keys from."""
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text("\n\n".join(KEYS) + "\n")
    return path


@pytest.fixture(scope="module")
def server(serve: Callable[..., HttpProcess], keys: Path) -> HttpProcess:
    limits = ("--max-body-bytes", 20_000, "--max-waiting", ROOM - 1)
    named = ("--served-model-name", "org/tiny", "--allowed-origins", *ORIGINS)
    return serve("--api-key-file", keys, *limits, *LONG, *named, "--log-prompts")


@pytest.fixture
def client(server: HttpProcess) -> Iterator[httpx.Client]:
    with server.client(headers=HEADERS) as client:
        yield client
        wait_for(lambda: is_idle(client.get("/live")), "a request has left something behind")


def test_keys(server: HttpProcess) -> None:
    for key in KEYS:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as known:
            (model,) = known.models.list()
            assert model.id == "org/tiny" and known.models.retrieve("org/tiny") == model
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="second-keY", max_retries=0) as unknown,
        pytest.raises(openai.AuthenticationError),
    ):
        unknown.models.list()
    for headers in (
        {},
        {"authorization": KEYS[1]},
        {"authorization": f"Basic {KEYS[1]}"},
        {"authorization": "Bearer"},
    ):
        for path in ("/v1/models", "/metrics", "/live", "/openapi.json", "/nothing"):
            response = httpx.get(server.url + path, headers=headers)
            assert (
                response.status_code == 401
                and response.json()["error"]["code"] == "invalid_api_key"
            )
    assert server.get("/health").status_code == server.get("/ready").status_code == 200
    assert server.post("/v1/completions", prompt="x").status_code == 401


def test_keys_are_read_again(server: HttpProcess, keys: Path) -> None:
    """A key that is taken out of the file is of no use a few seconds later, and one that is put
    in is.
    """

    def answers(key: str) -> int:
        return httpx.get(
            f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}
        ).status_code

    before = keys.read_text()
    keys.write_text(f"{before}a-new-one\n")
    wait_for(lambda: answers("a-new-one") == 200, "the new key does not count")
    keys.write_text(before)
    wait_for(lambda: answers("a-new-one") == 401, "the old key still counts")
    assert all(answers(key) == 200 for key in KEYS)


def test_keys_that_no_header_can_hold(server: HttpProcess, tmp_path: Path) -> None:
    """Refused at the start, by file and line; from a client they are as wrong as any other."""
    file = tmp_path / "keys"
    for content in ("right\nключ\n".encode(), b"right\n\xff\xfe\n", b"right\na\x07b\n"):
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"^api_key_file = '.*keys': line 2: a key must be of printable ASCII"
        ):
            ApiKeys(str(file))
    wrong = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer ключ".encode()})
    assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"


def test_who_has_a_key_may_use_any_name_of_the_server(client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"host": "models.example:8000"}).status_code == 200


def preflight(url: str, origin: str, **more: str) -> httpx.Response:
    """What a browser asks before a page of another origin may send a request."""
    asked = {"origin": origin, "access-control-request-method": "POST", **more}
    return httpx.options(f"{url}/v1/chat/completions", headers=asked)


def test_pages_of_allowed_origins(server: HttpProcess, client: httpx.Client) -> None:
    """A browser asks without a key and is told yes; answers and errors can then be read, streams
    too.
    """
    wanted = {"access-control-request-headers": "authorization,content-type,x-stainless-os"}
    for origin in ORIGINS:
        allowed = preflight(server.url, origin, **wanted)
        assert (
            allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == origin
        )
        assert (
            "POST" in allowed.headers["access-control-allow-methods"]
            and "Origin" in allowed.headers["vary"]
        )
        assert (
            allowed.headers["access-control-allow-headers"]
            == wanted["access-control-request-headers"]
        )
        body = {"prompt": "x", "max_tokens": 1}
        for stream in (False, True):
            answer = client.post(
                "/v1/completions", json=body | {"stream": stream}, headers={"origin": origin}
            )
            assert (
                answer.status_code == 200
                and answer.headers["access-control-allow-origin"] == origin
            )
        refused = httpx.post(f"{server.url}/v1/completions", json=body, headers={"origin": origin})
        assert (
            refused.status_code == 401 and refused.headers["access-control-allow-origin"] == origin
        )
    network = preflight(
        server.url, ORIGINS[0], **{"access-control-request-private-network": "true"}
    )
    assert network.headers["access-control-allow-private-network"] == "true"


def test_pages_of_other_origins(
    server: HttpProcess, shared_server: HttpProcess, client: httpx.Client
) -> None:
    """A browser keeps the answer from them: no header names them. By default no origin is
    allowed.
    """
    for url, origin in (
        (server.url, "https://other.example"),
        (server.url, "null"),
        (shared_server.url, ORIGINS[0]),
    ):
        refused = preflight(url, origin)
        assert (
            refused.status_code in (400, 405)
            and "access-control-allow-origin" not in refused.headers
        )
    answer = client.get("/v1/models", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_path_cannot_write_lines_of_the_log(server: HttpProcess, client: httpx.Client) -> None:
    assert client.get("/%0a2026-01-01%20INFO%20all%20is%20well%1b%5b2J").status_code == 404
    server.until_said("GET /%0a2026-01-01%20INFO%20all%20is%20well%1b%5b2J 404")
    log = server.log.read_text()
    assert "\x1b" not in log
    assert not any(line.startswith("2026-01-01 INFO all") for line in log.splitlines())
    client.get("/" + "x" * 5000)
    server.until_said("GET /xxx")
    assert max(map(len, server.log.read_text().splitlines())) < 500


def test_a_body_that_is_too_large(client: httpx.Client) -> None:
    """Refused by what it declares, and by what comes where it declares nothing."""
    body = b'{"prompt": "' + b"x" * 30_000 + b'"}'
    headers = {"content-type": "application/json"}
    declared = client.post("/v1/completions", content=body, headers=headers)
    chunks = (body[i : i + 1000] for i in range(0, len(body), 1000))
    undeclared = client.post("/v1/completions", content=chunks, headers=headers)
    for response in (declared, undeclared):
        assert response.status_code == 413
        assert "at most 20000 are allowed" in response.json()["error"]["message"]
    small = client.post(
        "/v1/completions", content=iter([b'{"prompt": "x", ', b'"max_tokens": 1}']), headers=headers
    )
    assert small.status_code == 200


def test_a_prompt_that_does_not_fit(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": [1] * 8192, "max_tokens": 3})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert (
        error["message"]
        == "the prompt has 8192 tokens; together with one of output at most 8192 fit"
    )


def test_a_full_queue(client: httpx.Client) -> None:
    """60 run and wait, one waits behind them, the next is told when to come again; none of the
    others is harmed.
    """

    def rejected() -> float:
        name = r'jmoe:requests_rejected_total\{model_name="org/tiny",reason="queue"\} (\S+)'
        return sum(map(float, re.findall(name, client.get("/metrics").text)))

    before = rejected()
    with client.stream("POST", "/v1/completions", json=MANY | {"stream": True}) as running:
        first = events(running.iter_lines())
        assert next(first)["choices"]
        with client.stream(
            "POST", "/v1/completions", json=MANY | {"stream": True, "n": 1, "max_tokens": 3}
        ) as waiting:
            refused = client.post("/v1/completions", json=REFUSED)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
            assert list(events(waiting.iter_lines()))[-1] == "[DONE]"
        assert next(first)["choices"]
    assert rejected() == before + 1


def test_when_to_try_again(client: httpx.Client) -> None:
    """Retry-After says when there is room, by the tokens that those who run and wait may still
    draw.
    """
    with client.stream("POST", "/v1/completions", json=MANY | {"stream": True}) as running:
        chunks = events(running.iter_lines())
        for _ in range(20):
            next(chunks)
        refused = client.post("/v1/completions", json=REFUSED)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 1, (
        "about 60,000 tokens are drawn before there is so much room"
    )


def test_a_request_that_takes_too_long(serve: Callable[..., HttpProcess]) -> None:
    """504, or an error in the stream; its place is free then."""
    server, body = serve(*LONG, "--request-timeout-s", 4), {"prompt": "x"} | ENDLESS
    whole = server.post("/v1/completions", **body)
    assert whole.status_code == 504 and whole.json()["error"]["type"] == "timeout_error"
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as client:
        stream = client.completions.create(
            model="tiny-moe", prompt="x", stream=True, extra_body=ENDLESS
        )
        assert next(stream).choices
        with pytest.raises(openai.APIError, match=r"^the request took longer than 4 s$"):
            list(stream)
    server.until("/live", is_idle)


def test_prompts_are_logged_where_asked(server: HttpProcess, client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "once upon", "max_tokens": 1})
    server.until_said("once upon")  # a request's line is written after its answer
