"""Requests that are made to stop the server: it refuses them, goes on answering others, and keeps
no memory.

How long `/health` took at worst and what the process grew by is printed (`pytest -rP`). The bounds
leave room for machines that do much else: on one that does not, nothing takes a second, and what is
refused late takes minutes.
"""

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
import uvicorn
from tokenizers import Tokenizer
from uvicorn.server import ServerState

from jmoe.config.serving import ServeConfig
from jmoe.serving.connection import Connections
from tests.fakes import wait_for
from tests.http_servers import ENDLESS, LIMIT_S, LONG, HttpProcess, is_idle

TIMEOUT_S = 2  # of headers, bodies and answers
MAX_CONNECTIONS = 64
LIMITS = (
    *(
        "--header-timeout-s",
        TIMEOUT_S,
        "--body-timeout-s",
        TIMEOUT_S,
        "--send-timeout-s",
        TIMEOUT_S,
    ),
    *("--max-connections", MAX_CONNECTIONS, "--max-body-bytes", 8 << 20, *LONG),
)
LONGEST_TOKEN = 512
WORST_S = 60.0
GROWTH_BYTES = 160 << 20


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., HttpProcess], model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> HttpProcess:
    """With a tokenizer of one long token, as those of many models have: long texts could fit,
    and are encoded.
    """
    folder = tmp_path_factory.mktemp("attacked") / "tiny-moe"
    shutil.copytree(model_folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["-" * LONGEST_TOKEN])
    tokenizer.save(str(folder / "tokenizer.json"))
    server = serve(*LIMITS, folder=folder)
    server.post("/v1/completions", prompt="x", max_tokens=1)
    return server


class Watch:
    """Asks for `/health` in a thread, each time over a new connection, and looks at the memory
    of the process.
    """

    def __init__(self, server: HttpProcess, pause_s: float = 0.02) -> None:
        self._pause_s = pause_s
        self._address = server.url.removeprefix("http://")
        self._process = psutil.Process(server.process.pid)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.requests_s: list[tuple[float, float]] = []  # begin and end
        self.wrong: list[Any] = []
        self.dropped = 0  # connections that ended before an answer

    def __enter__(self) -> Self:
        self._begin_bytes = self._peak_bytes = self._process.memory_info().rss
        self._begun_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        took_s = time.monotonic() - self._begun_s
        grown = (self._peak_bytes - self._begin_bytes) / 2**20
        print(
            f"/health {len(self.requests_s)} times in {took_s:.1f} s, worst {self.worst_s:.3f} s;"
            f" +{grown:.0f} MiB"
        )

    @property
    def worst_s(self) -> float:
        return max(end - begun for begun, end in self.requests_s)

    def check(self, *, growth_bytes: int = GROWTH_BYTES, dropped: int = 0) -> None:
        assert not self.wrong and self.dropped <= dropped
        assert self.worst_s < WORST_S
        assert self._peak_bytes - self._begin_bytes < growth_bytes

    def _run(self) -> None:
        while not self._end.is_set() or not self.requests_s:
            begun_s = time.monotonic()
            connection = http.client.HTTPConnection(self._address, timeout=LIMIT_S)
            try:
                connection.request("GET", "/health", headers={"connection": "close"})
                if (status := connection.getresponse().status) != 200:
                    self.wrong.append(status)
            except ConnectionResetError:
                self.dropped += 1
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(error)
            finally:
                connection.close()
            self.requests_s.append((begun_s, time.monotonic()))
            self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)
            time.sleep(self._pause_s)


