"""Pydantic models of request and response bodies, with the names of OpenAI's and vLLM's APIs.

https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server. A parameter that would change the
answer is either honoured or rejected by name. Accepted without effect: null, default values
(`allowed_values_validator`), and hints about billing, caches and the client (`Hint`).
"""

import math
import re
import time
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jmoe.config import check
from jmoe.inference.sampling_params import (
    MAX_IDS,
    MAX_LOGPROBS,
    MAX_STOP,
    MAX_STOP_CHARS,
    SamplingParams,
)
from jmoe.models.chat_template import DEFAULT_CALL_FORM, CallForm
from jmoe.models.generation_config import SAMPLING
from jmoe.serving.model_sampling import ModelSamplingDefaults
from jmoe.serving.request_body import FastList, Hint, RequestBody
from jmoe.serving.tool_schemas import (
    AnswerToolCall,
    MessageToolCall,
    NamedTool,
    Tool,
    ToolCallDelta,
    check_tool_choice,
    is_none,
)
from jmoe.types import Json, JsonObject

MAX_CHOICES = 128
MAX_PROMPTS = 8192
MAX_MESSAGES = 4096  # also the limit on all content parts together
MAX_VARIABLES = 64
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 1024  # of one message
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def text_or_list_tag(value: Json) -> str:
    """Return the union tag of a value, "list" or "text" (for anything else), so that only one union
    member reports errors.
    """
    return "list" if isinstance(value, list) else "text"


_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")
MOST_TOKENS = 2**31 - 1  # stands for "as many as the context allows"


def _parse_number_text(value: Json) -> Json:
    """Return 0.7 for the string "0.7" and 5 for 5.0; any other value unchanged."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if set(value) & set(".eE") else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _drop_empty_strings(value: Json) -> Json:
    """Return stop strings without empty ones: an empty list for "", and any other value but a list
    unchanged.
    """
    if isinstance(value, list):
        return [one for one in value if one != ""]
    return [] if value == "" else value


def _replace_false_by_none(value: Json) -> Json:
    """Return None for false, by which chat clients switch log-probabilities off."""
    return None if value is False else value


StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Finite = Annotated[float, BeforeValidator(_parse_number_text), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_parse_number_text)]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


def _max_entries_validator(count: int) -> BeforeValidator:
    """Return a validator that rejects a dict with more than `count` entries before validating
    them.
    """

    def check_num_entries(value: Json) -> Json:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"has {len(value)} entries; at most {count} are allowed")
        return value

    return BeforeValidator(check_num_entries)


def allowed_values_validator(*harmless: Json) -> BeforeValidator:
    """Return a validator that rejects every value except `harmless` ones, which equal the server's
    behaviour anyway.
    """

    def check_is_harmless(value: Json) -> Json:
        if not any(value == one and isinstance(value, type(one)) for one in harmless):
            message = "is not a parameter that this server supports, except as {harmless}"
            raise PydanticCustomError(
                "not_supported", message, {"harmless": " or ".join(map(repr, harmless))}
            )
        return value

    return BeforeValidator(check_is_harmless)


class StreamOptions(RequestBody):
    """Options of a streamed response.

    include_usage: send token counts in a last chunk. continuous_usage_stats: send the counts so far
    with every chunk too. include_obfuscation: OpenAI's chunk padding; accepted without effect.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Hint = None

    @model_validator(mode="after")
    def _check_options_agree(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage = true")
        return self


class JsonSchema(RequestBody):
    """The JSON schema that an answer must follow."""

    name: str
    description: str | None = None
    schema_: JsonObject = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """The required format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema_given(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type 'json_schema' and not otherwise")
        return self


class SamplingFields(RequestBody):
    """Sampling parameters under vLLM's names, common to completions, chats and responses."""

    top_k: Whole = Field(default=0, ge=-1, lt=2**31)
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    presence_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: Finite = Field(default=1.0, gt=0, le=100)
    logit_bias: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")],
            Annotated[Finite, Field(ge=-100, le=100)],
        ],
        Field(max_length=MAX_IDS),
        _max_entries_validator(MAX_IDS),
    ] = Field(default_factory=dict)
    seed: Whole | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[
        Annotated[StopString, Tag("text")]
        | Annotated[FastList[StopString], Field(max_length=MAX_STOP), Tag("list")],
        Discriminator(text_or_list_tag),
        BeforeValidator(_drop_empty_strings),
    ] = Field(default_factory=list)
    stop_token_ids: FastList[TokenId] = Field(default_factory=list, max_length=MAX_IDS)
    ignore_eos: bool = False
    min_tokens: Whole = Field(default=0, ge=0, lt=2**31)


