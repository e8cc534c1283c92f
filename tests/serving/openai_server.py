"""A small OpenAI-like server without a model: what the page and the load generator talk to in their
tests.

`python tests/serving/openai_server.py MODEL_DIR --port P` runs it as `serve.py` would run; other
options are ignored.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

PAGE = Path(__file__).resolve().parent.parent.parent / "jmoe" / "serving" / "page.html"
LIVE: dict[str, Any] = {
    "model": "fake-moe",
    "policy": "resident",
    "uptime_s": 75.0,
    "requests_running": 0,
    "requests_waiting": 0,
    "kv_tokens_used": 0,
    "kv_tokens_total": 4096,
    "prompt_tokens_total": 0,
    "generation_tokens_total": 0,
    "computed_tokens_total": 0,
    "tokens_per_s": 0.0,
    "slots": [],
    "streamed_bytes_total": 0,
    "nvme_bytes_total": 0,
    "hit_rate": 0.0,
    "expert_hits_total": 0,
    "experts_chosen_total": 0,
    "waited_s": 0.0,
    "roofline_fraction": 0.0,
    "expert_counts": None,
    "devices": None,
    "chat": True,
}


class OpenAIServer(ThreadingHTTPServer):
    """Context manager that answers on a free port of 127.0.0.1 in threads of its own.

    text: the tokens of every answer, each after `token_s`. deltas: those of the next chats instead,
    a list of deltas and a finish reason each. A prompt has 7 tokens; it and its answer
    fit in `max_model_len`. refuse: the next answers instead, (status, headers, message). live: what
    GET /live says.
    requests: (path, body, headers) of every POST but /tokenize; disconnects: clients that left.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.live = dict(LIVE)
        self.text: list[str] = ["Hello", ", ", "world"]
        self.token_s = 0.0
        self.deltas: list[tuple[list[dict[str, Any]], str]] = []
        self.max_model_len = 4096
        self.error_after: int | None = None  # so many tokens, then an error in the stream
        self.gate: threading.Barrier | None = None  # answers begin when so many requests have come
        self.refuse: list[tuple[int, Mapping[str, str], str]] = []
        self.requests: list[tuple[str, dict[str, Any], Mapping[str, str]]] = []
        self.disconnects = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/live":
            self._json(200, self.server.live)
        elif self.path == "/ready":
            self._json(200, {})
        elif self.path == "/v1/models":
            self._json(
                200,
                {"object": "list", "data": [{"id": self.server.live["model"], "object": "model"}]},
            )
        else:
            self._error(404, {}, f"no such path: {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._json(
                200,
                {"count": 7, "max_model_len": self.server.max_model_len, "tokens": list(range(7))},
            )
            return
        self.server.requests.append((self.path, body, dict(self.headers)))
        if self.server.refuse:
            self._error(*self.server.refuse.pop(0))
            return
        if self.server.gate:
            self.server.gate.wait(240)
        chat = self.path == "/v1/chat/completions"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            if chat and self.server.deltas:
                deltas, reason = self.server.deltas.pop(0)
                for delta in deltas:
                    self._choice({"delta": delta}, None)
                self._end({"delta": {}}, reason, len(deltas))
                return
            for i, text in enumerate(self.server.text[: body.get("max_tokens")]):
                if i == self.server.error_after:
                    self._event(
                        {
                            "error": {
                                "message": "the engine failed",
                                "type": "server_error",
                                "code": None,
                            }
                        }
                    )
                    return
                time.sleep(self.server.token_s)
                self._choice({"delta": {"content": text}} if chat else {"text": text}, None)
            said = {"delta": {}} if chat else {"text": ""}
            self._end(said, "stop", len(self.server.text))
        except ConnectionError:
            self.server.disconnects += 1

    def _end(self, said: dict[str, Any], finish_reason: str, tokens: int) -> None:
        self._choice(said, finish_reason)
        self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _choice(self, said: dict[str, Any], finish_reason: str | None) -> None:
        self._event(
            {"choices": [{"index": 0, **said, "finish_reason": finish_reason}], "usage": None}
        )

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def _error(self, status: int, headers: Mapping[str, str], message: str) -> None:
        self._json(
            status,
            {"error": {"message": message, "type": "error", "param": None, "code": None}},
            headers,
        )

    def _json(self, status: int, data: Any, headers: Mapping[str, str] | None = None) -> None:
        self._answer(status, json.dumps(data).encode(), "application/json", headers)

    def _answer(
        self, status: int, content: bytes, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    known, _ = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with OpenAIServer(known.port):
        signal.pause()
