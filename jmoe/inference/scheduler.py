"""Continuous batching: which sequence's tokens run in the next step, and in which row of the cache.

Standard library only. The engine's loop is

    plan = scheduler.schedule()
    ...run `scheduler.groups(plan)`, draw one token for each of plan.sampled...
    finished = scheduler.update(plan, tokens)

Every step runs all sequences that are past their prompt and do not rest, one token each, and beside
them a chunk of every prompt that fits the step, so a long prompt never makes the others wait. The
cache is [max_batch, max_seq_len]: a running sequence owns one row, and its token i (prompt, then
output) lies in column i.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from jmoe.config import check
from jmoe.config.engine import EngineConfig
from jmoe.inference.sequence import FinishReason, Sequence

SMALLEST_WIDTH = 16  # of more than one token: a narrower program would hardly be quicker
ROWS_RATIO = 4  # of prefill programs: rows, unlike tokens, are never padding
# in a step: reading every expert once must serve many tokens where experts are streamed
DEFAULT_PREFILL_CHUNKS = 8


def buckets(maximum: int, ratio: int = 2) -> tuple[int, ...]:
    """Return the sizes that programs are compiled for: 1, ratio, ratio^2, ... and `maximum`."""
    sizes = [1]
    while ratio * sizes[-1] < maximum:
        sizes.append(ratio * sizes[-1])
    return tuple(sorted({*sizes, maximum}))


def bucket(n: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of the ascending `sizes` that holds n; `ValueError` if none does."""
    check(n <= sizes[-1], "n", n, f"must not exceed the largest bucket, {sizes[-1]}")
    return sizes[bisect_left(sizes, n)]


@dataclass(frozen=True)
class Chunk:
    """Tokens of a sequence that run in one step, at columns `start`, `start + 1`, ... of a row of
    the cache.

    is_last: a token is drawn after them, as they end the prompt or are the sequence's last token.
    copy_from: before anything of this step runs, copy columns 0 ... start - 1 of that row into
    `row`; several in the order of the plan.
    """

    sequence: Sequence
    row: int
    start: int
    tokens: list[int]
    is_last: bool = True
    copy_from: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class ChunkGroup:
    """Chunks that run as one program, [num_rows, width]; those after which a token is drawn come
    first.
    """

    chunks: tuple[Chunk, ...]
    num_rows: int
    width: int


