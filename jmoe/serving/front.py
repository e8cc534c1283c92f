"""What stands before every handler: a request id, API keys, the limit of a body, one line of log."""

import hashlib
import hmac
import logging
import re
import time
import uuid
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jmoe.config import check
from jmoe.serving.errors import ApiError

log = logging.getLogger(__name__)

OPEN_PATHS = {"/", "/health", "/ready"}  # hold nothing that a key protects
ID_HEADER = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def read_api_keys(path: str | None) -> list[str]:
    """One key a line; `ValueError` naming the file if it has none."""
    if path is None:
        return []
    file = Path(path).expanduser()
    keys = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    check(bool(keys), "api_key_file", path, "must hold a key, one a line")
    return keys


class Front:
    """ASGI middleware. api_keys: none lets everyone in."""

    def __init__(self, app: ASGIApp, api_keys: list[str], max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(ID_HEADER, "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        notes: list[str] = []
        scope.setdefault("state", {}).update(request_id=request_id, note=notes.append)
        begun_s, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = request_id
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            body = await self._read_body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        else:
            await self._app(scope, _replay(body, receive), send_with_id)
        finally:
            took_s = time.monotonic() - begun_s
            level = logging.DEBUG if scope["path"] not in LOGGED_PATHS and status < 400 else logging.INFO
            log.log(
                level,
                "%s %s %s %d %.3f s %s",
                request_id,
                scope["method"],
                scope["path"],
                status,
                took_s,
                "; ".join(notes),
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key)
        # every key is compared, in constant time
        found = sum(hmac.compare_digest(digest, known) for known in self._digests)
        if scheme.lower() != "bearer" or not found:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        """All of it; `ApiError` 413 as soon as it is known to be too large."""
        declared = headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() else 0
        body = b""
        while size <= self._max_body_bytes:
            message = await receive()
            body += message.get("body", b"")
            size = max(size, len(body))
            if not message.get("more_body", False) and size <= self._max_body_bytes:
                return body
        raise ApiError(413, f"the body has {size} bytes or more; at most {self._max_body_bytes} are allowed")


# Probes and polls come every few seconds: they are logged at DEBUG unless they fail.
LOGGED_PATHS = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models"}


def _digest(key: str) -> bytes:
    """Keys are compared by digests of one length, so that not even their length shows."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body at once, then what follows it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
