"""Pydantic models of `/v1/responses`, with the names of OpenAI's API.

https://platform.openai.com/docs/api-reference/responses. The server keeps no responses: a request
brings the whole conversation, and a field that would need an earlier response is rejected by name.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from jmoe.serving.request_body import FastList, Hint, RequestBody
from jmoe.serving.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MOST_TOKENS,
    Finite,
    SamplingFields,
    Whole,
    allowed_values_validator,
    text_or_list_tag,
)
from jmoe.serving.tool_schemas import FunctionDefinition, FunctionName, is_none
from jmoe.types import Json, JsonObject

MAX_METADATA = 16
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TextContent(RequestBody):
    """A text part of an item. annotations, logprobs: of earlier answers, ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Hint = None
    logprobs: Hint = None


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[FastList[TextContent], Field(max_length=MAX_MESSAGES), Tag("list")],
    Discriminator(text_or_list_tag),
]


class InputItem(RequestBody):
    """Base of input items. id, status: of earlier answers, ignored."""

    id: Hint = None
    status: Hint = None


class InputMessage(InputItem):
    """A message. phase: a hint of Codex, ignored."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts
    phase: Hint = None


class InputFunctionCall(InputItem):
    """A call of an earlier answer.

    arguments: the text of a JSON object. namespace: of the function; None: it has none.
    """

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class InputFunctionOutput(InputItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningText(RequestBody):
    """A part of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(RequestBody):
    """A part of the summary of a reasoning."""

    type: Literal["summary_text"]
    text: str


class InputReasoning(InputItem):
    """The reasoning of an earlier answer; its summary is read if there is no content.

    encrypted_content: rejected, since only the server that wrote it can read it.
    """

    type: Literal["reasoning"]
    summary: FastList[SummaryText] = Field(default_factory=list, max_length=MAX_MESSAGES)
    content: FastList[ReasoningText] = Field(default_factory=list, max_length=MAX_MESSAGES)
    encrypted_content: Annotated[str, allowed_values_validator("")] = ""

    @property
    def text(self) -> str:
        """The reasoning as one string."""
        return "\n".join(part.text for part in self.content or self.summary)


def _item_tag(value: Json) -> str | None:
    """Return the union tag of an input item; a message may leave its type out."""
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputFunctionOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _item_tag,
        custom_error_type="item_type",
        custom_error_message=(
            "type must be message, function_call, function_call_output or reasoning"
        ),
    ),
]
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[FastList[Item], Field(min_length=1, max_length=MAX_MESSAGES), Tag("list")],
    Discriminator(text_or_list_tag),
]


class FunctionTool(FunctionDefinition):
    """A function that the model may call. strict: false if it is left out."""

    type: Literal["function"]


class NamespaceTool(RequestBody):
    """Functions under a common name, as Codex sends those of a server or of a group.

    The model sees each as the function `NAMESPACE.NAME`, and nothing of the description.
    """

    type: Literal["namespace"]
    name: FunctionName
    description: Hint = None
    tools: FastList[FunctionTool] = Field(min_length=1, max_length=MAX_TOOLS)


def _tool_tag(value: Json) -> str | None:
    """Return the union tag of a tool."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[NamespaceTool, Tag("namespace")],
    Discriminator(
        _tool_tag,
        custom_error_type="tool_type",
        custom_error_message="type must be function or namespace; the server runs no tools itself",
    ),
]


class NamedFunction(RequestBody):
    """A tool choice that names the function to be called."""

    type: Literal["function"]
    name: str


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[NamedFunction, Tag("named")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "named"),
]


class TextFormat(RequestBody):
    """The required format of an answer. schema: with type json_schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema_given(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema must be given with type 'json_schema' and not otherwise")
        return self


class TextOptions(RequestBody):
    """Options of the answer's text."""

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Annotated[str, allowed_values_validator("medium")] = "medium"


class ReasoningOptions(RequestBody):
    """Options of the reasoning.

    effort: as `reasoning_effort` of chat completions. summary, generate_summary: ignored, the
    reasoning itself is returned.
    """

    effort: Effort | None = None
    summary: Hint = None
    generate_summary: Hint = None


class ResponsesStreamOptions(RequestBody):
    """Options of a stream. include_obfuscation: accepted without effect."""

    include_obfuscation: Hint = None


class ResponsesRequest(SamplingFields):
    """Body of `POST /v1/responses`; sampling parameters that OpenAI's API lacks are vLLM's.

    instructions: a system message before the input. store: accepted, and nothing is stored.
    priority: as of chat completions.
    include: `reasoning.encrypted_content` has no effect: reasoning is returned in clear.
    """

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(default=None, ge=1, le=MOST_TOKENS)
    temperature: Finite | None = Field(default=None, ge=0, le=100)
    top_p: Finite | None = Field(default=None, gt=0, le=1)
    tools: FastList[ResponseTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    text: TextOptions = Field(default_factory=TextOptions)
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    include: FastList[Literal["reasoning.encrypted_content"]] = Field(
        default_factory=list, max_length=MAX_METADATA
    )
    metadata: dict[str, str] = Field(default_factory=dict, max_length=MAX_METADATA)
    truncation: Annotated[str, allowed_values_validator("disabled")] = "disabled"
    background: Annotated[bool, allowed_values_validator(False)] = False
    top_logprobs: Annotated[int, allowed_values_validator(0)] = 0
    priority: Whole = Field(default=0, ge=-(2**31), lt=2**31)
    store: Hint = None
    max_tool_calls: Hint = None  # of tools that the server would run; there are none
    user: Hint = None
    service_tier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    client_metadata: Hint = None


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Json] = Field(default_factory=list)
    logprobs: list[Json] = Field(default_factory=list)


class OutputReasoningText(BaseModel):
    """The text of a reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(BaseModel):
    """A message of an answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = Field(default_factory=list)


class OutputReasoning(BaseModel):
    """The reasoning of an answer."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus = "in_progress"
    summary: list[Json] = Field(default_factory=list)
    content: list[OutputReasoningText] = Field(default_factory=list)


class OutputFunctionCall(BaseModel):
    """A call of an answer.

    arguments: what the model wrote, if its output ends early. namespace: left out if the function
        has none.
    """

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | None = Field(default=None, exclude_if=is_none)
    arguments: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(BaseModel):
    """cached_tokens: input tokens that the cache had, so that they were not computed."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """reasoning_tokens: tokens of the reasoning, its delimiters included."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseSettings(BaseModel):
    """Fields of a response that repeat the request."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: JsonObject
    text: JsonObject
    tool_choice: Json
    tools: list[JsonObject]


class IncompleteDetails(BaseModel):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    """Why an answer failed."""

    code: str
    message: str


class ResponseObject(ResponseSettings):
    """The response of `/v1/responses`, and of the events at the ends of its stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = Field(default_factory=list)
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
