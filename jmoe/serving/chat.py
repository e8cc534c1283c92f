"""`POST /v1/chat/completions`."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import TokenLogprob
from jmoe.serving.completions import EVENTS
from jmoe.serving.engine_loop import Generation, Job
from jmoe.serving.schemas import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Envelope,
    Usage,
)
from jmoe.serving.service import Service, note_prompts, usage


@dataclass(frozen=True)
class _Chat:
    """A request whose answers are being drawn."""

    service: Service
    body: ChatCompletionRequest
    prompt: list[int]
    generation: Generation
    envelope: Envelope

    async def whole(self) -> ChatCompletionResponse:
        n = self.body.n
        texts = [""] * n
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(n)]
        reasons: list[Any] = [None] * n
        async for index, output in self.generation:
            texts[index] += output.text
            logprobs[index] += output.logprobs
            reasons[index] = output.finish_reason
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(content=texts[index]),
                logprobs=self._logprobs(logprobs[index]),
                finish_reason=reasons[index],
            )
            for index in range(n)
        ]
        return ChatCompletionResponse(**dict(self.envelope), choices=choices, usage=self._usage())

    async def chunks(self) -> AsyncIterator[ChatChunk]:
        """The role of every choice, then its text as it comes."""
        shared = dict(self.envelope)
        for index in range(self.body.n):
            delta = Delta(role="assistant", content="")
            yield ChatChunk(**shared, choices=[ChunkChoice(index=index, delta=delta)], usage=self._usage_so_far())
        async for index, output in self.generation:
            reason = output.finish_reason
            assert reason != "abort" and reason != "error", "these have no reader"
            choice = ChunkChoice(
                index=index,
                delta=Delta(content=output.text),
                logprobs=self._logprobs(output.logprobs),
                finish_reason=reason,
            )
            yield ChatChunk(**shared, choices=[choice], usage=self._usage_so_far())
        if self.body.includes_usage:
            yield ChatChunk(**shared, choices=[], usage=self._usage())

    def _logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs | None:
        return self.service.texts.chat_logprobs(logprobs) if self.body.logprobs else None

    def _usage_so_far(self) -> Usage | None:
        return self._usage() if self.body.usage_so_far else None

    def _usage(self) -> Usage:
        return usage([self.prompt], self.generation)


def chat_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=EVENTS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> ChatCompletionResponse | Response:
        """Answer a chat."""
        service.check_model(body.model)
        service.loop.check_room(body.n)  # before any work
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None

        def sampling(prompt: list[int], choice: int) -> SamplingParams:
            return body.sampling(service.max_new_tokens(prompt, asked, None), choice, logprobs=logprobs)

        def make() -> tuple[str, list[int], list[Job]]:
            text = service.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
            (prompt,) = service.encode([text], add_special_tokens=False)  # the template has written them
            return text, prompt, service.jobs(body, [prompt], sampling)

        size = sum(message.size for message in body.messages)
        text, prompt, jobs = await service.off_the_loop(make, size)
        note_prompts(service, request, [prompt], [text], len(jobs))
        generation = service.loop.submit(jobs, request.state.client)
        chat = _Chat(service, body, prompt, generation, service.envelope(request, "chatcmpl"))
        if body.stream:
            return service.stream(body, generation, chat.chunks())
        return await service.answer(request, generation, chat.whole())

    return router
