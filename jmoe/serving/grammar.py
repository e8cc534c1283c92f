"""Answers that follow a JSON schema: a fork of a `ForkServer` says which tokens may come next."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jmoe.config import check
from jmoe.serving.forks import SLOW_S, Fork, ForkServer, LimitError, Limits
from jmoe.serving.grammar_worker import HEAD, TOKEN, WRONG

MAX_SCHEMA_BYTES = 64 << 10
WHAT = "response_format.json_schema"
LIMITS = Limits(processor_s=2.0, memory_bytes=512 << 20, answer_bytes=1 << 20)
GRACE_S = 0.005  # a step waits so long for masks, which most schemas take a tenth of


class _Masks:
    """The masks of one request's outputs, and the fork that computes them; None: it is not there
    yet.
    """

    def __init__(self, fork: Fork, first: bytes, count: int) -> None:
        self._fork = fork
        self.masks: list[bytes | None] = [first] * count
        self.took_s = [0.0] * count
        self.errors = [""] * count

    def ask(self, index: int, token_id: int) -> None:
        """Ask for an output's next mask."""
        self.masks[index] = None
        try:
            self._fork.send(TOKEN.pack(index, token_id))
        except LimitError as error:
            self._give_up(str(error))

    def take(self, timeout_s: float) -> None:
        """Take in the next mask of any output, if it comes in time."""
        try:
            answer = self._fork.receive(timeout_s)
        except LimitError as error:
            self._give_up(str(error))
            return
        if answer is not None:
            index, took_s, kind = HEAD.unpack_from(answer)
            said = answer[HEAD.size :]
            self.took_s[index] = took_s
            self.masks[index] = said
            if kind == WRONG:
                self.errors[index] = f"{WHAT}: {said.decode(errors='replace')}"

    def let_others_go_first(self) -> None:
        """Lower the priority of the fork."""
        if not self._fork.is_slow:
            self._fork.let_others_go_first()

    def _give_up(self, error: str) -> None:
        for index, mask in enumerate(self.masks):
            if mask is None:
                self.masks[index], self.errors[index] = b"", error


class JsonConstraint:
    """The `Constraint` of one output, whose masks another process computes while the engine goes
    on with others.
    """

    def __init__(self, masks: _Masks, index: int, eos_token_id: int) -> None:
        self._masks, self._index, self._eos_token_id = masks, index, eos_token_id
        self._asked_s = 0.0

    @property
    def error(self) -> str:
        """Why there are no more masks, "" if there are; the output then ends, and is not to be
        used.
        """
        return self._masks.errors[self._index]

    def is_ready(self) -> bool:
        """Wait a little for the mask, unless the last one took longer than that too."""
        is_quick = self._masks.took_s[self._index] < GRACE_S
        self.wait(self._asked_s + GRACE_S - time.perf_counter() if is_quick else 0.0)
        is_ready = self._masks.masks[self._index] is not None
        if not is_ready and time.perf_counter() > self._asked_s + SLOW_S:
            self._masks.let_others_go_first()
        return is_ready

    def wait(self, limit_s: float) -> None:
        end_s = time.perf_counter() + limit_s
        while self._masks.masks[self._index] is None:
            left_s = max(0.0, end_s - time.perf_counter())
            self._masks.take(left_s)
            if not left_s:
                return

    def fill(self, words_W: np.ndarray) -> None:
        mask = self._masks.masks[self._index]
        assert mask is not None, "asked for before it was ready"
        if self.error:
            words_W[:] = 0
            word, bit = divmod(self._eos_token_id, 32)
            words_W[word] = np.uint32(1 << bit).astype(np.int32)
        else:
            words_W[:] = np.frombuffer(mask, np.int32)

    def accept(self, token_id: int) -> None:
        self._asked_s = time.perf_counter()
        if not self.error:
            self._masks.ask(self._index, token_id)


class Grammars:
    """Makes constraints for one model. Its process starts with the first of them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = (
            tokenizer,
            vocab_size,
            list(eos_token_ids),
        )
        self._starting = asyncio.Lock()
        self._server: ForkServer | None = None

    async def constraints(self, schema: dict[str, Any], count: int) -> list[JsonConstraint]:
        """Return one for each of `count` outputs, ready; `ValueError` for a schema that cannot
        be followed.
        """
        check(
            bool(self._eos_token_ids),
            "response_format",
            "json_schema",
            "the model has no end-of-text token",
        )
        text = json.dumps(schema)
        constraint = f"must have at most {MAX_SCHEMA_BYTES} bytes"
        check(len(text) <= MAX_SCHEMA_BYTES, f"len({WHAT})", len(text), constraint)
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.to_thread(self._start)
        fork = await self._server.new_fork()
        answer = await fork.ask(json.dumps({"schema": text, "count": count}).encode())
        _, _, kind = HEAD.unpack_from(answer)
        said = answer[HEAD.size :]
        if kind == WRONG:
            raise ValueError(f"{WHAT}: {said.decode(errors='replace')}")
        masks = _Masks(fork, said, count)
        return [JsonConstraint(masks, index, self._eos_token_ids[0]) for index in range(count)]

    def close(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.close()

    def _start(self) -> ForkServer:
        setup = {
            "tokenizer": self._tokenizer.to_str(),
            "vocab_size": self._vocab_size,
            "eos_token_ids": self._eos_token_ids,
        }
        return ForkServer(WHAT, "jmoe.serving.grammar_worker.begin_masks", setup, LIMITS)
