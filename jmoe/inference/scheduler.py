"""Continuous batching: decide which tokens run in the next step, and in which blocks of the cache.

The engine's loop is

    plan = scheduler.schedule()
    ...run `scheduler.group_chunks(plan)`, sample one token for each of plan.sampled_sequences...
    finished = scheduler.update(plan, tokens)

Every step runs one token of each decoding sequence (unless it is paused), with a draft of the
tokens that may follow it if there is one, and a chunk of each prompt that fits, so a long prompt
never blocks the others. A running sequence has one of `max_batch` rows
(of the sampler's state; a row belongs to one device) and a table of blocks: its token i (prompt,
then output) is in block i // block_tokens of the table.

Imports the standard library and jmoe's own modules without JAX.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple

from jmoe.config import check
from jmoe.config.engine import CACHE_BLOCK, EngineConfig
from jmoe.inference.block_pool import (
    NOTHING_CACHED,
    BlockPool,
    CachedPrefix,
    common_prefix_length,
    extend_digests,
)
from jmoe.inference.sequence import FinishReason, Sequence
from jmoe.inference.speculation import Drafter, PredictedDraft, PromptLookup

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


def _priority_of(sequence: Sequence) -> int:
    return sequence.priority


def smallest_bucket(n: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of the ascending `sizes` that is at least n. Raises ValueError if none
    is.
    """
    check(n <= sizes[-1], "n", n, f"must not exceed the largest bucket, {sizes[-1]}")
    return sizes[bisect_left(sizes, n)]


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a sequence that run in one step, from position `start` on.

    is_last: a token is sampled after them: they end the prompt, or are the sequence's latest
        output.
    num_drafted: how many of the tokens, the last ones, are a draft. A token is sampled after the
        token before the draft, and after each drafted token that equals the one sampled before.
    block_ids: the sequence's table: the blocks of its positions, in order. It has the position
        after the chunk too where a decoding sequence has a block for it.
    copies: pairs (block, block into which it is copied before the step runs). All copies happen
        before any token of the step is written, in the plan's order.
    """

    sequence: Sequence
    row: int
    start: int
    tokens: list[int]
    is_last: bool = True
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    copies: tuple[tuple[int, int], ...] = ()
    num_drafted: int = 0

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.start + len(self.tokens)

    def single_token_chunk(self, index: int) -> Chunk:
        """Return one token of a decoding sequence's chunk, as a step without drafts would run
        it.
        """
        at = self.start + index
        return Chunk(self.sequence, self.row, at, [self.tokens[index]], block_ids=self.block_ids)


@dataclass(frozen=True)
class ChunkGroup:
    """Chunks that run as one program of [num_rows, width] tokens, those with `is_last` first."""

    chunks: tuple[Chunk, ...]
    num_rows: int
    width: int


@dataclass(frozen=True)
class StepPlan:
    """One step: the latest token of every decoding sequence, and its draft; and chunks of prompts,
    oldest first.
    """

    decode: tuple[Chunk, ...] = ()
    prefill: tuple[Chunk, ...] = ()

    @property
    def has_drafts(self) -> bool:
        return any(chunk.num_drafted for chunk in self.decode)

    def without_drafts(self) -> StepPlan:
        """Return the step without its drafted tokens."""
        if not self.has_drafts:
            return self
        return StepPlan(tuple(chunk.single_token_chunk(0) for chunk in self.decode), self.prefill)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.decode + self.prefill

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """The sequences that get a token, in the order that `update` expects."""
        return [chunk.sequence for chunk in self.chunks if chunk.is_last]


@dataclass(frozen=True)
class SchedulerStats:
    """Current numbers of sequences, tokens and blocks; the last four count since the start."""

    waiting: int  # sequences without a row: new ones, and preempted ones
    running: int  # sequences with a row
    kv_tokens: int  # tokens of running sequences in the cache, those of a shared block once
    blocks: int  # of the cache
    blocks_used: int  # held by running sequences
    blocks_cached: int  # held by none, whose tokens can be reused until the memory is needed
    reused_tokens: int  # prompt tokens that were found in the cache and so not run
    prompt_tokens: int  # of the sequences that have got a row
    preemptions: int  # sequences that gave back their blocks, to be computed again


class _Admission(NamedTuple):
    """A pool that a waiting sequence may enter, and what the cache has of the sequence.

    here: the prefix in this pool, whose full blocks are shared. longest: the longest prefix in any
    pool, from which the tokens beyond `here` are copied.
    """

    pool: int
    here: CachedPrefix
    longest: CachedPrefix


class Scheduler:
    """Assigns rows, blocks and steps to sequences, first come, first served. Not thread-safe.

    Prompt and output together have at most `max_seq_len` tokens. Each prompt chunk is padded to one
    of `prefill_widths`; the split into chunks does not depend on other sequences.

    A sequence shares the full blocks of the longest prefix of its prompt that the cache has,
    computed with the same adapter. The part of a block that goes on from there is copied to a block
    of its own (if no running sequence has the block and the prompt continues it, the block itself
    is taken). Only the remaining tokens run. The sequence waits while an earlier prompt is
    computing at least half of the tokens that it needs. At least the last prompt token always runs,
    for its logits, and all of them if `prompt_logprobs` are requested. Blocks of finished sequences
    stay until their memory is needed.

    A sequence enters once there are blocks for its prompt, and one more for each running sequence
    that may need one. If a decoding sequence needs a block and all are in use, the sequence that
    entered last is preempted, among those with the largest `priority`: it gives its blocks back,
    waits in front of the others of its priority, and later computes its prompt and output again,
    save what the cache still has.

    eos_token_ids: tokens that end a sequence unless it ignores them.
    """

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: Collection[int] = (),
        *,
        ratio: int = 2,
        block_tokens: int = CACHE_BLOCK,
        has_states: bool = False,
        attention_chunk: int | None = None,
    ) -> None:
        """Set the sizes of programs.

        ratio: between consecutive sizes; a larger ratio means fewer programs and more padding.
        block_tokens: positions of a block; another number than the cache's is for tests.
        has_states: True if each row has a state of its sequence's tokens beside their blocks. A
            prefix is then reused only by a sequence that goes on from the last computed token of
            one that has ended or was preempted, in its row, until another sequence takes the row.
        attention_chunk: positions of a chunk within which layers of the model attend; the tokens of
            a sequence that run in one step are of one chunk. None if no layer does.
        """
        assert config.max_seq_len is not None, "the model's positions say it"
        self._attention_chunk = attention_chunk
        self._has_states = has_states
        self.max_batch, self.max_seq_len = config.max_batch, config.max_seq_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decode_buckets = bucket_sizes(self.max_batch, ratio)
        chunk = min(config.prefill_chunk_tokens, self.max_seq_len)
        self.prefill_widths = tuple(
            n for n in bucket_sizes(chunk, ratio) if n in (1, chunk) or n >= SMALLEST_WIDTH
        )
        default = min(DEFAULT_PREFILL_CHUNKS, self.max_batch) * chunk
        self.max_prefill_tokens = config.max_prefill_tokens or default
        self._predicts = config.speculation == "mtp"
        self._lookup_sizes = config.prompt_lookup_max, config.prompt_lookup_min
        self.max_drafted = config.draft_width - 1
        self.block_tokens = block_tokens
        num_pools = config.num_cache_pools
        size = config.num_cache_blocks(block_tokens) // num_pools
        self._pools = [BlockPool(i * size, size, block_tokens) for i in range(num_pools)]
        self._rows_per_pool = self.max_batch // num_pools
        self._rows: list[Sequence | None] = [None] * self.max_batch
        # of rows without a sequence: the tokens whose state the row has, and since when
        self._row_states: list[tuple[int, list[int]]] = [(0, [])] * self.max_batch
        self._waiting: deque[Sequence] = deque()  # by priority
        self._running: list[Sequence] = []  # in the order they entered
        self._prefilling: list[Sequence] = []  # likewise
        self._clock = count(1)  # of uses of blocks
        self._reused_tokens = self._prompt_tokens = self._preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises ValueError as `check_prompt_length` does."""
        self.check_prompt_length(sequence.prompt_token_ids)
        assert sequence.status == "waiting" and sequence not in self._waiting, (
            "a sequence runs once"
        )
        if self.max_drafted:
            sequence.drafter = self._make_drafter()
        place = bisect_right(self._waiting, sequence.priority, key=_priority_of)
        self._waiting.insert(place, sequence)

    def _make_drafter(self) -> Drafter:
        """Return the drafter of a new sequence."""
        return (
            PredictedDraft()
            if self._predicts
            else PromptLookup(self.max_drafted, *self._lookup_sizes)
        )

    def check_prompt_length(self, prompt_token_ids: Collection[int]) -> None:
        """Raise ValueError if a prompt is empty, or does not leave a position for one output
        token.
        """
        length = len(prompt_token_ids)
        check(length > 0, "prompt", prompt_token_ids, "must hold at least one token")
        constraint = (
            f"must be below max_seq_len = {self.max_seq_len}, to leave room for a token of output"
        )
        check(length < self.max_seq_len, "len(prompt_token_ids)", length, constraint)

    def finish(
        self, sequence: Sequence, reason: FinishReason, *, reuses_blocks: bool = True
    ) -> bool:
        """End a sequence now, e.g. at a stop string; return False if it is neither waiting nor
        running.

        Between `schedule` and `update` this discards the token being sampled.
        reuses_blocks: False if the content of the blocks that this sequence alone holds is wrong.
        """
        if sequence.row is not None:
            if not reuses_blocks:
                self._pool_of(sequence).remove_unshared_from_index(sequence.block_ids)
            # with an error the tokens of the step under way are not recorded
            self._release_row_and_blocks(sequence, keeps_state=reason != "error" and reuses_blocks)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            return False
        sequence.status, sequence.finish_reason = "finished", reason
        return True

    def forget_cached_prefixes(self) -> None:
        """Forget the prefixes in the cache, whose blocks something else overwrites; no sequence may
        run.
        """
        assert not self._running, "their blocks would be overwritten"
        for pool in self._pools:
            pool.forget_cached()
        self._row_states = [(0, [])] * self.max_batch

    @property
    def decoding_sequences(self) -> list[Sequence]:
        """The running sequences whose prompt is complete."""
        return [sequence for sequence in self._running if sequence.status == "decode"]

    @property
    def decoding_and_preempted_sequences(self) -> list[Sequence]:
        """The decoding sequences, and the waiting ones that were preempted."""
        return self.decoding_sequences + [s for s in self._waiting if s.num_preemptions]

    def has_capacity_for(self, priority: int) -> bool:
        """Return whether another sequence of this priority may wait here: it would have a row, and
        no sequence that ranks before it waits, or blocks are free beyond those that these need.

        Counts the blocks that the next sequences need to enter, as if none shared a prefix.
        """
        earlier = list(takewhile(lambda other: other.priority <= priority, self._waiting))
        if len(self._running) + len(earlier) >= self.max_batch:
            return False
        if not earlier:
            return True
        free = sum(pool.num_free - self._num_sequences_that_may_grow(pool) for pool in self._pools)
        return sum(self._num_blocks(s.num_tokens) + 1 for s in earlier) < free

    def schedule(self) -> StepPlan:
        """Return the next step; empty if no sequence waits and all running ones are paused.

        Idempotent until `update` is called.
        """
        for sequence in self.decoding_sequences:  # the ones that entered first come first
            if sequence.status == "decode" and not sequence.is_paused:
                self._allocate_next_block(sequence)
        decode = tuple(
            self._decode_chunk(sequence, row)
            for row, sequence in enumerate(self._rows)
            if sequence is not None and sequence.status == "decode" and not sequence.is_paused
        )
        for chunk in decode:
            self._allocate_block_ahead(chunk)
        chunks: list[Chunk] = []
        tokens = self.max_prefill_tokens
        while len(chunks) < len(self._prefilling) or self._admit_next(tokens):
            sequence = self._prefilling[len(chunks)]
            chunks.append(self._next_prompt_chunk(sequence))
            # a prompt's next step may be wider than one that an attention chunk ends
            rest = len(sequence.known_token_ids) - chunks[-1].start
            tokens -= smallest_bucket(self._next_chunk_size(rest), self.prefill_widths)
        assert tokens >= 0, (
            "the chunks of a prompt never get wider, so those of prompts under way fit"
        )
        return StepPlan(decode, tuple(chunks))

    def padded_width(self, chunk: Chunk) -> int:
        """Return the width of a prompt chunk, with padding."""
        return smallest_bucket(len(chunk.tokens), self.prefill_widths)

    def group_chunks(self, plan: StepPlan) -> list[ChunkGroup]:
        """Return a plan's chunks by program: one group of decoding sequences without drafts, one
        of those with drafts, then groups of prompts.

        Groups of prompts have shapes of `prefill_program_shapes` and no rows of padding.
        """
        groups = []
        for width, drafted in ((1, False), (1 + self.max_drafted, True)):
            rows = tuple(chunk for chunk in plan.decode if (chunk.num_drafted > 0) == drafted)
            if rows:
                num_rows = smallest_bucket(len(rows), self.decode_buckets)
                groups.append(ChunkGroup(rows, num_rows, width))
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

    @property
    def draft_program_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, width) of every program that sequences with drafts may need."""
        width = 1 + self.max_drafted
        return tuple((rows, width) for rows in self.decode_buckets) if width > 1 else ()

    @property
    def max_decode_tokens(self) -> int:
        """The most tokens of a step without prompts."""
        return self.max_batch * (1 + self.max_drafted)

    def update(self, plan: StepPlan, sampled_tokens: list[int]) -> list[Sequence]:
        """Append the tokens sampled for `plan.sampled_sequences`; return the sequences that end
        with them.

        A plan with drafts comes in several calls: `without_drafts`, then one for each accepted
        token.

        A sequence ends with reason "stop" at an end-of-text or stop token after its first
        `min_new_tokens` tokens, and with "length" after `max_new_tokens` or when its row is full.
        If the engine finds a stop string in the text of that last token, it overwrites
        `finish_reason`.
        """
        for chunk in plan.chunks:
            self._record_computed_tokens(chunk)
        finished = []
        for sequence, token in zip(plan.sampled_sequences, sampled_tokens, strict=True):
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

    def has_block_ahead(self, chunk: Chunk) -> bool:
        """Return whether a decoding sequence has a block for the token after its chunk's."""
        return chunk.end < len(chunk.block_ids) * self.block_tokens

    def pause_drafting_after_miss(self) -> bool:
        """Pause drafting for a few tokens, as this step had no draft; return
        whether no sequence drafts in the next step, which can then begin ahead.
        """
        drafters = [(s.drafter, s.num_tokens) for s in self.decoding_sequences if s.drafter]
        if any(not drafter.is_paused(num_tokens) for drafter, num_tokens in drafters):
            for drafter, num_tokens in drafters:
                drafter.pause_after_miss(num_tokens + 1)
        return all(drafter.is_paused(num_tokens + 1) for drafter, num_tokens in drafters)

    def may_continue_after_next_token(self, sequence: Sequence) -> bool:
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
        return bool(self._waiting or self._running)

    def stats(self) -> SchedulerStats:
        """Return the current numbers of sequences, tokens and blocks."""
        num_blocks = sum(pool.num_blocks for pool in self._pools)
        return SchedulerStats(
            waiting=len(self._waiting),
            running=len(self._running),
            kv_tokens=sum(sequence.num_computed_tokens for sequence in self._running)
            - sum(pool.num_tokens_saved_by_sharing for pool in self._pools),
            blocks=num_blocks,
            blocks_used=num_blocks - sum(pool.num_free for pool in self._pools),
            blocks_cached=sum(pool.num_cached for pool in self._pools),
            reused_tokens=self._reused_tokens,
            prompt_tokens=self._prompt_tokens,
            preemptions=self._preemptions,
        )

    def _program_row_counts(self, width: int) -> list[int]:
        """Return the row counts of programs of this width, ascending; any number of chunks is a sum
        of them.
        """
        most = min(self.max_batch, self.max_prefill_tokens // width)
        rows = [1]
        while rows[-1] * ROWS_RATIO <= most:
            rows.append(rows[-1] * ROWS_RATIO)
        return rows

    def _pool_of(self, sequence: Sequence) -> BlockPool:
        """Return the pool of a running sequence's blocks."""
        assert sequence.row is not None
        return self._pools[sequence.row // self._rows_per_pool]

    def _num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of `num_tokens` positions."""
        return -(-num_tokens // self.block_tokens)

    def _release_row_and_blocks(self, sequence: Sequence, *, keeps_state: bool = True) -> None:
        """Free a running sequence's row and its blocks, whose content can be reused.

        keeps_state: whether the row has the state of all computed tokens. In prefill it may be that
            of a step under way; a decoding step that ran ahead leaves the state before it.
        """
        assert sequence.row is not None
        if self._has_states and keeps_state and sequence.status == "decode":
            computed = sequence.known_token_ids[: sequence.num_computed_tokens]
            self._row_states[sequence.row] = next(self._clock), computed
        self._pool_of(sequence).release(sequence.block_ids, next(self._clock))
        self._rows[sequence.row] = None
        self._running.remove(sequence)
        if sequence.status == "prefill":
            self._prefilling.remove(sequence)
        # chunks of the step under way still have the old table
        sequence.row, sequence.block_ids = None, array("i")

    def _preempt(self, sequence: Sequence) -> None:
        """Make a running sequence wait, in front of the others of its priority, to compute its
        tokens again.
        """
        self._release_row_and_blocks(sequence)
        sequence.status, sequence.num_computed_tokens = "waiting", 0
        sequence.num_preemptions += 1
        place = bisect_left(self._waiting, sequence.priority, key=_priority_of)
        self._waiting.insert(place, sequence)
        self._preemptions += 1

    def _allocate_next_block(self, sequence: Sequence) -> None:
        """Give a decoding sequence a block for its next token, if it has none.

        If all blocks are in use, the sequences of the same pool that rank last, and of these the
        ones that entered last, are preempted, this one at the latest.
        """
        needed, pool = self._num_blocks(sequence.num_computed_tokens + 1), self._pool_of(sequence)
        while sequence.row is not None and len(sequence.block_ids) < needed:
            if pool.num_free:
                sequence.block_ids.extend(pool.allocate(1))
            else:
                others = (s for s in reversed(self._running) if self._pool_of(s) is pool)
                self._preempt(max(others, key=lambda other: other.priority))

    def _allocate_block_ahead(self, chunk: Chunk) -> None:
        """Give a decoding sequence a block for the token after its chunk's, if it may have such a
        token and a block is free.

        The step after this one may begin before `update` (`StepAhead`).
        """
        sequence = chunk.sequence
        if self.may_continue_after_next_token(sequence) and not self.has_block_ahead(chunk):
            pool = self._pool_of(sequence)
            if pool.num_free:
                sequence.block_ids.extend(pool.allocate(1))

    def _num_sequences_that_may_grow(self, pool: BlockPool) -> int:
        """Return the number of running sequences of a pool that may need another block."""
        return sum(
            len(s.block_ids)
            < self._num_blocks(
                min(
                    self.max_seq_len,
                    len(s.prompt_token_ids) + s.sampling.max_new_tokens,
                )
                - 1  # the last token is never written
            )
            for s in self._running
            if self._pool_of(s) is pool
        )

    def _admit_next(self, max_chunk_tokens: int) -> bool:
        """Give the first waiting sequence that is not paused a row and blocks; return False if it
        must go on waiting. Those of the lowest `priority` are first, then the longest waiting.

        It needs a free row and blocks, and its first chunk, padded, must not exceed
        `max_chunk_tokens`.
        """
        sequence = next((s for s in self._waiting if not s.is_paused), None)
        if sequence is None or not self._pools_with_free_row_and_block():
            return False
        known = sequence.known_token_ids
        needs_all = sequence.sampling.prompt_logprobs is not None and not sequence.output_token_ids
        reusable = [] if needs_all else known[:-1]
        row = None
        if self._has_states:
            row, reusable = self._find_row_to_continue(sequence, reusable)
        admissions = self._possible_admissions(sequence, reusable)
        coming = max(
            (
                common_prefix_length(s.known_token_ids, reusable)
                for s in self._prefilling
                if s.adapter == sequence.adapter and not self._has_states
            ),
            default=0,
        )
        for admission in admissions:
            length = max(admission.here.num_tokens, admission.longest.num_tokens)
            rest = len(known) - length
            if (
                smallest_bucket(self._next_chunk_size(rest), self.prefill_widths) > max_chunk_tokens
                or 2 * (coming - length) >= rest
            ):
                return False
            if self._assign_row_and_blocks(sequence, admission, len(known), row):
                break
        else:
            return False
        self._waiting.remove(sequence)
        sequence.status = "prefill"
        sequence.num_computed_tokens = sequence.first_position = length
        if not sequence.num_preemptions:
            sequence.num_reused_tokens = length
            self._reused_tokens += length
            self._prompt_tokens += len(known)
        self._running.append(sequence)
        self._prefilling.append(sequence)
        return True

    def _find_row_to_continue(
        self, sequence: Sequence, tokens: list[int]
    ) -> tuple[int | None, list[int]]:
        """Return (the free row that has the state of the longest prefix of `tokens` whose keys and
        values the row's pool has too, the prefix); (None, []) if there is none.
        """
        states = [
            (len(had), row)
            for row, (_, had) in enumerate(self._row_states)
            if had and self._rows[row] is None and tokens[: len(had)] == had
        ]
        for length, row in sorted(states, reverse=True):
            pool = self._pools[row // self._rows_per_pool]
            prefix = tokens[:length]
            cached = pool.find_cached_prefix(prefix, sequence.block_digests, sequence.prefix_root)
            if cached.num_tokens == length:
                return row, prefix
        return None, []

    def _free_row(self, pool: int) -> int:
        """Return a pool's free row: the one that has no state, or has had it for longest."""
        size = self._rows_per_pool
        free = [row for row in range(pool * size, pool * size + size) if self._rows[row] is None]
        return min(free, key=lambda row: self._row_states[row][0])

    def _possible_admissions(
        self, sequence: Sequence, reusable_tokens: list[int]
    ) -> list[_Admission]:
        """Return the pools with a free row, best first: the one that has the longest prefix of the
        `reusable_tokens`, then the one whose next block has been unused for longest.
        """
        prefixes = [
            pool.find_cached_prefix(reusable_tokens, sequence.block_digests, sequence.prefix_root)
            if reusable_tokens
            else NOTHING_CACHED
            for pool in self._pools
        ]
        longest = max(prefixes, key=lambda prefix: prefix.num_tokens)
        free = self._pools_with_free_row_and_block()
        free.sort(key=lambda i: (-prefixes[i].num_tokens, self._pools[i].last_use_of_next_block))
        return [_Admission(i, prefixes[i], longest) for i in free]

    def _pools_with_free_row_and_block(self) -> list[int]:
        """Return the numbers of the pools that have a free row and a free block."""
        size = self._rows_per_pool
        return [
            i
            for i, pool in enumerate(self._pools)
            if pool.num_free and None in self._rows[i * size : (i + 1) * size]
        ]

    def _assign_row_and_blocks(
        self, sequence: Sequence, admission: _Admission, num_tokens: int, row: int | None = None
    ) -> bool:
        """Give a waiting sequence a row of a pool, and blocks for `num_tokens` tokens.

        row: None for any. Returns False, without effect, if the pool has too few free blocks.
        """
        pool, (number, here, longest) = self._pools[admission.pool], admission
        shared, tail = list(here.full), here.tail
        copied: list[int] = []  # blocks whose content comes into the first new ones
        if longest.num_tokens > here.num_tokens:  # in another pool
            copied, tail = longest.full[len(shared) :], None
            copied += [] if longest.tail is None else [longest.tail]
        elif tail is not None and pool.is_cached(tail) and pool.num_tokens(tail) == here.num_tail:
            shared, tail = [*shared, tail], None
        elif tail is not None:
            copied = [tail]
        num_new = self._num_blocks(num_tokens) - len(shared)
        num_free = pool.num_free - sum(map(pool.is_cached, shared))
        if num_free < num_new + self._num_sequences_that_may_grow(pool):
            return False
        pool.add_holder(shared)
        if tail is not None and pool.is_cached(tail):
            pool.mark_most_recently_used(tail)
        new = pool.allocate(num_new)
        if tail in new:  # there was no other: its first tokens stay where they are
            new.remove(tail)
            new.insert(0, tail)
            copied = []
        sequence.block_ids = array("i", [*shared, *new])
        sequence.copies = tuple(zip(copied, new, strict=False))
        row = self._free_row(number) if row is None else row
        self._rows[row], sequence.row, self._row_states[row] = sequence, row, (0, [])
        return True

    def _decode_chunk(self, sequence: Sequence, row: int) -> Chunk:
        """Return a decoding sequence's latest token and its draft."""
        draft = self._draft_tokens(sequence)
        return Chunk(
            sequence,
            row,
            sequence.num_computed_tokens,
            sequence.output_token_ids[-1:] + draft,
            block_ids=sequence.block_ids,
            num_drafted=len(draft),
        )

    def _draft_tokens(self, sequence: Sequence) -> list[int]:
        """Return a decoding sequence's draft, [] for none, and allocate free blocks for it.

        A draft without enough free blocks is cut. It leaves the sequence at least one token to
        sample after it.
        """
        if sequence.drafter is None:
            return []
        prompt, output = sequence.prompt_token_ids, sequence.output_token_ids
        most = min(
            self.max_drafted,
            sequence.sampling.max_new_tokens - len(output) - 1,
            self.max_seq_len - sequence.num_tokens - 1,
            self._end_of_attention_chunk(sequence.num_computed_tokens) - sequence.num_tokens,
        )
        draft = sequence.drafter.draft_tokens(prompt, output, most)
        end, pool = sequence.num_tokens + len(draft), self._pool_of(sequence)
        missing = self._num_blocks(end) - len(sequence.block_ids)
        sequence.block_ids.extend(pool.allocate(min(max(0, missing), pool.num_free)))
        return draft[: len(sequence.block_ids) * self.block_tokens - sequence.num_tokens]

    def _next_chunk_size(self, num_remaining: int) -> int:
        """Return how many of a prompt's `num_remaining` tokens run in the next step."""
        return min(num_remaining, self.prefill_widths[-1])

    def _end_of_attention_chunk(self, position: int) -> int:
        """Return the position after the attention chunk that contains `position`."""
        size = self._attention_chunk or self.max_seq_len
        return (position // size + 1) * size

    def _next_prompt_chunk(self, sequence: Sequence) -> Chunk:
        """Return the tokens of a sequence in prefill that run in the next step."""
        assert sequence.row is not None
        tokens, start = sequence.known_token_ids, sequence.num_computed_tokens
        size = self._next_chunk_size(len(tokens) - start)
        end = min(start + size, self._end_of_attention_chunk(start))
        return Chunk(
            sequence,
            sequence.row,
            start,
            tokens[start:end],
            end == len(tokens),
            sequence.block_ids,
            sequence.copies if start == sequence.first_position else (),
        )

    def _record_computed_tokens(self, chunk: Chunk) -> None:
        """Record that a chunk's keys and values are in its blocks, and those copied before it."""
        sequence = chunk.sequence
        if sequence.row is None:  # ended while the step ran; its blocks may have a new owner
            return
        assert (sequence.row, sequence.num_computed_tokens) == (chunk.row, chunk.start), (
            "a plan is taken in once"
        )
        pool, size, start = self._pool_of(sequence), self.block_tokens, chunk.start
        tokens, digests, root = chunk.tokens, sequence.block_digests, sequence.prefix_root
        if start == sequence.first_position:  # blocks that were copied before have no tokens yet
            tokens, start = sequence.known_token_ids[: chunk.end], 0
        for i in range(start // size, self._num_blocks(chunk.end)):
            block = sequence.block_ids[i]
            begin = i * size + pool.num_tokens(block)
            new = tokens[begin - start : (i + 1) * size - start]
            if new:
                if len(digests) < i:
                    extend_digests(digests, sequence.known_token_ids, i, size, root)
                pool.record_tokens(block, digests[i - 1] if i else root, new)
        sequence.num_computed_tokens = chunk.end

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Return why the sequence ends with its latest token; None if it goes on."""
        sampling, output = sequence.sampling, sequence.output_token_ids
        if len(output) > sampling.min_new_tokens:
            ends_text = output[-1] in self.eos_token_ids and not sampling.ignore_eos
            if ends_text or output[-1] in sampling.stop_token_ids:
                return "stop"
        full = sequence.num_tokens >= self.max_seq_len
        return "length" if full or len(output) >= sampling.max_new_tokens else None
