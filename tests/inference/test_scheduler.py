"""The scheduler against blocks that are really written, copied and read, with a model that reads
all of a sequence.
"""

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.block_pool import BlockPool
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.scheduler import Chunk, Scheduler, StepPlan, bucket_sizes, smallest_bucket
from jmoe.inference.sequence import Sequence

VOCAB_SIZE = 50
EOS = 7
GARBAGE = -1
BLOCK = 8  # tokens


def make_scheduler(
    max_batch: int,
    max_seq_len: int,
    prefill_chunk_tokens: int,
    max_prefill_tokens: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    **options: Any,
) -> Scheduler:
    sizes = {"prefill_chunk_tokens": prefill_chunk_tokens, "max_prefill_tokens": max_prefill_tokens}
    config = EngineConfig(max_batch, max_seq_len, **sizes, **options)
    return Scheduler(config, eos_token_ids, block_tokens=BLOCK)


def next_token(tokens: list[int]) -> int:
    """What the model says after these tokens: a function of every one of them."""
    return zlib.crc32(bytes(tokens)) % VOCAB_SIZE


def expected_output(request: Sequence, max_seq_len: int) -> tuple[list[int], str]:
    """The output ids and the finish reason of a request that runs alone to its end."""
    sampling, sequence = request.sampling, list(request.prompt_token_ids)
    while True:
        sequence.append(next_token(sequence))
        output = sequence[len(request.prompt_token_ids) :]
        stops = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])}
        if output[-1] in stops and len(output) > sampling.min_new_tokens:
            return output, "stop"
        if len(output) == sampling.max_new_tokens or len(sequence) == max_seq_len:
            return output, "length"


