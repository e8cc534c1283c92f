"""`POST /v1/completions`."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Output, TokenLogprob
from jmoe.serving.engine_loop import Generation, Job
from jmoe.serving.schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Envelope,
    Usage,
)
from jmoe.serving.service import Service, note_prompts, usage
from jmoe.serving.vocabulary import TextOffsets, TokenTexts

DEFAULT_MAX_TOKENS = 16  # OpenAI's
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@dataclass
class _Prompt:
    text: str
    token_ids: list[int]


class _Choice:
    """Turns what the engine draws for one sequence into pieces of a completion."""

    def __init__(self, body: CompletionRequest, texts: TokenTexts, prompt: _Prompt, index: int) -> None:
        self._body, self._texts, self._prompt, self._index = body, texts, prompt, index
        self._begun = False
        self._offsets: TextOffsets | None = None

    def piece(self, output: Output) -> CompletionChoice:
        """The next piece; the first has the prompt, if it is to be echoed."""
        text, logprobs = output.text, output.logprobs
        if self._body.max_tokens == 0:  # one was drawn, since the engine draws at least one
            text, logprobs = "", []
        echoed: list[TokenLogprob] | None = None
        if self._body.echo and not self._begun:
            text, echoed = self._prompt.text + text, output.prompt_logprobs
        self._begun = True
        reason = "length" if self._body.max_tokens == 0 else output.finish_reason
        assert reason != "abort" and reason != "error", "these have no reader"
        found = self._logprobs(text, echoed, logprobs)
        return CompletionChoice(index=self._index, text=text, logprobs=found, finish_reason=reason)

    def _logprobs(
        self, text: str, echoed: Sequence[TokenLogprob] | None, logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs | None:
        """Return those of a piece. echoed: of the prompt from its second token on, where it is part of the piece."""
        if self._body.logprobs is None:
            return None
        if self._offsets is None:
            self._offsets = TextOffsets(self._texts, text)
        first, offsets = [], []
        if echoed is not None:
            first = self._prompt.token_ids[:1]
            offsets = self._offsets.of(self._prompt.token_ids, self._prompt.text)
        offsets += self._offsets.of([lp.token_id for lp in logprobs])
        return self._texts.completion_logprobs(first, [*(echoed or []), *logprobs], offsets)


def join(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """One choice of its pieces."""
    logprobs = None
    if pieces[0].logprobs is not None:
        parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        logprobs = CompletionLogprobs(
            tokens=[x for part in parts for x in part.tokens],
            token_logprobs=[x for part in parts for x in part.token_logprobs],
            top_logprobs=[x for part in parts for x in part.top_logprobs],
            text_offset=[x for part in parts for x in part.text_offset],
        )
    text = "".join(piece.text for piece in pieces)
    return pieces[-1].model_copy(update={"text": text, "logprobs": logprobs})


def _prompts(service: Service, body: CompletionRequest) -> list[_Prompt]:
    """The prompts with their token ids; text is echoed as it came."""
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    if texts:
        ids = service.encode(texts, add_special_tokens=body.add_special_tokens)
        return [_Prompt(text, found) for text, found in zip(texts, ids, strict=True)]
    prompts = []
    for prompt in body.prompts:
        assert isinstance(prompt, list)
        service.max_new_tokens(prompt, body.max_tokens, DEFAULT_MAX_TOKENS)  # whether it fits, before it is decoded
        text = service.tokenizer.decode(prompt, skip_special_tokens=False) if body.echo else ""
        prompts.append(_Prompt(text, prompt))
    return prompts


@dataclass(frozen=True)
class _Completion:
    """A request whose choices are being drawn."""

    service: Service
    body: CompletionRequest
    prompts: list[_Prompt]
    generation: Generation
    envelope: Envelope

    async def whole(self) -> CompletionResponse:
        found: dict[int, list[CompletionChoice]] = {}
        async for piece in self._pieces():
            found.setdefault(piece.index, []).append(piece)
        choices = [join(found[index]) for index in sorted(found)]
        return CompletionResponse(**dict(self.envelope), choices=choices, usage=self._usage())

    async def chunks(self) -> AsyncIterator[CompletionResponse]:
        shared = dict(self.envelope)
        async for piece in self._pieces():
            so_far = self._usage() if self.body.usage_so_far else None
            yield CompletionResponse(**shared, choices=[piece], usage=so_far)
        if self.body.includes_usage:
            yield CompletionResponse(**shared, choices=[], usage=self._usage())

    async def _pieces(self) -> AsyncIterator[CompletionChoice]:
        n, texts = self.body.n, self.service.texts
        choices = [_Choice(self.body, texts, self.prompts[i // n], i) for i in range(len(self.generation.jobs))]
        async for index, output in self.generation:
            yield choices[index].piece(output)

    def _usage(self) -> Usage:
        return usage([p.token_ids for p in self.prompts], self.generation, drawn=self.body.max_tokens != 0)


def completions_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=CompletionResponse, responses=EVENTS)
    async def completions(body: CompletionRequest, request: Request) -> CompletionResponse | Response:
        """Continue a text."""
        service.check_model(body.model)
        service.loop.check_room(len(body.prompts) * body.n)  # before any work
        prompt_logprobs = body.logprobs if body.echo else None

        def sampling(token_ids: list[int], choice: int) -> SamplingParams:
            most = service.max_new_tokens(token_ids, body.max_tokens, DEFAULT_MAX_TOKENS)
            return body.sampling(most, choice, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)

        def make() -> tuple[list[_Prompt], list[Job]]:
            prompts = _prompts(service, body)
            return prompts, service.jobs(body, [p.token_ids for p in prompts], sampling)

        prompts, jobs = await service.off_the_loop(make, sum(map(len, body.prompts)))
        token_ids = [p.token_ids for p in prompts]
        note_prompts(service, request, token_ids, [p.text or p.token_ids for p in prompts], len(jobs))
        generation = service.loop.submit(jobs, request.state.client)
        completion = _Completion(service, body, prompts, generation, service.envelope(request, "cmpl"))
        if body.stream:
            return service.stream(body, generation, completion.chunks())
        return await service.answer(request, generation, completion.whole())

    return router
