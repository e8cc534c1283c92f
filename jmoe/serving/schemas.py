"""Bodies of requests and responses, named as OpenAI's and vLLM's.

https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server. A parameter that would change the
answer is honoured or refused by its name. What changes nothing is accepted: null, the value that is
the default anyway (`_only`), and hints about billing, caches and the client (`Hint`).
"""

import math
import re
import time
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
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
from jmoe.models.generation_config import SAMPLING
from jmoe.serving.errors import UNKNOWN, printable
from jmoe.serving.model_sampling import ModelSampling

MAX_CHOICES = 128
MAX_PROMPTS = 8192
MAX_MESSAGES = 4096  # and pieces of their content, all together
MAX_VARIABLES = 64
T = TypeVar("T")
# its first mistake is enough: there may be a million
FastList = Annotated[list[T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _text_or_list(value: Any) -> str:
    """Return what a value is validated as: errors of both would be told of both."""
    return "list" if isinstance(value, list) else "text"


_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")
MOST_TOKENS = 2**31 - 1  # "as many as fit"


def _as_number(value: Any) -> Any:
    """Return the number that a text like "0.7" is, and 5 for 5.0: some clients send numbers so."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if set(value) & set(".eE") else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_empty(value: Any) -> Any:
    """Return stop strings without those that stop nothing."""
    if isinstance(value, list):
        return [one for one in value if one != ""]
    return [] if value == "" else value


def _none_if_false(value: Any) -> Any:
    """Return None for false: chats switch log-probabilities off so."""
    return None if value is False else value


StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Finite = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_as_number)]
Hint = Any  # names the client, or asks for what no answer depends on: taken and not looked at
FinishReason = Literal["stop", "length"]


def _at_most(count: int) -> BeforeValidator:
    """Refuse a longer dict before each of its entries is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"has {len(value)} entries; at most {count} are allowed")
        return value

    return BeforeValidator(check)


def _only(*harmless: Any) -> BeforeValidator:
    """Refuse, as a parameter that is not supported, every value but those that change nothing."""

    def check(value: Any) -> Any:
        if not any(value == one and isinstance(value, type(one)) for one in harmless):
            message = "is not a parameter that this server supports, except as {harmless}"
            raise PydanticCustomError(
                "not_supported", message, {"harmless": " or ".join(map(repr, harmless))}
            )
        return value

    return BeforeValidator(check)


class RequestBody(BaseModel):
    """Strict: no parameter that would change the answer is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        """Take null for nothing. Of parameters that are not known the first is named, and only
        that.
        """
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in present:
            if name not in known:
                raise PydanticCustomError(
                    UNKNOWN,
                    "is not a parameter that this server supports",
                    {"name": printable(name)},
                )
        return present


class StreamOptions(RequestBody):
    """include_usage: a last chunk with the token counts. continuous_usage_stats: also those so far
    with every chunk.

    include_obfuscation: OpenAI's padding of chunks, of which this server sends none.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Hint = None

    @model_validator(mode="after")
    def _agree(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage = true")
        return self


class JsonSchema(RequestBody):
    """The schema an answer follows."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type 'json_schema' and not otherwise")
        return self


class GenerationBody(RequestBody):
    """Parameters that completions and chat completions have in common.

    max_tokens: -1, as many as fit. stream_options: without a stream, nothing. store and the like
    may only have the value that changes nothing.
    """

    is_chat: ClassVar[bool] = False

    model: str | None = None
    max_tokens: Whole | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    n: Whole = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: Finite = Field(default=1.0, ge=0, le=100)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
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
        _at_most(MAX_IDS),
    ] = Field(default_factory=dict)
    seed: Whole | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[
        Annotated[StopString, Tag("text")]
        | Annotated[FastList[StopString], Field(max_length=MAX_STOP), Tag("list")],
        Discriminator(_text_or_list),
        BeforeValidator(_without_empty),
    ] = Field(default_factory=list)
    stop_token_ids: FastList[TokenId] = Field(default_factory=list, max_length=MAX_IDS)
    ignore_eos: bool = False
    min_tokens: Whole = Field(default=0, ge=0, lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    store: Annotated[bool, _only(False)] = False
    skip_special_tokens: Annotated[bool, _only(True)] = True
    user: Hint = None
    metadata: Hint = None
    service_tier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    num_ctx: Hint = None
    keep_alive: Hint = None

    @model_validator(mode="after")
    def _ends(self) -> "GenerationBody":
        if self.json_schema is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError(
                "min_tokens and ignore_eos do not go with response_format, by which the answer ends"
            )
        return self

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema that the answer has to follow."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        schema = self.response_format.json_schema
        return {"type": "object"} if schema is None else schema.schema_

    @property
    def streamed_usage(self) -> StreamOptions:
        """Which chunks have the token counts."""
        return self.stream_options or StreamOptions()

    @property
    def asked_tokens(self) -> int | None:
        """The most tokens of an answer that the client asks for; None if it leaves that to the
        server.
        """
        return MOST_TOKENS if self.max_tokens == -1 else self.max_tokens

    @property
    def _sampling_set(self) -> dict[str, Any]:
        """Parameters that the request says and that a model may have defaults of."""
        return {name: getattr(self, name) for name in SAMPLING if name in self.model_fields_set}

    def sampling(
        self,
        max_new_tokens: int,
        choice: int,
        model: ModelSampling,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Return the parameters of one of the `n` choices; each has a seed of its own, the first
        the request's.

        max_new_tokens: what was asked for, or what the context leaves of it. model: its defaults.
        `ValueError` for more min_tokens than max_tokens.
        """
        asked = self.asked_tokens
        fits = asked is None or self.min_tokens <= asked
        check(fits, "min_tokens", self.min_tokens, f"must be at most max_tokens = {asked}")
        seed = None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63
        ends_turn = not self.ignore_eos and (self.is_chat or self.json_schema is not None)
        return SamplingParams(
            **{name: getattr(self, name) for name in SAMPLING}
            | dict(model.defaults)
            | self._sampling_set,
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


def _kind_of_prompt(prompt: Any) -> str:
    """Return what a prompt is by its first element: a list is validated as one thing, not as all
    it might be.
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
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`. prompt: text or token ids, or a list of them. max_tokens 0 needs
    echo.
    """

    prompt: Prompt
    best_of: Annotated[int, _only(1)] = 1
    suffix: Annotated[str, _only("")] = ""
    echo: bool = False
    logprobs: Annotated[
        Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_none_if_false)
    ] = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _has_output(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 needs echo = true")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several; an empty list is one prompt without a token."""
        return [self.prompt] if _kind_of_prompt(self.prompt) in ("text", "tokens") else self.prompt  # type: ignore


class TextPart(RequestBody):
    """A piece of a message's content. cache_control: a hint of clients that also speak to
    Anthropic.
    """

    type: Literal["text"]
    text: str
    cache_control: Hint = None


class Message(RequestBody):
    """A message of a chat. reasoning_content, or by another name: how the assistant came to it,
    for the template.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[FastList[TextPart], Tag("list")],
        Discriminator(_text_or_list),
    ] = ""
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[Any], _only([])] = Field(default_factory=list)
    annotations: Annotated[list[Any], _only([])] = Field(default_factory=list)
    refusal: Annotated[str, _only("")] = ""
    cache_control: Hint = None

    @property
    def reasoned(self) -> str:
        """The reasoning under whichever name it has; "" without one."""
        return self.reasoning_content or self.reasoning or self.thinking or ""

    @property
    def text(self) -> str:
        """The content as one string."""
        return (
            self.content
            if isinstance(self.content, str)
            else "\n".join(part.text for part in self.content)
        )

    @property
    def size(self) -> int:
        """Characters of the content and the reasoning."""
        return len(self.text) + len(self.reasoned)

    def for_template(self, as_parts: bool) -> dict[str, Any]:
        """Return the message as the chat template takes it: its content as one string, or as
        parts.
        """
        content: str | list[dict[str, str]] = self.text
        if as_parts:
            texts = (
                [self.content]
                if isinstance(self.content, str)
                else [part.text for part in self.content]
            )
            content = [{"type": "text", "text": text} for text in texts]
        optional = {"name": self.name, "reasoning_content": self.reasoned or None}
        present = {name: value for name, value in optional.items() if value is not None}
        return {"role": self.role, "content": content} | present


# What the server itself gives to a template.
RESERVED = ("messages", "add_generation_prompt", "tools", "documents", "self")


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in RESERVED:
        if name in variables:
            raise ValueError(f"{name} cannot be given here")
    return variables


TemplateVariables = Annotated[
    dict[str, Any], AfterValidator(_check_variables), Field(max_length=MAX_VARIABLES)
]


def _check_parts(messages: Any) -> Any:
    """Count the pieces of all messages before any of them is looked at."""
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
    FastList[Message], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(_check_parts)
]


class ChatCompletionRequest(GenerationBody):
    """`POST /v1/chat/completions`. chat_template_kwargs: further variables of the model's
    template.
    """

    is_chat = True

    messages: Messages
    max_completion_tokens: Whole | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    tools: Annotated[list[Any], _only([])] = Field(default_factory=list)
    tool_choice: Annotated[str, _only("none", "auto")] = "none"
    parallel_tool_calls: Hint = None  # of what no tool is there for
    functions: Annotated[list[Any], _only([])] = Field(default_factory=list)
    function_call: Annotated[str, _only("none", "auto")] = "none"
    modalities: Annotated[list[str], _only(["text"])] = Field(default_factory=lambda: ["text"])

    @model_validator(mode="after")
    def _agree(self) -> "ChatCompletionRequest":
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
        return self


class TokenizeRequest(RequestBody):
    """`POST /tokenize`: of a prompt, or of messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages must be given")
        return self

    @property
    def size(self) -> int:
        """Characters, about."""
        return len(self.prompt or "") + sum(message.size for message in self.messages or [])


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: FastList[TokenId]


class TokenizeResponse(BaseModel):
    """count: of tokens. max_model_len: the most of a prompt and its output together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text."""

    prompt: str


class Usage(BaseModel):
    """Tokens of the prompts, each counted once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """Lists by token; null for the first of a prompt, which follows nothing."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A text; in a stream the next piece of it, with finish_reason null until the last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Envelope(BaseModel):
    """Fields that every response and every chunk of one request repeats."""

    id: str
    created: int = Field(default_factory=lambda: math.floor(time.time()))
    model: str


class CompletionResponse(Envelope):
    """A response, or a chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token that could have stood there. bytes: its UTF-8, of which it may hold a part of a
    character only.
    """

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a choice, or of a chunk."""

    content: list[ChatLogprob]


class AnswerMessage(BaseModel):
    """The model's answer. reasoning_content: what it said in other channels; null where the
    model has none.
    """

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletionResponse(Envelope):
    """The answers to a chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """Text that a chunk adds to a message; the role comes with the first."""

    role: Literal["assistant"] | None = None
    content: str
    reasoning_content: str | None = None


class ChunkChoice(BaseModel):
    """The next piece of an answer, with finish_reason null until the last."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Envelope):
    """A chunk of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A model that is served. max_model_len: the most tokens of a prompt and its output together.

    sampling_defaults: of requests that do not say these parameters.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jmoe"
    max_model_len: int
    sampling_defaults: dict[str, int | float]


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """`GET /health` and `GET /ready`."""

    status: Literal["ok"] = "ok"


class LiveDevices(BaseModel):
    """Several devices that share a model, since the start.

    loads, copies: of each device, choices of tokens that it computed, and experts copied to it.
    balancedness: of each layer, the mean device's load as a part of the busiest one's. replans,
    swaps: as in `PlacementStats`.
    """

    loads: list[float]
    copies: list[int]
    balancedness: list[float]
    replans: int
    swaps: int


class Live(BaseModel):
    """`GET /live`: what the page shows. Totals are since the start.

    chat: the model has a chat template. slots: for each slot the [layer, expert] in it, or null;
    empty: all experts stay on the device. expert_counts: [layer][expert], how many tokens chose it
    in the last steps. tokens_per_s: drawn in the last seconds. devices: null where there is only
    one.
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
    tokens_per_s: float
    slots: list[list[int] | None]
    streamed_bytes_total: int
    nvme_bytes_total: int
    hit_rate: float
    waited_s: float
    roofline_fraction: float
    expert_counts: list[list[int]]
    devices: LiveDevices | None