class Engine:
    """Runs plans on a cache of token ids: what a real one does with keys and values, padding and
    copies included.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cache = [[GARBAGE] * BLOCK for _ in range(scheduler.stats().blocks)]
        self.plans: list[StepPlan] = []
        self.finished: list[Sequence] = []

    def read(self, chunk: Chunk) -> list[int]:
        """What the blocks of a chunk's sequence hold, up to the chunk's end."""
        held = [token for block in chunk.block_ids for token in self.cache[block]]
        return held[: chunk.end]

    def run(self, plan: StepPlan) -> list[int]:
        """The tokens for `plan.sampled_sequences`, each from what its blocks hold."""
        self.plans.append(plan)
        for chunk in plan.prefill:
            for source, target in chunk.copies:
                self.cache[target][:] = self.cache[source]  # all of it: more than was asked for
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                self.cache[chunk.block_ids[position // BLOCK]][position % BLOCK] = token
        for chunk in plan.prefill:
            known = chunk.sequence.known_token_ids
            assert self.read(chunk) == known[: chunk.end], (
                "shared or copied tokens are the sequence's"
            )
            assert chunk.is_last == (chunk.end == len(known))
        return [next_token(self.read(chunk)) for chunk in plan.chunks if chunk.is_last]

    def step(self) -> list[Sequence]:
        plan = self.scheduler.schedule()
        finished = self.scheduler.update(plan, self.run(plan))
        self.finished += finished
        return finished

    def run_to_end(self) -> None:
        while self.scheduler.has_unfinished:
            self.step()


@dataclass
class Watch:
    """What must hold for every plan, whatever the requests."""

    scheduler: Scheduler
    decoding: set[Sequence] = field(default_factory=set)  # past their prompt, not finished
    admitted: list[Sequence] = field(default_factory=list)
    next_position: dict[Sequence, int] = field(default_factory=dict)
    entries: dict[Sequence, int] = field(default_factory=dict)  # preemptions before it last entered

    def plan(self, plan: StepPlan) -> None:
        rows = [chunk.row for chunk in plan.chunks]
        assert len(set(rows)) == len(rows), "a row belongs to one sequence"
        written = [
            chunk.block_ids[i]
            for chunk in plan.chunks
            for i in range(chunk.start // BLOCK, (chunk.end - 1) // BLOCK + 1)
        ]
        held = Counter(block for chunk in plan.chunks for block in chunk.block_ids)
        assert all(held[block] == 1 for block in written), "what is written, one sequence has"
        assert all(0 <= row < self.scheduler.max_batch for row in rows)
        running = {s for s in self.decoding if s.status == "decode"}  # the others are preempted
        assert {chunk.sequence for chunk in plan.decode} == running, (
            "every running sequence in every step"
        )
        for chunk in plan.decode:
            tokens = chunk.sequence.prompt_token_ids + chunk.sequence.output_token_ids
            assert chunk.start == len(tokens) - 1 == self.next_position[chunk.sequence]
            assert chunk.tokens == tokens[-1:] and chunk.is_last and not chunk.copies
            self.next_position[chunk.sequence] += 1
        self.groups(plan)
        for chunk in plan.prefill:
            self.chunk(chunk)

    def groups(self, plan: StepPlan) -> None:
        """Every chunk runs once, in a program that exists, and no row of a prompt's is padding."""
        groups = self.scheduler.group_chunks(plan)
        assert {chunk for group in groups for chunk in map(id, group.chunks)} == set(
            map(id, plan.chunks)
        )
        assert sum(len(group.chunks) for group in groups) == len(plan.chunks)
        if plan.decode:
            decode = groups.pop(0)
            assert decode.chunks == plan.decode and decode.width == 1
            assert decode.num_rows == smallest_bucket(
                len(plan.decode), self.scheduler.decode_buckets
            )
        assert all(group.num_rows == len(group.chunks) for group in groups)
        assert {(group.num_rows, group.width) for group in groups} <= set(
            self.scheduler.prefill_program_shapes
        )
        assert (
            sum(group.num_rows * group.width for group in groups)
            <= self.scheduler.max_prefill_tokens
        )
        for group in groups:
            narrower = [width for width in self.scheduler.prefill_widths if width < group.width]
            assert all(
                max(narrower, default=0) < len(chunk.tokens) <= group.width
                for chunk in group.chunks
            )
            ends = [chunk.is_last for chunk in group.chunks]
            assert ends == sorted(ends, reverse=True), "rows that get a token come first"

    def chunk(self, chunk: Chunk) -> None:
        sequence, prompt = chunk.sequence, chunk.sequence.known_token_ids
        if sequence not in self.next_position:
            self.admitted.append(sequence)
            assert sequence.first_position == sequence.num_reused_tokens
            reused = sequence.sampling.prompt_logprobs is None
            assert reused or sequence.num_reused_tokens == 0
        if self.entries.get(sequence) != sequence.num_preemptions:  # it is new or comes again
            self.entries[sequence] = sequence.num_preemptions
            self.next_position[sequence] = sequence.first_position
        else:
            assert not chunk.copies, "copied once"
        widest = self.scheduler.prefill_widths[-1]
        assert len(chunk.tokens) == min(len(prompt) - chunk.start, widest), (
            "cut the same whatever else runs"
        )
        assert chunk.start == self.next_position[sequence]
        assert chunk.tokens == prompt[chunk.start : chunk.end]
        self.next_position[sequence] = chunk.end

    def update(self, plan: StepPlan) -> None:
        self.decoding = {
            s for s in (*self.decoding, *plan.sampled_sequences) if s.status == "decode"
        }


def random_request(
    rng: random.Random, index: int, max_seq_len: int, prefixes: list[list[int]]
) -> Sequence:
    prompt = list(rng.choice(prefixes)) + [
        rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))
    ]
    prompt = prompt[: rng.choice([max_seq_len - 1, 5, max_seq_len // 2])]
    max_new_tokens = rng.randrange(1, 25)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.randrange(3))),
        min_new_tokens=rng.choice([0, 0, rng.randrange(max_new_tokens + 1)]),
        prompt_logprobs=rng.choice([None, None, None, 3]),
    )
    return Sequence(prompt, sampling, request=index)