@dataclass(frozen=True)
class StepPlan:
    """One step: the last token of every sequence past its prompt, and chunks of other prompts,
    oldest first.
    """

    decode: tuple[Chunk, ...] = ()
    prefill: tuple[Chunk, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.decode + self.prefill

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order that `update` wants them."""
        return [chunk.sequence for chunk in self.chunks if chunk.is_last]


@dataclass(frozen=True)
class SchedulerStats:
    """Sequences and tokens now, but for `reused_tokens`, which are counted since the start."""

    waiting: int  # without a row
    running: int  # with a row
    kv_tokens: int  # of the running ones in the cache
    reused_tokens: int  # prompt tokens of admitted sequences that were not run


@dataclass(eq=False)
class _Row:
    """A row of the cache. tokens: those whose keys and values it holds, from column 0; kept when
    the sequence ends.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    freed_at: int = 0  # the lower, the longer unused


class Scheduler:
    """Gives sequences rows and steps, first come, first served.

    Prompt and output together never exceed `max_seq_len`, the columns. Each chunk of a prompt is
    padded to one of `prefill_widths`. eos_token_ids: end a sequence that does not ignore them.

    A sequence that ended leaves its tokens in its row. A new one takes the free row that shares the
    longest prefix with its prompt, the longest unused one among equals, and computes only the rest;
    if a running row shares more, that much is copied. It waits while a prompt before it computes at
    least half of what it needs itself, and then copies that. At least the last token of a prompt is
    always run, for its logits; all of it if `prompt_logprobs` are asked for. How a prompt is cut
    into chunks does not depend on the other sequences. Not thread-safe.
    """

    def __init__(
        self, config: EngineConfig, eos_token_ids: Collection[int] = (), *, ratio: int = 2
    ) -> None:
        """ratio: of the sizes of programs; the larger, the fewer there are, and the more of them
        is padding.
        """
        assert config.max_seq_len is not None, "the model's positions say it"
        self.max_batch, self.max_seq_len = config.max_batch, config.max_seq_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decode_buckets = buckets(self.max_batch, ratio)
        chunk = min(config.prefill_chunk_tokens, self.max_seq_len)
        self.prefill_widths = tuple(
            n for n in buckets(chunk, ratio) if n in (1, chunk) or n >= SMALLEST_WIDTH
        )
        default = min(DEFAULT_PREFILL_CHUNKS, self.max_batch) * chunk
        self.max_prefill_tokens = config.max_prefill_tokens or default
        self._rows = [_Row(index) for index in range(self.max_batch)]
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []  # in the order they came
        self._frees = 0
        self._reused_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. `ValueError` for an empty or too long prompt."""
        self.check_prompt(sequence.prompt_token_ids)
        assert sequence.status == "waiting" and sequence not in self._waiting, (
            "a sequence runs once"
        )
        self._waiting.append(sequence)

    def check_prompt(self, prompt_token_ids: Collection[int]) -> None:
        """Raise `ValueError` if it is empty or too long."""
        length = len(prompt_token_ids)
        check(length > 0, "prompt", prompt_token_ids, "must hold at least one token")
        constraint = (
            f"must be below max_seq_len = {self.max_seq_len}, to leave room for a token of output"
        )
        check(length < self.max_seq_len, "len(prompt_token_ids)", length, constraint)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End a sequence now, as after a stop string; False if it is neither waiting nor running.

        Also between `schedule` and `update`: the token under way is then dropped. Nothing that an
        "error" left in the cache is used again.
        """
        if sequence.row is not None:
            row = self._rows[sequence.row]
            if reason == "error":
                row.tokens.clear()
            self._frees += 1
            row.sequence, row.freed_at = None, self._frees
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            return False
        if sequence.status == "prefill":
            self._prefilling.remove(sequence)
        sequence.status, sequence.finish_reason, sequence.row = "finished", reason, None
        return True

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences that are past their prompt."""
        running = [row.sequence for row in self._rows if row.sequence is not None]
        return [sequence for sequence in running if sequence.status == "decode"]

    def schedule(self) -> StepPlan:
        """Return the next step, empty if nothing waits and all that runs rests.

        Without an `update` between, the same again.
        """
        decode = tuple(
            Chunk(
                row.sequence,
                row.index,
                row.sequence.num_computed_tokens,
                row.sequence.output_token_ids[-1:],
            )
            for row in self._rows
            if row.sequence is not None
            and row.sequence.status == "decode"
            and not row.sequence.rests
        )
        chunks: list[Chunk] = []
        tokens = self.max_prefill_tokens
        while len(chunks) < len(self._prefilling) or self._admit(tokens):
            chunks.append(self._next_chunk(self._prefilling[len(chunks)]))
            tokens -= self.width(chunks[-1])
        assert tokens >= 0, (
            "the chunks of a prompt never get wider, so those of prompts under way fit"
        )
        return StepPlan(decode, tuple(chunks))

    def width(self, chunk: Chunk) -> int:
        """Return the tokens of a chunk of a prompt, with padding."""
        return bucket(len(chunk.tokens), self.prefill_widths)

    def groups(self, plan: StepPlan) -> list[ChunkGroup]:
        """Return a plan's chunks by program: `decode`, then prompts in `prefill_shapes` without
        padded rows.
        """
        groups = []
        if plan.decode:
            groups.append(ChunkGroup(plan.decode, bucket(len(plan.decode), self.decode_buckets), 1))
        by_width: dict[int, list[Chunk]] = {}
        for chunk in sorted(plan.prefill, key=lambda chunk: not chunk.is_last):
            by_width.setdefault(self.width(chunk), []).append(chunk)
        for width, chunks in by_width.items():
            for num_rows in reversed(self._num_rows(width)):
                while len(chunks) >= num_rows:
                    groups.append(ChunkGroup(tuple(chunks[:num_rows]), num_rows, width))
                    chunks = chunks[num_rows:]
        return groups

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, width) of every program that a prefill may need."""
        return tuple(
            (rows, width) for width in self.prefill_widths for rows in self._num_rows(width)
        )

    def update(self, plan: StepPlan, tokens: list[int]) -> list[Sequence]:
        """Take in the tokens drawn for `plan.sampled`; returns the sequences that ended with them.

        A sequence ends with "stop" at an end-of-text or stop token, unless it is among its first
        `min_new_tokens`; with "length" after `max_new_tokens`, or when its row is full. If the
        engine finds a stop string in the text of such a last token, it sets that `finish_reason`
        itself.
        """
        for chunk in plan.chunks:
            self._note_computed(chunk)
        finished = []
        for sequence, token in zip(plan.sampled, tokens, strict=True):
            if sequence.status == "finished":  # in the meantime, by `finish`
                continue
            if sequence.status == "prefill":
                self._prefilling.remove(sequence)
                sequence.status = "decode"
            sequence.output_token_ids.append(int(token))
            if (reason := self._reason_to_finish(sequence)) is not None:
                self.finish(sequence, reason)
                finished.append(sequence)
        return finished

    def may_go_on(self, sequence: Sequence) -> bool:
        """Return False for a sequence that surely ends with the token under way, by
        `max_new_tokens` or a full row.
        """
        length, most = len(sequence.output_token_ids) + 1, sequence.sampling.max_new_tokens
        return (
            sequence.status == "decode"
            and length < most
            and sequence.num_tokens + 1 < self.max_seq_len
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether `schedule` would return a plan that is not empty."""
        return bool(self._waiting) or any(row.sequence is not None for row in self._rows)

    def stats(self) -> SchedulerStats:
        running = [row.sequence for row in self._rows if row.sequence is not None]
        kv_tokens = sum(sequence.num_computed_tokens for sequence in running)
        return SchedulerStats(len(self._waiting), len(running), kv_tokens, self._reused_tokens)

    def _num_rows(self, width: int) -> list[int]:
        """Return the rows of programs of this width, ascending: few, and any number of chunks is
        a sum of them.
        """
        most = min(self.max_batch, self.max_prefill_tokens // width)
        rows = [1]
        while rows[-1] * ROWS_RATIO <= most:
            rows.append(rows[-1] * ROWS_RATIO)
        return rows

    def _admit(self, tokens: int) -> bool:
        """Give the longest waiting sequence a row, if one is free and its first chunk fits
        `tokens` with padding.
        """
        free = [row for row in self._rows if row.sequence is None]
        if not free or not self._waiting:
            return False
        sequence = self._waiting[0]
        prompt = sequence.prompt_token_ids if sequence.sampling.prompt_logprobs is None else []
        shared = {row.index: _common_prefix(row.tokens, prompt[:-1]) for row in self._rows}
        target = max(free, key=lambda row: (shared[row.index], -row.freed_at))
        source = max(self._rows, key=lambda row: shared[row.index])
        length = shared[source.index]
        rest = len(sequence.prompt_token_ids) - length
        coming = max(
            (_common_prefix(s.prompt_token_ids, prompt[:-1]) for s in self._prefilling), default=0
        )
        if (
            bucket(self._chunk_tokens(rest), self.prefill_widths) > tokens
            or 2 * (coming - length) >= rest
        ):
            return False
        self._waiting.popleft()
        if length > shared[target.index]:
            sequence.copy_from = source.index
        # a copied prefix counts once the step that copies it has run
        del target.tokens[shared[target.index] :]
        target.sequence = sequence
        sequence.status, sequence.row = "prefill", target.index
        sequence.num_computed_tokens = sequence.num_reused_tokens = length
        self._reused_tokens += length
        self._prefilling.append(sequence)
        return True

    def _chunk_tokens(self, rest: int) -> int:
        """Return how many of the `rest` tokens of a prompt run in the next step."""
        return min(rest, self.prefill_widths[-1])

    def _next_chunk(self, sequence: Sequence) -> Chunk:
        assert sequence.row is not None
        prompt, start = sequence.prompt_token_ids, sequence.num_computed_tokens
        end = start + self._chunk_tokens(len(prompt) - start)
        copy_from = sequence.copy_from if start == sequence.num_reused_tokens else None
        return Chunk(
            sequence, sequence.row, start, prompt[start:end], end == len(prompt), copy_from
        )

    def _note_computed(self, chunk: Chunk) -> None:
        """Take in that the keys and values of a chunk are in its row now."""
        sequence = chunk.sequence
        if sequence.status == "finished":  # while the step ran; its row may be another's
            return
        assert (sequence.row, sequence.num_computed_tokens) == (chunk.row, chunk.start), (
            "a plan is taken in once"
        )
        resident = self._rows[chunk.row].tokens
        # what was copied before a first chunk
        resident += sequence.prompt_token_ids[len(resident) : chunk.start]
        resident += chunk.tokens
        sequence.num_computed_tokens = chunk.end

    def _reason_to_finish(self, sequence: Sequence) -> FinishReason | None:
        sampling, output = sequence.sampling, sequence.output_token_ids
        if len(output) > sampling.min_new_tokens:
            ends_text = output[-1] in self.eos_token_ids and not sampling.ignore_eos
            if ends_text or output[-1] in sampling.stop_token_ids:
                return "stop"
        full = sequence.num_tokens >= self.max_seq_len
        return "length" if full or len(output) >= sampling.max_new_tokens else None


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many first tokens are equal. Slices compare at the speed of C: prompts may be
    very long.
    """
    if not a or not b or a[0] != b[0]:
        return 0
    # the first `equal` are; the first `end` are not, or do not exist
    equal, end = 1, min(len(a), len(b)) + 1
    while end - equal > 1:
        middle = (equal + end) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            end = middle
    return equal
