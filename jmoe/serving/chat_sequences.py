"""From a chat's request to the sequences that answer it: what every route of chats has in common.

A route converts its body to a `ChatCompletionRequest`, calls `make_chat_sequences`, and turns the
`events` of the engine's outputs (`jmoe.inference.output_events`) into its own answer.
"""

from typing import NamedTuple

from fastapi import Request

from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Sequence
from jmoe.serving.errors import ApiError
from jmoe.serving.output_parsers.formats import NONE
from jmoe.serving.output_parsers.output_format import OutputFormat
from jmoe.serving.output_parsers.parser import ParserSettings
from jmoe.serving.schemas import ChatCompletionRequest
from jmoe.serving.service import Service
from jmoe.types import JsonObject

OPEN_REASONING = "<think>"  # begins the reasoning of models without channels
# variables by which templates switch the reasoning off: of most models, and of DeepSeek-V3.1
SWITCHES = ("enable_thinking", "thinking")


class ChatSequences(NamedTuple):
    """The prompt's token ids, and one sequence for each of the `n` choices."""

    prompt: list[int]
    sequences: list[Sequence]


async def make_chat_sequences(
    service: Service, body: ChatCompletionRequest, request: Request
) -> ChatSequences:
    """Return the sequences that answer a chat, with the streams that parse their outputs and the
    constraints that the request asks for.

    Raises `ApiError` for a request that cannot be served.
    """
    service.check_model(body.model)
    client = request.state.client
    service.loop.requests_to_evict(body.n, client)  # raises before tokenization
    output_format = service.output_format
    if body.callable_tools:
        _check_tools(output_format)
        _check_unconstrained(body)
    text = await service.render_chat(
        body.messages,
        body.add_generation_prompt,
        {**_reasoning_variables(body, output_format), **body.chat_template_kwargs},
        request,
        tools=body.callable_tools,
        documents=body.documents,
    )
    if body.json_schema is not None and text.rstrip().endswith(OPEN_REASONING):
        message = (
            "response_format: the model's chat template begins the answer with"
            f" {OPEN_REASONING}, so the schema would bind the reasoning: switch it off by"
            " chat_template_kwargs, if the template can, or leave response_format out"
        )
        raise ApiError(400, message, param="response_format")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    num_earlier_calls = sum(len(message.tool_calls) for message in body.messages)
    schemas = {tool.function.name: tool.function.parameters for tool in body.callable_tools}
    settings = ParserSettings(parameters=schemas or None, num_earlier_calls=num_earlier_calls)
    max_calls = None if body.parallel_tool_calls else 1

    def sampling_params(prompt: list[int], choice: int) -> SamplingParams:
        most = service.max_new_tokens(prompt, body.requested_max_tokens)
        return body.sampling_params(most, choice, service.model_sampling, logprobs=logprobs)

    def make_sequences() -> ChatSequences:
        # off by default: the template already contains the special tokens
        (prompt,) = service.encode([text], add_special_tokens=body.add_special_tokens)
        sequences = service.make_sequences(body, [prompt], sampling_params)
        for sequence in sequences:
            sequence.open_stream = output_format.open_stream(text, settings, max_calls)
        return ChatSequences(prompt, sequences)

    made = await service.process_text(make_sequences, len(text), client)
    await service.set_constraints(body, made.sequences, request)
    service.log_prompts(request, [text])
    return made


def _check_tools(output_format: OutputFormat) -> None:
    """Raise `ApiError` 400 if the model's template shows no tools, or no format of calls."""
    if output_format.tool_format == NONE:
        message = (
            "tools: the model's chat template shows no format of tool calls that this server"
            " knows; --tool-parser names one"
        )
        raise ApiError(400, message, param="tools")
    if not output_format.reads_variable("tools"):
        message = "tools: the model's chat template does not read tools"
        raise ApiError(400, message, param="tools")


def _check_unconstrained(body: ChatCompletionRequest) -> None:
    """Raise `ApiError` 400 if the request asks for calls that a grammar would have to force."""
    if body.tool_choice not in (None, "auto"):
        raise ApiError(400, "tool_choice: must be auto or none", param="tool_choice")
    if any(tool.function.strict for tool in body.tools):
        raise ApiError(400, "tools: strict = True: is not supported", param="tools")


def _reasoning_variables(body: ChatCompletionRequest, output_format: OutputFormat) -> JsonObject:
    """Return the template's variables for `reasoning_effort`. Raises `ApiError` 400 if the template
    reads none.
    """
    effort = body.reasoning_effort
    if effort is None:
        return {}
    variables: JsonObject = {}
    if output_format.reads_variable("reasoning_effort"):
        variables["reasoning_effort"] = effort
    if effort == "none":
        variables |= {name: False for name in SWITCHES if output_format.reads_variable(name)}
    if not variables:
        message = (
            f"reasoning_effort = {effort!r}: must be left out: the model's chat template reads no"
            " such variable"
        )
        raise ApiError(400, message, param="reasoning_effort")
    return variables