@pytest.mark.parametrize(
    ("max_batch", "max_seq_len", "prefill_chunk_tokens", "options"),
    [
        (1, 40, 8, {}),
        (3, 64, 16, {"max_prefill_tokens": 40}),
        (8, 50, 5, {"max_prefill_tokens": 23}),
        (6, 33, 1, {"max_prefill_tokens": 3}),
        (4, 61, 1000, {}),
        (20, 70, 20, {}),
        (8, 61, 7, {"max_prefill_tokens": 7}),
        # few blocks: sequences wait for them and are preempted
        (8, 61, 20, {"cache_tokens": 61}),
        (8, 61, 7, {"cache_tokens": 140, "max_prefill_tokens": 30}),
        # devices with blocks of their own
        (8, 61, 20, {"mesh": EngineMesh(4)}),
        (8, 61, 20, {"mesh": EngineMesh(2), "cache_tokens": 150}),
        (8, 61, 20, {"mesh": EngineMesh(2, dense="tensor"), "cache_tokens": 150}),
    ],
)
def test_simulation(
    max_batch: int, max_seq_len: int, prefill_chunk_tokens: int, options: dict[str, Any]
) -> None:
    rng = random.Random(max_batch + prefill_chunk_tokens)
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (0, 3, 11, 30, 45)]
    scheduler = make_scheduler(
        max_batch, max_seq_len, prefill_chunk_tokens, eos_token_ids=(EOS,), **options
    )
    engine, watch = Engine(scheduler), Watch(scheduler)
    requests: list[Sequence] = []
    aborted: set[Sequence] = set()

    def add(count: int) -> None:
        for _ in range(count):
            requests.append(random_request(rng, len(requests), max_seq_len, prefixes))
            scheduler.add(requests[-1])

    def abort() -> None:
        unfinished = [request for request in requests if request.status != "finished"]
        if unfinished and rng.random() < 0.05:
            request = rng.choice(unfinished)
            assert scheduler.finish(request, "abort")
            assert request.finish_reason == "abort"
            aborted.add(request)

    add(10)
    while scheduler.has_unfinished or len(requests) < 250:
        if len(requests) < 250 and rng.random() < 0.4:
            add(rng.randrange(4))
        abort()
        watch.update(StepPlan())
        plan = scheduler.schedule()
        assert scheduler.schedule() == plan, "nothing changes until update"
        assert bool(plan.chunks) == scheduler.has_unfinished
        watch.plan(plan)
        tokens = engine.run(plan)
        abort()  # a client hangs up while the step runs
        finished = scheduler.update(plan, tokens)
        assert all(request.status == "finished" and request not in aborted for request in finished)
        engine.finished += finished
        watch.update(plan)

    assert aborted
    assert set(engine.finished) == set(requests) - aborted
    for request in engine.finished:
        assert (request.output_token_ids, request.finish_reason) == expected_output(
            request, max_seq_len
        )
    admitted = set(watch.admitted)
    assert watch.admitted == [request for request in requests if request in admitted], (
        "first come, first served"
    )
    check_stats(scheduler, engine, requests)


def check_stats(scheduler: Scheduler, engine: Engine, requests: list[Sequence]) -> None:
    stats = scheduler.stats()
    copies = [chunk for plan in engine.plans for chunk in plan.prefill if chunk.copies]
    tables = [[chunk.block_ids for chunk in plan.chunks] for plan in engine.plans]
    shared = [sum(map(len, some)) > len({b for ids in some for b in ids}) for some in tables]
    assert stats.waiting == stats.running == stats.kv_tokens == stats.blocks_used == 0
    assert 0 < stats.blocks_cached <= stats.blocks
    assert stats.reused_tokens == sum(request.num_reused_tokens for request in requests) > 0
    entered = [request for request in requests if request.finish_reason != "abort"]
    assert stats.prompt_tokens >= sum(len(request.prompt_token_ids) for request in entered)
    assert stats.preemptions == sum(request.num_preemptions for request in requests)
    assert copies and any(shared) == (scheduler.max_batch > 1)


