"""What every handler needs: the model that is served, its tokenizer and template, and the engine's loop."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request
from jinja2 import TemplateError
from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from jmoe.config.serving import ServeConfig
from jmoe.inference.sampling_params import SamplingParams
from jmoe.serving.chat_template import ChatTemplate
from jmoe.serving.engine_loop import EngineLoop, Generation, Job
from jmoe.serving.errors import ApiError, printable
from jmoe.serving.grammar import Grammars
from jmoe.serving.metrics import Metrics
from jmoe.serving.middleware import DISCONNECTED
from jmoe.serving.schemas import Envelope, GenerationBody, Message, Usage
from jmoe.serving.vocabulary import TokenTexts

T = TypeVar("T")
log = logging.getLogger(__name__)

LONG_TEXT = 1 << 16  # characters: of longer ones one is worked on at a time, so that short ones find a thread
PING_S = 15
SEND_TIMEOUT_S = 60.0  # a client that reads nothing for so long has gone


@dataclass
class Service:
    """One model behind HTTP."""

    config: ServeConfig
    name: str
    loop: EngineLoop
    metrics: Metrics
    tokenizer: Tokenizer
    texts: TokenTexts
    chat_template: ChatTemplate | None
    grammars: Grammars
    created: int = field(default_factory=lambda: int(time.time()))
    _long_texts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    @property
    def max_seq_len(self) -> int:
        return self.loop.engine.max_seq_len

    def check_model(self, name: str | None) -> None:
        """`ApiError` 404 for another model."""
        if name not in (None, self.name):
            raise ApiError(404, f"the model {name!r} is not served here", param="model", code="model_not_found")

    async def off_the_loop(self, make: Callable[[], T], size: int) -> T:
        """What `make` gives in a thread: whatever grows with a request must not hold up the others. size: of its text.

        `ApiError` 400 for a `ValueError`.
        """
        try:
            async with self._long_texts if size > LONG_TEXT else contextlib.nullcontext():
                return await asyncio.to_thread(make)
        except ValueError as error:
            raise ApiError.from_value_error(error) from error

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids; `ApiError` 400 for a text that cannot fit, by its length alone."""
        for text in texts:
            if printable(text) != text:
                raise ApiError(400, "the prompt holds half of a surrogate pair, which is no text")
            limit, tokens = self.texts.longest_text(self.max_seq_len), self.max_seq_len
            if limit is not None and len(text) > limit:
                message = f"the prompt has {len(text)} characters; at most {limit} can be the {tokens} tokens that fit"
                raise ApiError(400, message, code="context_length_exceeded")
        # `encode` would not let another thread of Python run meanwhile
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoded.ids for encoded in found]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        """The prompt of a chat.

        Text of a message that looks like a control token becomes one, as it does in transformers and vLLM: the template
        gives one string. https://github.com/huggingface/transformers/issues/29279
        """
        if self.chat_template is None:
            raise ApiError(400, "messages: the model has no chat template; use /v1/completions", param="messages")
        given = [message.for_template() for message in messages]
        try:
            return self.chat_template.render(given, add_generation_prompt=add_generation_prompt, **variables)
        except ValueError as error:
            log.info("%s", error)
            reason = error.__cause__ or error
            said = reason.message if isinstance(reason, TemplateError) else "cannot render them"
            raise ApiError(400, f"messages: the model's chat template: {said}", param="messages") from error

    def max_new_tokens(self, prompt_token_ids: Sequence[int], asked: int | None, default: int | None) -> int:
        """Tokens to draw at most; `ApiError` 400 with both numbers if prompt and output do not fit."""
        length, limit = len(prompt_token_ids), self.max_seq_len
        if length + max(1, asked or 1) > limit:
            output = f" and {asked} of output" if asked else ""
            message = f"the prompt has {length} tokens{output}; together at most {limit} fit"
            raise ApiError(400, message, param="max_tokens" if length < limit else None, code="context_length_exceeded")
        room = limit - length
        return max(1, asked) if asked is not None else min(room, default or room)

    def jobs(
        self, body: GenerationBody, prompts: Sequence[list[int]], make: Callable[[list[int], int], SamplingParams]
    ) -> list[Job]:
        """Choice i of prompt p has number p * n + i. `ValueError` for what the engine would refuse."""
        jobs = [Job(prompt, make(prompt, choice)) for prompt in prompts for choice in range(body.n)]
        for job in jobs[:: body.n]:
            self.loop.engine.check_request(job.prompt_token_ids, job.sampling)
        if body.json_schema is not None:
            constraints = self.grammars.constraints(body.json_schema, len(jobs))
            jobs = [replace(job, constraint=found) for job, found in zip(jobs, constraints, strict=True)]
        return jobs

    async def answer(self, request: Request, generation: Generation, make: Awaitable[T]) -> T | Response:
        """What `make` gives, which is cancelled if the client disconnects before."""
        answer = asyncio.ensure_future(make)
        gone = asyncio.ensure_future(_disconnected(request))
        with generation:
            try:
                await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
                return answer.result() if answer.done() else Response(status_code=DISCONNECTED)
            finally:
                answer.cancel()
                gone.cancel()
                request.state.note(f"{generation.num_tokens} drawn")

    def stream(self, body: GenerationBody, generation: Generation, chunks: AsyncIterator[BaseModel]) -> Response:
        """Server-sent events: the chunks, the usage if asked for, `[DONE]`. An error is an event, then the end."""
        without = None if body.includes_usage else {"usage"}

        async def events() -> AsyncIterator[bytes]:
            try:
                async for chunk in chunks:
                    yield _event(chunk.model_dump_json(exclude=without))
            except ApiError as error:
                yield _event(error.body.model_dump_json())
                return
            yield _event("[DONE]")

        return _Stream(generation, events())

    def envelope(self, request: Request, prefix: str) -> Envelope:
        """What all chunks of one response share."""
        return Envelope(id=f"{prefix}-{request.state.request_id}", model=self.name)


class _Stream(EventSourceResponse):
    """Server-sent events that end a generation with them, however they end."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, ping=PING_S, send_timeout=SEND_TIMEOUT_S, sep="\n")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            try:
                await super().__call__(scope, receive, send)
            finally:
                scope["state"]["note"](f"{self._generation.num_tokens} drawn")


def _event(data: str) -> bytes:
    """A server-sent event; `data` is one line. sse-starlette looks for lines in what is not bytes, at every token."""
    return f"data: {data}\n\n".encode()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage(prompts: Sequence[Sequence[int]], generation: Generation, *, drawn: bool = True) -> Usage:
    """What has been read so far. drawn: False where the one token that was drawn is not part of the answer."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = generation.num_read if drawn else 0
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def note_prompts(
    service: Service, request: Request, token_ids: Sequence[Sequence[int]], prompts: Sequence[object], choices: int
) -> None:
    """For the log: how many tokens and choices, and the prompts themselves only where that is asked for."""
    request.state.note(f"{sum(map(len, token_ids))} prompt tokens, {choices} choices")
    if service.config.log_prompts:
        request.state.note(repr(prompts))
