"""Responses to generation requests: one JSON object, or a stream of server-sent events.

The base of the routes that generate.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jmoe.inference.sequence import Sequence
from jmoe.serving.engine_loop import Generation
from jmoe.serving.errors import ApiError
from jmoe.serving.middleware import DISCONNECTED
from jmoe.serving.schemas import (
    ChunkChoice,
    CompletionChoice,
    CompletionTokensDetails,
    Envelope,
    GenerationBody,
    PromptTokensDetails,
    Usage,
)
from jmoe.serving.service import Service, wait_for_disconnect
from jmoe.types import JsonObject

PING_S = 15
# Many clients split lines as `str.splitlines` does. JSON already escapes its other line ends.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
# for OpenAPI, which cannot describe the events' schema
EVENTS: dict[int | str, JsonObject] = {200: {"content": {"text/event-stream": {}}}}


class StreamableBody(Protocol):
    """A request's body that says whether its response is streamed."""

    @property
    def stream(self) -> bool: ...


Body = TypeVar("Body", bound=StreamableBody)
ChoiceBody = TypeVar("ChoiceBody", bound=GenerationBody)
Delta = TypeVar("Delta", CompletionChoice, ChunkChoice)


@dataclass(frozen=True)
class Answer(ABC, Generic[Body]):
    """Builds the response of one request, streamed or whole.

    id_prefix: the beginning of the response's id.
    prompts: token ids of each prompt.
    envelope: the `Envelope` fields, which the response or every chunk repeats.
    """

    id_prefix: ClassVar[str]
    logprob_bytes: ClassVar[int] = 0  # memory per reported log-probability

    service: Service
    body: Body
    prompts: list[list[int]]
    generation: Generation
    envelope: JsonObject

    @classmethod
    async def respond(
        cls,
        service: Service,
        request: Request,
        body: Body,
        prompts: list[list[int]],
        sequences: list[Sequence],
    ) -> BaseModel | Response:
        """Submit the sequences to the engine and return the response, streamed or whole.

        Raises ApiError as `EngineLoop.submit` does, or for an error before the whole response.
        """
        request.state.note(f"{sum(map(len, prompts))} prompt tokens, {len(sequences)} choices")
        model = sequences[0].adapter or service.name
        envelope = Envelope(id=f"{cls.id_prefix}{request.state.request_id}", model=model)
        generation = service.loop.submit(sequences, request.state.client)
        generation.logprob_bytes = cls.logprob_bytes
        if service.tracer is not None:
            generation.on_end = partial(
                service.tracer.record_span, generation, request.state.request_id, request.headers
            )
        answer = cls(service, body, prompts, generation, dict(envelope))
        return (
            _EventStreamResponse(answer)
            if body.stream
            else await answer._respond_whole_or_abort(request)
        )

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a stream, by `format_event`; errors are events too."""

    @abstractmethod
    async def whole_response(self) -> BaseModel | Response:
        """Return the response after all sequences have ended. Raises ApiError as `Generation`
        does.
        """

    def usage(self) -> Usage:
        """Return the token counts so far; of the output, only tokens that the response has read
        count.
        """
        prompt_tokens = sum(map(len, self.prompts))
        completion_tokens = self.generation.num_read_tokens
        total = prompt_tokens + completion_tokens
        sequences = self.generation.sequences
        of_prompts = sequences[:: len(sequences) // len(self.prompts)]  # the first choice of each
        cached = sum(sequence.num_reused_tokens for sequence in of_prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=total,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=self.generation.num_read_reasoning_tokens
            ),
        )

    async def _respond_whole_or_abort(self, request: Request) -> BaseModel | Response:
        """Return the whole response, or an empty one if the client disconnects first; the
        sequences are then aborted.
        """
        whole = asyncio.ensure_future(self.whole_response())
        gone = asyncio.ensure_future(wait_for_disconnect(request))
        with self.generation:
            try:
                await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
                return whole.result() if whole.done() else Response(status_code=DISCONNECTED)
            finally:
                whole.cancel()
                gone.cancel()
                request.state.note(f"{self.generation.num_tokens} drawn")


@dataclass(frozen=True)
class ChoiceAnswer(Answer[ChoiceBody], Generic[ChoiceBody, Delta]):
    """An answer of `n` choices, of OpenAI's completions and chat completions.

    Streamed or whole, it is built from the same deltas. A delta (`CompletionChoice` or
    `ChunkChoice`) is what one engine output adds to one choice.
    """

    @abstractmethod
    def deltas(self) -> AsyncIterator[Delta]:
        """Yield what each engine output adds to a choice, in order of generation."""

    @abstractmethod
    def make_chunk(self, choices: list[Delta], usage: Usage | None) -> BaseModel:
        """Return one chunk of a stream."""

    @abstractmethod
    def make_response(self, deltas: list[list[Delta]]) -> BaseModel:
        """Return the whole response. deltas: for each choice, all its deltas in order."""

    async def chunks(self) -> AsyncIterator[BaseModel]:
        """Yield the chunks of a streamed response, the last with the usage if the client asked for
        it.
        """
        async for delta in self.deltas():
            yield self.make_chunk(
                [delta],
                self.usage() if self.body.effective_stream_options.continuous_usage_stats else None,
            )
        if self.body.effective_stream_options.include_usage:
            yield self.make_chunk([], self.usage())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield one event per chunk, then `[DONE]` or an error."""
        without = None if self.body.effective_stream_options.include_usage else {"usage"}
        try:
            async for chunk in self.chunks():
                yield format_event(chunk.model_dump_json(exclude=without))
        except ApiError as error:
            yield format_event(error.body.model_dump_json())
        else:
            yield b"data: [DONE]\n\n"

    async def whole_response(self) -> BaseModel:
        """Return the response after all sequences have ended."""
        self.generation.is_kept = True
        deltas: list[list[Delta]] = [[] for _ in self.generation.sequences]
        async for delta in self.deltas():
            deltas[delta.index].append(delta)
        return self.make_response(deltas)


class _EventStreamResponse(EventSourceResponse):
    """A response of server-sent events.

    `Connection` closes a connection whose client does not read.
    """

    def __init__(self, answer: Answer[Any]) -> None:
        super().__init__(answer.events(), ping=PING_S, sep="\n")
        self._generation = answer.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            try:
                await super().__call__(scope, receive, send)
            finally:
                scope["state"]["note"](f"{self._generation.num_tokens} drawn")


def format_event(data: str, name: str | None = None) -> bytes:
    """Return a server-sent event with its data on one line.

    Events are bytes, since sse-starlette would split text into lines.
    """
    data = data if data.isascii() else data.translate(_LINE_ENDS)
    event = "" if name is None else f"event: {name}\n"
    return f"{event}data: {data}\n\n".encode()
