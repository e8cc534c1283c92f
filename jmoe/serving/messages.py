"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

A request becomes a chat (`convert_to_chat`), and the events of its output become content blocks
(`BlockBuilder`).
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from jmoe.inference.output_events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from jmoe.serving.answer import EVENTS, Answer, format_event
from jmoe.serving.chat_sequences import (
    SWITCHES,
    count_prompt_tokens,
    make_chat_sequences,
)
from jmoe.serving.errors import ApiError, validation_error
from jmoe.serving.json_body import JsonRoute
from jmoe.serving.messages_schemas import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    CountTokensRequest,
    CountTokensResponse,
    MessageResponse,
    MessagesRequest,
    MessagesUsage,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    TurnMessage,
)
from jmoe.serving.output_parsers.output_format import OutputFormat
from jmoe.serving.schemas import ChatCompletionRequest
from jmoe.serving.service import Service
from jmoe.types import JsonObject

# a chat request's name, or its name and value -> those in this API
NAMES = {
    "tool_choice = 'required'": "tool_choice.type = 'any'",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "tools.function": "tools",
    "tool_choice.function": "tool_choice",
    "stop": "stop_sequences",
}
EFFORT = {"reasoning_effort": "output_config.effort"}
DISABLED = {
    "reasoning_effort = 'none'": "thinking.type = 'disabled'",
    "reasoning_effort": "thinking.type",
}
DEFAULT_EFFORT = "high"  # of Anthropic's API: as no effort at all


@contextmanager
def _renaming_fields_in_errors(body: CountTokensRequest) -> Iterator[None]:
    """Return a context whose errors name the fields of this API in place of a chat's."""
    off = body.thinking is not None and body.thinking.type == "disabled"
    names = NAMES | (DISABLED if off else EFFORT)
    try:
        yield
    except ValidationError as error:
        renamed = validation_error(error.errors())
        renamed.rename_fields(names)
        raise renamed from error
    except ApiError as error:
        error.rename_fields(names)
        raise


def make_chat_prompt_fields(body: CountTokensRequest, output_format: OutputFormat) -> JsonObject:
    """Return the fields of a chat that make its prompt."""
    messages: list[JsonObject] = []
    if body.system:
        messages.append({"role": "system", "content": _chat_text_parts(body.system)})
    for message in body.messages:
        if message.role == "system":
            messages.append({"role": "system", "content": _chat_text_parts(message.texts)})
        else:
            messages += (
                _chat_messages_of_assistant(message)
                if message.role == "assistant"
                else _chat_messages_of_user(message)
            )
    effort = body.output_config.effort
    if effort == DEFAULT_EFFORT and not output_format.reads_variable("reasoning_effort"):
        effort = None
    fields: JsonObject = {
        "model": body.model,
        "messages": messages,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ],
        "reasoning_effort": effort,
    }
    return fields | _thinking_fields(body.thinking, output_format)


def _thinking_fields(thinking: Thinking | None, output_format: OutputFormat) -> JsonObject:
    """Return the fields of a chat that switch the reasoning on or off."""
    if thinking is None or thinking.type == "adaptive":
        return {}
    reasons = output_format.tags is not None or output_format.harmony is not None
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"} if reasons else {}
    switches = {name: True for name in SWITCHES if output_format.reads_variable(name)}
    return {"chat_template_kwargs": switches}


