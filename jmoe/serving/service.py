"""The served model with its tokenizer, chat template and engine loop: the state that all HTTP
handlers share.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from tokenizers import Tokenizer

from jmoe.config import check
from jmoe.config.serving import ServeConfig
from jmoe.inference.engine import Engine
from jmoe.inference.harmony import TURN_ENDS
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Sequence
from jmoe.models.chat_template import (
    FORMS,
    CallForm,
    RenderingError,
    decode_rendering,
    developer_as_system,
    read_templates,
)
from jmoe.serving.admission import FairSemaphore
from jmoe.serving.engine_loop import EngineLoop
from jmoe.serving.errors import ApiError, replace_surrogates
from jmoe.serving.forks import ForkServer, LimitError, Limits, LostError
from jmoe.serving.grammar import Grammars, GrammarSource, JsonConstraint
from jmoe.serving.metrics import Metrics
from jmoe.serving.middleware import DISCONNECTED
from jmoe.serving.model_sampling import ModelSamplingDefaults
from jmoe.serving.output_parsers.output_format import OutputFormat
from jmoe.serving.schemas import GenerationBody, Message
from jmoe.serving.threads import run_in_thread
from jmoe.serving.tool_schemas import Tool
from jmoe.serving.tracing import Tracer
from jmoe.serving.vocabulary import TokenVocabulary
from jmoe.types import JsonObject

T = TypeVar("T")
log = logging.getLogger(__name__)

# characters; longer texts are processed one at a time, which keeps threads free
LONG_TEXT = 1 << 16
THREADS = 4  # concurrent text-processing threads
FORKS = max(4, len(os.sched_getaffinity(0)))  # concurrent forks
RENDER_S = 2.0  # CPU time of one rendering
RENDER_BYTES = 32  # memory limit per byte of a body; output limit: an eighth


@dataclass(frozen=True)
class Templates:
    """A model's chat template.

    server: the helper process that renders it.
    takes_parts: it reads a message's content as parts, not as a string.
    renders_developer_role: it writes messages of the role "developer".
    call_form: the form in which it reads tool calls.
    end_token: the end-of-text token of its settings; "" if there is none.
    """

    server: ForkServer
    takes_parts: bool
    renders_developer_role: bool
    call_form: CallForm
    end_token: str


def start_templates(folder: Path, max_body_bytes: int) -> Templates | None:
    """Start the helper process of the chat template in a model's folder; return None if the model
    has none.

    Waits until the process is ready, a fifth of a second. max_body_bytes: the longest body of a
    request; the process may use memory in proportion. Raises ValueError if the template is damaged.
    """
    setup = read_templates(folder)
    if setup is None:
        return None
    limits = Limits(
        RENDER_S,
        (256 << 20) + RENDER_BYTES * max_body_bytes,
        (1 << 20) + RENDER_BYTES // 8 * max_body_bytes,
    )
    server = ForkServer(
        "the model's chat template", "jmoe.models.chat_template.make_fork_renderer", setup, limits
    )
    form, renders_developer_role, *call_form = json.loads(
        decode_rendering(server.ask_blocking(FORMS))
    )
    if form is None:
        log.warning(
            "the model's chat template shows nothing of a message's content, as a string or in"
            " parts"
        )
    end_token = setup["special_tokens"].get("eos_token", "")
    return Templates(
        server, form == "parts", renders_developer_role, CallForm(*call_form), end_token
    )


def choose_output_format(
    folder: Path, tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str
) -> OutputFormat:
    """Return the format of answers by the chat template in a model's folder, or as the options say.

    Raises ValueError for a damaged template, or an option that does not go with the tokenizer.
    """
    setup = read_templates(folder)
    text = "" if setup is None else "\n".join(setup["templates"].values())
    return OutputFormat.choose(tokenizer, text, tool_parser, reasoning_parser)


@contextlib.contextmanager
def templates_starting_in_thread(
    folder: Path, max_body_bytes: int
) -> Iterator[Callable[[], Templates | None]]:
    """Return a context in which a thread runs `start_templates`, meanwhile the model can be loaded.

    Yields a function that waits for the result and returns it; the helper process ends with the
    block.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="chat template") as thread:
        starting = thread.submit(start_templates, folder, max_body_bytes)
        try:
            yield starting.result
        finally:
            if starting.exception() is None and (templates := starting.result()) is not None:
                templates.server.close()


