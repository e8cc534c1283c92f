"""Constrains answers to a JSON schema or a grammar with token masks that a forked process computes.

`Grammars.constraints` starts one fork per request. grammar_worker.py is the code that runs there.

W: 32-bit words of a token mask, one bit per token
"""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from jmoe.config import check
from jmoe.serving.forks import SLOW_S, Fork, ForkServer, LimitError, Limits, start_process_in_thread
from jmoe.serving.grammar_worker import HEAD, LARK, SCHEMA, TOKEN, WRONG
from jmoe.types import JsonObject

MAX_SCHEMA_BYTES, MAX_GRAMMAR_BYTES = 64 << 10, 256 << 10
WHAT = "response_format.json_schema"


class GrammarSource(NamedTuple):
    """A grammar that outputs must follow. form: `SCHEMA` or `LARK`. what: the request's field, in
    errors.
    """

    form: str
    text: str
    what: str

    @classmethod
    def from_schema(cls, schema: JsonObject) -> Self:
        """Return the source of a JSON schema."""
        return cls(SCHEMA, json.dumps(schema), WHAT)

    @classmethod
    def from_tool_grammar(cls, grammar: str) -> Self:
        """Return the source of a grammar of tool calls."""
        return cls(LARK, grammar, "tools")


LIMITS = Limits(processor_s=2.0, memory_bytes=512 << 20, answer_bytes=1 << 20)
GRACE_S = 0.005  # wait of a step for masks; most take a tenth of it


class _Masks:
    """The next token mask of each output of one request, and the fork that computes the masks.

    masks: by output, the mask's bytes; None while the fork computes it.
    took_s: by output, the fork's time for the last mask, in seconds.
    errors: by output, why there are no more masks; "" while there are.
    """

    def __init__(self, fork: Fork, first: bytes, count: int, what: str) -> None:
        self._fork, self._what = fork, what
        self.masks: list[bytes | None] = [first] * count
        self.took_s = [0.0] * count
        self.errors = [""] * count

    def request_mask(self, index: int, token_id: int) -> None:
        """Send an output's newly drawn token to the fork, which computes the next mask."""
        self.masks[index] = None
        try:
            self._fork.send(TOKEN.pack(index, token_id))
        except LimitError as error:
            self._fail_awaited_masks(str(error))

    def receive_mask(self, timeout_s: float) -> None:
        """Receive the next mask, of whichever output comes first, within `timeout_s` seconds."""
        try:
            answer = self._fork.receive(timeout_s)
        except LimitError as error:
            self._fail_awaited_masks(str(error))
            return
        if answer is not None:
            index, took_s, kind = HEAD.unpack_from(answer)
            said = answer[HEAD.size :]
            self.took_s[index] = took_s
            self.masks[index] = said
            if kind == WRONG:
                self.errors[index] = f"{self._what}: {said.decode(errors='replace')}"

    def lower_priority(self) -> None:
        """Lower the fork's scheduling priority, once."""
        if not self._fork.is_slow:
            self._fork.lower_priority()

    def _fail_awaited_masks(self, error: str) -> None:
        """Set the error of each output whose next mask has not come."""
        for index, mask in enumerate(self.masks):
            if mask is None:
                self.masks[index], self.errors[index] = b"", error


class JsonConstraint:
    """The `Constraint` of one output. A fork computes its masks while the engine continues with
    other sequences.
    """

    def __init__(self, masks: _Masks, index: int, eos_token_id: int, param: str) -> None:
        """Constrain output number `index`. param: the request's field, for errors."""
        self._masks, self._index, self._eos_token_id = masks, index, eos_token_id
        self.param = param
        self._asked_s = 0.0

    @property
    def error(self) -> str:
        """Why the schema cannot be followed any further, or "".

        After an error the only allowed token is end-of-text, and the output must not be used.
        """
        return self._masks.errors[self._index]

    def is_ready(self) -> bool:
        """Return whether the next mask has arrived.

        Wait for the mask until `GRACE_S` after its request, unless the previous mask took longer
        than `GRACE_S`. A fork that takes longer than `SLOW_S` gets a lower priority.
        """
        is_quick = self._masks.took_s[self._index] < GRACE_S
        self.wait(self._asked_s + GRACE_S - time.perf_counter() if is_quick else 0.0)
        is_ready = self._masks.masks[self._index] is not None
        if not is_ready and time.perf_counter() > self._asked_s + SLOW_S:
            self._masks.lower_priority()
        return is_ready

    def wait(self, limit_s: float) -> None:
        end_s = time.perf_counter() + limit_s
        while self._masks.masks[self._index] is None:
            left_s = max(0.0, end_s - time.perf_counter())
            self._masks.receive_mask(left_s)
            if not left_s:
                return

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
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
            self._masks.request_mask(self._index, token_id)


def _first_reason(said: str) -> str:
    """Return the reason in llguidance's message, without its place in the grammar, which the client
    has not written.
    """
    first, *_ = said.splitlines() or [""]
    return re.sub(r"^at \d+\(\d+\): ", "", first)


class Grammars:
    """Creates JSON constraints for one model. Its fork server starts at first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = (
            tokenizer,
            vocab_size,
            list(eos_token_ids),
        )
        self._starting = asyncio.Lock()
        self._server: ForkServer | None = None

    async def make_constraints(self, source: GrammarSource, count: int) -> list[JsonConstraint]:
        """Return `count` constraints for `source`, each with its first mask ready.

        Raises ValueError if it is invalid, too large or unsupported, or the model has no
        end token, and `LostError` if the fork was killed or none can be started.
        """
        what, size = source.what, len(source.text)
        param, _, field = what.partition(".")
        can_end = bool(self._eos_token_ids)
        check(can_end, param, field, "the model has no end-of-text token")
        limit = MAX_SCHEMA_BYTES if source.form == SCHEMA else MAX_GRAMMAR_BYTES
        check(size <= limit, f"len({what})", size, f"must have at most {limit} bytes")
        async with self._starting:
            if self._server is None:
                self._server = await start_process_in_thread(self._start_fork_server, WHAT)
        fork = await self._server.fork_after_restart_if_killed()
        fork.set_name_in_errors(what)
        question = {"form": source.form, "text": source.text, "count": count}
        answer = await fork.ask(json.dumps(question).encode())
        _, _, kind = HEAD.unpack_from(answer)
        said = answer[HEAD.size :]
        if kind == WRONG:
            raise ValueError(f"{what}: {_first_reason(said.decode(errors='replace'))}")
        masks, end = _Masks(fork, said, count, what), self._eos_token_ids[0]
        return [JsonConstraint(masks, index, end, param) for index in range(count)]

    def close(self) -> None:
        """Kill the fork server."""
        if self._server is not None:
            self._server.close()

    def _start_fork_server(self) -> ForkServer:
        """Return a new server of forks with the model's tokenizer."""
        setup = {
            "tokenizer": self._tokenizer.to_str(),
            "vocab_size": self._vocab_size,
            "eos_token_ids": self._eos_token_ids,
        }
        return ForkServer(WHAT, "jmoe.serving.grammar_worker.make_mask_answerer", setup, LIMITS)