def request(name: str, prompt: list[int], **sampling: object) -> Sequence:
    return Sequence(
        prompt,
        SamplingParams(**{"max_new_tokens": 4, "ignore_eos": True, **sampling}),
        request=name,
    )


def admitted(engine: Engine, new: Sequence) -> Chunk:
    """The first chunk of `new`, after which it runs to its end with whatever else runs."""
    engine.scheduler.add(new)
    while True:
        engine.step()
        for chunk in engine.plans[-1].prefill:
            if chunk.sequence is new:
                return chunk


def test_decode_never_waits_for_a_long_prompt() -> None:
    engine = Engine(make_scheduler(4, 1000, 10))
    admitted(engine, request("short", [1, 2, 3], max_new_tokens=200))
    engine.scheduler.add(request("long", list(range(10)) * 90))
    for step in range(90):
        engine.step()
        plan = engine.plans[-1]
        assert [row.sequence.request for row in plan.decode] == ["short"]
        (chunk,) = plan.prefill
        assert (chunk.start, len(chunk.tokens)) == (10 * step, 10)
        assert chunk.is_last == (step == 89)
    engine.step()
    assert {row.sequence.request for row in engine.plans[-1].decode} == {"short", "long"}


def group_shapes(engine: Engine) -> list[tuple[int, int]]:
    groups = engine.scheduler.group_chunks(replace(engine.plans[-1], decode=()))
    return sorted((len(group.chunks), group.width) for group in groups)


def test_many_prompts_in_a_step() -> None:
    """One long chunk does not widen the short ones, and no row is padding."""
    engine = Engine(make_scheduler(8, 1000, 512))
    assert engine.scheduler.prefill_widths == (1, 16, 32, 64, 128, 256, 512)
    for index, length in enumerate([600, 3, 3, 3, 3, 3, 3, 3]):
        engine.scheduler.add(request(str(index), [index] * length))
    engine.step()
    assert [len(chunk.tokens) for chunk in engine.plans[-1].prefill] == [512, 3, 3, 3, 3, 3, 3, 3]
    assert group_shapes(engine) == [(1, 16), (1, 16), (1, 16), (1, 512), (4, 16)]
    assert [r.request for r in engine.plans[-1].sampled_sequences] == list("1234567")
    engine.step()
    assert group_shapes(engine) == [(1, 128)]
    assert [row.sequence.request for row in engine.plans[-1].decode] == list("1234567")


def test_what_does_not_fit_the_step_waits_and_nobody_overtakes() -> None:
    engine = Engine(make_scheduler(8, 1000, 64, max_prefill_tokens=150))
    requests = [
        request(str(index), [index] * length) for index, length in enumerate([100, 60, 60, 5, 5])
    ]
    for new in requests:
        engine.scheduler.add(new)
    ran = []
    while any(new.status != "decode" for new in requests):
        engine.step()
        ran.append(
            [(chunk.sequence.request, len(chunk.tokens)) for chunk in engine.plans[-1].prefill]
        )
    assert ran == [[("0", 64), ("1", 60)], [("0", 36), ("2", 60), ("3", 5)], [("4", 5)]]


def test_a_prefix_that_is_being_computed_is_waited_for_if_it_is_long() -> None:
    engine = Engine(make_scheduler(8, 64, 8))
    prefix = list(range(20))
    for index in range(4):
        engine.scheduler.add(request(f"long {index}", [*prefix, 40 + index, 1, 2]))
    engine.scheduler.add(request("other", [49] * 5))
    starts = []
    while not engine.plans or engine.plans[-1].prefill:
        engine.step()
        starts.append([(chunk.sequence.request, chunk.start) for chunk in engine.plans[-1].prefill])
    assert starts[:3] == [[("long 0", 0)], [("long 0", 8)], [("long 0", 16)]]
    assert starts[3:] == [[("long 1", 20), ("long 2", 20), ("long 3", 20), ("other", 0)], []]
    engine = Engine(make_scheduler(8, 64, 8))
    for index in range(4):  # to wait for 7 of 20 tokens would not pay
        engine.scheduler.add(request(str(index), [*range(7), *[40 + index] * 13]))
    engine.step()
    assert [chunk.start for chunk in engine.plans[-1].prefill] == [0] * 4
    engine.run_to_end()
    assert all(r.output_token_ids == expected_output(r, 64)[0] for r in engine.finished)


