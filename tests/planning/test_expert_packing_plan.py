"""When a device gets twice the experts, by tables and as properties."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmoe.planning.expert_packing import (
    MemoryShortfall,
    PackingDecision,
    decide_packing,
    is_packing_decided_at,
)


def decide(all_to_all_s: float, ffn_s: float, now: int = 1, **options: Any) -> PackingDecision:
    return decide_packing(all_to_all_s, ffn_s, now, **{"step": 10, "most_experts": 16} | options)


def test_the_steps_of_lina() -> None:
    assert [step for step in range(24) if is_packing_decided_at(step)] == [10, 14, 18, 22]


@pytest.mark.parametrize(
    ("all_to_all_s", "ffn_s", "now", "options", "experts", "done", "words"),
    [
        (
            0.02,
            0.01,
            1,
            {},
            2,
            False,
            "all-to-all 20 ms, experts 10 ms: 2 experts a device from now on",
        ),
        (0.02, 0.01, 3, {}, 6, False, "6 experts a device from now on"),
        (
            0.01,
            0.02,
            4,
            {"step": 14},
            4,
            True,
            "the experts are not the shorter: it stays at 4 experts a device",
        ),
        (
            0.02,
            0.02,
            1,
            {},
            1,
            True,
            "the experts are not the shorter: it stays at 1 expert a device",
        ),
        (0.0, 0.0, 8, {}, 8, True, "the experts are not the shorter"),
        (0.02, 0.01, 16, {}, 16, True, "the mesh allows no more than 16 experts a device"),
        (0.02, 0.01, 1, {"step": 9}, 1, False, "before step 10, then every 4 steps"),
        (0.02, 0.01, 1, {"step": 12}, 1, False, "before step 10, then every 4 steps"),
        (
            0.02,
            0.01,
            2,
            {"shortfall": MemoryShortfall(0, 5)},
            4,
            False,
            "4 experts a device from now on",
        ),
        (
            0.02,
            0.01,
            2,
            {"shortfall": MemoryShortfall(10**9)},
            4,
            False,
            "4 experts a device from now on, in host memory: devices lack 1.00 GB for them",
        ),
        (
            0.02,
            0.01,
            2,
            {"shortfall": MemoryShortfall(10**9, refused="snapshots need the device")},
            2,
            True,
            "need 1.00 GB more memory than there is; snapshots need the device",
        ),
        (
            0.02,
            0.01,
            2,
            {"shortfall": MemoryShortfall(10**9, 5 * 10**8)},
            2,
            True,
            "in host memory 0.50 GB would be lacking",
        ),
        (0.02, 0.01, 2, {"step_s": {1: 1.0, 2: 0.9}}, 4, False, "4 experts a device from now on"),
        (
            0.02,
            0.01,
            2,
            {"step_s": {1: 1.0, 2: 1.1}},
            1,
            True,
            "1.1 s, 1 s with half the experts on a device: back",
        ),
        (0.01, 0.02, 2, {"step_s": {1: 1.0, 2: 1.1}}, 1, True, "back to 1 expert a device"),
        (0.02, 0.01, 2, {"step_s": {1: 1.0, 2: 1.005}}, 4, False, "4 experts a device from now on"),
        (0.02, 0.01, 2, {"step_s": {2: 1.1}}, 4, False, "4 experts a device from now on"),
    ],
)
def test_decisions(
    all_to_all_s: float,
    ffn_s: float,
    now: int,
    options: dict[str, Any],
    experts: int,
    done: bool,
    words: str,
) -> None:
    decision = decide(all_to_all_s, ffn_s, now, **options)
    assert (decision.experts_per_device, decision.done) == (experts, done)
    assert words in decision.reason


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0.1, 0.1, 0), {}, "experts_per_device = 0: must be greater than 0"),
        ((0.1, 0.1, 32), {}, "most_experts = 16: must be at least experts_per_device = 32"),
        ((-0.1, 0.1, 1), {}, "all_to_all_s = -0.1: must not be negative"),
        ((0.1, float("nan"), 1), {}, "ffn_s = nan: must not be negative"),
    ],
)
def test_bad_numbers(
    arguments: tuple[float, float, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        decide(*arguments, **options)


seconds = st.floats(0, 10)
shortfalls = st.builds(
    MemoryShortfall, st.integers(0, 10), st.integers(0, 10), st.sampled_from(["", "no"])
)


@given(seconds, seconds, st.integers(0, 4), st.integers(0, 4), st.integers(0, 40), shortfalls)
def test_it_doubles_only_where_it_may(
    a: float, f: float, now: int, above: int, step: int, shortfall: MemoryShortfall
) -> None:
    most = 2 ** (now + above)
    decision = decide_packing(a, f, 2**now, step=step, most_experts=most, shortfall=shortfall)
    assert (
        decision.experts_per_device in (2**now, 2 ** (now + 1))
        and decision.experts_per_device <= most
    )
    doubled = decision.experts_per_device > 2**now
    assert doubled == (
        is_packing_decided_at(step)
        and a > f
        and above > 0
        and (not shortfall.lacking_bytes or shortfall.must_offload)
    )
    assert decision.done == (is_packing_decided_at(step) and not doubled)


@given(
    st.lists(st.tuples(seconds, seconds, st.floats(0.1, 10)), min_size=9, max_size=9),
    st.integers(0, 4),
)
def test_it_comes_to_an_end(measured: list[tuple[float, float, float]], most: int) -> None:
    """After all doublings that there are and one step back; what it ends with is not known to be
    slower.
    """
    experts, step, step_s = 1, 10, dict[int, float]()
    for all_to_all_s, ffn_s, whole_s in measured:
        step_s[experts] = whole_s
        decision = decide_packing(
            all_to_all_s, ffn_s, experts, step=step, most_experts=2**most, step_s=step_s
        )
        experts, step = decision.experts_per_device, step + 4
        if decision.done:
            break
    assert decision.done and step <= 10 + 4 * (most + 2)
    assert experts == 1 or step_s[experts] <= 1.01 * step_s[experts // 2]
