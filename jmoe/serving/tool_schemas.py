"""Pydantic models of tools and tool calls in the bodies of chats, as OpenAI's API has them.

https://platform.openai.com/docs/guides/function-calling
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from jmoe.config import check
from jmoe.serving.request_body import Hint, RequestBody
from jmoe.types import JsonObject

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(RequestBody):
    """A function that the model may call.

    parameters: the JSON schema of its arguments, an object. strict: calls follow the schema; the
    server then constrains them.
    """

    name: FunctionName
    description: str | None = None
    parameters: JsonObject = Field(default_factory=dict)
    strict: bool = False


class Tool(RequestBody):
    """A tool of the request."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Hint = None

    def for_template(self) -> JsonObject:
        """Return the tool as a dict for the chat template."""
        function = self.function
        described: JsonObject = {"name": function.name}
        if function.description is not None:
            described["description"] = function.description
        if "parameters" in function.model_fields_set:
            described["parameters"] = function.parameters
        return {"type": self.type, "function": described}


class FunctionReference(RequestBody):
    """The name of a function of the request."""

    name: str


class NamedTool(RequestBody):
    """A tool choice that names the function to be called."""

    type: Literal["function"]
    function: FunctionReference


class CalledFunction(RequestBody):
    """The function and arguments of an earlier call. arguments: a JSON object, or its text."""

    name: str
    arguments: str | JsonObject = ""
    provider_specific_fields: Hint = None


class MessageToolCall(RequestBody):
    """A call of an earlier message of the assistant."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Hint = None
    provider_specific_fields: Hint = None

    def for_template(self, as_object: bool) -> JsonObject:
        """Return the call as a dict for the chat template. as_object: with the arguments as a JSON
        object instead of text. Raises ValueError if they are none.
        """
        arguments = self.function.arguments
        if as_object and isinstance(arguments, str):
            arguments = _parse_arguments(arguments)
        elif not as_object and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


def _parse_arguments(text: str) -> JsonObject:
    """Return the arguments in a text; an empty one has none."""
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    words = "must be a JSON object, because the model's chat template reads it"
    name = "messages: arguments of a tool call"
    check(isinstance(arguments, dict), name, text[:100], words)
    assert isinstance(arguments, dict)
    return arguments


def check_tool_choice(choice: object, tools: Sequence[Tool]) -> None:
    """Raise ValueError if two tools have one name, or if the choice needs a tool that is not
    there.
    """
    names = [tool.function.name for tool in tools]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    check(twice is None, "tools.function.name", twice, "must be given once")
    if choice == "required":
        check(bool(tools), "tool_choice", choice, "needs tools")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        check(name in names, "tool_choice.function.name", name, "must be a function of tools")


class FunctionCall(BaseModel):
    """arguments: the text of a JSON object; what the model wrote, if its output ends early."""

    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    """A call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def is_none(value: object) -> bool:
    """Return whether a field is None, so that answers leave it out."""
    return value is None


class FunctionCallDelta(BaseModel):
    """The text that a chunk appends to a call. Only a call's first chunk has the name."""

    name: str | None = Field(default=None, exclude_if=is_none)
    arguments: str = ""


class ToolCallDelta(BaseModel):
    """The part of call number `index` that a chunk has. Only a call's first chunk has the id."""

    index: int
    id: str | None = Field(default=None, exclude_if=is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=is_none)
    function: FunctionCallDelta