def test_blocks_are_copied_before_anything_is_written_over_them() -> None:
    """A block that is copied may be given away before the copy is made: copies come first, in the
    plan's order.
    """
    engine = Engine(make_scheduler(3, 64, 64, cache_tokens=64))
    source = request("source", list(range(13)), max_new_tokens=40)
    tail = admitted(engine, source).block_ids[1]
    engine.scheduler.add(request("copies", [*range(12), 41]))
    assert [copy[0] for copy in engine.scheduler.schedule().prefill[0].copies] == [tail]
    engine.scheduler.finish(source, "abort")
    engine.scheduler.add(request("overwrites", [42] * 41))
    plan = engine.scheduler.schedule()
    assert [(c.sequence.request, c.start) for c in plan.prefill] == [
        ("copies", 12),
        ("overwrites", 0),
    ]
    assert tail in plan.prefill[1].block_ids
    engine.run_to_end()
    assert len(engine.finished) == 2
    assert all(r.output_token_ids == expected_output(r, 64)[0] for r in engine.finished)


def test_a_finished_request_leaves_its_prefix() -> None:
    engine = Engine(make_scheduler(2, 64, 64))
    first = request("first", list(range(20)))
    assert admitted(engine, first).start == 0
    engine.run_to_end()
    # The next turn of a conversation: all but the last token of output has been computed.
    turn = first.prompt_token_ids + first.output_token_ids + [1, 2]
    second = request("second", turn)
    chunk = admitted(engine, second)
    # nobody else has the block in the middle of which it goes on
    assert chunk.block_ids[:3] == engine.plans[0].prefill[0].block_ids
    assert (chunk.start, chunk.copies) == (23, ())
    assert chunk.tokens == turn[23:]
    assert second.num_reused_tokens == 23
    engine.run_to_end()
    # The very same prompt: its last token is run, for its logits.
    again = request("again", turn)
    chunk = admitted(engine, again)
    assert (chunk.start, chunk.tokens, chunk.is_last) == (len(turn) - 1, turn[-1:], True)


def test_full_blocks_are_shared_and_the_rest_is_copied() -> None:
    """With a sequence that runs, and with one that has ended and that another may come back to."""
    engine = Engine(make_scheduler(3, 64, 64))
    first = request("first", list(range(23)), max_new_tokens=30)
    blocks = list(admitted(engine, first).block_ids)
    chunk = admitted(engine, request("second", [*range(20), 40]))
    assert list(chunk.block_ids[:2]) == blocks[:2] and chunk.block_ids[2] not in blocks
    assert chunk.copies == ((blocks[2], chunk.block_ids[2]),)
    assert (chunk.start, chunk.tokens) == (20, [40])
    engine.run_to_end()
    chunk = admitted(engine, request("third", [*range(20), 41]))
    assert chunk.copies[0][0] in (blocks[2], engine.plans[1].prefill[0].block_ids[2])
    engine.run_to_end()
    for prompt in (list(range(23)), [*range(20), 40], [*range(20), 41]):
        assert admitted(engine, request("again", [*prompt, 49])).start == len(prompt)
        engine.run_to_end()


def test_a_prefix_of_whole_blocks_is_not_copied() -> None:
    engine = Engine(make_scheduler(3, 64, 64))
    first = request("first", list(range(16)), max_new_tokens=30)
    blocks = list(admitted(engine, first).block_ids)
    chunk = admitted(engine, request("second", [*range(16), 40]))
    assert (chunk.start, chunk.copies, list(chunk.block_ids[:2])) == (16, (), blocks[:2])
    assert engine.scheduler.stats().kv_tokens < first.num_tokens + 17
    engine.run_to_end()


