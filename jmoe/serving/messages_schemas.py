"""Pydantic models of `/v1/messages`, with the names of Anthropic's API.

https://docs.anthropic.com/en/api/messages.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from jmoe.inference.sampling_params import MAX_STOP
from jmoe.serving.request_body import FastList, Hint, RequestBody
from jmoe.serving.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MOST_TOKENS,
    Finite,
    StopString,
    Whole,
    allowed_values_validator,
    text_or_list_tag,
)
from jmoe.serving.tool_schemas import FunctionName
from jmoe.types import Json, JsonObject


class TextBlock(RequestBody):
    """A text. cache_control, citations: ignored."""

    type: Literal["text"]
    text: str
    cache_control: Hint = None
    citations: Hint = None


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[FastList[TextBlock], Field(max_length=MAX_MESSAGES), Tag("list")],
    Discriminator(text_or_list_tag),
]


class ThinkingBlock(RequestBody):
    """The reasoning of an earlier answer. signature: ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: Hint = None


class ToolUseBlock(RequestBody):
    """A call of an earlier answer. caller: ignored."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    cache_control: Hint = None
    caller: Hint = None


class ToolResultBlock(RequestBody):
    """The result of a call. is_error: ignored; chat templates have no place for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""
    is_error: Hint = None
    cache_control: Hint = None


def _block_tag(value: Json) -> str | None:
    """Return the union tag of a content block."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _block_tag,
        custom_error_type="block_type",
        custom_error_message="type must be text, thinking, tool_use or tool_result",
    ),
]


class TurnMessage(RequestBody):
    """A message. Its blocks must be of its role. A system's message may follow a user's."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[FastList[Block], Field(max_length=MAX_MESSAGES), Tag("list")],
        Discriminator(text_or_list_tag),
    ]

    @property
    def blocks(self) -> list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content

    @property
    def texts(self) -> list[TextBlock]:
        """The blocks of text alone."""
        return [block for block in self.blocks if isinstance(block, TextBlock)]

    @model_validator(mode="after")
    def _check_block_types_of_role(self) -> "TurnMessage":
        others: dict[str, tuple[type, ...]] = {
            "user": (ThinkingBlock, ToolUseBlock),
            "assistant": (ToolResultBlock,),
            "system": (ThinkingBlock, ToolUseBlock, ToolResultBlock),
        }
        for block in self.blocks:
            if isinstance(block, others[self.role]):
                raise ValueError(f"{block.type} must not be given with role = {self.role!r}")
        return self


class MessageTool(RequestBody):
    """A tool that the model may call. strict: calls follow the schema."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool = False
    cache_control: Hint = None


class MessageToolChoice(RequestBody):
    """How the model uses the tools. name: with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name_given(self) -> "MessageToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name must be given with type 'tool' and not otherwise")
        return self


class Thinking(RequestBody):
    """Whether the model reasons; without it, or "adaptive", as its template does by itself.

    budget_tokens: the reasoning ends after so many tokens. display: ignored.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = Field(default=None, ge=1, lt=2**31)
    display: Hint = None


class ContextEdit(RequestBody):
    """A change of the conversation before the prompt. The one that keeps all thinking is none."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[Json, allowed_values_validator("all")]


class ContextManagement(RequestBody):
    """Changes of the conversation before the prompt, as Claude Code sends them."""

    edits: FastList[ContextEdit] = Field(default_factory=list, max_length=MAX_MESSAGES)


class AnswerFormat(RequestBody):
    """The schema that the answer must follow."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestBody):
    """Options of the answer.

    effort: as `reasoning_effort` of chat completions. "high" is this API's default: it has no
    effect if the model's template reads no effort.
    """

    effort: Literal["low", "medium", "high", "xhigh"] | None = None
    format: AnswerFormat | None = None


class CountTokensRequest(RequestBody):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: FastList[TurnMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts = ""
    tools: FastList[MessageTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    context_management: ContextManagement | None = None
    cache_control: Hint = None

    @model_validator(mode="after")
    def _check_last_message(self) -> "CountTokensRequest":
        if self.messages[-1].role == "assistant":
            raise ValueError("messages must end with a message of the user")
        return self


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Whole = Field(ge=1, le=MOST_TOKENS)
    stop_sequences: FastList[StopString] = Field(default_factory=list, max_length=MAX_STOP)
    temperature: Finite | None = Field(default=None, ge=0, le=100)
    top_p: Finite | None = Field(default=None, gt=0, le=1)
    top_k: Whole | None = Field(default=None, ge=-1, lt=2**31)
    stream: bool = False
    mcp_servers: Annotated[list[Json], allowed_values_validator([])] = Field(default_factory=list)
    metadata: Hint = None
    service_tier: Hint = None


class CountTokensResponse(BaseModel):
    """input_tokens: number of tokens of the prompt."""

    input_tokens: int


class AnswerText(BaseModel):
    """A text of an answer."""

    type: Literal["text"] = "text"
    text: str = ""


class AnswerThinking(BaseModel):
    """The reasoning of an answer. The server signs nothing."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class AnswerToolUse(BaseModel):
    """A call of an answer. input: `{"INVALID_JSON": TEXT}` if the model wrote no JSON object."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: JsonObject = Field(default_factory=dict)


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class MessagesUsage(BaseModel):
    """Token counts; the prompt has input_tokens + cache_read_input_tokens."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int


class MessageResponse(BaseModel):
    """The response of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
