"""Drafts looked up in a sequence's own tokens, and when there are none."""

import random

import pytest

from jmoe.config.engine import EngineConfig
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.scheduler import Scheduler, StepPlan
from jmoe.inference.sequence import Sequence
from jmoe.inference.speculation import MAX_FALSE_MATCHES, MAX_PAUSE, MISS_PAUSE, PromptLookup


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 2, 3, 4], [5, 6, 9, 2]),  # the longest run, of three
        ([1, 2, 3, 7, 8, 2, 3, 5, 6, 2, 3], [5, 6, 2, 3]),  # its last occurrence
        ([1, 2, 3, 8, 3, 5, 5, 3], []),  # one token alone is not enough
        ([6, 6, 6, 6], [6, 6, 6, 6]),  # what repeats goes on
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([4], []),
        # bytes of neighbours that look like a token
        ([0x01000000, 0x02000001, 0x01020000, 1, 0x0200], []),
    ],
)
def test_what_followed_the_latest_tokens_before(tokens: list[int], draft: list[int]) -> None:
    for cut in range(len(tokens) + 1):  # wherever the output begins
        assert PromptLookup(4, 3, 2).draft_tokens(tokens[:cut], tokens[cut:], 9) == draft
    assert PromptLookup(4, 3, 2).draft_tokens(tokens, [], 2) == draft[:2]
    assert PromptLookup(4, 3, 2).draft_tokens(tokens, [], 0) == []


def test_a_prompt_whose_bytes_match_everywhere_does_not_hold_up_a_step() -> None:
    """The bytes of 2, 2 are in 0x200, 0x200 too, between the tokens."""

    def draft(false: int) -> list[int]:
        tokens = [2, 2, 9] + [0x200] * false + [2, 2]
        return PromptLookup(4, 2, 2).draft_tokens(tokens, [], 2)

    assert draft(MAX_FALSE_MATCHES) == [9, 0x200]
    assert draft(2 * MAX_FALSE_MATCHES) == []


def test_equals_a_search_token_by_token() -> None:
    rng = random.Random(0)
    lookup, tokens = PromptLookup(5, 4, 1), [rng.randrange(4)]
    for _ in range(400):
        expected: list[int] = []
        for size in range(min(4, len(tokens) - 1), 0, -1):
            ends = [
                end
                for end in range(size, len(tokens))
                if tokens[end - size : end] == tokens[-size:]
            ]
            if ends:
                whole = list(tokens)
                for i in range(5):
                    whole.append(whole[ends[-1] + i])
                expected = whole[len(tokens) :]
                break
        assert lookup.draft_tokens(tokens[:7], tokens[7:], 5) == expected
        assert lookup.draft_tokens(tokens[:7], tokens[7:], 5) == expected, (
            "nothing changes by asking"
        )
        tokens.append(rng.choice([rng.randrange(4), rng.randrange(2**31 - 1)]))


def test_it_backs_off_and_comes_back() -> None:
    lookup, tokens = PromptLookup(8, 2, 1), [7] * 10
    most = lambda: len(lookup.draft_tokens(tokens, [], 99))  # noqa: E731
    assert most() == 8
    lookup.record_acceptance(10, 8, 3)
    assert most() == 3
    lookup.record_acceptance(10, 3, 3)
    assert most() == 6
    lookup.record_acceptance(10, 6, 0)
    assert most() == 0 and lookup.is_paused(10) and not lookup.is_paused(11)
    pauses = []
    for _ in range(8):
        lookup.record_acceptance(10, 1, 0)
        pauses.append(next(n for n in range(10, 99) if not lookup.is_paused(n)) - 10)
    assert pauses == [3, 7, 15, 31, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    lookup.record_acceptance(10, 1, 1)
    assert most() == 2 and not lookup.is_paused(10)
    lookup.pause_after_miss(10)
    assert lookup.is_paused(10 + MISS_PAUSE - 1) and not lookup.is_paused(10 + MISS_PAUSE)


def make_scheduler(**options: int) -> Scheduler:
    config = EngineConfig(2, 60, speculation="lookup", num_speculative_tokens=6, **options)
    return Scheduler(config, block_tokens=4)


def run(scheduler: Scheduler, plan: StepPlan, token: int) -> None:
    """Take in a plan whose tokens are all `token`, with every draft refused."""
    plan = plan.without_drafts()
    scheduler.update(plan, [token] * len(plan.sampled_sequences))


@pytest.mark.parametrize(("most", "expected"), [(1, []), (2, []), (3, [1]), (20, [6])])
def test_no_draft_goes_beyond_the_end_of_its_sequence(most: int, expected: list[int]) -> None:
    scheduler = make_scheduler()
    scheduler.add(Sequence([5] * 8, SamplingParams(max_new_tokens=most)))
    run(scheduler, scheduler.schedule(), 5)
    drafted = [chunk.num_drafted for chunk in scheduler.schedule().decode]
    assert drafted == (expected or [0] * (most > 1))


def test_drafts_take_free_blocks_and_none_of_others() -> None:
    scheduler = make_scheduler(cache_tokens=60)  # 15 blocks
    first, other = (
        Sequence([5] * 27, SamplingParams(max_new_tokens=30)),
        Sequence([8] * 27, SamplingParams(max_new_tokens=2)),
    )
    for sequence in (first, other):
        scheduler.add(sequence)
    run(scheduler, scheduler.schedule(), 5)
    plan = scheduler.schedule()
    assert scheduler.schedule() == plan
    (chunk, _) = plan.decode
    assert (chunk.tokens, chunk.num_drafted) == ([5] * 5, 4), "7 and 7 blocks are held, one is free"
    assert len(first.block_ids) == 8 and scheduler.stats().preemptions == 0
    groups = scheduler.group_chunks(plan)
    assert [(group.num_rows, group.width) for group in groups] == [(1, 1), (1, 7)]
    assert (1, 7) in scheduler.draft_program_shapes and scheduler.max_decode_tokens == 14
    single = chunk.single_token_chunk(2)
    assert (single.start, single.tokens, single.num_drafted) == (chunk.start + 2, [5], 0)