def test_prompt_logprobs_need_every_position() -> None:
    engine = Engine(make_scheduler(2, 64, 64))
    admitted(engine, request("first", list(range(20))))
    engine.run_to_end()
    chunk = admitted(engine, request("second", list(range(20)), prompt_logprobs=1))
    assert (chunk.start, chunk.copies) == (0, ())
    assert chunk.tokens == list(range(20))
    engine.run_to_end()
    # What it computed is as good as anybody's.
    assert admitted(engine, request("third", list(range(20)))).start == 19


def test_the_least_recently_used_blocks_are_overwritten_first() -> None:
    engine = Engine(make_scheduler(3, 16, 16))  # six blocks, two a sequence
    blocks = []
    for index in range(3):
        blocks.append(set(admitted(engine, request(f"a{index}", [index] * 10)).block_ids))
        engine.run_to_end()
    assert len(set.union(*blocks)) == 6
    turn = [0] * 10 + engine.finished[0].output_token_ids
    # used again: now the last to go
    assert set(admitted(engine, request("a0", turn, max_new_tokens=1)).block_ids) == blocks[0]
    engine.run_to_end()
    for index, old in enumerate([blocks[1], blocks[2], blocks[0]]):
        assert set(admitted(engine, request(f"b{index}", [30 + index] * 10)).block_ids) == old
        engine.run_to_end()


def test_an_aborted_copy_is_not_taken_for_done() -> None:
    engine = Engine(make_scheduler(2, 64, 64))
    running = request("running", list(range(20)), max_new_tokens=40)
    never = request("never", [*range(20), 1])
    block = admitted(engine, running).block_ids[2]
    engine.scheduler.add(never)
    plan = engine.scheduler.schedule()
    assert plan.prefill[0].copies == ((block, never.block_ids[2]),)
    engine.scheduler.finish(never, "abort")  # before the step ran
    engine.scheduler.finish(running, "abort")
    chunk = admitted(engine, request("next", [*range(20), 2]))
    assert (chunk.start, chunk.block_ids[2]) == (20, block)
    engine.run_to_end()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("reuses_blocks", [False, True])
def test_blocks_of_a_failed_sequence(is_shared: bool, reuses_blocks: bool) -> None:
    """With wrong content, those that it alone has are not reused: 16 of 20 tokens are shared."""
    engine = Engine(make_scheduler(2, 64, 64))
    failed = request("failed", list(range(20)), max_new_tokens=30)
    admitted(engine, failed)
    other = request("other", [*range(16 if is_shared else 0), 40], max_new_tokens=30)
    admitted(engine, other)
    engine.scheduler.finish(failed, "error", reuses_blocks=reuses_blocks)
    assert admitted(engine, request("next", [*range(20), 41])).start == (
        20 if reuses_blocks else 16 if is_shared else 0
    )
    engine.run_to_end()


def test_a_prompt_that_waits_for_blocks_is_not_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(make_scheduler(2, 40, 40, cache_tokens=40))
    admitted(engine, request("first", [1] * 33, max_new_tokens=5))
    engine.scheduler.add(request("second", [2] * 20))
    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "find_cached_prefix", lambda *_: pytest.fail("no block is free"))
        engine.step()
    engine.run_to_end()
    assert len(engine.finished) == 2


