"""Continuous batching: decide which tokens run in the next step, and in which row of the KV cache.

The engine's loop is

    plan = scheduler.schedule()
    ...run `scheduler.group_chunks(plan)`, sample one token for each of plan.sampled_sequences...
    finished = scheduler.update(plan, tokens)

Every step runs one token of each decoding sequence (unless it is paused) and a chunk of each prompt
that fits, so a long prompt never blocks the others. The cache is [max_batch, max_seq_len]: a
running sequence owns one row, and its token i (prompt, then output) is in column i.

Imports the standard library and jmoe's own modules without JAX.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from jmoe.config import check
from jmoe.config.engine import EngineConfig
from jmoe.inference.sequence import FinishReason, Sequence

SMALLEST_WIDTH = 16  # of prefill programs; a narrower one would hardly be faster
ROWS_RATIO = 4  # between the numbers of rows of prefill programs, whose rows are never padding
# prompt chunks of a step: streaming an expert costs the same for many tokens as for few
DEFAULT_PREFILL_CHUNKS = 8


def bucket_sizes(maximum: int, ratio: int = 2) -> tuple[int, ...]:
    """Return the ascending sizes for which programs are compiled: 1, ratio, ratio^2, ... and
    `maximum`.
    """
    sizes = [1]
    while ratio * sizes[-1] < maximum:
        sizes.append(ratio * sizes[-1])
    return tuple(sorted({*sizes, maximum}))


def smallest_bucket(n: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of the ascending `sizes` that is at least n. Raises ValueError if none
    is.
    """
    check(n <= sizes[-1], "n", n, f"must not exceed the largest bucket, {sizes[-1]}")
    return sizes[bisect_left(sizes, n)]


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a sequence that run in one step, from column `start` of a row of the
    cache.

    is_last: a token is sampled after them: they end the prompt, or are the sequence's latest
        output.
    copy_from: row whose columns 0 to start - 1 are copied into `row` before the step runs; copies
        happen in the plan's order.
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
    """Chunks that run as one program of [num_rows, width] tokens, those with `is_last` first."""

    chunks: tuple[Chunk, ...]
    num_rows: int
    width: int


