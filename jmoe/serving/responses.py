"""`POST /v1/responses`: OpenAI's Responses API without stored responses.

A request becomes a chat (`make_chat_request`), and the events of its output become items
(`ItemBuilder`).
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

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
from jmoe.serving.chat_sequences import make_chat_sequences
from jmoe.serving.errors import ApiError, validation_error
from jmoe.serving.json_body import JsonRoute
from jmoe.serving.responses_schemas import (
    FunctionTool,
    IncompleteDetails,
    InputFunctionCall,
    InputFunctionOutput,
    InputMessage,
    InputReasoning,
    InputTokensDetails,
    NamedFunction,
    NamespaceTool,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseSettings,
    ResponsesRequest,
    ResponsesUsage,
    TextContent,
)
from jmoe.serving.schemas import ChatCompletionRequest, SamplingFields
from jmoe.serving.service import Service
from jmoe.types import JsonObject

# a chat request's name -> the name in this API
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tools.function": "tools",
    "tool_choice.function": "tool_choice",
}


@contextmanager
def _renaming_fields_in_errors() -> Iterator[None]:
    """Return a context whose errors name the fields of this API in place of a chat's."""
    try:
        yield
    except ValidationError as error:
        renamed = validation_error(error.errors())
        renamed.rename_fields(NAMES)
        raise renamed from error
    except ApiError as error:
        error.rename_fields(NAMES)
        raise


