"""Every error as OpenAI's clients expect it: a status and {"error": {message, type, param,
code}}.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
MAX_MESSAGE = 1000  # characters: what is wrong may be quoted, and be long
UNKNOWN = "unknown_parameter"  # the type of pydantic's error for it
# What the engine calls them, and what OpenAI does.
PARAMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt_token_ids": "prompt",
}


class ErrorDetail(BaseModel):
    """The error, and the parameter that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = TYPES.get(status, "invalid_request_error")
        message = printable(message[:MAX_MESSAGE])
        param = None if param is None else param[:MAX_MESSAGE]
        self.body = ErrorResponse(
            error=ErrorDetail(message=message, type=kind, param=param, code=code)
        )

    @classmethod
    def from_value_error(cls, error: ValueError) -> "ApiError":
        """Return 400 for what `jmoe.config.check` refused: `name = value: constraint`."""
        message = str(error)
        for ours, theirs in PARAMS.items():
            message = message.replace(ours, theirs)
        name, separator, _ = message.partition(" = ")
        return cls(400, message, param=name if separator else None)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body.model_dump(), self.status, headers=self.headers)


def printable(text: str) -> str:
    """Return `text` without what UTF-8 cannot carry: JSON may hold half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _validation_error(errors: Sequence[Any]) -> ApiError:
    """Return 400 for the first thing in which a body departs from its schema."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    param = printable(".".join(place)) or None
    if first["type"] == UNKNOWN:
        param = printable(".".join([*place, first["ctx"]["name"]]))
        return ApiError(
            400,
            f"{param[: MAX_MESSAGE // 2]}: is not a parameter that this server supports",
            param=param,
        )
    if not place and first["type"] != "value_error":
        return ApiError(
            400, "the body must be a JSON object, sent as Content-Type: application/json"
        )
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    message = printable(str(first["msg"])).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception of a handler in OpenAI's shape."""

    def answer(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            error = _validation_error(error.errors())
        elif isinstance(error.__cause__, ApiError):  # of a body, which FastAPI wraps
            error = error.__cause__
        elif isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
        elif not isinstance(error, ApiError):
            error = ApiError(500, "internal error; the server's log says more")
        return error.response()

    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
