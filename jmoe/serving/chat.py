"""`POST /v1/chat/completions`."""

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Sequence
from jmoe.serving.answer import EVENTS, Answer
from jmoe.serving.errors import ApiError
from jmoe.serving.json_body import JsonRoute
from jmoe.serving.schemas import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Usage,
)
from jmoe.serving.service import Service

OPEN_REASONING = "<think>"  # begins the reasoning of models without channels
CHANNELS = ("content", "reasoning_content")


class _ChatAnswer(Answer[ChatCompletionRequest, ChunkChoice]):
    id_prefix = "chatcmpl"
    logprob_bytes = 800

    async def deltas(self) -> AsyncIterator[ChunkChoice]:
        """Yield an empty delta with the role for each choice, then the generated text."""
        for index in range(self.body.n):
            yield ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        async for output in self.generation:
            reason = output.finish_reason
            assert reason != "abort" and reason != "error", "these have no reader"
            logprobs = (
                self.service.vocabulary.chat_logprobs(output.logprobs)
                if self.body.logprobs
                else None
            )
            delta = Delta(content=output.text, reasoning_content=output.reasoning or None)
            yield ChunkChoice(
                index=output.sequence.index, delta=delta, logprobs=logprobs, finish_reason=reason
            )

    def make_chunk(self, choices: list[ChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(**self.envelope, choices=choices, usage=usage)

    def make_response(self, deltas: list[list[ChunkChoice]]) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            **self.envelope, choices=list(map(_join_deltas, deltas)), usage=self.usage()
        )


def _join_deltas(deltas: list[ChunkChoice]) -> ChatChoice:
    """Return one choice of a whole response, joined from its stream deltas."""
    *_, last = deltas
    assert last.finish_reason is not None
    logprobs = None
    if last.logprobs is not None:
        logprobs = ChatLogprobs(
            content=[lp for one in deltas if one.logprobs for lp in one.logprobs.content]
        )
    content, reasoning = (
        "".join(getattr(one.delta, name) or "" for one in deltas) for name in CHANNELS
    )
    message = AnswerMessage(content=content, reasoning_content=reasoning or None)
    return ChatChoice(
        index=last.index, message=message, logprobs=logprobs, finish_reason=last.finish_reason
    )


def chat_router(service: Service) -> APIRouter:
    """Return the `/v1/chat/completions` route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=EVENTS)
    async def chat_completions(
        body: ChatCompletionRequest, request: Request
    ) -> BaseModel | Response:
        """Generate the assistant's next message of a chat."""
        service.check_model(body.model)
        client = request.state.client
        service.loop.requests_to_evict(body.n, client)  # raises before tokenization
        logprobs = (body.top_logprobs or 0) if body.logprobs else None

        def sampling_params(prompt: list[int], choice: int) -> SamplingParams:
            most = service.max_new_tokens(prompt, body.requested_max_tokens)
            return body.sampling_params(most, choice, service.model_sampling, logprobs=logprobs)

        text = await service.render_chat(
            body.messages, body.add_generation_prompt, body.chat_template_kwargs, request
        )

        if body.json_schema is not None and text.rstrip().endswith(OPEN_REASONING):
            message = (
                "response_format: the model's chat template begins the answer with"
                f" {OPEN_REASONING}, so the schema would bind the reasoning: switch it off by"
                " chat_template_kwargs, if the template can, or leave response_format out"
            )
            raise ApiError(400, message, param="response_format")

        def make_sequences() -> tuple[list[int], list[Sequence]]:
            # off by default: the template already contains the special tokens
            (prompt,) = service.encode([text], add_special_tokens=body.add_special_tokens)
            sequences = service.make_sequences(body, [prompt], sampling_params)
            for sequence in sequences:
                sequence.harmony = service.harmony
            return prompt, sequences

        prompt, sequences = await service.process_text(make_sequences, len(text), client)
        await service.set_constraints(body, sequences, request)
        service.log_prompts(request, [text])
        return await _ChatAnswer.respond(service, request, body, [prompt], sequences)

    return router
