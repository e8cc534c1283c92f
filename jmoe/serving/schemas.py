"""Bodies of requests and responses, named as OpenAI's and vLLM's.

https://platform.openai.com/docs/api-reference and https://docs.vllm.ai/en/latest/serving/openai_compatible_server.
A request holds what the server acts on and nothing else: another parameter is refused by its name, unless it is null.
"""

import math
import time
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from jmoe.inference.sampling import MAX_IDS, MAX_LOGPROBS, SamplingParams

MAX_CHOICES = 128
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
FinishReason = Literal["stop", "length"]


class RequestBody(BaseModel):
    """Strict: no number as a string, no parameter that would be ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """Null is the same as not given."""
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(RequestBody):
    """include_usage: a last chunk with the token counts."""

    include_usage: bool = False


class JsonSchema(RequestBody):
    """The schema an answer follows."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """What form an answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type 'json_schema' and not otherwise")
        return self


class GenerationBody(RequestBody):
    """What completions and chat completions have in common. user and the like name the client; nothing else."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: Finite = Field(default=1.0, ge=0, le=100)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    presence_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: Finite = Field(default=1.0, gt=0, le=100)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[Finite, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=MAX_IDS
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _streams(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        if self.json_schema is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError("min_tokens and ignore_eos do not go with response_format, by which the answer ends")
        return self

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema that the answer has to follow."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        given = self.response_format.json_schema
        return {"type": "object"} if given is None else given.schema_

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, max_new_tokens: int, choice: int, *, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Of one of the `n` choices, each of which has a seed of its own; the first has the given one."""
        seed = None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=seed,
            stop_token_ids=tuple(self.stop_token_ids),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
            min_new_tokens=self.min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`. prompt: text or token ids, or a list of them. max_tokens 0 needs echo."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _has_output(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 needs echo = true")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several; an empty list is one prompt without a token."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        numbers = [token for token in self.prompt if isinstance(token, int)]
        return [numbers] if len(numbers) == len(self.prompt) else self.prompt  # type: ignore[return-value]


class TextPart(RequestBody):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(RequestBody):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


# What the server itself gives to a template.
RESERVED = ("messages", "add_generation_prompt", "tools", "documents", "self")


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in RESERVED:
        if name in variables:
            raise ValueError(f"{name} cannot be given here")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_variables)]


class ChatCompletionRequest(GenerationBody):
    """`POST /v1/chat/completions`. chat_template_kwargs: further variables of the model's template."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ")
        return self


class TokenizeRequest(RequestBody):
    """`POST /tokenize`: of a prompt, or of messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages must be given")
        return self


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


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
    """Per token; null for the first of a prompt, which follows nothing."""

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
    """What every response and every chunk of one request repeats."""

    id: str
    created: int = Field(default_factory=lambda: math.floor(time.time()))
    model: str


class CompletionResponse(Envelope):
    """Also a chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token that could have stood there. bytes: its UTF-8, of which it may hold a part of a character only."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of a choice, or of a chunk."""

    content: list[ChatLogprob]


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str


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
    """What a chunk adds to a message; the role comes with the first."""

    role: Literal["assistant"] | None = None
    content: str


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
    """A model that is served. max_model_len: the most tokens of a prompt and its output together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jmoe"
    max_model_len: int


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """`GET /health` and `GET /ready`."""

    status: Literal["ok"] = "ok"


class Live(BaseModel):
    """`GET /live`: what the page shows. Totals are since the start.

    chat: the model has a chat template. slots: for each slot the [layer, expert] in it, or null; empty: all experts
    stay on the device. expert_counts: [layer][expert], how many tokens chose it in the last steps. tokens_per_s: drawn
    in the last seconds.
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
