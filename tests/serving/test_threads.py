"""A server at a limit of processes, where no thread starts."""

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI

from jmoe.serving.errors import add_error_handlers
from jmoe.serving.threads import NO_THREAD, run_in_thread


def test_where_no_thread_starts_every_answer_is_an_error_of_the_api(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client may try again; a mistake of the program stays one."""
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/work")
    async def work() -> int:
        return await run_in_thread(lambda: 7)

    @app.get("/bug")
    async def bug() -> int:
        return int("x")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError(NO_THREAD)

    async def answers() -> list[tuple[int, str | None]]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            got = [await client.get(path) for path in ("/work", "/bug")]
        return [(a.status_code, a.json()["error"]["code"]) for a in got]

    async def answers_without_threads() -> list[tuple[int, str | None]]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            return await answers()

    assert asyncio.run(answers_without_threads()) == [(503, "no_thread"), (500, None)]


def test_other_errors_of_the_work_are_not_changed() -> None:
    def fail() -> None:
        raise RuntimeError("x")

    with pytest.raises(RuntimeError, match="x"):
        asyncio.run(run_in_thread(fail))