def test_ten_chats_with_one_system_prompt() -> None:
    """What is in the cache of one is read by all, and computed once."""
    system = [token % VOCAB_SIZE for token in range(160)]
    scheduler = make_scheduler(10, 200, 200, cache_tokens=400)  # one alone takes 170
    engine = Engine(scheduler)
    chats = [request(str(i), [*system, i, i, i], max_new_tokens=5) for i in range(10)]
    for chat in chats:
        scheduler.add(chat)
    peak = 0
    while scheduler.has_unfinished:
        engine.step()
        stats = scheduler.stats()
        peak = max(peak, stats.blocks_used)
    computed = sum(len(chunk.tokens) for plan in engine.plans for chunk in plan.prefill)
    assert computed == len(system) + 10 * 3
    assert peak == len(system) // BLOCK + 10
    assert (stats.reused_tokens, stats.prompt_tokens) == (9 * 160, 10 * 163)
    assert stats.preemptions == 0
    assert all(chat.output_token_ids == expected_output(chat, 200)[0] for chat in chats)


def test_requests_wait_for_blocks() -> None:
    """The first takes the cache; the second enters once it has ended, and the third not before."""
    engine = Engine(make_scheduler(3, 40, 40, cache_tokens=40))
    first, second, third = (
        request(name, [i] * length)
        for i, (name, length) in enumerate([("first", 33), ("second", 20), ("third", 1)])
    )
    for new in (first, second, third):
        engine.scheduler.add(new)
    entered = []
    while engine.scheduler.has_unfinished:
        engine.step()
        entered.append([chunk.sequence.request for chunk in engine.plans[-1].prefill])
    assert [names for names in entered if names] == [["first"], ["second", "third"]]
    assert engine.scheduler.stats().preemptions == 0


def test_the_last_to_enter_is_preempted() -> None:
    """It gives its blocks to the older one, and goes on with its own tokens before a newer one."""
    engine = Engine(make_scheduler(3, 48, 48, cache_tokens=48))
    first, second = (request(name, [i] * 14, max_new_tokens=30) for i, name in enumerate("ab"))
    for new in (first, second):
        engine.scheduler.add(new)
    engine.step()
    engine.scheduler.add(request("c", [2] * 14))
    while not second.num_preemptions:
        engine.step()
    assert (second.status, second.row, len(second.block_ids)) == ("waiting", None, 0)
    assert second.output_token_ids == expected_output(second, 48)[0][: second.num_tokens - 14]
    engine.run_to_end()
    assert first.num_preemptions == 0
    assert engine.scheduler.stats().preemptions == second.num_preemptions
    assert engine.finished[0] is first
    assert all(r.output_token_ids == expected_output(r, 48)[0] for r in engine.finished)
    assert len(engine.finished) == 3


def test_the_lowest_priority_is_preempted() -> None:
    """A sequence that entered first gives its blocks to a later one that ranks before it."""
    engine = Engine(make_scheduler(3, 48, 48, cache_tokens=48))
    first, second = (request(name, [i] * 14, max_new_tokens=30) for i, name in enumerate("ab"))
    first.priority = 1
    for new in (first, second):
        engine.scheduler.add(new)
    engine.run_to_end()
    assert first.num_preemptions > 0 == second.num_preemptions
    assert engine.finished == [second, first]
    assert all(r.output_token_ids == expected_output(r, 48)[0] for r in engine.finished)


def test_a_preempted_sequence_lets_those_pass_that_rank_before_it() -> None:
    """A newer one of a lower priority enters where the preempted one does not fit yet; one of the
    same priority waits behind it.
    """
    engine = Engine(make_scheduler(3, 48, 48, cache_tokens=48))
    scheduler = engine.scheduler
    first, second = (request(name, [i] * 14, max_new_tokens=30) for i, name in enumerate("ab"))
    second.priority = 1
    for new in (first, second):
        scheduler.add(new)
    while not second.num_preemptions:
        engine.step()
    assert scheduler.has_capacity_for(0) and not scheduler.has_capacity_for(1)
    later, urgent = (request(name, [i] * 3, max_new_tokens=4) for i, name in ((2, "c"), (3, "d")))
    later.priority = 1
    for new in (later, urgent):
        scheduler.add(new)
    engine.run_to_end()
    assert engine.finished.index(urgent) < engine.finished.index(second)
    assert engine.finished[0] is urgent and first.num_preemptions == urgent.num_preemptions == 0
    assert all(r.output_token_ids == expected_output(r, 48)[0] for r in engine.finished)
    assert len(engine.finished) == 4


