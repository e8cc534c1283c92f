"""Links: transfers are counted, and take as long as the limit asks for."""

import numpy as np
import pytest

from jmoe.memory.link import SLACK_S, Link


class Clock:
    """Time that only passes when somebody sleeps or says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_s += duration_s


def test_link_counts() -> None:
    clock = Clock()
    link = Link(clock=clock, sleep=clock.sleep)

    def move() -> int:
        clock.now_s += 0.5
        return 1000

    assert link.run_transfer(move) == 1000
    clock.now_s += 10  # nothing under way
    first = link.start_transfer()
    clock.now_s += 1
    second = link.start_transfer()
    clock.now_s += 1
    link.finish_transfer(first, 10)
    assert link.stats().seconds == pytest.approx(2.5)  # the second is still under way
    clock.now_s += 1
    link.finish_transfer(second, 20)
    stats = link.stats()
    assert (stats.transfers, stats.num_bytes) == (3, 1030)
    assert stats.seconds == pytest.approx(3.5)

    def fail() -> int:
        clock.now_s += 1
        raise OSError("unplugged")

    with pytest.raises(OSError, match="unplugged"):
        link.run_transfer(fail)
    assert (link.stats().transfers, link.stats().num_bytes) == (3, 1030)


def test_limit_is_kept() -> None:
    """Whatever the sizes, pauses and copy times: in no window do more bytes pass than the limit
    allows.
    """
    rng = np.random.default_rng(0)
    clock = Clock()
    limit_bytes_per_s = 1e6
    link = Link(limit_bytes_per_s, clock=clock, sleep=clock.sleep)
    ends: list[tuple[float, int]] = []
    busy_s = 0.0
    for _ in range(300):
        clock.now_s += rng.exponential(0.01) * rng.integers(2)
        num_bytes = int(rng.exponential(20_000)) + 1
        copy_s = float(rng.exponential(0.01))
        begin_s = clock.now_s

        def move(copy_s: float = copy_s, num_bytes: int = num_bytes) -> int:
            clock.now_s += copy_s
            return num_bytes

        link.run_transfer(move)
        took_s = clock.now_s - begin_s
        busy_s += took_s
        # the copy's own time counts
        assert took_s <= max(copy_s, num_bytes / limit_bytes_per_s) + 1e-9
        ends.append((clock.now_s, num_bytes))
    for first in range(len(ends)):
        passed = np.cumsum([num_bytes for _, num_bytes in ends[first + 1 :]])
        window_s = np.array([end_s - ends[first][0] for end_s, _ in ends[first + 1 :]])
        assert (passed <= limit_bytes_per_s * (window_s + SLACK_S) + 1e-3).all()
    assert link.stats().seconds == pytest.approx(busy_s)


def test_limit_is_shared_by_threads_and_made_up_for() -> None:
    clock = Clock()
    link = Link(1000.0, clock=clock, sleep=clock.sleep)
    starts = [link.start_transfer() for _ in range(3)]
    for start_s in starts:
        link.finish_transfer(start_s, 500)
    assert clock.now_s == pytest.approx(100 + 1.5 - SLACK_S)

    def late(duration_s: float) -> None:
        clock.now_s += duration_s + 0.001

    link = Link(1000.0, clock=clock, sleep=late)
    begin_s = clock.now_s
    for _ in range(100):
        link.run_transfer(lambda: 10)
    assert clock.now_s - begin_s == pytest.approx(1.0, abs=2 * SLACK_S)  # not 1.1
