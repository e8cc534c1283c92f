"""HTTP/1.1 connections with limits on header size, transfer time and the number of
connections.

uvicorn's httptools protocol, which `Connection` extends, has none of these limits.
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from jmoe.config.serving import ServeConfig
from jmoe.serving.errors import ApiError
from jmoe.serving.shares import Shares, client_of_address

MAX_HEAD_BYTES = 32 << 10  # request line and headers; also trailers after a body
MAX_HEADERS = 128
MAX_PIPELINED = 8  # requests waiting behind earlier ones of the connection
LINGER_S = 1.0  # time for a client that is still sending to read the error


@dataclass
class Connections:
    """State shared by all connections.

    waiting: connections that wait for their client to send or read, longest wait first.
    """

    config: ServeConfig
    waiting: "dict[Connection, None]" = field(default_factory=dict)
    shares: "Shares[Connection]" = field(init=False)

    def __post_init__(self) -> None:
        self.shares = Shares(self.config.max_connections)

    def make_connection(self, **options: Any) -> "Connection":
        """Return a new connection. uvicorn calls it as its protocol factory."""
        return Connection(self, **options)


class _RefusedError(Exception):
    """Raised to stop the parser; `Connection._refusal` holds the status and message."""


class _Parser(httptools.HttpRequestParser):
    """llhttp's parser, which ignores an Upgrade header and continues in HTTP/1.1.

    llhttp alone stops after the headers of an Upgrade request, and treats the body as bytes of
    another protocol.
    """

    def __init__(self, connection: "Connection") -> None:
        super().__init__(connection)
        self._connection = connection
        # As in uvicorn: pipelined data after a request with `Connection: close` is no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._connection.decline_upgrade(data[upgrade.args[0] :])


class _UnframedCycle(RequestResponseCycle):
    """Response cycle for an HTTP/1.0 client, which does not know chunked encoding.

    The end of a response of unknown length is marked by closing the connection.
    """

    _unframed = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            self._unframed = b"content-length" not in names
            if self._unframed:
                self.chunked_encoding = False
        elif self._unframed:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """An HTTP/1.1 connection with time limits on receiving headers and body and on sending answers.

    When `max_connections` are open, a new connection replaces one of the client that has the most:
    the one that has waited longest for that client to act. Slow or silent clients thus cannot keep
    others out. A new connection that may replace none gets a 503.
    """

    def __init__(self, shared: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # non-body bytes since the last message or chunk
        self._refusal: tuple[int, str] | None = None
        self.parser = _Parser(self)
        self._repeats_head = False  # the parser re-reads a head that was already processed

    # Called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        client = client_of_address(self.client[0] if self.client else "")
        evicted = self._shared.shares.items_to_evict(client, 1, self._shared.waiting, even=True)
        if evicted is None:
            most = self._shared.config.max_connections
            self._send_error(
                503, f"all {most} connections that this server keeps are in use: try again later"
            )
            self.transport.close()
            return
        for slowest in evicted:
            slowest.evict()
        self._shared.shares.add(self, client, 1)
        self._start_client_timer(self._shared.config.header_timeout_s, "headers")

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:  # rest of a refused request
            return
        if self._timer is None and self._is_idle:
            self._start_client_timer(self._shared.config.header_timeout_s, "headers")
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and self._refusal is None:
            self._send_error_and_close(431, f"the headers have more than {MAX_HEAD_BYTES} bytes")

    def evict(self) -> None:
        """Abort the connection to free its place for another one."""
        self._shared.waiting.pop(self, None)
        self._shared.shares.remove(self)
        self.transport.abort()

    def eof_received(self) -> None:
        """Mark the running request as disconnected, so that nothing more is written.

        The transport closes right after this call, before it calls `connection_lost`.
        """
        if not self._is_idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.shares.remove(self)
        self._stop_client_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._shared.waiting[self] = None
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()
        if self._timer is None and not self._is_idle:
            self._shared.waiting.pop(self, None)

    # Called by the parser

    def decline_upgrade(self, remaining_data: bytes) -> None:
        """Continue in HTTP/1.1 after a request head that offers an upgrade.

        A new parser reads the same head without its Upgrade header, and then `remaining_data`.

        remaining_data: the bytes received after that head.
        """
        headers = [pair for pair in self.headers if pair[0] != b"upgrade"]
        begin = b"%b %b HTTP/%b\r\n" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        self.parser = _Parser(self)
        self._repeats_head = True
        self.parser.feed_data(
            b"".join([begin, *(b"%b: %b\r\n" % pair for pair in headers), b"\r\n"])
        )
        self._repeats_head = False
        self.parser.feed_data(remaining_data)

    def on_message_begin(self) -> None:
        if not self._repeats_head:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._repeats_head:
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = (431, f"there are more than {MAX_HEADERS} headers")
            raise _RefusedError

    def on_headers_complete(self) -> None:
        if self._repeats_head:
            return
        if (
            len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            > MAX_HEAD_BYTES
        ):
            self._refusal = (431, f"the headers have more than {MAX_HEAD_BYTES} bytes")
            raise _RefusedError
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = (
                400,
                f"more than {MAX_PIPELINED} requests wait for the answers to earlier ones",
            )
            raise _RefusedError
        if sum(name == b"host" for name, _ in self.headers) > 1:
            self._refusal = (400, "there are several Host headers")
            raise _RefusedError
        if self.parser.get_method() == b"CONNECT":
            self._refusal = (501, "CONNECT: this server is no proxy")
            raise _RefusedError
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and [coding.lower().strip() for coding in codings] != [b"chunked"]:
            self._refusal = (501, "the only Transfer-Encoding that this server reads is chunked")
            raise _RefusedError
        self._start_client_timer(self._shared.config.body_timeout_s, "body")
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _UnframedCycle  # uvicorn creates the cycle, without a hook

    def on_body(self, body: bytes) -> None:
        self._head_bytes = max(0, self._head_bytes - len(body))
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # `decline_upgrade` continues
            return
        self._head_bytes = 0
        self._stop_client_timer()
        super().on_message_complete()

    # Called by uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_send_timer()
        elif self._is_idle:
            self._shared.waiting[self] = None

    def shutdown(self) -> None:
        """Answer 503 to a request whose body is still arriving, else shut down as uvicorn does.

        uvicorn would wait for the body.
        """
        is_arriving = not self._is_idle and self.cycle.more_body and not self.cycle.response_started
        if is_arriving and not self.pipeline:
            self._send_error_and_close(503, "the server is shutting down")
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_send_timer()

    def send_400_response(self, msg: str) -> None:
        self._send_error_and_close(*(self._refusal or (400, "what was sent is not HTTP/1.1")))

    # Private helpers

    @property
    def _is_idle(self) -> bool:
        """Whether no response is under way."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_client_timer(self, limit_s: float, awaited: str) -> None:
        """Start the timer that ends the request with 408 unless the client sends what is `awaited`,
        "headers" or "body", within `limit_s`.
        """
        self._stop_client_timer()
        self._shared.waiting[self] = None
        self._timer = self.loop.call_later(limit_s, self._handle_client_timeout, limit_s, awaited)

    def _stop_client_timer(self) -> None:
        """Stop the time limit on the client's next bytes, if there is one."""
        self._shared.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_send_timer(self) -> None:
        """Stop the time limit on the client's reading, if there is one."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _start_send_timer(self) -> None:
        """Start the timer that aborts the connection after `send_timeout_s` unless the client has
        read what was written; `close` alone would wait forever.
        """
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(
                self._shared.config.send_timeout_s, self.transport.abort
            )

    def _handle_client_timeout(self, limit_s: float, awaited: str) -> None:
        """Answer 408 and close; close without an answer if no request has begun."""
        self._timer = None
        nothing_begun = awaited == "headers" and not self._head_bytes
        answered = awaited == "body" and self._is_idle
        if nothing_begun or answered:
            self.transport.close()
        else:
            self._send_error_and_close(408, f"the {awaited} did not arrive in {limit_s:g} s")

    def _send_error_and_close(self, status: int, message: str) -> None:
        """Answer with an error and close the connection; ignore what still arrives.

        Close without an answer if the current response has started or earlier requests are still
        unanswered: the client would take the error for the answer to another request.
        """
        self._refusal = (status, message)
        self._stop_client_timer()
        idle = self._is_idle
        if not idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.pipeline and (
            idle or (self.cycle.more_body and not self.cycle.response_started)
        ):
            self._send_error(status, message)
            self._shared.waiting[self] = None
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.abort()

    def _send_error(self, status: int, message: str) -> None:
        """Write an error response that announces the end of the connection."""
        body = json.dumps(ApiError(status, message).body.model_dump()).encode()
        headers = {
            b"content-type": b"application/json",
            b"content-length": b"%d" % len(body),
            b"connection": b"close",
        }
        lines = [STATUS_LINE[status], *(b"%b: %b\r\n" % pair for pair in headers.items())]
        self.transport.write(b"".join([*lines, b"\r\n", body]))
