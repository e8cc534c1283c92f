"""Continuous batching: which sequence's tokens run in the next step, and in which row of the cache.

Standard library only. The engine's loop is

    plan = scheduler.schedule()
    ...run plan.prefill and plan.decode, draw one token for each of plan.sampled_requests...
    finished = scheduler.update(plan, tokens)

Every step runs all sequences that are past their prompt, one token each, and beside them a chunk of every prompt that
fits the step, so a long prompt never makes the others wait. The cache is [max_batch, max_seq_len]: a running request
owns one slot, a whole row, and token i of its sequence (prompt, then output) lies in column i.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jmoe.config import check
from jmoe.config.engine import EngineConfig
from jmoe.inference.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


SMALLEST_WIDTH = 16  # of more than one token: a narrower program would hardly be quicker
ROWS_RATIO = 4  # of prefill programs: rows, unlike tokens, are never padding
DEFAULT_PREFILL_CHUNKS = 8  # in a step: reading every expert once must serve many tokens where experts are streamed


def buckets(maximum: int) -> tuple[int, ...]:
    """The sizes that programs are compiled for: 1, 2, 4, ... and `maximum`."""
    check(maximum >= 1, "maximum", maximum, "must be at least 1")
    sizes = [1]
    while 2 * sizes[-1] < maximum:
        sizes.append(2 * sizes[-1])
    return tuple(sorted({*sizes, maximum}))


def bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds n; `ValueError` if none does."""
    check(n <= sizes[-1], "n", n, f"must not exceed the largest bucket, {sizes[-1]}")
    return sizes[bisect_left(sizes, n)]


