"""Answers a batch of requests with the server's own routes, called in the process: no socket, the
same schemas, templates, grammars and errors.
"""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable

from fastapi import FastAPI
from starlette.types import Message

from jmoe.serving.batch_files import AnswersFile, BatchRequest
from jmoe.serving.chat import chat_router
from jmoe.serving.completions import completions_router
from jmoe.serving.errors import ApiError, add_error_handlers
from jmoe.serving.responses import responses_router
from jmoe.serving.service import Service
from jmoe.types import Json, JsonObject

log = logging.getLogger(__name__)

CLIENT = "batch"
# Requests under way for each sequence of the engine's batch: while one set runs, texts of the next
# are tokenized and answers of the last are written.
IN_FLIGHT = 2
PROGRESS_S = 10.0
# A status that says that this process lacked something for a moment: memory, a thread, a place.
PASSING = (429, 503)
TRIES, PAUSE_S = 3, 1.0  # of such a request, and the pause before the second, twice that later


class EngineFailedError(Exception):
    """The engine has failed: requests under way have no answer."""


class BatchAnswerer:
    """Answers single requests with a service that no HTTP server has."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._app = FastAPI()
        add_error_handlers(self._app)
        for router in (completions_router, chat_router, responses_router):
            self._app.include_router(router(service))

    @property
    def num_concurrent_requests(self) -> int:
        """How many requests to answer at once so that the engine's batch stays full."""
        return IN_FLIGHT * self._service.loop.engine.max_batch

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the engine draws per second, averaged over the last seconds."""
        return self._service.loop.tokens_per_s

    @contextlib.asynccontextmanager
    async def running_engine(self) -> AsyncIterator[None]:
        """Run the engine in this event loop until the block ends; the service is then closed."""
        self._service.loop.start()
        try:
            yield
        finally:
            await self._service.loop.stop()
            self._service.close()

    async def answer_request(self, request: BatchRequest) -> JsonObject:
        """Return one request's line of the answers file. A request that ends with a `PASSING` error
        is tried `TRIES` times in all. Raises EngineFailedError.
        """
        limit = self._service.config.max_body_bytes
        error = request.error
        if len(request.body) > limit:
            error = ApiError(413, f"the body has {len(request.body)} bytes; at most {limit} may be")
        if error is not None:
            return request.refusal_line(error)
        for number in range(1, TRIES + 1):
            request_id = uuid.uuid4().hex
            status, body = await self._post_to_app(request, request_id)
            if status != 200 and self._service.loop.failure is not None:
                raise EngineFailedError(self._service.loop.failure)
            if status not in PASSING or number == TRIES:
                break
            log.info("line %d of the batch: status %d, tried again", request.line, status)
            await asyncio.sleep(number * PAUSE_S)
        return request.answer_line(status, request_id, body)

    async def _post_to_app(self, request: BatchRequest, request_id: str) -> tuple[int, Json]:
        """Return (status, JSON of the body) of the route's response to a request."""
        scope: JsonObject = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "state": {"request_id": request_id, "client": CLIENT, "note": log.debug},
        }
        pending: list[Message] = [{"type": "http.request", "body": request.body}]
        status, body = 0, bytearray()

        async def receive() -> Message:
            if not pending:
                await asyncio.Future()  # the client of a batch never disconnects
            return pending.pop()

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            body.extend(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        except Exception:  # raised again after the response with status 500 was sent
            log.exception("line %d of the batch", request.line)
            if not body:
                raise
        return status, json.loads(bytes(body))


class BatchCounts:
    """Counts the answers of a batch.

    answered, failed: how many requests have an answer since the start, and those with an error.
    tokens: how many tokens the answers have.
    """

    def __init__(self, total: int) -> None:
        """total: how many requests lack an answer."""
        self._total, self._begun_s = total, time.monotonic()
        self.answered = self.failed = self.tokens = 0

    def count_response(self, response: JsonObject) -> None:
        """Count the response of one answer."""
        self.answered += 1
        if response["status_code"] == 200:
            usage = response["body"]["usage"]
            name = "output_tokens" if "output_tokens" in usage else "completion_tokens"
            self.tokens += usage[name]
        else:
            self.failed += 1

    def describe(self) -> str:
        """Return a phrase with the numbers of requests."""
        errors = f", {self.failed:,} of them with an error" if self.failed else ""
        return f"{self.answered:,} of {self._total:,} requests answered{errors}"

    def summary(self) -> str:
        """Return the last line: requests, seconds, tokens and tokens per second in all."""
        took_s = time.monotonic() - self._begun_s
        return (
            f"{self.describe()} in {took_s:.1f} s; {self.tokens:,} tokens,"
            f" {self.tokens / took_s:,.1f} tokens/s"
        )


class BatchRunner:
    """Answers the requests of a batch with one engine."""

    def __init__(self, service: Service, answers: AnswersFile, total: int) -> None:
        """total: how many requests lack an answer."""
        self._answerer, self._answers = BatchAnswerer(service), answers
        self._counts = BatchCounts(total)

    async def run(self, requests: Iterable[BatchRequest], say: Callable[[str], None]) -> None:
        """Answer all `requests`, many at once, and append each answer when it is complete.

        say: prints a line of progress. Raises EngineFailedError, in which case requests under way
        have no answer.
        """
        waiting = iter(requests)

        async def answer_until_none_waits() -> None:
            for request in waiting:  # shared by all tasks
                answer = await self._answerer.answer_request(request)
                await asyncio.to_thread(self._answers.append, answer)
                self._counts.count_response(answer["response"])

        async with self._answerer.running_engine(), self._reporting_progress(say):
            count = self._answerer.num_concurrent_requests
            await asyncio.gather(*(answer_until_none_waits() for _ in range(count)))
        say(self._counts.summary())

    @contextlib.asynccontextmanager
    async def _reporting_progress(self, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Say the progress every `PROGRESS_S` seconds until the block ends."""

        async def say_repeatedly() -> None:
            while True:
                await asyncio.sleep(PROGRESS_S)
                rate = self._answerer.tokens_per_s
                say(f"{self._counts.describe()}; {rate:,.1f} tokens/s")

        saying = asyncio.create_task(say_repeatedly())
        try:
            yield
        finally:
            saying.cancel()