def numbered(count: int, value: Any) -> dict[str, Any]:
    return {f"k{i}": value for i in range(count)}


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"role": "user", "content": "x"}
LONG_TEXT = "x" * (8192 * LONGEST_TOKEN + 1)
# what is sent, and words of the answer
BODIES: dict[str, tuple[str, Any, str]] = {
    "prompts times choices": (
        COMPLETIONS,
        {"prompt": ["x"] * 8000, "n": 128},
        "1024000 sequences in one request",
    ),
    "token prompts times choices": (
        COMPLETIONS,
        {"prompt": [[1]] * 8000, "n": 128},
        "sequences in one request",
    ),
    "prompts": (COMPLETIONS, {"prompt": ["x"] * 100_000}, "at most 8192 items"),
    "prompts of two kinds": (COMPLETIONS, {"prompt": [[1], "x"] * 4000}, "prompt.several.1: "),
    "no prompts": (COMPLETIONS, {"prompt": [[1]] + [["x"] * 1000] * 1000}, "prompt.several.1.0: "),
    "token ids": (COMPLETIONS, {"prompt": [1] * 2_000_000}, "the prompt has 2000000 tokens"),
    "lists": (COMPLETIONS, {"prompt": [[1]] * 800_000}, "at most 8192 items"),
    "echo": (
        COMPLETIONS,
        {"prompt": [[1] * 30_000] * 60, "echo": True},
        "the prompt has 30000 tokens",
    ),
    "a long text": (
        COMPLETIONS,
        {"prompt": LONG_TEXT},
        "characters; at most 4194304 can be the 8192 tokens that fit",
    ),
    "a long chat": (
        CHAT,
        {"messages": [{"role": "user", "content": LONG_TEXT}]},
        "characters; at most 4194304 can",
    ),
    "a long text to count": ("/tokenize", {"prompt": LONG_TEXT}, "characters; at most 4194304 can"),
    "many tokens to decode": (
        "/detokenize",
        {"tokens": [1] * 1_000_000},
        "at most 8192 are allowed",
    ),
    "no tokens to decode": ("/detokenize", {"tokens": ["x"] * 500_000}, "tokens.0: "),
    "unknown parameters": (
        COMPLETIONS,
        {"prompt": "x"} | numbered(400_000, 1),
        "k0: is not a parameter that this",
    ),
    "a long name": (
        COMPLETIONS,
        {"prompt": "x", "y" * 1_000_000: 1},
        "is not a parameter that this server supports",
    ),
    "a long model": (COMPLETIONS, {"prompt": "x", "model": "y" * 1_000_000}, "the model 'yyy"),
    "unknown in messages": (
        CHAT,
        {"messages": [HI | numbered(50, 1)] * 4000},
        "messages.0.k0: is not a parameter",
    ),
    "no messages": (
        CHAT,
        {"messages": [{"role": 1, "content": 1}] * 100_000},
        "at most 4096 of both are allowed",
    ),
    "messages": (CHAT, {"messages": [HI] * 100_000}, "at most 4096 of both are allowed"),
    "parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 90_000}]},
        "4096 of",
    ),
    "variables": (
        CHAT,
        {"messages": [HI], "chat_template_kwargs": numbered(100_000, 1)},
        "at most 64 items",
    ),
    "a deep variable": (
        CHAT,
        {"messages": [HI], "chat_template_kwargs": {"a": nested(900)}, "stop_token_ids": [10**6]},
        "",
    ),
    "biases": (
        COMPLETIONS,
        {"prompt": "x", "logit_bias": numbered(100_000, "x")},
        "logit_bias: has 100000 entries",
    ),
    "stop token ids": (
        COMPLETIONS,
        {"prompt": "x", "stop_token_ids": ["x"] * 500_000},
        "stop_token_ids.0: ",
    ),
    "stop strings": (
        COMPLETIONS,
        {"prompt": "x", "stop": [f"{i}x" for i in range(100_000)]},
        "at most 64 items",
    ),
    "a long stop string": (
        COMPLETIONS,
        {"prompt": "x", "stop": "x" * 1_000_000},
        "at most 256 characters",
    ),
    "a large schema": (
        COMPLETIONS,
        {
            "prompt": "x",
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {"properties": numbered(50_000, {"type": "integer"})},
                },
            },
        },
        "at most 65536 bytes",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(server: HttpProcess, name: str) -> None:
    """Refused by what is wrong first, in a few words, before work that grows with them."""
    path, body, words = BODIES[name]
    content = json.dumps(body).encode()
    with Watch(server) as watch, server.client() as client:
        response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == (404 if "model" in name else 400), response.text[:2000]
    assert words in response.json()["error"]["message"] and len(response.text) < 4000
    watch.check()


