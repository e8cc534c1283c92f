"""Hosts whose clocks differ are named, and delays are not taken for differences."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from jmoe.cluster.clocks import HostClocks, RunningClock, probe_disk_time


class Rank0:
    """Looks at reports at moments of its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        self._clocks = HostClocks("h0")
        monkeypatch.setattr(time, "time", lambda: self._now)

    def looks(self, now: float, *reports: tuple[int, int, float]) -> list[str]:
        """The lines that a look at (rank, beat, time stamp) yields."""
        self._now = now
        read: dict[int, dict[str, Any]] = {
            r: {"beat": b, "time": t, "host": f"h{r}"} for r, b, t in reports
        }
        return list(self._clocks.new_skew_warnings(read, now))


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Rank0:
    return Rank0(monkeypatch)


def test_a_clock_ahead_is_named_once(rank_0: Rank0) -> None:
    assert rank_0.looks(100, (0, 1, 100.0), (1, 1, 101.0)) == []
    (line,) = rank_0.looks(101, (0, 2, 101.0), (1, 2, 161.0))
    assert "the clock of rank 1 on h1 is 60 s ahead of rank 0's on h0: training goes on" in line
    assert rank_0.looks(102, (0, 3, 102.0), (1, 3, 162.0)) == []


def test_a_clock_behind_is_named_at_its_second_report(rank_0: Rank0) -> None:
    assert rank_0.looks(100, (1, 1, 40.0)) == []  # it may have been written long ago
    assert rank_0.looks(101, (1, 2, 41.0)) == []  # this one may have been held up
    (line,) = rank_0.looks(102, (1, 3, 42.0))
    assert "the clock of rank 1 on h1 is 59 s behind rank 0's" in line


def test_delays_are_no_differences(rank_0: Rank0) -> None:
    """Of a rank that is stopped, of rank 0 itself, and of one report on its way."""
    assert rank_0.looks(100, (1, 1, 100.0)) == []
    for now in (101, 130, 160):
        assert rank_0.looks(now, (1, 1, 100.0)) == []  # stopped
    assert rank_0.looks(161, (1, 2, 160.5)) == []
    assert rank_0.looks(261, (1, 3, 162.0)) == []  # rank 0 was stopped: made after its last look
    assert rank_0.looks(262, (1, 4, 163.0)) == []  # held up
    assert rank_0.looks(263, (1, 5, 262.5)) == []
    assert rank_0.looks(264, (1, 6, 200.0)) == []


def test_the_time_of_the_disk(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.touch()
    now = probe_disk_time(tmp_path)
    (after := tmp_path / "after").touch()
    assert now is not None and before.stat().st_mtime <= now <= after.stat().st_mtime
    assert set(os.listdir(tmp_path)) == {"before", "after"}
    assert probe_disk_time(tmp_path / "absent") is None


def test_a_clock_stands_still_while_the_process_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    clock = RunningClock(0.5)
    begun_s = clock.now()
    for _ in range(10):
        now_s += 1.0  # later than it wanted, on a busy machine
        clock.skip_suspension()
    assert clock.now() - begun_s == 10.0
    now_s += 3600.0
    assert clock.skip_suspension() - begun_s == clock.now() - begun_s == 11.5
    now_s += 0.5
    assert clock.skip_suspension() - begun_s == 12.0
