"""`POST /v1/chat/completions`."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Sequence, TokenLogprob
from jmoe.serving.answer import EVENTS, Answer
from jmoe.serving.schemas import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from jmoe.serving.service import Service


class _ChatAnswer(Answer[ChatCompletionRequest]):
    @staticmethod
    def id_prefix() -> str:
        return "chatcmpl"

    async def whole(self) -> ChatCompletionResponse:
        n = self.body.n
        texts = [""] * n
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(n)]
        reasons: list[Any] = [None] * n
        async for output in self.generation:
            index = output.sequence.index
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
        return ChatCompletionResponse(**self.envelope, choices=choices, usage=self.usage())

    async def chunks(self) -> AsyncIterator[ChatChunk]:
        """Yield the role of every choice, then its text as it comes."""
        for index in range(self.body.n):
            yield self._chunk(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))
        async for output in self.generation:
            reason = output.finish_reason
            assert reason != "abort" and reason != "error", "these have no reader"
            choice = ChunkChoice(
                index=output.sequence.index,
                delta=Delta(content=output.text),
                logprobs=self._logprobs(output.logprobs),
                finish_reason=reason,
            )
            yield self._chunk(choice)
        if self.body.includes_usage:
            yield ChatChunk(**self.envelope, choices=[], usage=self.usage())

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return ChatChunk(**self.envelope, choices=[choice], usage=self.usage_so_far())

    def _logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs | None:
        return self.service.vocabulary.chat_logprobs(logprobs) if self.body.logprobs else None


def chat_router(service: Service) -> APIRouter:
    """Return the route."""
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

        def make() -> tuple[str, list[int], list[Sequence]]:
            text = service.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
            (prompt,) = service.encode([text], add_special_tokens=False)  # the template has written them
            return text, prompt, service.sequences(body, [prompt], sampling)

        text, prompt, sequences = await service.off_the_loop(make, sum(message.size for message in body.messages))
        service.log_prompts(request, [text])
        return await _ChatAnswer.respond(service, request, body, [prompt], sequences)

    return router
