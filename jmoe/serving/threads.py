"""Work of a request that would block the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from jmoe.serving.errors import ApiError

T = TypeVar("T")
NO_THREAD = "can't start new thread"  # Python's text
REFUSED = "the system starts no thread for this request (a limit of processes or memory): try again"


async def run_in_thread(call: Callable[[], T]) -> T:
    """Return `call()`, run in a thread. Raises `ApiError` 503 if the system starts none."""
    try:
        return await asyncio.to_thread(call)
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        raise ApiError(503, REFUSED, code="no_thread", headers={"Retry-After": "1"}) from error