def convert_to_chat(body: MessagesRequest, service: Service) -> ChatCompletionRequest:
    """Return the chat that a request stands for. Raises ValidationError."""
    fields = make_chat_prompt_fields(body, service.output_format) | {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    choice, thinking = body.tool_choice, body.thinking
    if choice is not None:
        words = {"auto": "auto", "none": "none", "any": "required"}
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = words.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if thinking is not None and thinking.type == "enabled":
        budget, limit = thinking.budget_tokens, min(body.max_tokens - 1, service.max_seq_len)
        # a budget that leaves nothing to the answer ends nothing
        fields["thinking_token_budget"] = budget if budget is None or budget < limit else None
    return ChatCompletionRequest.model_validate(fields)


def _chat_text_parts(content: str | list[TextBlock]) -> str | list[JsonObject]:
    """Return a message's content in the form of /v1/chat/completions."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": block.text} for block in content]


def _chat_messages_of_user(message: TurnMessage) -> list[JsonObject]:
    """Return a user's message as messages of a chat: one for each tool result, and one for the
    texts between two of them.
    """
    messages: list[JsonObject] = []
    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            result = {"role": "tool", "tool_call_id": block.tool_use_id}
            messages.append(result | {"content": _chat_text_parts(block.content)})
        elif isinstance(block, TextBlock):
            if not messages or messages[-1]["role"] == "tool":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append({"type": "text", "text": block.text})
    return messages or [{"role": "user", "content": ""}]


def _chat_messages_of_assistant(message: TurnMessage) -> list[JsonObject]:
    """Return an assistant's message as a list of one message of a chat."""
    thoughts: list[str] = []
    texts: list[TextBlock] = []
    calls: list[JsonObject] = []
    for block in message.blocks:
        if isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, TextBlock):
            texts.append(block)
        elif not isinstance(block, ToolResultBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
    chat: JsonObject = {
        "role": "assistant",
        "content": _chat_text_parts(texts),
        "tool_calls": calls,
    }
    return [chat | ({"reasoning": "\n".join(thoughts)} if thoughts else {})]


class BlockBuilder:
    """Builds the content blocks of an answer and the events of its stream from the output's
    events.

    blocks: so far; the last one may be open. An event is the dict that is sent.
    """

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._is_open, self._arguments = False, ""

    def push(self, events: list[OutputEvent]) -> Iterator[JsonObject]:
        """Yield the stream's events for the next events of the output."""
        for event in events:
            if isinstance(event, ContentDelta):
                yield from self._add_text(event.text)
            elif isinstance(event, ReasoningDelta):
                yield from self._add_thinking(event.text)
            elif isinstance(event, ToolCallBegin):
                yield from self.close()
                self._arguments = ""
                yield self._open_block(AnswerToolUse(id=event.id, name=event.name))
            elif isinstance(event, ToolCallArguments):
                self._arguments += event.text
                yield self._delta_event({"type": "input_json_delta", "partial_json": event.text})
            else:
                yield from self.close()

    def close(self) -> Iterator[JsonObject]:
        """Yield the event that ends the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            last = self.blocks[-1]
            if isinstance(last, AnswerToolUse):
                last.input = _parse_call_input(self._arguments)
            yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _add_text(self, text: str) -> Iterator[JsonObject]:
        """Add text to the open text block, or to a new one; yield the events of that."""
        last = self.blocks[-1] if self._is_open else None
        if not isinstance(last, AnswerText):
            if not text:
                return
            yield from self.close()
            last = AnswerText()
            yield self._open_block(last)
        last.text += text
        yield self._delta_event({"type": "text_delta", "text": text})

    def _add_thinking(self, text: str) -> Iterator[JsonObject]:
        """Add text to the open thinking block, or to a new one; yield the events of that."""
        last = self.blocks[-1] if self._is_open else None
        if not isinstance(last, AnswerThinking):
            if not text:
                return
            yield from self.close()
            last = AnswerThinking()
            yield self._open_block(last)
        last.thinking += text
        yield self._delta_event({"type": "thinking_delta", "thinking": text})

    def _open_block(self, block: AnswerBlock) -> JsonObject:
        """Append an open block; return the event that begins it."""
        self.blocks.append(block)
        self._is_open = True
        index = len(self.blocks) - 1
        return {
            "type": "content_block_start",
            "index": index,
            "content_block": block.model_dump(),
        }

    def _delta_event(self, delta: JsonObject) -> JsonObject:
        """Return the event that adds `delta` to the last block."""
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _parse_call_input(arguments: str) -> JsonObject:
    """Return the input of a call from the text that the model wrote."""
    try:
        made = json.loads(arguments or "{}")
        json.dumps(made, allow_nan=False)
        AnswerToolUse(id="", name="", input=made).model_dump_json()  # neither deep nor surrogates
    except (ValueError, RecursionError):
        return {"INVALID_JSON": arguments}
    assert isinstance(made, dict), "validated"
    return made


class _MessagesAnswer(Answer[MessagesRequest]):
    id_prefix = "msg_"

    async def block_events(self, builder: BlockBuilder) -> AsyncIterator[JsonObject]:
        """Yield the stream's events of all blocks."""
        async for output in self.generation:
            assert output.finish_reason not in ("abort", "error"), "these have no reader"
            for event in builder.push(output.events):
                yield event
        for event in builder.close():
            yield event

    def make_message(self, blocks: list[AnswerBlock], is_ended: bool) -> MessageResponse:
        """Return the message with the blocks so far."""
        usage = self.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        message = MessageResponse(
            id=self.envelope["id"],
            model=self.envelope["model"],
            content=blocks,
            usage=MessagesUsage(
                input_tokens=usage.prompt_tokens - cached,
                output_tokens=usage.completion_tokens,
                cache_read_input_tokens=cached,
            ),
        )
        if is_ended:
            (sequence,) = self.generation.sequences
            assert sequence.text is not None, "a server has a tokenizer"
            message.stop_sequence = sequence.text.matched_stop
            if message.stop_sequence is not None:
                message.stop_reason = "stop_sequence"
            elif sequence.finish_reason == "length":
                message.stop_reason = "max_tokens"
            else:
                called = any(isinstance(block, AnswerToolUse) for block in blocks)
                message.stop_reason = "tool_use" if called else "end_turn"
        return message

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream from `message_start` to `message_stop` or `error`."""

        def write(event: JsonObject) -> bytes:
            return format_event(json.dumps(event, ensure_ascii=False), event["type"])

        builder = BlockBuilder()
        begun = self.make_message([], False)
        yield write({"type": "message_start", "message": begun.model_dump()})
        try:
            with _renaming_fields_in_errors(self.body):
                async for event in self.block_events(builder):
                    yield write(event)
        except ApiError as error:
            yield write(error.body_for_messages_api())
        else:
            ended = self.make_message(builder.blocks, True)
            delta = ended.model_dump(include={"stop_reason", "stop_sequence"})
            usage = ended.usage.model_dump()
            yield write({"type": "message_delta", "delta": delta, "usage": usage})
            yield write({"type": "message_stop"})

    async def whole_response(self) -> MessageResponse:
        """Return the message after the sequence has ended."""
        self.generation.is_kept = True
        builder = BlockBuilder()
        with _renaming_fields_in_errors(self.body):
            async for _ in self.block_events(builder):
                pass
        return self.make_message(builder.blocks, True)


def messages_router(service: Service) -> APIRouter:
    """Return the `/v1/messages` routes."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/messages", response_model=MessageResponse, responses=EVENTS)
    async def messages(body: MessagesRequest, request: Request) -> BaseModel | Response:
        """Generate the assistant's next message."""
        with _renaming_fields_in_errors(body):
            chat = convert_to_chat(body, service)
            prompt, sequences = await make_chat_sequences(service, chat, request)
        return await _MessagesAnswer.respond(service, request, body, [prompt], sequences)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> CountTokensResponse:
        """Return the number of tokens of a request's prompt."""
        with _renaming_fields_in_errors(body):
            fields = make_chat_prompt_fields(body, service.output_format) | {"max_tokens": 1}
            if body.tool_choice is not None and body.tool_choice.type == "none":
                fields["tool_choice"] = "none"
            chat = ChatCompletionRequest.model_validate(fields)
            input_tokens = await count_prompt_tokens(service, chat, request)
        return CountTokensResponse(input_tokens=input_tokens)

    return router
