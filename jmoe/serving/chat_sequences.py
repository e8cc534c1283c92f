"""From a chat's request to the sequences that answer it: what every route of chats has in common.

A route converts its body to a `ChatCompletionRequest`, calls `make_chat_sequences`, and turns the
`events` of the engine's outputs (`jmoe.inference.output_events`) into its own answer.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fastapi import Request

from jmoe.inference.harmony import AnswerConstraint
from jmoe.inference.reasoning_constraint import ReasoningConstraint
from jmoe.inference.sampling_params import Constraint, SamplingParams, Unconstrained
from jmoe.inference.sequence import Sequence
from jmoe.serving.errors import ApiError
from jmoe.serving.grammar import GrammarSource, JsonConstraint
from jmoe.serving.output_parsers.formats import NONE, reasoning_tags_after_prompt
from jmoe.serving.output_parsers.grammars import CallGrammar
from jmoe.serving.output_parsers.output_format import OutputFormat
from jmoe.serving.output_parsers.parser import ParserSettings
from jmoe.serving.schemas import ChatCompletionRequest
from jmoe.serving.service import Service
from jmoe.serving.tool_schemas import NamedTool
from jmoe.types import JsonObject

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
    service.check_model_name(body.model)
    client = request.state.client
    service.loop.requests_to_evict(body.n, client)  # raises before tokenization
    output_format = service.output_format
    text = await _render_prompt(service, body, request)
    source = await service.run_text_work(
        lambda: _grammar_source(body, output_format), len(text), client
    )
    binds = source is not None or body.thinking_token_budget is not None
    param = "thinking_token_budget" if source is None else source.what.partition(".")[0]
    boundary = reasoning_boundary(output_format, text, param) if binds else None
    if boundary is None and body.thinking_token_budget is not None:
        message = (
            f"thinking_token_budget = {body.thinking_token_budget}: must be left out: the"
            " reasoning after this prompt, if there is one, does not end with a token of its own"
        )
        raise ApiError(400, message, param="thinking_token_budget")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    num_earlier_calls = sum(len(message.tool_calls) for message in body.messages)
    schemas = {tool.function.name: tool.function.parameters for tool in body.callable_tools}
    settings = ParserSettings(parameters=schemas or None, num_earlier_calls=num_earlier_calls)
    max_calls = None if body.parallel_tool_calls else 1

    def sampling_params(prompt: list[int], choice: int) -> SamplingParams:
        most = service.limit_new_tokens(prompt, body.requested_max_tokens)
        return body.sampling_params(most, choice, service.model_sampling, logprobs=logprobs)

    def make_sequences() -> ChatSequences:
        # off by default: the template already contains the special tokens
        (prompt,) = service.encode_prompts([text], add_special_tokens=body.add_special_tokens)
        sequences = service.make_sequences(body, [prompt], sampling_params)
        for sequence in sequences:
            sequence.open_stream = output_format.open_stream(text, settings, max_calls)
        return ChatSequences(prompt, sequences)

    made = await service.run_text_work(make_sequences, len(text), client)
    if binds:
        count = len(made.sequences)
        answers: Iterable[Constraint] = (Unconstrained() for _ in range(count))
        if source is not None:
            answers = await service.make_constraints(source, count, request)
        for sequence, answer in zip(made.sequences, answers, strict=True):
            sequence.constraint = _constraint_after_reasoning(
                service, body, sequence, answer, boundary
            )
    service.log_prompts(request, [text])
    return made


async def count_prompt_tokens(
    service: Service, body: ChatCompletionRequest, request: Request
) -> int:
    """Return the number of tokens of a chat's prompt, also while the queue is full.

    Raises `ApiError` for a chat that cannot be rendered.
    """
    service.check_model_name(body.model)
    text = await _render_prompt(service, body, request)
    (tokens,) = await service.run_text_work(
        lambda: service.encode_prompts([text], add_special_tokens=body.add_special_tokens),
        len(text),
        request.state.client,
    )
    return len(tokens)


async def _render_prompt(service: Service, body: ChatCompletionRequest, request: Request) -> str:
    """Return the text of a chat's prompt. Raises `ApiError` if the template cannot render it."""
    output_format = service.output_format
    if body.callable_tools:
        _check_template_shows_tools(output_format)
    return await service.render_chat(
        body.messages,
        body.add_generation_prompt,
        {**_effort_template_variables(body, output_format), **body.chat_template_kwargs},
        request,
        tools=body.callable_tools,
        documents=body.documents,
    )


