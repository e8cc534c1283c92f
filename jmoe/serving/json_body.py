"""Strict parsing of JSON request bodies: duplicate names, NaN and Infinity are errors.

Python's `json` accepts these, and keeps the last of several values of a name. `JsonRoute` makes
FastAPI parse with `parse_body`.
"""

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from jmoe.serving.errors import ApiError, replace_surrogates
from jmoe.serving.threads import run_in_thread
from jmoe.types import Json, JsonObject

LONG_BODY_BYTES = 1 << 16


class JsonRoute(APIRoute):
    """A FastAPI route that parses request bodies with `parse_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly


class _JsonRequest(Request):
    async def json(self) -> Json:
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) > LONG_BODY_BYTES:  # parsing would block the event loop
                self._json = await run_in_thread(partial(parse_body, body))
            else:
                self._json = parse_body(body)
        return self._json


def parse_body(body: bytes) -> Json:
    """Return the JSON value in `body`.

    Raises `ApiError` 400 for a duplicate name in an object, NaN or Infinity, too deep nesting, an
    integer with too many digits, and invalid UTF-8; raises `json.JSONDecodeError` for other syntax
    errors.
    """
    try:
        return json.loads(  # from text: of bytes Python guesses the encoding
            body.decode("utf-8-sig"),
            object_pairs_hook=_dict_of_unique_names,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "lists and objects of the body are nested too deeply") from error
    except ValueError as error:  # raised by `int`
        raise ApiError(400, "a number of the body has too many digits") from error


def _dict_of_unique_names(pairs: list[tuple[str, Json]]) -> JsonObject:
    """Return the pairs as a dict. Raises `ApiError` 400 for a name that occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        name = replace_surrogates(name)
        raise ApiError(400, f"{name}: is given twice in one object", param=name)
    return values


def _refuse_constant(name: str) -> NoReturn:
    """Raise `ApiError` 400 for NaN and Infinity, which Python reads and JSON lacks."""
    raise ApiError(400, f"the body is not JSON, which has no {name}")