def test_a_text_that_is_encoded(server: HttpProcess) -> None:
    """Others are answered meanwhile, also by Python: in one of a few tries, as this process may
    stand still in some.
    """
    most = 0
    with Watch(server, pause_s=0.001) as watch, server.client() as client:
        for _ in range(20):
            begun_s = time.monotonic()
            response = client.post("/tokenize", json={"prompt": "The quick brown fox. " * 50_000})
            end_s = time.monotonic()
            assert response.status_code == 200
            meanwhile = sum(
                begun_s < begun and end < end_s for begun, end in list(watch.requests_s)
            )
            print(f"encoded in {end_s - begun_s:.1f} s, {meanwhile} others meanwhile")
            if (most := max(most, meanwhile)) > 4:
                break
    assert most > 4, "of a server that does nothing else, one before and one after"
    watch.check(growth_bytes=320 << 20)  # the tokenizer takes 170 bytes a character


def connect(server: HttpProcess, *, buffer_bytes: int | None = None) -> socket.socket:
    """buffer_bytes: of what has arrived and is not read, the system takes no more than about
    this.
    """
    host, _, port = server.url.removeprefix("http://").partition(":")
    client = socket.socket()
    if buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.settimeout(LIMIT_S)
    client.connect((host, int(port)))
    return client


def send_until_refused(
    server: HttpProcess, begin: bytes, piece: bytes, most: int
) -> tuple[int, bytes]:
    """How many bytes went out until the server answered, and what it answered."""
    with connect(server) as connection:
        sent, answer = 0, b""
        with contextlib.suppress(OSError):
            connection.sendall(begin)
            while sent < most and not answer:
                connection.sendall(piece)
                sent += len(piece)
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    answer = connection.recv(65536)
                connection.settimeout(LIMIT_S)
        if not answer:
            connection.settimeout(LIMIT_S)
            with contextlib.suppress(OSError):
                answer = connection.recv(65536)
        return sent, answer


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\n2\r\n{}\r\n"
HEADS = {
    "a header without end": (GET + b"x: ", b"y" * 65536),
    "headers without end": (GET, b"".join(b"x-%d: y\r\n" % i for i in range(5000))),
    "a name without end": (GET, b"y" * 65536),
    "a path without end": (b"GET /", b"y" * 65536),
    "trailers without end": (CHUNKED + b"0\r\n", b"".join(b"x-%d: y\r\n" % i for i in range(5000))),
    "a trailer without end": (CHUNKED + b"0\r\nx: ", b"y" * 65536),
    "a chunk extension without end": (CHUNKED + b"2;x=", b"y" * 65536),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_without_end(server: HttpProcess, name: str) -> None:
    begin, piece = HEADS[name]
    with Watch(server) as watch:
        for _ in range(8):
            sent, answer = send_until_refused(server, begin, piece, 128 << 20)
            assert answer.startswith(b"HTTP/1.1 431 "), (sent, answer)
            assert b"headers" in answer and b'"error"' in answer
            assert sent <= 64 << 20, (
                "what buffers on the way may hold while the server stands still"
            )
    watch.check()


def open_connections(server: HttpProcess) -> int:
    return sum(
        c.status != "LISTEN" for c in psutil.Process(server.process.pid).net_connections("tcp")
    )


def until_closed(server: HttpProcess, most: int = 0) -> None:
    begun_s = time.monotonic()
    while open_connections(server) > most:
        assert time.monotonic() < begun_s + LIMIT_S, (
            f"{open_connections(server)} connections are still open"
        )
        time.sleep(0.05)


def test_clients_that_say_little(server: HttpProcess) -> None:
    """Silent ones, and ones that send a byte at a time, of headers or a body: `/health` is answered
    all the time.

    The watch is dropped itself where its thread stands still between connecting and asking while as
    many others come.
    """
    kinds = [
        (b"", b""),
        (b"", b"\r\n"),
        (GET, b"x"),
        (POST + b"content-length: 100000\r\n\r\n", b"x"),
        (CHUNKED + b"1", b"0"),
    ]
    with Watch(server) as watch, contextlib.ExitStack() as stack:
        clients = [
            (stack.enter_context(connect(server)), *kinds[i % len(kinds)]) for i in range(1000)
        ]
        for client, begin, _ in clients:
            with contextlib.suppress(OSError):
                client.sendall(begin)
        for _ in range(10):
            until_closed(server, most=MAX_CONNECTIONS + 1 + 8)  # with a few that are being closed
            for client, _, drip in clients:
                with contextlib.suppress(OSError):
                    client.sendall(drip)
            time.sleep(TIMEOUT_S / 5)
        until_closed(server, most=8)  # the watch's, and those of its last requests
    watch.check(dropped=3)
    until_closed(server)


@pytest.mark.parametrize(
    ("begin", "answer"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nx", b"the headers did not arrive in 2 s"),
        (POST + b"content-length: 10\r\n\r\n{", b"the body did not arrive in 2 s"),
    ],
)
def test_a_client_that_is_too_slow_is_told(
    server: HttpProcess, begin: bytes, answer: bytes
) -> None:
    for _ in range(20):
        with connect(server) as client:
            client.sendall(begin)
            found = b"".join(iter(lambda: client.recv(65536), b""))
        if bool(found) == bool(answer):
            break  # else this process has stood still before it sent anything
    assert (
        found.startswith(b"HTTP/1.1 408 Request Timeout\r\n" if answer else b"") and answer in found
    )
    assert bool(found) == bool(answer)


def test_a_client_that_takes_no_answer(server: HttpProcess) -> None:
    """Its connection and what was written for it are given up."""
    with Watch(server) as watch, contextlib.ExitStack() as stack:
        for _ in range(32):
            client = stack.enter_context(connect(server, buffer_bytes=4096))
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 8)
        time.sleep(TIMEOUT_S)
        until_closed(server, most=8)
    watch.check()


