"""Whose clock says what: ages of files go by the disk's own clock, and hosts whose clocks differ
are named.

Nothing in a run waits for, or decides by, the time of another host or that in which it was
suspended. Standard library.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SKEW_S = 5.0  # clocks that differ by less are not worth a word
LATE_S = 1.0  # a thread may come so much later than it wanted on a busy machine


class RunningClock:
    """Counts the seconds in which this process has run: it stands still while the process is
    suspended.

    After SIGSTOP, `scontrol suspend` or a sleep of its host a process goes on where it was, and
    nothing is late. `look` is to be called every `every_s` by one thread; time in which it was not
    called does not count.
    """

    def __init__(self, every_s: float) -> None:
        self._longest_s = every_s + LATE_S
        self._last_s, self._missed_s = time.monotonic(), 0.0

    def look(self) -> float:
        """Return `now`, after a look at whether the process was suspended."""
        now_s = time.monotonic()
        self._missed_s += max(0.0, now_s - self._last_s - self._longest_s)
        self._last_s = now_s
        return now_s - self._missed_s

    def now(self) -> float:
        """Return the seconds; what the present gap misses is not known before the next `look`."""
        return time.monotonic() - self._missed_s


def disk_time(folder: Path) -> float | None:
    """Return the time that a file would be given that is made in this folder now; None where none
    can be made.

    A server that lends out its disk gives files the time of its own clock. The file has no name, or
    not for long.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime
    return None


class HostClocks:
    """Compares this host's clock with those of other ranks, by the time stamps of their reports.

    A report that is new has been made since the last look: what a delay can explain is no
    difference between clocks.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._beats: dict[int, int] = {}
        # ranks whose last report was too old; it may have been held up
        self._behind: set[int] = set()
        self._named: set[int] = set()
        self._last_look_s: float | None = None

    def look(self, reports: Mapping[int, Mapping[str, Any]], begun_s: float) -> Iterator[str]:
        """Yield a line for each rank whose clock is found to differ, once; begun_s: the time
        before they were read.
        """
        for rank, report in reports.items():
            new, self._beats[rank] = self._beats.get(rank) != report["beat"], report["beat"]
            if not new or rank in self._named or "time" not in report:
                continue
            ahead_s = report["time"] - time.time()
            behind_s = 0.0 if self._last_look_s is None else self._last_look_s - report["time"]
            again, too_old = rank in self._behind, behind_s > SKEW_S
            self._behind = self._behind | {rank} if too_old else self._behind - {rank}
            if ahead_s > SKEW_S or (again and too_old):
                self._named.add(rank)
                by = f"{ahead_s:.0f} s ahead of" if ahead_s > 0 else f"{behind_s:.0f} s behind"
                yield (
                    f"warning: the clock of rank {rank} on {report['host']} is {by} rank 0's on"
                    f" {self._host}: training goes on, but the times in their logs do not compare"
                )
        self._last_look_s = begun_s
