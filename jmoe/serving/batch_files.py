"""The two files of a batch: requests, and answers that survive the end of the process.

Both are OpenAI's batch format, one JSON object a line:
https://platform.openai.com/docs/guides/batch.
"""

import fcntl
import json
import os
import threading
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from jmoe.config import check
from jmoe.memory.direct_io import fsync
from jmoe.serving.errors import ApiError, replace_surrogates
from jmoe.serving.json_body import parse_body
from jmoe.types import Json, JsonObject

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
FIELDS = ("custom_id", "method", "url", "body")
ID_PREFIX = "batch_req_"  # of an answer's id; the number of the request's line follows
BEGIN = f'{{"id": "{ID_PREFIX}'.encode()  # of every line of answers
MAX_NAMED = 10  # duplicates that one error lists


@dataclass(frozen=True)
class BatchRequest:
    """One line of a batch.

    line: its number, from 1. custom_id: None if the line has no text of that name.
    path, body: the route, and the JSON that its request has. error: why the line is no request;
    path and body are then empty.
    """

    line: int
    custom_id: str | None
    path: str = ""
    body: bytes = b""
    error: ApiError | None = None

    @property
    def key(self) -> str | int:
        """The request's identity among the answers: `custom_id`, or its line without one."""
        return self.line if self.custom_id is None else self.custom_id

    def answer_line(self, status: int, request_id: str, body: Json) -> JsonObject:
        """Return this request's line of the answers file, with an error unless `status` is 200."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        error = None
        if status != 200:
            error = {name: body["error"][name] for name in ("code", "message")}
        return {
            "id": f"{ID_PREFIX}{self.line}",
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }

    def refusal_line(self, error: ApiError) -> JsonObject:
        """Return the line of the answers file for a request that is refused before any route."""
        return self.answer_line(error.status, uuid.uuid4().hex, error.body.model_dump())


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the request of each line of a file but empty ones."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse_request_line(number, line)


def read_request_keys(path: Path) -> set[str | int]:
    """Return the keys of all requests in a file.

    Raises ValueError that names the lines of requests with one `custom_id`.
    """
    lines: dict[str | int, int] = {}
    twice: list[str] = []
    for request in read_requests(path):
        first = lines.setdefault(request.key, request.line)
        if first != request.line and len(twice) < MAX_NAMED:
            name = replace_surrogates(str(request.custom_id))
            twice.append(f"{name!r} on lines {first} and {request.line}")
    one_each = f"each custom_id must be on one line: {'; '.join(twice)}"
    check(not twice, "requests", str(path), one_each)
    return set(lines)


def _parse_request_line(number: int, line: bytes) -> BatchRequest:
    """Return the request of a line; one that is invalid has an `error`."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    custom_id = said.get("custom_id") if isinstance(said, dict) else None
    if not isinstance(custom_id, str):
        custom_id = None
    try:
        strictly = _check_request_line(parse_body(line))
    except ApiError as error:
        return BatchRequest(number, custom_id, error=error)
    except json.JSONDecodeError as error:
        return BatchRequest(
            number, custom_id, error=ApiError(400, f"the line is not JSON: {error}")
        )
    except ValueError as error:
        return BatchRequest(number, custom_id, error=ApiError.from_value_error(error))
    body = json.dumps(strictly["body"]).encode()
    return BatchRequest(number, custom_id, strictly["url"], body)


def _check_request_line(request: Json) -> JsonObject:
    """Return the object of a line; raise ValueError or `ApiError` unless it is a request."""
    if not isinstance(request, dict):
        raise ApiError(400, "the line must be a JSON object")
    missing = [name for name in FIELDS if name not in request]
    if missing:
        raise ApiError(400, f"{missing[0]}: is missing", param=missing[0])
    unknown = [name for name in request if name not in FIELDS]
    if unknown:
        raise ApiError(400, f"{unknown[0]}: is no field of a batch's line", param=unknown[0])
    check(isinstance(request["custom_id"], str), "custom_id", request["custom_id"], "must be text")
    check(request["method"] == "POST", "method", request["method"], "must be POST")
    check(request["url"] in PATHS, "url", request["url"], f"must be {' or '.join(PATHS)}")
    body = request["body"]
    check(isinstance(body, dict), "body", body, "must be a JSON object")
    stream = body.get("stream")
    check(
        stream in (None, False), "body.stream", stream, "must be false: a batch has whole answers"
    )
    return request


class AnswersFile:
    """The answers of a batch: one process at a time appends to the file.

    keys: requests that have an answer.
    """

    def __init__(self, path: Path, requests: Path, requested_keys: Collection[str | int]) -> None:
        """Open or create the file, and cut off a last line that was not written to its end.

        requests, requested_keys: the file of the requests, and their keys. Raises ValueError if
        another process writes the file, or if it holds anything but answers to these requests.
        """
        is_new = not path.exists()
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.keys, end = _read_answered_keys(path, requests, requested_keys)
            self._file.truncate(end)
        except BlockingIOError:
            self._file.close()
            message = "must be written by one process, and another one has it open"
            raise ValueError(f"answers = {str(path)!r}: {message}") from None
        except BaseException:
            self._file.close()
            raise
        self._lock = threading.Lock()
        if is_new:
            fsync(path.absolute().parent)

    def append(self, answer: JsonObject) -> None:
        """Append one answer; it is on the disk when this returns. Threads may call this at once."""
        line = memoryview(json.dumps(answer).encode() + b"\n")
        with self._lock:
            while line:
                line = line[self._file.write(line) :]
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _read_answered_keys(
    path: Path, requests: Path, requested_keys: Collection[str | int]
) -> tuple[set[str | int], int]:
    """Return (keys of the answered requests, bytes of whole lines).

    Raises ValueError for a line that answers none of the requests, or one a second time.
    """
    keys: set[str | int] = set()
    end = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            words = f"must be a new file or answers to {requests}: line {number} is none"
            if not line.endswith(b"\n"):  # the process was killed while it wrote the line
                is_begun = line[: len(BEGIN)] == BEGIN[: len(line)]
                check(is_begun, "answers", str(path), words)
                break
            key = _answered_key(line)
            check(key in requested_keys and key not in keys, "answers", str(path), words)
            keys.add(key)
            end += len(line)
    return keys, end


def _answered_key(line: bytes) -> str | int:
    """Return the key of the request that a line answers, 0 if the line is no answer."""
    try:
        answer = json.loads(line)
        custom_id, name = answer["custom_id"], answer["id"]
        if isinstance(custom_id, str):
            return custom_id
        return int(name.removeprefix(ID_PREFIX)) if custom_id is None else 0
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0
