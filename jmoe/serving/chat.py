"""`POST /v1/chat/completions`."""

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from jmoe.inference.output_events import (
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    join_content,
)
from jmoe.serving.answer import EVENTS, ChoiceAnswer
from jmoe.serving.chat_sequences import make_chat_sequences
from jmoe.serving.json_body import JsonRoute
from jmoe.serving.schemas import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatFinishReason,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Usage,
)
from jmoe.serving.service import Service
from jmoe.serving.tool_schemas import (
    AnswerToolCall,
    FunctionCall,
    FunctionCallDelta,
    ToolCallDelta,
)


class _ChatAnswer(ChoiceAnswer[ChatCompletionRequest, ChunkChoice]):
    id_prefix = "chatcmpl-"
    logprob_bytes = 800

    async def deltas(self) -> AsyncIterator[ChunkChoice]:
        """Yield an empty delta with the role for each choice, then the generated text."""
        for index in range(self.body.n):
            yield ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        with_calls: set[int] = set()
        async for output in self.generation:
            index = output.sequence.index
            ended = output.finish_reason
            assert ended != "abort" and ended != "error", "these have no reader"
            if any(isinstance(event, ToolCallBegin) for event in output.events):
                with_calls.add(index)
            is_call = ended == "stop" and index in with_calls
            reason: ChatFinishReason | None = "tool_calls" if is_call else ended
            logprobs = (
                self.service.vocabulary.chat_logprobs(output.logprobs)
                if self.body.logprobs
                else None
            )
            delta = make_delta(output.events)
            yield ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)

    def make_chunk(self, choices: list[ChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(**self.envelope, choices=choices, usage=usage)

    def make_response(self, deltas: list[list[ChunkChoice]]) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            **self.envelope, choices=list(map(_join_deltas, deltas)), usage=self.usage()
        )


def make_delta(events: list[OutputEvent]) -> Delta:
    """Return what events add to the answer's message; with no events its content is ""."""
    content = join_content(events)
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    calls: list[ToolCallDelta] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            function = FunctionCallDelta(name=event.name)
            calls.append(
                ToolCallDelta(index=event.index, id=event.id, type="function", function=function)
            )
        elif isinstance(event, ToolCallArguments):
            if not (calls and calls[-1].index == event.index):
                calls.append(ToolCallDelta(index=event.index, function=FunctionCallDelta()))
            calls[-1].function.arguments += event.text
    is_content = bool(content) or not (reasoning or calls)
    return Delta(
        content=content if is_content else None,
        reasoning_content=reasoning or None,
        reasoning=reasoning or None,
        tool_calls=calls or None,
    )


def _join_tool_calls(deltas: list[ChunkChoice]) -> list[AnswerToolCall]:
    """Return the tool calls of one choice."""
    calls: list[AnswerToolCall] = []
    for one in deltas:
        for call in one.delta.tool_calls or ():
            if call.id is not None:
                function = FunctionCall(name=call.function.name or "", arguments="")
                calls.append(AnswerToolCall(id=call.id, function=function))
            calls[call.index].function.arguments += call.function.arguments
    return calls


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
        "".join(getattr(one.delta, name) or "" for one in deltas)
        for name in ("content", "reasoning")
    )
    calls = _join_tool_calls(deltas)
    message = AnswerMessage(
        content=content or (None if calls else ""),
        reasoning_content=reasoning or None,
        reasoning=reasoning or None,
        tool_calls=calls or None,
    )
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
        prompt, sequences = await make_chat_sequences(service, body, request)
        return await _ChatAnswer.respond(service, request, body, [prompt], sequences)

    return router