class Service:
    """One served model with all that its routes need.

    created: Unix time at which the server started.
    adapters: names of the model's LoRA adapters, which a request gives as its model.
    output_format: how reasoning and tool calls stand in the model's answers.
    end_token_ids: tokens that end a text or a turn.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServeConfig,
        folder: Path,
        name: str,
        templates: Templates | None,
    ) -> None:
        """Take an engine. On several devices, compile its programs: steps there have a time limit.

        folder: the model's Hugging Face folder, with a tokenizer.json.
        name: the model's name in the API.
        templates: from `start_templates`.
        """
        assert engine.tokenizer is not None, "checked before the weights were read"
        if engine.uses_several_devices:
            engine.compile_all_programs()
        self.config, self.name, self.created = config, name, int(time.time())
        self.adapters = engine.adapters.names
        endpoint = config.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint, name)
        self.metrics = Metrics(name)
        self.loop = EngineLoop(engine, self.metrics, config)
        self.metrics.register_stats_source(self.loop)
        self.tokenizer, self.max_seq_len = engine.tokenizer, engine.max_seq_len
        self.vocabulary = TokenVocabulary(self.tokenizer)
        self._templates = templates
        turn_ends = [] if templates is None else [templates.end_token]
        self.output_format = choose_output_format(
            folder, self.tokenizer, config.tool_parser, config.reasoning_parser
        )
        turn_ends += TURN_ENDS if self.has_chat and self.output_format.harmony is not None else ()
        sampling = ModelSamplingDefaults.read(folder, config.sampling_defaults)
        self.model_sampling = sampling.with_turn_end_tokens(
            turn_ends, self.tokenizer, engine.config.vocab_size
        )
        self.end_token_ids = (*engine.eos_token_ids, *self.model_sampling.turn_end_token_ids)
        self.grammars = Grammars(self.tokenizer, engine.config.vocab_size, self.end_token_ids)
        self._long_texts, self._threads, self._forks = (
            FairSemaphore(1),
            FairSemaphore(THREADS),
            FairSemaphore(FORKS),
        )

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._templates is not None

    def close(self) -> None:
        """Kill the worker processes that compile schemas; send the spans that wait."""
        self.grammars.close()
        if self.tracer is not None:
            self.tracer.close()

    def check_model_name(self, name: str | None) -> None:
        """Raise `ApiError` 404 if `name` is neither the served model, which None stands for, nor
        one of its adapters.
        """
        if name not in (None, self.name, *self.adapters):
            raise ApiError(
                404, f"the model {name!r} is not served here", param="model", code="model_not_found"
            )

    async def run_text_work(self, work: Callable[[], T], num_characters: int, client: str) -> T:
        """Return `work()`, run in a thread so that long texts do not block the event loop.

        num_characters: length of the text; above `LONG_TEXT`, one such call runs at a time.
        Raises `ApiError` 400 if `work` raises ValueError, 503 if the system starts no thread.
        """
        try:
            async with (
                self._long_texts.hold_permit(client)
                if num_characters > LONG_TEXT
                else contextlib.nullcontext(),
                self._threads.hold_permit(client),
            ):
                return await run_in_thread(work)
        except ValueError as error:
            raise ApiError.from_value_error(error) from error

    def encode_prompts(
        self, texts: list[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text.

        Raises `ApiError` 400 for a text with lone surrogates, one that the tokenizer cannot encode,
        or one longer than the context could hold.
        """
        for text in texts:
            if replace_surrogates(text) != text:
                raise ApiError(400, "the prompt holds half of a surrogate pair, which is no text")
            limit, tokens = self.vocabulary.max_text_length(self.max_seq_len), self.max_seq_len
            if limit is not None and len(text) > limit:
                message = (
                    f"the prompt has {len(text)} characters; at most {limit} can be the {tokens}"
                    " tokens that fit"
                )
                raise ApiError(400, message, code="context_length_exceeded")
        try:  # the batch call releases the GIL, `encode` does not
            batch = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            # a Rust panic: not an `Exception`, and its class is not importable
            if type(error).__name__ != "PanicException":
                raise
            raise ApiError(400, f"the model's tokenizer cannot encode the text: {error}") from error
        return [encoding.ids for encoding in batch]

    async def _run_with_fork_permit(self, request: Request, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work()`, run when the client gets a place among the `FORKS`
        concurrent ones.

        Cancels the work if the client disconnects. Raises `ApiError` 503 if the fork is killed.
        """

        async def work_with_permit() -> T:
            async with self._forks.hold_permit(request.state.client):
                return await work()

        doing, gone = (
            asyncio.ensure_future(work_with_permit()),
            asyncio.ensure_future(wait_for_disconnect(request)),
        )
        try:
            await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ApiError(DISCONNECTED, "the client has left")
            return doing.result()
        except LostError as error:
            log.error("%s", error)
            raise ApiError(503, str(error), code="process_lost") from error
        finally:
            doing.cancel()
            gone.cancel()

    async def render_chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        variables: JsonObject,
        request: Request,
        *,
        tools: list[Tool],
        documents: list[JsonObject] | None = None,
    ) -> str:
        """Return the prompt text of a chat.

        Message text that spells a control token becomes that token, as in transformers and vLLM,
        since the template produces one string:
        https://github.com/huggingface/transformers/issues/29279. Raises `ApiError` 400 if the model
        has no template or the template fails.
        """
        if self._templates is None:
            raise ApiError(
                400,
                "messages: the model has no chat template; use /v1/completions",
                param="messages",
            )
        forms = self._templates.takes_parts, self._templates.call_form
        try:
            plain = [message.for_template(*forms) for message in messages]
            if not self._templates.renders_developer_role:
                plain = developer_as_system(plain)
        except ValueError as error:
            raise ApiError.from_value_error(error) from error
        question: JsonObject = {
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
            "tools": [tool.for_template() for tool in tools] or None,
            "documents": documents,
            **variables,
        }
        try:
            asked = json.dumps(question).encode()
            return decode_rendering(
                await self._run_with_fork_permit(
                    request, partial(self._templates.server.ask, asked)
                )
            )
        except RenderingError as error:
            log.info("%s", error)
            said = f"the model's chat template: {error.said or 'cannot render them'}"
            raise ApiError(400, f"messages: {said}", param="messages") from error
        except RecursionError as error:
            raise ApiError(
                400, "messages: lists and objects are nested too deeply", param="messages"
            ) from error
        except LimitError as error:
            log.info("%s", error)
            raise ApiError(400, f"messages: {error}", param="messages") from error

    def limit_new_tokens(self, prompt_token_ids: list[int], requested: int | None) -> int:
        """Return the maximum number of tokens to draw, at least 1.

        It is the smaller of `requested` and the context length left by the prompt; only the latter
        if `requested` is None. Raises `ApiError` 400 if the prompt fills the context.
        """
        length, limit = len(prompt_token_ids), self.max_seq_len
        if length >= limit:
            message = (
                f"the prompt has {length} tokens; together with one of output at most {limit} fit"
            )
            raise ApiError(400, message, code="context_length_exceeded")
        most = limit - length
        return most if requested is None else min(most, max(1, requested))

    def make_sequences(
        self,
        body: GenerationBody,
        prompts: list[list[int]],
        make_sampling_params: Callable[[list[int], int], SamplingParams],
    ) -> list[Sequence]:
        """Return n sequences per prompt: choice i of prompt p is sequence p * n + i.

        Raises ValueError for a prompt or parameters that the engine rejects.

        make_sampling_params: called with a prompt's token ids and the number of a choice.
        """
        check(
            not body.priority or self.config.scheduling_policy == "priority",
            "priority",
            body.priority,
            "must be 0: the server runs without --scheduling-policy priority",
        )
        adapter = body.model if body.model is not None and body.model in self.adapters else ""
        sequences = [
            Sequence(
                prompt,
                make_sampling_params(prompt, choice),
                priority=body.priority,
                adapter=adapter,
            )
            for prompt in prompts
            for choice in range(body.n)
        ]
        for sequence in sequences[:: body.n]:
            self.loop.engine.check_request(sequence.prompt_token_ids, sequence.sampling)
        return sequences

    async def make_constraints(
        self, source: GrammarSource, count: int, request: Request
    ) -> list[JsonConstraint]:
        """Return the constraints of `count` outputs.

        Raises `ApiError` 400 for a source that cannot be followed, and 503 if the fork is killed.
        """
        try:
            return await self._run_with_fork_permit(
                request, partial(self.grammars.make_constraints, source, count)
            )
        except ValueError as error:
            raise ApiError.from_value_error(error) from error

    def log_prompts(self, request: Request, prompts: list[str | list[int]]) -> None:
        """Add the prompts to the request's log line if `log_prompts` is set."""
        if self.config.log_prompts:
            request.state.note(repr(prompts))


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has disconnected or the response is complete."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
