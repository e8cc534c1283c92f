"""Error responses in the format of OpenAI's API: a status and `{"error": {message, type, param,
code}}`, and of Anthropic's API for its routes: `{"type": "error", "error": {type, message}}`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from jmoe.types import JsonObject

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# Anthropic's API, of which these are paths, has other types for these.
MESSAGES_PATH = "/v1/messages"
MESSAGES_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
_NAMED = re.compile(r"([\w.]+) = ")
MAX_MESSAGE = 1000  # characters; a message may quote a long value
UNKNOWN = "unknown_parameter"  # type of the pydantic error for an unknown parameter
# Engine parameter name -> OpenAI's name.
PARAMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt_token_ids": "prompt",
}


class ErrorDetail(BaseModel):
    """An error: its text, OpenAI's error type, and the parameter that caused it, if any."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with an error response.

    param: the request parameter that caused the error.
    code: a machine-readable reason, e.g. "queue_full".
    headers: added to the response.
    """

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
        message = replace_surrogates(message[:MAX_MESSAGE])
        param = None if param is None else param[:MAX_MESSAGE]
        self.body = ErrorResponse(
            error=ErrorDetail(message=message, type=kind, param=param, code=code)
        )

    @classmethod
    def from_value_error(cls, error: ValueError) -> "ApiError":
        """Return a 400 error from the message of a `ValueError`.

        In the message, engine names of parameters are replaced by OpenAI's; `param` is the name
        before " = ", as in messages of `jmoe.config.check`.
        """
        message = str(error)
        for ours, theirs in PARAMS.items():
            message = message.replace(ours, theirs)
        name, separator, _ = message.partition(" = ")
        return cls(400, message, param=name if separator else None)

    def rename_fields(self, names: Mapping[str, str]) -> None:
        """Replace names of fields at the beginning of the message and of `param`.

        names: a chat request's name, or `NAME = VALUE`, -> that in the API of another route.
        """
        detail = self.body.error
        for ours, theirs in names.items():
            pattern = re.compile(rf"^{re.escape(ours)}(?!\w)")
            detail.message = pattern.sub(theirs, detail.message)
            detail.param = None if detail.param is None else pattern.sub(theirs, detail.param)

    def json_response(self, path: str) -> JSONResponse:
        """Return the response to a request for `path`."""
        body = (
            self.body_for_messages_api()
            if path.startswith(MESSAGES_PATH)
            else self.body.model_dump()
        )
        return JSONResponse(body, self.status, headers=self.headers)

    def body_for_messages_api(self) -> JsonObject:
        """Return the body in the format of Anthropic's API, with `param` and `code` beside it."""
        kind = MESSAGES_TYPES.get(self.status, self.body.error.type)
        return {"type": "error", "error": self.body.error.model_dump() | {"type": kind}}


def replace_surrogates(text: str) -> str:
    """Return `text` with lone surrogates, which JSON allows and UTF-8 does not, replaced by `?`."""
    return text.encode("utf-8", "replace").decode()


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return a 400 error for the first of pydantic's validation errors."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    param = replace_surrogates(".".join(place)) or None
    if first["type"] == UNKNOWN:
        param = replace_surrogates(".".join([*place, first["ctx"]["name"]]))
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
    message = replace_surrogates(str(first["msg"])).removeprefix("Value error, ")
    if param is None and (named := _NAMED.match(message)):  # by `jmoe.config.check`
        return ApiError(400, message, param=named[1])
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def add_error_handlers(app: FastAPI) -> None:
    """Register handlers that turn every exception into an error response in OpenAI's format."""

    async def respond_to_error(
        request: Request, error: Exception
    ) -> JSONResponse:  # a thread may not start
        if isinstance(error, RequestValidationError):
            error = validation_error(error.errors())
        elif isinstance(error.__cause__, ApiError):  # raised while parsing a body; FastAPI wraps it
            error = error.__cause__
        elif isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
        elif not isinstance(error, ApiError):
            error = ApiError(500, "internal error; the server's log says more")
        return error.json_response(request.url.path)

    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond_to_error)