@pytest.mark.slow
def test_a_stream_that_nobody_takes(server: HttpProcess) -> None:
    """Its sequences, which would be drawn for an hour, end with its connection."""
    content = json.dumps({"prompt": "x", "stream": True, "logprobs": 5} | ENDLESS).encode()
    head = POST + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    with connect(server, buffer_bytes=4096) as client:
        client.sendall(head + content)
        server.until("/live", lambda response: not is_idle(response))
        server.until("/live", is_idle)
    until_closed(server)


def test_requests_without_waiting_for_answers(server: HttpProcess) -> None:
    """A few may be sent ahead; thousands would be kept until their turn comes."""
    one = GET + b"\r\n"
    with connect(server) as client:
        client.sendall(one * 8)
        few = b""
        while few.count(b'{"status":"ok"}') < 8:
            arrived = client.recv(65536)
            assert arrived, few
            few += arrived
    with Watch(server) as watch:
        for _ in range(20):
            with connect(server) as client, contextlib.suppress(OSError):
                client.sendall(one * 20_000)
                answers = b"".join(iter(lambda: client.recv(65536), b""))
                assert answers.count(b'{"status":"ok"}') < 20_000
    watch.check()


UPGRADE = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings:"
    b" AAMAAABkAAQCAAAAAAIAAAAA\r\n"
)
SMUGGLED = GET + b"\r\n"
AFTER = b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
JSON_HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
TEXT_BODY = b'{"prompt": "one line"}'


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (JSON_HEAD + b"content-length: %d\r\n" % len(TEXT_BODY), TEXT_BODY, 200),
        (
            JSON_HEAD + b"transfer-encoding: chunked\r\n",
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(TEXT_BODY), TEXT_BODY),
            200,
        ),
        (JSON_HEAD + b"content-length: %d\r\n" % len(SMUGGLED), SMUGGLED, 400),
        (GET, b"", 200),
    ],
)
def test_an_offer_of_another_protocol(
    server: HttpProcess, head: bytes, body: bytes, status: int
) -> None:
    """It is not taken up: a body is a body, wherever its segments end, and what follows it is
    the next request.
    """
    request = head + UPGRADE + b"\r\n" + body
    at_body = len(request) - len(body)
    for cut in (len(request), at_body, at_body - 2, at_body + len(body) // 2):
        with connect(server) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(request[:cut])
            time.sleep(0.05)  # so that it arrives by itself
            client.sendall(request[cut:] + AFTER)
            received = b"".join(iter(lambda: client.recv(65536), b""))
        first, second = received.split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"%d " % status), (cut, received)
        assert second.startswith(b"200 ") and second.endswith(b'{"status":"ok"}'), (cut, received)
        assert status != 200 or not body or b'"count":' in first