def _grammar_source(
    body: ChatCompletionRequest, output_format: OutputFormat
) -> GrammarSource | None:
    """Return what the answers must follow: the schema of `response_format`, or calls of tools by
    their schemas if a call is required or a tool is strict. Raises `ApiError` 400.
    """
    tools, choice = body.callable_tools, body.tool_choice
    if not (body.binds_calls or (tools and body.json_schema is not None)):
        return None if body.json_schema is None else GrammarSource.from_schema(body.json_schema)
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    schemas = {tool.function.name: tool.function.parameters for tool in tools}
    answer_schema = None if body.requires_call else body.json_schema
    asked = CallGrammar(schemas, body.requires_call, body.parallel_tool_calls, answer_schema)
    try:
        return GrammarSource.from_tool_grammar(output_format.write_grammar(asked))
    except ValueError as error:
        raise ApiError.from_value_error(error) from error


class ReasoningBoundary(NamedTuple):
    """The tokens around the reasoning of an output. is_open: the prompt ends inside it."""

    begin: int
    end: int
    is_open: bool


def reasoning_boundary(
    output_format: OutputFormat, prompt: str, param: str
) -> ReasoningBoundary | None:
    """Return the tokens around the reasoning after a prompt; None if none can follow, or if the
    model tells it otherwise.

    Raises `ApiError` 400 for `param`, the request's field that binds the answer, if the prompt
    opens a reasoning that does not end with one token.
    """
    tags = output_format.tags and reasoning_tags_after_prompt(output_format.tags, prompt)
    if tags is None:
        return None
    begin, end = map(output_format.tokenizer.token_to_id, (tags.begin, tags.end))
    if begin is not None and end is not None:
        return ReasoningBoundary(begin, end, tags.is_open)
    if tags.is_open:
        message = (
            f"{param}: the model's chat template begins the answer with"
            f" {tags.begin}, and its tokenizer has no token {tags.end}, after which the answer"
            " could be bound: switch the reasoning off by chat_template_kwargs, if the template"
            f" can, or leave {param} out"
        )
        raise ApiError(400, message, param=param)
    return None


def _constraint_after_reasoning(
    service: Service,
    body: ChatCompletionRequest,
    sequence: Sequence,
    answer: Constraint,
    boundary: ReasoningBoundary | None,
) -> Constraint:
    """Return the constraint of an output whose answer, after the reasoning, `answer` binds."""
    harmony = service.output_format.harmony
    if harmony is not None:
        if isinstance(answer, JsonConstraint) and answer.param == "tools":
            return answer  # its grammar has the messages before a call too
        prompt = sequence.prompt_token_ids
        return AnswerConstraint(answer, service.tokenizer, harmony, prompt, service.end_token_ids)
    if boundary is None:
        return answer
    free = isinstance(answer, Unconstrained)
    # a call that the reasoning's end does not precede would be bound by nothing
    forbidden = (*service.end_token_ids, *service.output_format.call_token_ids)
    return ReasoningConstraint(
        answer,
        boundary.begin,
        boundary.end,
        is_open=boundary.is_open,
        budget=body.thinking_token_budget,
        forbidden=() if free else forbidden,
    )


def _check_template_shows_tools(output_format: OutputFormat) -> None:
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


def _effort_template_variables(
    body: ChatCompletionRequest, output_format: OutputFormat
) -> JsonObject:
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
