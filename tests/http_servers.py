"""serve.py as a process, and what a client does with it."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.processes import kill_group, start_logged

START_LIMIT_S, LIMIT_S = 400.0, 240.0  # guards against what hangs
# long answers, one shape to compile
LONG = ("--max-batch", 1, "--max-seq-len", 8192, "--prefill-chunk-tokens", 1)
# A request to a server with these options that no machine has answered before its test has looked,
# however fast it is and however long the test's own process stands still: its choices run one after
# the other.
ENDLESS: dict[str, Any] = {"max_tokens": 8000, "n": 60, "ignore_eos": True}


@dataclass
class HttpProcess:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LIMIT_S, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LIMIT_S)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=LIMIT_S)

    @contextlib.contextmanager
    def stream(self, **body: Any) -> Iterator[Iterator[Any]]:
        """The events of a completion that is streamed."""
        body = {"prompt": "x", "ignore_eos": True, **body, "stream": True}
        with (
            self.client() as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield events(response.iter_lines())

    def until(self, path: str, condition: Callable[[httpx.Response], bool]) -> httpx.Response:
        """GET until the condition holds."""
        begun = time.monotonic()
        while not condition(found := self.get(path)):
            assert time.monotonic() < begun + LIMIT_S, found.text
            time.sleep(0.02)
        return found

    def until_said(self, words: str, limit_s: float = LIMIT_S) -> None:
        """Wait for words in the log."""
        begun = time.monotonic()
        while words not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < begun + limit_s, (
                self.log.read_text()
            )
            time.sleep(0.02)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        kill_group(self.process)


def start_server(log: Path, env: Mapping[str, str | None], *arguments: object) -> HttpProcess:
    """serve.py on a free port, once it has said its address."""
    process = start_logged(
        ["serve.py", *map(str, arguments), "--port", "0"], log, env | {"PYTHONUNBUFFERED": "1"}
    )
    server = HttpProcess(process, "", log)
    try:
        server.until_said("\nserving ", START_LIMIT_S)
    except BaseException:
        server.kill()
        raise
    server.url = log.read_text().partition("\nserving ")[2].split()[0]
    return server


def is_idle(live: httpx.Response) -> bool:
    """Whether nothing runs or waits, by an answer to `GET /live`."""
    return live.json()["requests_running"] == live.json()["requests_waiting"] == 0


def events(lines: Iterator[str]) -> Iterator[Any]:
    """The data of server-sent events: parsed, `[DONE]` as it is."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