@dataclass(frozen=True)
class StepPlan:
    """One step: the latest token of every decoding sequence, and chunks of prompts, oldest
    first.
    """

    decode: tuple[Chunk, ...] = ()
    prefill: tuple[Chunk, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.decode + self.prefill

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """The sequences that get a token, in the order that `update` expects."""
        return [chunk.sequence for chunk in self.chunks if chunk.is_last]


@dataclass(frozen=True)
class SchedulerStats:
    """Current numbers of sequences and tokens; `reused_tokens` counts since the start."""

    waiting: int  # sequences without a row of the cache
    running: int  # sequences with a row
    kv_tokens: int  # tokens of running sequences in the cache
    reused_tokens: int  # prompt tokens that were found in the cache and so not run


@dataclass(eq=False)
class _CacheRow:
    """A row of the cache.

    tokens: those whose keys and values are in the row, from column 0 on; kept after the sequence
        ends, for reuse.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    freed_at: int = 0  # increases with every row that is freed; 0 if this one never was


class Scheduler:
    """Assigns rows of the cache and steps to sequences, first come, first served. Not thread-safe.

    Prompt and output together have at most `max_seq_len` tokens. Each prompt chunk is padded to one
    of `prefill_widths`; the split into chunks does not depend on other sequences.

    A finished sequence leaves its tokens in its row, for prefix reuse. A new sequence takes the
    free row that shares the longest prefix with its prompt (the least recently used one among
    equals), and runs only the remaining tokens. If a running row shares a longer prefix, that
    prefix is copied. The sequence waits while an earlier prompt is computing at least half of the
    tokens that it needs, and then copies them. At least the last prompt token always runs, for its
    logits, and all of them if `prompt_logprobs` are requested.

    eos_token_ids: tokens that end a sequence unless it ignores them.
    """

    def __init__(
        self, config: EngineConfig, eos_token_ids: Collection[int] = (), *, ratio: int = 2
    ) -> None:
        """Set the sizes of programs.

        ratio: between consecutive sizes; a larger ratio means fewer programs and more padding.
        """
        assert config.max_seq_len is not None, "the model's positions say it"
        self.max_batch, self.max_seq_len = config.max_batch, config.max_seq_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decode_buckets = bucket_sizes(self.max_batch, ratio)
        chunk = min(config.prefill_chunk_tokens, self.max_seq_len)
        self.prefill_widths = tuple(
            n for n in bucket_sizes(chunk, ratio) if n in (1, chunk) or n >= SMALLEST_WIDTH
        )
        default = min(DEFAULT_PREFILL_CHUNKS, self.max_batch) * chunk
        self.max_prefill_tokens = config.max_prefill_tokens or default
        self._rows = [_CacheRow(index) for index in range(self.max_batch)]
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []  # in the order they came
        self._frees = 0
        self._reused_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises ValueError as `check_prompt` does."""
        self.check_prompt(sequence.prompt_token_ids)
        assert sequence.status == "waiting" and sequence not in self._waiting, (
            "a sequence runs once"
        )
        self._waiting.append(sequence)

    def check_prompt(self, prompt_token_ids: Collection[int]) -> None:
        """Raise ValueError if a prompt is empty, or does not leave a position for one output
        token.
        """
        length = len(prompt_token_ids)
        check(length > 0, "prompt", prompt_token_ids, "must hold at least one token")
        constraint = (
            f"must be below max_seq_len = {self.max_seq_len}, to leave room for a token of output"
        )
        check(length < self.max_seq_len, "len(prompt_token_ids)", length, constraint)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End a sequence now, e.g. at a stop string; return False if it is neither waiting nor
        running.

        Between `schedule` and `update` this discards the token being sampled. After reason "error"
        the row's content is not reused.
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

    def forget_cached_prefixes(self) -> None:
        """Reuse nothing of the cache's rows, which something else overwrites; no sequence may
        run.
        """
        for row in self._rows:
            assert row.sequence is None, "its row would be overwritten"
            row.tokens.clear()

    @property
    def decoding_sequences(self) -> list[Sequence]:
        """The running sequences whose prompt is complete."""
        running = [row.sequence for row in self._rows if row.sequence is not None]
        return [sequence for sequence in running if sequence.status == "decode"]

    def schedule(self) -> StepPlan:
        """Return the next step; empty if no sequence waits and all running ones are paused.

        Idempotent until `update` is called.
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
            and not row.sequence.is_paused
        )
        chunks: list[Chunk] = []
        tokens = self.max_prefill_tokens
        while len(chunks) < len(self._prefilling) or self._admit_next(tokens):
            chunks.append(self._next_chunk(self._prefilling[len(chunks)]))
            tokens -= self.padded_width(chunks[-1])
        assert tokens >= 0, (
            "the chunks of a prompt never get wider, so those of prompts under way fit"
        )
        return StepPlan(decode, tuple(chunks))

    def padded_width(self, chunk: Chunk) -> int:
        """Return the width of a prompt chunk, with padding."""
        return smallest_bucket(len(chunk.tokens), self.prefill_widths)

    def group_chunks(self, plan: StepPlan) -> list[ChunkGroup]:
        """Return a plan's chunks by program: one group of decoding sequences, then groups of
        prompts.

        Groups of prompts have shapes of `prefill_program_shapes` and no rows of padding.
        """
        groups = []
        if plan.decode:
            groups.append(
                ChunkGroup(plan.decode, smallest_bucket(len(plan.decode), self.decode_buckets), 1)
            )
        by_width: dict[int, list[Chunk]] = {}
        for chunk in sorted(plan.prefill, key=lambda chunk: not chunk.is_last):
            by_width.setdefault(self.padded_width(chunk), []).append(chunk)
        for width, chunks in by_width.items():
            for num_rows in reversed(self._program_row_counts(width)):
                while len(chunks) >= num_rows:
                    groups.append(ChunkGroup(tuple(chunks[:num_rows]), num_rows, width))
                    chunks = chunks[num_rows:]
        return groups

    @property
    def prefill_program_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, width) of every program that prompts may need."""
        return tuple(
            (rows, width)
            for width in self.prefill_widths
            for rows in self._program_row_counts(width)
        )

    def update(self, plan: StepPlan, tokens: list[int]) -> list[Sequence]:
        """Append the tokens sampled for `plan.sampled_sequences`; return the sequences that end
        with them.

        A sequence ends with reason "stop" at an end-of-text or stop token after its first
        `min_new_tokens` tokens, and with "length" after `max_new_tokens` or when its row is full.
        If the engine finds a stop string in the text of that last token, it overwrites
        `finish_reason`.
        """
        for chunk in plan.chunks:
            self._note_computed(chunk)
        finished = []
        for sequence, token in zip(plan.sampled_sequences, tokens, strict=True):
            if sequence.status == "finished":  # `finish` was called while the step ran
                continue
            if sequence.status == "prefill":
                self._prefilling.remove(sequence)
                sequence.status = "decode"
            sequence.output_token_ids.append(int(token))
            if (reason := self._finish_reason(sequence)) is not None:
                self.finish(sequence, reason)
                finished.append(sequence)
        return finished

    def may_continue(self, sequence: Sequence) -> bool:
        """Return False if the sequence ends with the token being sampled, whatever that token
        is.
        """
        length, most = len(sequence.output_token_ids) + 1, sequence.sampling.max_new_tokens
        return (
            sequence.status == "decode"
            and length < most
            and sequence.num_tokens + 1 < self.max_seq_len
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._waiting) or any(row.sequence is not None for row in self._rows)

    def stats(self) -> SchedulerStats:
        running = [row.sequence for row in self._rows if row.sequence is not None]
        kv_tokens = sum(sequence.num_computed_tokens for sequence in running)
        return SchedulerStats(len(self._waiting), len(running), kv_tokens, self._reused_tokens)

    def _program_row_counts(self, width: int) -> list[int]:
        """Return the row counts of programs of this width, ascending; any number of chunks is a sum
        of them.
        """
        most = min(self.max_batch, self.max_prefill_tokens // width)
        rows = [1]
        while rows[-1] * ROWS_RATIO <= most:
            rows.append(rows[-1] * ROWS_RATIO)
        return rows

    def _admit_next(self, tokens: int) -> bool:
        """Give the longest waiting sequence a row; return False if it must go on waiting.

        It needs a free row, and its first chunk, padded, must not exceed `tokens`.
        """
        free = [row for row in self._rows if row.sequence is None]
        if not free or not self._waiting:
            return False
        sequence = self._waiting[0]
        prompt = sequence.prompt_token_ids if sequence.sampling.prompt_logprobs is None else []
        shared = {row.index: _common_prefix_length(row.tokens, prompt[:-1]) for row in self._rows}
        target = max(free, key=lambda row: (shared[row.index], -row.freed_at))
        source = max(self._rows, key=lambda row: shared[row.index])
        length = shared[source.index]
        rest = len(sequence.prompt_token_ids) - length
        coming = max(
            (_common_prefix_length(s.prompt_token_ids, prompt[:-1]) for s in self._prefilling),
            default=0,
        )
        if (
            smallest_bucket(self._next_chunk_size(rest), self.prefill_widths) > tokens
            or 2 * (coming - length) >= rest
        ):
            return False
        self._waiting.popleft()
        if length > shared[target.index]:
            sequence.copy_from = source.index
        # a copied prefix is added to the row's tokens once the step that copies it has run
        del target.tokens[shared[target.index] :]
        target.sequence = sequence
        sequence.status, sequence.row = "prefill", target.index
        sequence.num_computed_tokens = sequence.num_reused_tokens = length
        self._reused_tokens += length
        self._prefilling.append(sequence)
        return True

    def _next_chunk_size(self, rest: int) -> int:
        """Return how many of a prompt's `rest` tokens run in the next step."""
        return min(rest, self.prefill_widths[-1])

    def _next_chunk(self, sequence: Sequence) -> Chunk:
        assert sequence.row is not None
        prompt, start = sequence.prompt_token_ids, sequence.num_computed_tokens
        end = start + self._next_chunk_size(len(prompt) - start)
        copy_from = sequence.copy_from if start == sequence.num_reused_tokens else None
        return Chunk(
            sequence, sequence.row, start, prompt[start:end], end == len(prompt), copy_from
        )

    def _note_computed(self, chunk: Chunk) -> None:
        """Record that a chunk's keys and values are in its row."""
        sequence = chunk.sequence
        if sequence.status == "finished":  # ended while the step ran; its row may have a new owner
            return
        assert (sequence.row, sequence.num_computed_tokens) == (chunk.row, chunk.start), (
            "a plan is taken in once"
        )
        resident = self._rows[chunk.row].tokens
        # the prefix that was copied before the first chunk
        resident += sequence.prompt_token_ids[len(resident) : chunk.start]
        resident += chunk.tokens
        sequence.num_computed_tokens = chunk.end

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        sampling, output = sequence.sampling, sequence.output_token_ids
        if len(output) > sampling.min_new_tokens:
            ends_text = output[-1] in self.eos_token_ids and not sampling.ignore_eos
            if ends_text or output[-1] in sampling.stop_token_ids:
                return "stop"
        full = sequence.num_tokens >= self.max_seq_len
        return "length" if full or len(output) >= sampling.max_new_tokens else None


def _common_prefix_length(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two lists.

    Bisects with slice comparisons, which run in C: prompts may be very long.
    """
    if not a or not b or a[0] != b[0]:
        return 0
    # invariant: the first `equal` elements agree; the first `end` differ, or do not exist
    equal, end = 1, min(len(a), len(b)) + 1
    while end - equal > 1:
        middle = (equal + end) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            end = middle
    return equal
