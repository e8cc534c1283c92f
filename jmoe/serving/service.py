"""The model that is served, with its tokenizer and template, and the engine's loop: what handlers share."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from jinja2 import TemplateError

from jmoe.config.serving import ServeConfig
from jmoe.inference.engine import Engine
from jmoe.inference.harmony import TURN_ENDS, Harmony
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Sequence
from jmoe.serving.chat_template import ChatTemplate
from jmoe.serving.engine_loop import EngineLoop
from jmoe.serving.errors import ApiError, printable
from jmoe.serving.grammar import Grammars
from jmoe.serving.metrics import Metrics
from jmoe.serving.model_sampling import ModelSampling
from jmoe.serving.schemas import GenerationBody, Message
from jmoe.serving.vocabulary import TokenVocabulary

T = TypeVar("T")
log = logging.getLogger(__name__)

LONG_TEXT = 1 << 16  # characters: of longer ones one is worked on at a time, so that short ones find a thread


class Service:
    """One model behind HTTP: everything but the routes."""

    def __init__(self, engine: Engine, config: ServeConfig, folder: Path, name: str) -> None:
        """Compile what requests may need. folder: the model's, which must hold a tokenizer.json."""
        assert engine.tokenizer is not None, "checked before the weights were read"
        engine.compile_for_service()
        self.config, self.name, self.created = config, name, int(time.time())
        self.metrics = Metrics(name)
        self.loop = EngineLoop(engine, self.metrics, config)
        self.metrics.watch(self.loop)
        self.tokenizer, self.max_seq_len = engine.tokenizer, engine.max_seq_len
        self.vocabulary = TokenVocabulary(self.tokenizer)
        self.chat_template = ChatTemplate.from_folder(folder)
        if self.chat_template is not None and self.chat_template.content_form is None:
            log.warning("the model's chat template shows nothing of a message's content, as a string or in parts")
        self.harmony = None if self.chat_template is None else Harmony.of(self.tokenizer)
        turn_ends = [] if self.chat_template is None else [self.chat_template.special_tokens.get("eos_token", "")]
        turn_ends += TURN_ENDS if self.harmony is not None else ()
        sampling = ModelSampling.read(folder, config.sampling_defaults)
        self.model_sampling = sampling.with_turn_ends(turn_ends, self.tokenizer, engine.config.vocab_size)
        ends = (*engine.eos_token_ids, *self.model_sampling.turn_end_token_ids)
        self.grammars = Grammars(self.tokenizer, engine.config.vocab_size, ends)
        self._long_texts = asyncio.Semaphore(1)

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` 404 for another model."""
        if name not in (None, self.name):
            raise ApiError(404, f"the model {name!r} is not served here", param="model", code="model_not_found")

    async def off_the_loop(self, make: Callable[[], T], size: int) -> T:
        """Run `make` in a thread: what grows with a request must not hold up the others. size: of its text.

        `ApiError` 400 for a `ValueError`.
        """
        try:
            async with self._long_texts if size > LONG_TEXT else contextlib.nullcontext():
                return await asyncio.to_thread(make)
        except ValueError as error:
            raise ApiError.from_value_error(error) from error

    def encode(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return token ids; `ApiError` 400 for a text that cannot fit, by its length alone."""
        for text in texts:
            if printable(text) != text:
                raise ApiError(400, "the prompt holds half of a surrogate pair, which is no text")
            limit, tokens = self.vocabulary.longest_text(self.max_seq_len), self.max_seq_len
            if limit is not None and len(text) > limit:
                message = f"the prompt has {len(text)} characters; at most {limit} can be the {tokens} tokens that fit"
                raise ApiError(400, message, code="context_length_exceeded")
        # `encode` would not let another thread of Python run meanwhile
        batch = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    def render(self, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        """Return the prompt of a chat.

        Text of a message that looks like a control token becomes one, as it does in transformers and vLLM: the template
        gives one string. https://github.com/huggingface/transformers/issues/29279
        """
        if self.chat_template is None:
            raise ApiError(400, "messages: the model has no chat template; use /v1/completions", param="messages")
        plain = [message.for_template(self.chat_template.content_form == "parts") for message in messages]
        try:
            return self.chat_template.render(plain, add_generation_prompt=add_generation_prompt, **variables)
        except ValueError as error:
            log.info("%s", error)
            reason = error.__cause__ or error
            said = reason.message if isinstance(reason, TemplateError) else "cannot render them"
            raise ApiError(400, f"messages: the model's chat template: {said}", param="messages") from error

    def max_new_tokens(self, prompt_token_ids: list[int], asked: int | None) -> int:
        """Return how many tokens to draw at most: what is asked for, or what the prompt leaves of the context.

        At least one. `ApiError` 400 for a prompt that leaves no room for it.
        """
        length, limit = len(prompt_token_ids), self.max_seq_len
        if length >= limit:
            message = f"the prompt has {length} tokens; together with one of output at most {limit} fit"
            raise ApiError(400, message, code="context_length_exceeded")
        room = limit - length
        return room if asked is None else min(room, max(1, asked))

    def sequences(
        self, body: GenerationBody, prompts: list[list[int]], make: Callable[[list[int], int], SamplingParams]
    ) -> list[Sequence]:
        """Return choice i of prompt p as sequence p * n + i; `ValueError` for what the engine would refuse."""
        sequences = [Sequence(prompt, make(prompt, choice)) for prompt in prompts for choice in range(body.n)]
        for sequence in sequences[:: body.n]:
            self.loop.engine.check_request(sequence.prompt_token_ids, sequence.sampling)
        if body.json_schema is not None:
            constraints = self.grammars.constraints(body.json_schema, len(sequences))
            for sequence, constraint in zip(sequences, constraints, strict=True):
                sequence.constraint = constraint
        return sequences

    def log_prompts(self, request: Request, prompts: list[Any]) -> None:
        """Note the prompts themselves for the log, where that is asked for."""
        if self.config.log_prompts:
            request.state.note(repr(prompts))