def test_a_client_of_http_1_0(server: HttpProcess) -> None:
    """It knows no chunks: the lengths of chunks would be part of its answer."""
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true, "ignore_eos": true}'
    head = (
        b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length:"
        b" %d\r\n\r\n"
    )
    for method in (b"POST", b"HEAD"):
        request = head % len(body) + body if method == b"POST" else b"HEAD / HTTP/1.0\r\n\r\n"
        with connect(server) as client:
            client.sendall(request)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        answer_head, _, text = answer.partition(b"\r\n\r\n")
        assert answer_head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in answer_head
        assert (
            not text
            if method == b"HEAD"
            else text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")
        )


def test_codings_of_a_body(server: HttpProcess) -> None:
    """What is not read is not taken for a body that was sent as it is."""
    for coding, status in ((b"chunked", 200), (b"Chunked", 200), (b"gzip, chunked", 501)):
        with connect(server) as client:
            request = JSON_HEAD + b"connection: close\r\ntransfer-encoding: %b\r\n\r\n" % coding
            client.sendall(request + b"%x\r\n%b\r\n0\r\n\r\n" % (len(TEXT_BODY), TEXT_BODY))
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert (
            status == 200
            or b"the only Transfer-Encoding that this server reads is chunked" in answer
        )


def test_a_client_that_ends_its_side() -> None:
    """Nothing is written to it, in the very moment of its answer either: the transport is
    closed, and would refuse.
    """

    class Transport(asyncio.Transport):
        def write(self, data: Any) -> None:
            raise RuntimeError("the handler is closed")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answering.set()
        await left.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def check() -> None:
        config = uvicorn.Config(app, log_config=None)
        config.load()
        options = {"config": config, "server_state": ServerState(), "app_state": {}}
        connection = Connections(ServeConfig("x")).make_connection(**options)
        connection.connection_made(Transport())
        connection.data_received(GET + b"\r\n")
        await answering.wait()
        connection.eof_received()
        left.set()
        (task,) = options["server_state"].tasks
        await task
        assert connection.cycle.disconnected and not connection.cycle.response_started
        connection.connection_lost(ConnectionResetError())

    answering, left = asyncio.Event(), asyncio.Event()
    asyncio.run(check())


def test_two_hosts(server: HttpProcess) -> None:
    with connect(server) as client:
        client.sendall(GET + b"host: elsewhere\r\n\r\n")
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"there are several Host headers" in answer


def test_connect(server: HttpProcess) -> None:
    with connect(server) as client:
        client.sendall(b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 501 ")


def test_bodies_that_nothing_asks_for(server: HttpProcess) -> None:
    """Answered without waiting for them."""
    for method, path, status in (
        ("GET", "/health", 200),
        ("HEAD", "/", 200),
        ("POST", "/health", 405),
    ):
        with connect(server) as client:
            client.sendall(
                f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n".encode()
            )
            assert client.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())
            begun_s = time.monotonic()
            with contextlib.suppress(OSError):
                while client.recv(65536):
                    pass
            assert time.monotonic() < begun_s + LIMIT_S, (
                "the rest of the body may not take for ever either"
            )


def test_bodies_of_many_clients(shared_server: HttpProcess) -> None:
    """Bodies that are being sent have so much room together, 16 of the longest, however many
    send.
    """
    server = shared_server  # it leaves clients a minute
    head = POST + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (4 << 20)
    body = b'{"prompt": "' + b"x" * ((4 << 20) - 1000)
    with Watch(server) as watch, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(40)]
        for client in clients:
            with contextlib.suppress(OSError):  # it was refused
                client.sendall(head + body)
            client.setblocking(False)
        answers: list[bytes] = []

        def refused() -> bool:
            for client in clients:
                with contextlib.suppress(OSError):  # it has no answer yet
                    answers.append(client.recv(65536).partition(b"\r\n")[0])
            return any(answers)

        wait_for(refused, "there was room for all of them")
    assert set(answers) <= {b"HTTP/1.1 503 Service Unavailable", b""}
    assert not watch.wrong


@pytest.fixture(scope="module", autouse=True)
def after_all(server: HttpProcess) -> Iterator[None]:
    """It still serves, has logged no error of its own, and ends as it should."""
    yield
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    until_closed(server)
    assert server.terminate() == 0
    log = server.log.read_text()
    assert "Traceback" not in log and log.splitlines()[-1] == "stopped"