class GenerationBody(SamplingFields):
    """Parameters common to completions and chat completions.

    max_tokens: -1 means as many as the context allows. stream_options: ignored without `stream`.
    store, skip_special_tokens: only their default is accepted.
    priority: requests with lower ones run first (`ServeConfig.scheduling_policy`).
    """

    is_chat: ClassVar[bool] = False

    model: str | None = None
    max_tokens: Whole | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    n: Whole = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: Finite = Field(default=1.0, ge=0, le=100)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    priority: Whole = Field(default=0, ge=-(2**31), lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    store: Annotated[bool, allowed_values_validator(False)] = False
    skip_special_tokens: Annotated[bool, allowed_values_validator(True)] = True
    user: Hint = None
    metadata: Hint = None
    service_tier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    num_ctx: Hint = None
    keep_alive: Hint = None

    @model_validator(mode="after")
    def _check_answer_can_end(self) -> "GenerationBody":
        if self.json_schema is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError(
                "min_tokens and ignore_eos do not go with response_format, by which the answer ends"
            )
        return self

    @property
    def json_schema(self) -> JsonObject | None:
        """The schema that the answer must follow, None if there is none."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        schema = self.response_format.json_schema
        return {"type": "object"} if schema is None else schema.schema_

    @property
    def effective_stream_options(self) -> StreamOptions:
        """The stream options, with defaults if not given."""
        return self.stream_options or StreamOptions()

    @property
    def requested_max_tokens(self) -> int | None:
        """The requested maximum of new tokens, None if the request sets none."""
        return MOST_TOKENS if self.max_tokens == -1 else self.max_tokens

    @property
    def _requested_sampling_fields(self) -> JsonObject:
        """Return {name: value} for parameters that the request sets and for which a model may have
        defaults.
        """
        return {name: getattr(self, name) for name in SAMPLING if name in self.model_fields_set}

    def sampling_params(
        self,
        max_new_tokens: int,
        choice: int,
        model: ModelSamplingDefaults,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Return the sampling parameters of choice number `choice`.

        Choice i has the seed `seed + i`, so the choices differ. max_new_tokens: the requested
        maximum, or the rest of the context if that is smaller. model: defaults for parameters that
        the request does not set. Raises ValueError if min_tokens exceeds max_tokens.
        """
        asked = self.requested_max_tokens
        fits = asked is None or self.min_tokens <= asked
        check(fits, "min_tokens", self.min_tokens, f"must be at most max_tokens = {asked}")
        seed = None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63
        ends_turn = not self.ignore_eos and (self.is_chat or self.json_schema is not None)
        return SamplingParams(
            **{name: getattr(self, name) for name in SAMPLING}
            | dict(model.defaults)
            | self._requested_sampling_fields,
            max_new_tokens=max_new_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=seed,
            stop_token_ids=(*self.stop_token_ids, *(model.turn_end_token_ids if ends_turn else ())),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
            min_new_tokens=min(self.min_tokens, max_new_tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _prompt_tag(prompt: Json) -> str:
    """Return the union tag of a prompt, from its first element, so that only one union member
    validates it: "text" for a string, "texts" for strings, "several" for lists of token ids, and
    "tokens" for token ids.
    """
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else 0
    return "texts" if isinstance(first, str) else "several" if isinstance(first, list) else "tokens"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[FastList[TokenId], Tag("tokens")]
    | Annotated[FastList[str], Field(max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[FastList[FastList[TokenId]], Field(max_length=MAX_PROMPTS), Tag("several")],
    Discriminator(_prompt_tag),
]


class CompletionRequest(GenerationBody):
    """Body of `POST /v1/completions`.

    prompt: text, token ids, or a list of either. max_tokens may be 0 only with `echo`.
    """

    prompt: Prompt
    best_of: Annotated[int, allowed_values_validator(1)] = 1
    suffix: Annotated[str, allowed_values_validator("")] = ""
    echo: bool = False
    logprobs: Annotated[
        Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None,
        BeforeValidator(_replace_false_by_none),
    ] = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_has_output(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 needs echo = true")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list. An empty list is one prompt without tokens."""
        return [self.prompt] if _prompt_tag(self.prompt) in ("text", "tokens") else self.prompt  # type: ignore


def _tool_choice_tag(value: Json) -> str:
    """Return the union tag of a tool choice."""
    return "word" if isinstance(value, str) else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")],
    Discriminator(_tool_choice_tag),
]


class TextPart(RequestBody):
    """A text part of a message's content. cache_control: a hint of Anthropic clients, ignored."""

    type: Literal["text"]
    text: str
    cache_control: Hint = None


class Message(RequestBody):
    """A chat message.

    reasoning_content, reasoning, thinking: the assistant's earlier reasoning under one of its
    names, passed to the template.
    tool_calls: calls of an assistant's message. tool_call_id: the call that a tool's message
    answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[FastList[TextPart], Tag("list")],
        Discriminator(text_or_list_tag),
    ] = ""
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: FastList[MessageToolCall] = Field(default_factory=list, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = None
    annotations: Annotated[list[Json], allowed_values_validator([])] = Field(default_factory=list)
    refusal: Annotated[str, allowed_values_validator("")] = ""
    cache_control: Hint = None
    provider_specific_fields: Hint = None  # LiteLLM adds it to every message of an answer

    @property
    def reasoning_text(self) -> str:
        """The reasoning under whichever name it was given; "" without one."""
        return self.reasoning_content or self.reasoning or self.thinking or ""

    @property
    def text(self) -> str:
        """The content as one string, parts joined by newlines."""
        return (
            self.content
            if isinstance(self.content, str)
            else "\n".join(part.text for part in self.content)
        )

    @property
    def num_characters(self) -> int:
        """Number of characters of content and reasoning."""
        return len(self.text) + len(self.reasoning_text)

    @model_validator(mode="after")
    def _check_fields_of_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls must not be given with role = {self.role!r}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id must not be given with role = {self.role!r}")
        return self

    def for_template(self, as_parts: bool, calls: CallForm = DEFAULT_CALL_FORM) -> JsonObject:
        """Return the message as a dict for the chat template. Raises ValueError for arguments of a
        call that the template needs as an object, and that are none.

        as_parts: pass the content as a list of text parts instead of one string.
        calls: the form in which the template reads tool calls.
        """
        content: str | list[dict[str, str]] = self.text
        if as_parts:
            texts = (
                [self.content]
                if isinstance(self.content, str)
                else [part.text for part in self.content]
            )
            content = [{"type": "text", "text": text} for text in texts]
        optional: JsonObject = {
            "name": self.name,
            "reasoning_content": self.reasoning_text or None,
            "tool_calls": [call.for_template(calls.has_objects) for call in self.tool_calls]
            or None,
            "tool_call_id": self.tool_call_id,
        }
        present = {name: value for name, value in optional.items() if value is not None}
        if self.tool_calls and not self.text and not calls.has_content:
            return {"role": self.role} | present
        return {"role": self.role, "content": content} | present


# Template variables that the server sets itself.
RESERVED = ("messages", "add_generation_prompt", "tools", "documents", "self")
Tools = Annotated[FastList[Tool], Field(max_length=MAX_TOOLS)]


def _check_not_reserved(variables: JsonObject) -> JsonObject:
    """Return the template's variables unchanged; raise ValueError for one of `RESERVED`."""
    for name in RESERVED:
        if name in variables:
            raise ValueError(f"{name} cannot be given here")
    return variables


TemplateVariables = Annotated[
    JsonObject, AfterValidator(_check_not_reserved), Field(max_length=MAX_VARIABLES)
]


def _check_num_messages_and_parts(messages: Json) -> Json:
    """Return the messages unchanged; raise ValueError if there are more than `MAX_MESSAGES`
    messages or content parts, before each is validated.
    """
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if max(len(messages), parts) > MAX_MESSAGES:
            raise ValueError(
                f"{len(messages)} messages with {parts} parts; at most {MAX_MESSAGES} of both are"
                " allowed"
            )
    return messages


Messages = Annotated[
    FastList[Message],
    Field(min_length=1, max_length=MAX_MESSAGES),
    BeforeValidator(_check_num_messages_and_parts),
]


class ChatCompletionRequest(GenerationBody):
    """Body of `POST /v1/chat/completions`.

    chat_template_kwargs: additional variables for the model's chat template.
    tool_choice: "auto" if there are tools and nothing is given, else "none".
    reasoning_effort: a variable of the template, of the same name; "none" switches the reasoning
    off. thinking_token_budget: the reasoning ends after so many tokens. prediction: the expected
    answer, by which a server may be faster; ignored.
    """

    is_chat = True

    messages: Messages
    max_completion_tokens: Whole | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    documents: Annotated[FastList[JsonObject], Field(max_length=MAX_MESSAGES)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: Whole | None = Field(default=None, ge=0, lt=2**31)
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    prediction: Hint = None
    functions: Annotated[list[Json], allowed_values_validator([])] = Field(default_factory=list)
    function_call: Annotated[str, allowed_values_validator("none", "auto")] = "none"
    modalities: Annotated[list[str], allowed_values_validator(["text"])] = Field(
        default_factory=lambda: ["text"]
    )

    @model_validator(mode="after")
    def _check_options_agree(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if 0 in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens must be at least 1, or -1 for as many as fit")
        if self.max_tokens is not None and self.max_completion_tokens not in (
            None,
            self.max_tokens,
        ):
            raise ValueError("max_tokens and max_completion_tokens differ")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        check_tool_choice(self.tool_choice, self.tools)
        if self.binds_calls:
            words = "with a strict tool or a required call, by which the answer ends"
            check(not self.min_tokens, "min_tokens", self.min_tokens, f"must be 0 {words}")
            check(not self.ignore_eos, "ignore_eos", True, f"must be false {words}")
        can_reason = self.thinking_token_budget is None or not self.min_tokens
        check(can_reason, "min_tokens", self.min_tokens, "must be 0 with thinking_token_budget")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call; none with tool_choice "none"."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def requires_call(self) -> bool:
        """Whether the answer must call a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def binds_calls(self) -> bool:
        """Whether a grammar binds the calls of the answer."""
        return self.requires_call or any(tool.function.strict for tool in self.callable_tools)


class TokenizeRequest(RequestBody):
    """Body of `POST /tokenize`: either a prompt, or messages and tools for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    tools: Tools = Field(default_factory=list)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages must be given")
        return self

    @property
    def num_characters(self) -> int:
        """Approximate number of characters of the prompt or of the messages."""
        return len(self.prompt or "") + sum(
            message.num_characters for message in self.messages or []
        )


class DetokenizeRequest(RequestBody):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: FastList[TokenId]


class TokenizeResponse(BaseModel):
    """count: number of tokens. max_model_len: maximum tokens of a prompt plus its output."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """prompt: the decoded text."""

    prompt: str


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens that the cache had, so that they were not computed."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """reasoning_tokens: tokens of the reasoning, its delimiters included."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts: each prompt counted once, completions summed over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry a token. A prompt's first token has null log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A completion, or in a stream its next part; finish_reason is null until the last part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Envelope(BaseModel):
    """Fields repeated in every response and every chunk of one request."""

    id: str
    created: int = Field(default_factory=lambda: math.floor(time.time()))
    model: str


class CompletionResponse(Envelope):
    """A response of `/v1/completions`, or one chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A candidate token. bytes: its UTF-8 bytes, which may be a partial character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A generated token with its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a choice or of a stream chunk."""

    content: list[ChatLogprob]


class AnswerMessage(BaseModel):
    """The generated message.

    content: null beside tool calls, if there is none.
    reasoning_content, reasoning: the model's reasoning under both names that clients read, null if
        it has none.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnswerToolCall] | None = Field(default=None, exclude_if=is_none)


class ChatChoice(BaseModel):
    """One of the `n` generated messages."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletionResponse(Envelope):
    """The whole response of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """The texts and calls that a chunk appends to a message. Only the first delta has the role.
    A chunk leaves out the fields it has nothing for.
    """

    role: Literal["assistant"] | None = Field(default=None, exclude_if=is_none)
    content: str | None = Field(default=None, exclude_if=is_none)
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    reasoning: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[ToolCallDelta] | None = Field(default=None, exclude_if=is_none)


class ChunkChoice(BaseModel):
    """The next part of a choice; finish_reason is null until the last part."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None


class ChatChunk(Envelope):
    """One chunk of a streamed chat response."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The served model, or a LoRA adapter of it.

    parent: the model that an adapter belongs to; null for the model itself. max_model_len: maximum
    tokens of a prompt plus its output. sampling_defaults: values for sampling parameters that a
    request omits.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jmoe"
    parent: str | None = None
    max_model_len: int
    sampling_defaults: dict[str, int | float]


class ModelList(BaseModel):
    """Response of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """Response of `GET /health` and `GET /ready`."""

    status: Literal["ok"] = "ok"


class LiveDevices(BaseModel):
    """Statistics of a model sharded over several devices, since the server's start.

    loads: by device, number of (token, expert) assignments computed. copies: by device, number of
    experts copied to it. balancedness: by layer, mean device load divided by the maximum device
    load. replans, swaps: see `PlacementStats`.
    """

    loads: list[float]
    copies: list[int]
    balancedness: list[float]
    replans: int
    swaps: int


class Live(BaseModel):
    """Response of `GET /live`, shown by the status page. Totals are since the server's start.

    chat: whether the model has a chat template. slots: for each slot its [layer, expert], or null
    if empty; an empty list if all experts stay on the device. expert_counts: [layer][expert],
    tokens routed to it in the last steps. tokens_per_s: averaged over the last seconds.
    computed_tokens_total: of prompts and outputs, without those that the cache had. devices: null
    with a single device.
    """

    model: str
    chat: bool
    policy: str
    uptime_s: float
    requests_running: int
    requests_waiting: int
    kv_tokens_used: int
    kv_tokens_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    computed_tokens_total: int
    tokens_per_s: float
    slots: list[list[int] | None]
    streamed_bytes_total: int
    nvme_bytes_total: int
    hit_rate: float
    expert_hits_total: int
    experts_chosen_total: int
    waited_s: float
    roofline_fraction: float
    expert_counts: list[list[int]]
    devices: LiveDevices | None