@dataclass(eq=False)
class Request:
    """One prompt on its way to its output. The scheduler writes everything below `noise_seed`; all may read it.

    prompt_token_ids: at least one. noise_seed: what its draws depend on beside their positions, a hash of the seed in
    the sampling parameters and of the prompt, so that two prompts with one seed are two samples; else a random number.
    state: waiting (no slot yet), prefill, decode, finished. num_computed_tokens: how many tokens of prompt + output
    have their keys and values in the slot; num_reused_tokens: how many of these were there before, or were copied.
    output_token_ids: with the stop token, if one ended it.
    """

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    noise_seed: int = field(init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    state: Literal["waiting", "prefill", "decode", "finished"] = field(default="waiting", init=False)
    slot: int | None = field(default=None, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_reused_tokens: int = field(default=0, init=False)
    copy_from: tuple[int, int] | None = field(default=None, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.noise_seed = secrets.randbits(63) if seed is None else _noise_seed(seed, self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True)
class DecodeRow:
    """Run `token`, the last of the request's sequence, at column `position` of row `slot`."""

    request: Request
    slot: int
    token: int
    position: int


@dataclass(frozen=True)
class PrefillChunk:
    """Run `tokens` of the request's prompt at columns `start`, `start + 1`, ... of row `slot`.

    copy_from: (other slot, length): before anything of this step runs, copy columns 0 ... length - 1 of that row into
    `slot`; several in the order of the plan. is_last: the prompt ends here, so a token is drawn from the last position.
    """

    request: Request
    slot: int
    start: int
    tokens: list[int]
    is_last: bool
    copy_from: tuple[int, int] | None


@dataclass(frozen=True)
class PrefillGroup:
    """Chunks that run as one program, [len(chunks), width]; those that end their prompt come first."""

    width: int
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step: `decode` holds every request past its prompt, `prefill` chunks of different requests, oldest first."""

    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillChunk, ...]

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.prefill

    @property
    def sampled_requests(self) -> tuple[Request, ...]:
        """Those that get a token, in the order that `update` wants them: `decode`, then prompts that are complete."""
        return (*(row.request for row in self.decode), *(chunk.request for chunk in self.prefill if chunk.is_last))


@dataclass(frozen=True)
class SchedulerStats:
    """What the scheduler has done. Token counts are of steps that ran; reused ones of requests that were admitted."""

    waiting: int  # now, without a slot
    running: int  # now, with a slot
    kv_tokens: int  # now, of the running ones in the cache
    steps: int
    prefill_tokens: int
    decode_tokens: int
    reused_tokens: int  # prompt tokens that were not run, copied_tokens among them
    copied_tokens: int
    finished: dict[str, int]  # by reason


@dataclass(eq=False)
class _Slot:
    """A row of the cache. tokens: those whose keys and values it holds, from column 0; kept when the request ends."""

    index: int
    tokens: list[int] = field(default_factory=list)
    request: Request | None = None
    freed_at: int = 0  # the lower, the longer unused


class Scheduler:
    """Gives requests slots and steps, first come, first served.

    Prompt and output together never exceed `max_seq_len`, the columns. Each chunk of a prompt is padded to one of
    `prefill_widths`. eos_token_ids: end a request that does not ignore them.

    A request that ended leaves its tokens in its slot. A new one takes the free slot that shares the longest prefix
    with its prompt, the longest unused one among equals, and computes only the rest; if a running slot shares more,
    that much is copied. It waits while a prompt before it computes at least half of what it needs itself, and then
    copies that. At least the last token of a prompt is always run, for its logits; all of it if `prompt_logprobs` are
    asked for. How a prompt is cut into chunks does not depend on the other requests. Not thread-safe.
    """

    def __init__(self, config: EngineConfig, eos_token_ids: Sequence[int] = ()) -> None:
        assert config.max_seq_len is not None, "the model's positions say it"
        self.max_batch, self.max_seq_len = config.max_batch, config.max_seq_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decode_buckets = buckets(self.max_batch)
        chunk = min(config.prefill_chunk_tokens, self.max_seq_len)
        self.prefill_widths = tuple(n for n in buckets(chunk) if n in (1, chunk) or n >= SMALLEST_WIDTH)
        default = min(DEFAULT_PREFILL_CHUNKS, self.max_batch) * chunk
        self.max_prefill_tokens = config.max_prefill_tokens or default
        self._slots = [_Slot(index) for index in range(self.max_batch)]
        self._requests: dict[str, Request] = {}  # not finished, in the order they came
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []  # in the order they came
        self._frees = 0
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        """Queue a new request. `ValueError` for an empty or too long prompt, or an id that is still in use."""
        self.check_prompt(request.prompt_token_ids)
        check(request.id not in self._requests, "id", request.id, "is that of a request that has not finished")
        assert request.state == "waiting" and request.slot is None, "a request runs once"
        self._requests[request.id] = request
        self._waiting.append(request)

    def check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """`ValueError` if it is empty or too long."""
        length = len(prompt_token_ids)
        check(length > 0, "prompt", prompt_token_ids, "must hold at least one token")
        constraint = f"must be below max_seq_len = {self.max_seq_len}, to leave room for a token of output"
        check(length < self.max_seq_len, "len(prompt_token_ids)", length, constraint)

    def abort(self, request_id: str) -> Request | None:
        """`finish` with the reason "abort"."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request now, as after a stop string; None if no request of this id is waiting or running.

        Also between `schedule` and `update`: the token under way is then dropped. Nothing that an "error" left in the
        cache is used again.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if reason == "error" and request.slot is not None:
            self._slots[request.slot].tokens.clear()
        if request.state == "waiting":
            self._waiting.remove(request)
        if request.state == "prefill":
            self._prefilling.remove(request)
        if request.slot is not None:
            slot = self._slots[request.slot]
            self._frees += 1
            slot.request, slot.freed_at = None, self._frees
        request.state, request.finish_reason, request.slot = "finished", reason, None
        self._finished[reason] += 1
        return request

    def schedule(self) -> StepPlan:
        """The next step. Empty if nothing waits or runs. Without an `update` between, the same again."""
        decode = tuple(
            DecodeRow(slot.request, slot.index, slot.request.output_token_ids[-1], slot.request.num_computed_tokens)
            for slot in self._slots
            if slot.request is not None and slot.request.state == "decode"
        )
        chunks: list[PrefillChunk] = []
        tokens = self.max_prefill_tokens
        while len(chunks) < len(self._prefilling) or self._admit(tokens):
            chunks.append(self._next_chunk(self._prefilling[len(chunks)]))
            tokens -= self.width(chunks[-1])
        assert tokens >= 0, "the chunks of a prompt never get wider, so those of prompts under way fit"
        return StepPlan(decode, tuple(chunks))

    def width(self, chunk: PrefillChunk) -> int:
        """The tokens of a chunk, with padding."""
        return bucket(len(chunk.tokens), self.prefill_widths)

    def prefill_groups(self, plan: StepPlan) -> list[PrefillGroup]:
        """The chunks of a plan by programs, each in one of `prefill_shapes`: no row is padding."""
        by_width: dict[int, list[PrefillChunk]] = {}
        for chunk in sorted(plan.prefill, key=lambda chunk: not chunk.is_last):
            by_width.setdefault(self.width(chunk), []).append(chunk)
        groups = []
        for width, chunks in by_width.items():
            for rows in reversed(self._rows(width)):
                while len(chunks) >= rows:
                    groups.append(PrefillGroup(width, tuple(chunks[:rows])))
                    chunks = chunks[rows:]
        return groups

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, width) of every program that a prefill may need."""
        return tuple((rows, width) for width in self.prefill_widths for rows in self._rows(width))

    def update(self, plan: StepPlan, tokens: Sequence[int]) -> list[Request]:
        """Take in the tokens drawn for `plan.sampled_requests`; returns the requests that ended with them.

        A request ends with "stop" at an end-of-text or stop token, unless it is among its first `min_new_tokens`;
        with "length" after `max_new_tokens`, or when its row is full. If the engine finds a stop string in the text
        of such a last token, it sets that `finish_reason` itself.
        """
        sampled = plan.sampled_requests
        assert len(tokens) == len(sampled), f"{len(tokens)} tokens for {len(sampled)} requests"
        self._counts["steps"] += not plan.is_empty
        self._counts["decode_tokens"] += len(plan.decode)
        for row in plan.decode:
            self._note_computed(row.request, row.slot, row.position, [row.token])
        for chunk in plan.prefill:
            self._counts["prefill_tokens"] += len(chunk.tokens)
            self._note_computed(chunk.request, chunk.slot, chunk.start, chunk.tokens)
        finished = []
        for request, token in zip(sampled, tokens):
            if request.state == "finished":  # in the meantime, by `finish`
                continue
            if request.state == "prefill":
                self._prefilling.remove(request)
                request.state = "decode"
            request.output_token_ids.append(int(token))
            if (reason := self._reason_to_finish(request)) is not None:
                self.finish(request.id, reason)
                finished.append(request)
        return finished

    @property
    def has_unfinished(self) -> bool:
        """Whether `schedule` would return a plan that is not empty."""
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        count = self._counts
        return SchedulerStats(
            waiting=len(self._waiting),
            running=len(self._requests) - len(self._waiting),
            kv_tokens=sum(request.num_computed_tokens for request in self._requests.values()),
            steps=count["steps"],
            prefill_tokens=count["prefill_tokens"],
            decode_tokens=count["decode_tokens"],
            reused_tokens=count["reused_tokens"],
            copied_tokens=count["copied_tokens"],
            finished=dict(self._finished),
        )

    def _rows(self, width: int) -> list[int]:
        """The rows of programs of this width, ascending: few, and any number of chunks is a sum of them."""
        most = min(self.max_batch, self.max_prefill_tokens // width)
        rows = [1]
        while rows[-1] * ROWS_RATIO <= most:
            rows.append(rows[-1] * ROWS_RATIO)
        return rows

    def _admit(self, tokens: int) -> bool:
        """Give the longest waiting request a slot, if one is free and its first chunk fits `tokens` with padding."""
        free = [slot for slot in self._slots if slot.request is None]
        if not free or not self._waiting:
            return False
        request = self._waiting[0]
        prompt = request.prompt_token_ids if request.sampling.prompt_logprobs is None else []
        shared = {slot.index: _common_prefix(slot.tokens, prompt[:-1]) for slot in self._slots}
        target = max(free, key=lambda slot: (shared[slot.index], -slot.freed_at))
        source = max(self._slots, key=lambda slot: shared[slot.index])
        length = shared[source.index]
        rest = len(request.prompt_token_ids) - length
        coming = max((_common_prefix(r.prompt_token_ids, prompt[:-1]) for r in self._prefilling), default=0)
        if bucket(self._chunk_tokens(rest), self.prefill_widths) > tokens or 2 * (coming - length) >= rest:
            return False
        self._waiting.popleft()
        if length > shared[target.index]:
            request.copy_from = (source.index, length)
            self._counts["copied_tokens"] += length
        del target.tokens[shared[target.index] :]  # a copied prefix counts once the step that copies it has run
        target.request = request
        request.state, request.slot = "prefill", target.index
        request.num_computed_tokens = request.num_reused_tokens = length
        self._counts["reused_tokens"] += length
        self._prefilling.append(request)
        return True

    def _chunk_tokens(self, rest: int) -> int:
        """How many of the `rest` tokens of a prompt run in the next step."""
        return min(rest, self.prefill_widths[-1])

    def _next_chunk(self, request: Request) -> PrefillChunk:
        assert request.slot is not None
        prompt, start = request.prompt_token_ids, request.num_computed_tokens
        end = start + self._chunk_tokens(len(prompt) - start)
        copy_from = request.copy_from if start == request.num_reused_tokens else None
        return PrefillChunk(request, request.slot, start, prompt[start:end], end == len(prompt), copy_from)

    def _note_computed(self, request: Request, slot: int, start: int, tokens: list[int]) -> None:
        """The keys and values of `tokens` are in the slot now."""
        if request.state == "finished":  # while the step ran; its slot may be another's
            return
        assert (request.slot, request.num_computed_tokens) == (slot, start), "a plan is taken in once, and in order"
        resident = self._slots[slot].tokens
        resident += request.prompt_token_ids[len(resident) : start]  # what was copied into it, before a first chunk
        resident += tokens
        request.num_computed_tokens += len(tokens)

    def _reason_to_finish(self, request: Request) -> FinishReason | None:
        sampling, output = request.sampling, request.output_token_ids
        if len(output) > sampling.min_new_tokens:
            ends_text = output[-1] in self.eos_token_ids and not sampling.ignore_eos
            if ends_text or output[-1] in sampling.stop_token_ids:
                return "stop"
        full = request.num_tokens >= self.max_seq_len
        return "length" if full or len(output) >= sampling.max_new_tokens else None


def _noise_seed(seed: int, prompt_token_ids: list[int]) -> int:
    """A number in [0, 2^63) from both."""
    words = array("q", [seed, *prompt_token_ids])
    return int.from_bytes(hashlib.blake2b(words.tobytes(), digest_size=8).digest(), "little") >> 1


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many first tokens are equal. Slices compare at the speed of C: prompts have many thousands of tokens."""
    if not a or not b or a[0] != b[0]:
        return 0
    equal, end = 1, min(len(a), len(b)) + 1  # the first `equal` are; the first `end` are not, or do not exist
    while end - equal > 1:
        middle = (equal + end) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            end = middle
    return equal
