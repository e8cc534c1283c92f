"""`AuthMiddleware` runs before every handler.

It checks host and API key, reads the body within the memory limits, adds a request id and security
headers to the response, and logs one line per request.
"""

import asyncio
import ipaddress
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jmoe.config.serving import ServeConfig
from jmoe.serving.api_keys import ApiKeys, digest_of_key
from jmoe.serving.errors import MESSAGES_PATH, ApiError
from jmoe.serving.shares import Shares, client_of_address

log = logging.getLogger(__name__)

DISCONNECTED = 499  # nginx's status for a client that disconnected
OPEN_PATHS = {"/", "/health", "/ready"}  # served without a key
ID_HEADER = "x-request-id"
KEY_HEADER = "x-api-key"  # of Anthropic's clients, in place of Authorization
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_LOGGED_PATH = 200
# Memory limit of all bodies being read or processed, in units of the maximum body size.
MAX_BODIES = 16
SMALL_SHARE = 256  # each client is guaranteed 1 / SMALL_SHARE of that memory
STALL_S = 1.0  # a body without data for so long is evictable for its own client's others
SECURITY_HEADERS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY"}
# for responses that set none
CONTENT_SECURITY_POLICY = "default-src 'none'; frame-ancestors 'none'"


class AuthMiddleware:
    """ASGI middleware that authenticates requests and limits the memory of their bodies.

    Without API keys every client is allowed. A server on a loopback address without API keys also
    checks the Host header, against DNS rebinding.
    """

    def __init__(self, app: ASGIApp, api_keys: ApiKeys, config: ServeConfig) -> None:
        self._app, self._max_body_bytes = app, config.max_body_bytes
        self._keys = api_keys
        address = _parse_ip_address(config.host)
        is_loopback = config.host == "localhost" or (address is not None and address.is_loopback)
        self._hosts = {"localhost", *config.allowed_hosts} if is_loopback and not api_keys else None
        # bodies being read or processed
        self._bytes: Shares[_Body] = Shares(MAX_BODIES * config.max_body_bytes)
        # ordered by time of last data, oldest first
        self._arriving: dict[_Body, None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked_id = headers.get(ID_HEADER, "")
        request_id = asked_id if _ID.fullmatch(asked_id) else uuid.uuid4().hex
        notes: list[str] = []
        scope.setdefault("state", {}).update(request_id=request_id, note=notes.append)
        begun_s, status = time.monotonic(), DISCONNECTED

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent[ID_HEADER] = request_id
                sent.setdefault("content-security-policy", CONTENT_SECURITY_POLICY)
                for name, value in SECURITY_HEADERS.items():
                    sent[name] = value
            await send(message)

        body = _Body()
        try:
            self._check_host(headers)
            self._identify_client(scope, headers)
            if await self._read_body(scope, headers, receive, body):
                # handled as GET; uvicorn omits the response body
                asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
                await self._app(
                    asked,
                    _receive_buffered_body_first(bytes(body.data), receive),
                    send_with_headers,
                )
        except ApiError as error:
            await error.json_response(scope["path"])(scope, receive, send_with_headers)
        finally:
            self._bytes.remove(body)
            _log_request(scope, status, time.monotonic() - begun_s, notes)

    def _check_host(self, headers: Headers) -> None:
        """Raise `ApiError` 403 if the Host header is a name that this server does not have.

        Another site's page can reach a loopback server under a name of its own (DNS rebinding).
        IP addresses are always allowed.
        """
        host = headers.get("host", "localhost").lower()
        name = (
            host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
        )
        if self._hosts is not None and name not in self._hosts and _parse_ip_address(name) is None:
            message = (
                f"the host {name!r} is not served: name it with --allowed-hosts, or use"
                " --api-key-file"
            )
            raise ApiError(403, message, code="host_not_allowed")

    def _identify_client(self, scope: Scope, headers: Headers) -> None:
        """Check the API key, and store the client's identity in the request's state.

        The identity is the digest of the key; without keys, the client's address.

        Raises `ApiError` 401 for a missing or wrong key.
        """
        scope["state"]["client"] = client_of_address((scope.get("client") or ("",))[0])
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scope["path"].startswith(MESSAGES_PATH) and KEY_HEADER in headers:
            scheme, key = "bearer", headers[KEY_HEADER]
        if scheme.lower() != "bearer" or not self._keys.match(key):
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        scope["state"]["client"] = digest_of_key(key).hex()

    async def _read_body(
        self, scope: Scope, headers: Headers, receive: Receive, body: "_Body"
    ) -> bool:
        """Read the whole body into `body`; return False if the client disconnects first.

        Bodies of GET, HEAD and open paths are not read. Raises `ApiError` 415 for a compressed
        body, 413 as soon as the body is known to be too large, and 503 if the memory for bodies is
        exhausted or this body is evicted for another client's.
        """
        if scope["method"] in ("GET", "HEAD") or scope["path"] in OPEN_PATHS:
            return True
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() not in ("", "identity"):
            text = f"Content-Encoding = {encoding!r}: must be identity: send the body as it is"
            raise ApiError(415, text)
        declared = headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() else 0
        self._arriving[body] = None
        try:
            while size <= self._max_body_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                self._append_body_piece(body, message.get("body", b""), scope["state"]["client"])
                size = max(size, len(body.data))
                if not message.get("more_body", False) and size <= self._max_body_bytes:
                    return True
        except asyncio.CancelledError:
            if not body.is_evicted:
                raise
            body.task.uncancel()
            raise _bodies_full_error() from None
        finally:
            self._arriving.pop(body, None)
        raise ApiError(
            413, f"the body has {size} bytes or more; at most {self._max_body_bytes} are allowed"
        )

    def _append_body_piece(self, body: "_Body", piece: bytes, client: str) -> None:
        """Append `piece` to `body`; if memory is full, drop bodies that are still arriving.

        The client with the most bytes loses its longest-silent bodies first; the sender's own
        bodies are dropped only after `STALL_S` without data. Raises `ApiError` 503 if nothing may
        be dropped and the client would hold more than its guaranteed share.
        """
        now_s = time.monotonic()
        self._arriving[body] = self._arriving.pop(body)
        slow = [other for other in self._arriving if other is not body and not other.is_evicted]
        slow = [
            other
            for other in slow
            if other.data and (other.client != client or now_s > other.last_s + STALL_S)
        ]
        evicted = self._bytes.items_to_evict(client, len(piece), slow)
        if (
            evicted is None
            and self._bytes.amount_of_client(client) + len(piece) > self._bytes.limit // SMALL_SHARE
        ):
            raise _bodies_full_error()
        for other in evicted or ():
            other.is_evicted = True
            self._bytes.remove(other)
            other.task.cancel()
        body.data += piece
        body.client, body.last_s = client, now_s
        self._bytes.add(body, client, len(piece))


class _Body:
    """A request body, and the task that reads it.

    is_evicted: True once the body is dropped; its task is then cancelled.
    last_s: when the last piece arrived, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.data, self.client, self.last_s = bytearray(), "", 0.0
        self.is_evicted = False
        task = asyncio.current_task()
        assert task is not None, "a request is answered by a task"
        self.task = task


def _bodies_full_error() -> ApiError:
    """Return the 503 error for a body that finds no memory."""
    text = "the bodies of other requests take all the room there is for them: try again later"
    return ApiError(503, text, headers={"Retry-After": "1"})


# Other paths (probes and polls, every few seconds) are logged at DEBUG unless they fail.
LOGGED_PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/models",
}


def _parse_ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a text is, None for other text."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _log_request(scope: Scope, status: int, took_s: float, notes: list[str]) -> None:
    """Log one line about a finished request, at DEBUG for successes outside `LOGGED_PATHS`."""
    level = logging.DEBUG if scope["path"] not in LOGGED_PATHS and status < 400 else logging.INFO
    # percent-encoded as sent, so without line breaks
    path = scope["raw_path"].decode("ascii", "backslashreplace")[:MAX_LOGGED_PATH]
    log.log(
        level,
        "%s %s %s %d %.3f s %s",
        scope["state"]["request_id"],
        scope["method"],
        path,
        status,
        took_s,
        "; ".join(notes),
    )


def _receive_buffered_body_first(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that yields the buffered body once, then delegates to `receive`."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_buffered() -> Message:
        return pending.pop() if pending else await receive()

    return receive_buffered
