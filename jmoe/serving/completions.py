"""`POST /v1/completions`."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Output, Sequence, TokenLogprob
from jmoe.serving.answer import EVENTS, ChoiceAnswer
from jmoe.serving.grammar import GrammarSource
from jmoe.serving.json_body import JsonRoute
from jmoe.serving.schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from jmoe.serving.service import Service
from jmoe.serving.vocabulary import TextOffsets, TokenVocabulary

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class _DeltaBuilder:
    """Converts the engine outputs of one sequence to deltas of a completion choice."""

    def __init__(
        self, body: CompletionRequest, vocabulary: TokenVocabulary, sequence: Sequence
    ) -> None:
        self._body, self._vocabulary, self._sequence = body, vocabulary, sequence
        self._begun = False
        self._offsets: TextOffsets | None = None

    def make_delta(self, output: Output) -> CompletionChoice:
        """Return the next delta. With `echo`, the first delta begins with the prompt."""
        text, logprobs = output.text, output.logprobs
        if self._body.max_tokens == 0:  # the engine draws at least one token; drop it
            text, logprobs = "", []
        echoed: list[TokenLogprob] | None = None
        if self._body.echo and not self._begun:
            text, echoed = self._sequence.prompt_text + text, output.prompt_logprobs
        self._begun = True
        reason = "length" if self._body.max_tokens == 0 else output.finish_reason
        assert reason != "abort" and reason != "error", "these have no reader"
        described = self._delta_logprobs(text, echoed, logprobs)
        return CompletionChoice(
            index=self._sequence.index, text=text, logprobs=described, finish_reason=reason
        )

    def _delta_logprobs(
        self, text: str, echoed: list[TokenLogprob] | None, logprobs: list[TokenLogprob]
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of one delta, None if the request does not ask for them.

        text: the text of the delta.
        echoed: of the prompt from its second token on, if the delta begins with the prompt.
        logprobs: of the drawn tokens.
        """
        if self._body.logprobs is None:
            return None
        if self._offsets is None:
            self._offsets = TextOffsets(self._vocabulary, text)
        first, offsets = [], []
        if echoed is not None:
            first = self._sequence.prompt_token_ids[:1]
            offsets = self._offsets.advance(
                self._sequence.prompt_token_ids, self._sequence.prompt_text
            )
        offsets += self._offsets.advance([lp.token_id for lp in logprobs])
        return self._vocabulary.completion_logprobs(first, [*(echoed or []), *logprobs], offsets)


def _join_deltas(deltas: list[CompletionChoice]) -> CompletionChoice:
    """Return one choice of a whole response, joined from its stream deltas."""
    logprobs = None
    if deltas[0].logprobs is not None:
        lists: dict[str, list[Any]] = {name: [] for name in CompletionLogprobs.model_fields}
        for delta in deltas:
            for name, values in lists.items():
                values += getattr(delta.logprobs, name)
        logprobs = CompletionLogprobs(**lists)
    text = "".join(delta.text for delta in deltas)
    return deltas[-1].model_copy(update={"text": text, "logprobs": logprobs})


def _texts_and_token_ids(
    service: Service, body: CompletionRequest
) -> tuple[list[str], list[list[int]]]:
    """Return (text of each prompt, "" for ids that are not echoed; token ids of each prompt)."""
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    if texts:
        return texts, service.encode_prompts(texts, add_special_tokens=body.add_special_tokens)
    prompts = [prompt for prompt in body.prompts if isinstance(prompt, list)]
    for prompt in prompts:
        service.limit_new_tokens(prompt, None)  # raises if the prompt does not fit
        texts.append(
            service.tokenizer.decode(prompt, skip_special_tokens=False) if body.echo else ""
        )
    return texts, prompts


class _CompletionAnswer(ChoiceAnswer[CompletionRequest, CompletionChoice]):
    id_prefix = "cmpl-"
    logprob_bytes = 200

    async def deltas(self) -> AsyncIterator[CompletionChoice]:
        choices = [
            _DeltaBuilder(self.body, self.service.vocabulary, sequence)
            for sequence in self.generation.sequences
        ]
        async for output in self.generation:
            yield choices[output.sequence.index].make_delta(output)

    def make_chunk(
        self, choices: list[CompletionChoice], usage: Usage | None
    ) -> CompletionResponse:
        return CompletionResponse(**self.envelope, choices=choices, usage=usage)

    def make_response(self, deltas: list[list[CompletionChoice]]) -> CompletionResponse:
        return self.make_chunk(list(map(_join_deltas, deltas)), self.usage())

    def usage(self) -> Usage:
        usage = super().usage()
        if self.body.max_tokens == 0:  # the dropped token does not count
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage


def completions_router(service: Service) -> APIRouter:
    """Return the `/v1/completions` route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", response_model=CompletionResponse, responses=EVENTS)
    async def completions(body: CompletionRequest, request: Request) -> BaseModel | Response:
        """Generate a continuation of each prompt."""
        service.check_model_name(body.model)
        client = request.state.client
        service.loop.requests_to_evict(len(body.prompts) * body.n, client)  # raises early
        prompt_logprobs = body.logprobs if body.echo else None

        def sampling_params(token_ids: list[int], choice: int) -> SamplingParams:
            asked = (
                DEFAULT_MAX_TOKENS
                if body.requested_max_tokens is None
                else body.requested_max_tokens
            )
            most = service.limit_new_tokens(token_ids, asked)
            model, logprobs = service.model_sampling, body.logprobs
            return body.sampling_params(
                most, choice, model, logprobs=logprobs, prompt_logprobs=prompt_logprobs
            )

        def make_sequences() -> tuple[list[list[int]], list[Sequence]]:
            texts, prompts = _texts_and_token_ids(service, body)
            sequences = service.make_sequences(body, prompts, sampling_params)
            for i, sequence in enumerate(sequences):
                sequence.prompt_text = texts[i // body.n]
            return prompts, sequences

        prompts, sequences = await service.run_text_work(
            make_sequences, sum(map(len, body.prompts)), client
        )
        if body.json_schema is not None:
            source = GrammarSource.from_schema(body.json_schema)
            constraints = await service.make_constraints(source, len(sequences), request)
            for sequence, constraint in zip(sequences, constraints, strict=True):
                sequence.constraint = constraint
        service.log_prompts(
            request, [s.prompt_text or s.prompt_token_ids for s in sequences[:: body.n]]
        )
        return await _CompletionAnswer.respond(service, request, body, prompts, sequences)

    return router
