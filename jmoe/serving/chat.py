"""`POST /v1/chat/completions`."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jmoe.inference.engine import Output, TokenLogprob
from jmoe.inference.sampling import SamplingParams
from jmoe.serving.completions import EVENTS
from jmoe.serving.engine_loop import Generation
from jmoe.serving.schemas import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    Envelope,
)
from jmoe.serving.service import Service, usage


def chat_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    async def whole(
        body: ChatCompletionRequest, prompt: list[int], generation: Generation, envelope: Envelope
    ) -> ChatCompletionResponse:
        texts = [""] * body.n
        logprobs: list[list[TokenLogprob]] = [[] for _ in texts]
        reasons: list[Any] = [None] * body.n
        async for index, output in generation:
            texts[index] += output.text
            logprobs[index] += output.logprobs
            reasons[index] = output.finish_reason
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(content=text),
                logprobs=service.texts.chat_logprobs(logprobs[index]) if body.logprobs else None,
                finish_reason=reasons[index],
            )
            for index, text in enumerate(texts)
        ]
        return ChatCompletionResponse(**dict(envelope), choices=choices, usage=usage([prompt], generation))

    def choice(index: int, output: Output, body: ChatCompletionRequest) -> dict[str, Any]:
        logprobs = service.texts.chat_logprobs(output.logprobs).model_dump() if body.logprobs else None
        delta = {"content": output.text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": output.finish_reason}

    async def chunks(
        body: ChatCompletionRequest, prompt: list[int], generation: Generation, envelope: Envelope
    ) -> AsyncIterator[ChatChunk]:
        shared = dict(envelope)
        for index in range(body.n):
            begin = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": begin, "logprobs": None, "finish_reason": None}
            yield ChatChunk(**shared, choices=[first])
        async for index, output in generation:
            yield ChatChunk(**shared, choices=[choice(index, output, body)])
        if body.includes_usage:
            yield ChatChunk(**shared, choices=[], usage=usage([prompt], generation))

    @router.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=EVENTS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> ChatCompletionResponse | Response:
        """Answer a chat."""
        service.check_model(body.model)
        service.loop.check_ready()
        text = service.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        prompt = await service.encode(text, add_special_tokens=False)  # the template has written them
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        most = service.max_new_tokens(prompt, asked, None)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None

        def sampling(_: list[int], choice: int) -> SamplingParams:
            return body.sampling(most, choice, logprobs=logprobs)

        jobs = service.jobs([prompt], sampling, body.n)
        request.state.note(f"{len(prompt)} prompt tokens, {body.n} choices")
        if service.config.log_prompts:
            request.state.note(repr(text))
        generation = service.loop.submit(jobs)
        envelope = service.envelope(request, "chatcmpl")
        if body.stream:
            return service.stream(body, generation, chunks(body, prompt, generation, envelope))
        return await service.answer(request, generation, whole(body, prompt, generation, envelope))

    return router