def make_chat_request(body: ResponsesRequest) -> ChatCompletionRequest:
    """Return the chat that a request stands for. Raises ValidationError."""
    fields: JsonObject = {
        "model": body.model,
        "messages": make_chat_messages(body),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [
            {
                "type": "function",
                "function": tool.model_dump(exclude={"type"}, exclude_unset=True) | {"name": name},
            }
            for name, (_, tool) in _functions_by_name_in_chat(body)
        ],
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort,
        "priority": body.priority,
        "stream": body.stream,
    }
    if isinstance(body.tool_choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    fields |= body.model_dump(include=set(SamplingFields.model_fields), exclude_unset=True)
    wanted = body.text.format
    if wanted.type == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif wanted.type == "json_schema":
        schema = {"name": wanted.name or "answer", "schema": wanted.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return ChatCompletionRequest.model_validate(fields)


def _functions_by_name_in_chat(
    body: ResponsesRequest,
) -> Iterator[tuple[str, tuple[str | None, FunctionTool]]]:
    """Yield (name in the chat, (namespace or None, function)) of each function of the tools."""
    for tool in body.tools:
        if isinstance(tool, NamespaceTool):
            for function in tool.tools:
                yield _function_name_in_chat(tool.name, function.name), (tool.name, function)
        else:
            yield tool.name, (None, tool)


def _function_name_in_chat(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def make_chat_messages(body: ResponsesRequest) -> list[JsonObject]:
    """Return the messages of a chat.

    The instructions and the system and developer messages before all others are one system
    message, since many templates take no other; later ones are system messages of their own. The
    assistant's reasoning, text and calls between two other items are one message.
    """
    items = (
        [InputMessage(role="user", content=body.input)]
        if isinstance(body.input, str)
        else body.input
    )
    system = [body.instructions] if body.instructions else []
    messages: list[JsonObject] = []
    for item in items:
        if isinstance(item, InputFunctionOutput):
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.call_id,
                    "content": _chat_text_parts(item.output),
                }
            )
        elif isinstance(item, InputMessage) and item.role != "assistant":
            content = _chat_text_parts(item.content)
            if item.role == "user":
                messages.append({"role": "user", "content": content})
            elif messages:
                messages.append({"role": "system", "content": content})
            else:
                system += [content] if isinstance(content, str) else [p["text"] for p in content]
        else:
            _add_to_assistant_message(messages, item)
    if system:
        messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return messages


def _add_to_assistant_message(
    messages: list[JsonObject], item: InputMessage | InputFunctionCall | InputReasoning
) -> None:
    """Add an item of the assistant to its last message, or to a new one that begins with it."""
    last = messages[-1] if messages else {}
    new = last.get("role") != "assistant"
    if isinstance(item, InputReasoning):
        new |= "content" in last or "tool_calls" in last or "reasoning" in last
    elif isinstance(item, InputMessage):
        new |= "content" in last
    if new:
        last = {"role": "assistant"}
        messages.append(last)
    if isinstance(item, InputReasoning):
        last["reasoning"] = item.text
    elif isinstance(item, InputMessage):
        last["content"] = _chat_text_parts(item.content)
    else:
        name = _function_name_in_chat(item.namespace, item.name)
        function = {"name": name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)


def _chat_text_parts(content: str | list[TextContent]) -> Any:
    """Return a message's content in the form of /v1/chat/completions."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


class ItemBuilder:
    """Builds the items of an answer and the events of its stream from the output's events.

    items: so far; the last one may be open. An event is the dict that is sent, without its
    sequence number.
    """

    def __init__(self, suffix: str, namespaces: Mapping[str, str] = MappingProxyType({})) -> None:
        """suffix: ends the ids of the items, which are unique in the answer.

        namespaces: by name of a function in the chat, its namespace, with which that name begins.
        """
        self.items: list[OutputItem] = []
        self._suffix, self._is_open, self._namespaces = suffix, False, namespaces

    def push(self, events: list[OutputEvent], is_cut: bool) -> Iterator[JsonObject]:
        """Yield the stream's events for the next events of the output.

        is_cut: the output ends with them before the model ended it; the item that ends with the
        last of them is incomplete.
        """
        for number, event in enumerate(events, 1):
            if isinstance(event, ContentDelta | ReasoningDelta):
                if event.text:
                    yield from self._add_text(event)
            elif isinstance(event, ToolCallBegin):
                yield from self.close("completed")
                yield self._open_item(self._make_call(event))
            elif isinstance(event, ToolCallArguments):
                item = self.items[-1]
                assert isinstance(item, OutputFunctionCall), "calls come one after the other"
                item.arguments += event.text
                yield self._event_of_item("function_call_arguments.delta", delta=event.text)
            else:
                ends_cut = is_cut and number == len(events)
                yield from self.close("incomplete" if ends_cut else "completed")

    def close(self, status: Literal["completed", "incomplete"]) -> Iterator[JsonObject]:
        """Yield the events that end the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item.status = status
        if isinstance(item, OutputFunctionCall):
            done = {"name": item.name, "arguments": item.arguments}
            yield self._event_of_item("function_call_arguments.done", **done)
        else:
            (part,) = item.content
            more: JsonObject = {"logprobs": []} if isinstance(part, OutputText) else {}
            yield self._event_of_item(f"{part.type}.done", content_index=0, text=part.text, **more)
            yield self._event_of_item("content_part.done", content_index=0, part=part.model_dump())
        yield self._event_with_item("output_item.done")

    def _add_text(self, event: ContentDelta | ReasoningDelta) -> Iterator[JsonObject]:
        """Add text to the open item of its kind, or to a new one; yield the events of that."""
        is_content = isinstance(event, ContentDelta)
        kind = OutputMessage if is_content else OutputReasoning
        if not (self._is_open and isinstance(self.items[-1], kind)):
            yield from self.close("completed")
            yield self._open_item(kind(id=self._item_id("msg" if is_content else "rs")))
            begun = OutputText() if is_content else OutputReasoningText()
            self.items[-1].content.append(begun)  # type: ignore[union-attr, arg-type]
            yield self._event_of_item(
                "content_part.added", content_index=0, part=begun.model_dump()
            )
        (part,) = self.items[-1].content  # type: ignore[union-attr]
        part.text += event.text
        more: JsonObject = {"logprobs": []} if is_content else {}
        yield self._event_of_item(f"{part.type}.delta", content_index=0, delta=event.text, **more)

    def _make_call(self, begun: ToolCallBegin) -> OutputFunctionCall:
        """Return the item of a call."""
        namespace = self._namespaces.get(begun.name)
        name = begun.name if namespace is None else begun.name[len(namespace) + 1 :]
        return OutputFunctionCall(
            id=self._item_id("fc"), call_id=begun.id, name=name, namespace=namespace
        )

    def _item_id(self, prefix: str) -> str:
        """Return the id of the next item."""
        return f"{prefix}_{len(self.items)}_{self._suffix}"

    def _open_item(self, item: OutputItem) -> JsonObject:
        """Append an open item; return the event that adds it."""
        self.items.append(item)
        self._is_open = True
        return self._event_with_item("output_item.added")

    def _event_of_item(self, kind: str, **fields: Any) -> JsonObject:
        """Return an event of the last item, named by its id and index."""
        place = {"output_index": len(self.items) - 1, "item_id": self.items[-1].id}
        return {"type": f"response.{kind}", **place, **fields}

    def _event_with_item(self, kind: str) -> JsonObject:
        """Return an event that contains the last item."""
        index = len(self.items) - 1
        return {
            "type": f"response.{kind}",
            "output_index": index,
            "item": self.items[-1].model_dump(),
        }


def make_response_settings(body: ResponsesRequest) -> ResponseSettings:
    """Return the fields of a response that repeat the request. Raises `ApiError` 400 if they
    cannot be sent back.
    """
    choice = body.tool_choice
    settings = ResponseSettings(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning={"effort": body.reasoning.effort, "summary": None},
        text=body.text.model_dump(by_alias=True, exclude_none=True),
        tool_choice=choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
        tools=[tool.model_dump() for tool in body.tools],
    )
    try:
        # without infinities, which JSON has not
        return ResponseSettings.model_validate_json(settings.model_dump_json())
    except ValueError as error:
        message = (
            "the body holds half of a surrogate pair, which is no text, or lists and objects that"
            " are nested too deeply"
        )
        raise ApiError(400, message) from error


class _ResponsesAnswer(Answer[ResponsesRequest]):
    id_prefix = "resp_"

    def make_item_builder(self) -> ItemBuilder:
        """Return the builder of this answer's items."""
        functions = {
            name: space for name, (space, _) in _functions_by_name_in_chat(self.body) if space
        }
        return ItemBuilder(self.envelope["id"].removeprefix("resp_"), functions)

    async def item_events(self, builder: ItemBuilder, is_cut: list[bool]) -> AsyncIterator[Any]:
        """Yield the stream's events of all items; is_cut gets whether the answer is incomplete."""
        async for output in self.generation:
            ended = output.finish_reason
            assert ended != "abort" and ended != "error", "these have no reader"
            is_cut.append(ended == "length")
            for event in builder.push(output.events, is_cut[-1]):
                yield event
        for event in builder.close("incomplete" if is_cut[-1] else "completed"):
            yield event

    def make_response(self, items: list[OutputItem], is_cut: bool | None) -> ResponseObject:
        """Return the response with the items so far; is_cut: None before the answer has ended."""
        sampling = self.generation.sequences[0].sampling
        response = ResponseObject(
            **dict(make_response_settings(self.body)),
            id=self.envelope["id"],
            created_at=self.envelope["created"],
            model=self.envelope["model"],
            output=items,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        if is_cut is not None:
            response.status = "incomplete" if is_cut else "completed"
            response.incomplete_details = IncompleteDetails() if is_cut else None
            response.usage = self.response_usage()
        return response

    def response_usage(self) -> ResponsesUsage:
        """Return the token counts under the names of this API."""
        usage = self.usage()
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream from `response.created` to `response.completed`,
        `response.incomplete` or `response.failed`.
        """
        number = 0

        def write(event: JsonObject) -> bytes:
            nonlocal number
            data = json.dumps(event | {"sequence_number": number}, ensure_ascii=False)
            number += 1
            return format_event(data, event["type"])

        def write_response(kind: str, response: ResponseObject) -> bytes:
            return write({"type": f"response.{kind}", "response": response.model_dump()})

        builder, is_cut = self.make_item_builder(), [False]
        begun = self.make_response([], None)
        yield write_response("created", begun)
        yield write_response("in_progress", begun)
        try:
            with _renaming_fields_in_errors():
                async for event in self.item_events(builder, is_cut):
                    yield write(event)
        except ApiError as error:
            failed = self.make_response(builder.items, None)
            detail = error.body.error
            failed.status = "failed"
            failed.error = ResponseError(code=detail.code or detail.type, message=detail.message)
            yield write_response("failed", failed)
        else:
            response = self.make_response(builder.items, is_cut[-1])
            yield write_response(response.status, response)

    async def whole_response(self) -> ResponseObject:
        """Return the response after the sequence has ended."""
        self.generation.is_kept = True
        builder, is_cut = self.make_item_builder(), [False]
        with _renaming_fields_in_errors():
            async for _ in self.item_events(builder, is_cut):
                pass
        return self.make_response(builder.items, is_cut[-1])


def responses_router(service: Service) -> APIRouter:
    """Return the `/v1/responses` route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses", response_model=ResponseObject, responses=EVENTS)
    async def responses(body: ResponsesRequest, request: Request) -> BaseModel | Response:
        """Generate the next items of a conversation."""
        make_response_settings(body)  # raises before anything is generated
        with _renaming_fields_in_errors():
            chat = make_chat_request(body)
            prompt, sequences = await make_chat_sequences(service, chat, request)
        return await _ResponsesAnswer.respond(service, request, body, [prompt], sequences)

    return router