def test_a_sequence_that_fills_the_cache_runs_to_its_end() -> None:
    engine = Engine(make_scheduler(2, 40, 8, cache_tokens=40))
    whole = [request(str(i), [i] * 8, max_new_tokens=32) for i in range(2)]
    for new in whole:
        engine.scheduler.add(new)
    engine.run_to_end()
    assert [len(r.output_token_ids) for r in whole] == [32, 32]
    assert whole[1].num_preemptions > 0 == whole[0].num_preemptions


def test_a_cache_that_no_sequence_fits() -> None:
    with pytest.raises(ValueError, match="cache_tokens = 60: must be at least 61: a sequence of"):
        make_scheduler(2, 61, 8, cache_tokens=60)
    words = (
        "cache_tokens = 100: must be at least 122: a sequence of 61 tokens, on each of 2 devices"
    )
    with pytest.raises(ValueError, match=words):
        make_scheduler(2, 61, 8, cache_tokens=100, mesh=EngineMesh(2))
    make_scheduler(2, 61, 8, cache_tokens=100, mesh=EngineMesh(2, dense="tensor"))
    with pytest.raises(ValueError, match="cache_tokens = 0: must be"):
        EngineConfig(cache_tokens=0)


def test_stop_string_found_by_the_engine() -> None:
    engine = Engine(make_scheduler(1, 64, 64))
    new = request("a", [1, 2, 3], max_new_tokens=30)
    admitted(engine, new)
    engine.step()
    assert engine.scheduler.finish(new, "stop")
    assert (new.finish_reason, len(new.output_token_ids)) == ("stop", 2)
    assert not engine.scheduler.has_unfinished
    assert not engine.scheduler.schedule().chunks
    assert not engine.scheduler.finish(new, "stop")


def test_abort_in_every_state() -> None:
    scheduler = make_scheduler(1, 64, 2)  # one row: the others wait
    engine = Engine(scheduler)
    first, second, third = (request(name, list(range(10))) for name in "abc")
    for new in (first, second, third):
        scheduler.add(new)
    engine.step()
    assert (first.status, second.status, third.status) == ("prefill", "waiting", "waiting")
    assert scheduler.finish(second, "abort")  # waiting
    assert scheduler.finish(first, "abort")  # in its prompt
    assert not scheduler.finish(request("nobody", [1]), "abort")
    engine.step()
    while third.status != "decode":
        engine.step()
    assert third.num_reused_tokens == 2, "of the aborted prompt"
    assert scheduler.finish(third, "abort")
    assert [s.finish_reason for s in (first, second, third)] == ["abort"] * 3


def test_the_row_ends_the_request() -> None:
    engine = Engine(make_scheduler(1, 10, 4))
    new = request("a", list(range(9)), max_new_tokens=5)
    admitted(engine, new)
    engine.run_to_end()
    assert (len(new.output_token_ids), new.finish_reason) == (1, "length")


@pytest.mark.parametrize("name", ["max_batch", "max_seq_len", "prefill_chunk_tokens"])
def test_bad_sizes(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0: must be (at least|greater than)"):
        EngineConfig(**{name: 0})


def test_buckets() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(2) == (1, 2)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(9) == (1, 2, 4, 8, 9)
    assert bucket_sizes(64, 4) == (1, 4, 16, 64) and bucket_sizes(100, 4) == (1, 4, 16, 64, 100)
    assert make_scheduler(2, 10, 512, max_prefill_tokens=10).prefill_widths == (1, 10)
    for maximum in range(1, 40):
        sizes = bucket_sizes(maximum)
        for n in range(1, maximum + 1):
            assert smallest_bucket(n, sizes) == min(size for size in sizes if size >= n)
    with pytest.raises(ValueError, match="n = 9: must not exceed the largest bucket, 8"):
        smallest_bucket(9, bucket_sizes(8))
