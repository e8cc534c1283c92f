"""Clocks of hosts and file systems: file ages by the disk's own clock, and warnings about hosts
whose clocks differ.

No decision of a run depends on another host's clock, or on time in which the process was suspended.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from jmoe.types import Json

SKEW_S = 5.0  # a smaller difference is not reported
LATE_S = 1.0  # scheduling delay that a busy machine may cause


class RunningClock:
    """Clock of the seconds in which this process ran: the clock stands still while the process is
    suspended.

    After SIGSTOP, `scontrol suspend` or a sleep of the host, a process continues where it was, and
    no time limit has passed. One thread must call `skip_suspension` every `every_s` seconds; a
    longer gap between two calls does not count.
    """

    def __init__(self, every_s: float) -> None:
        self._longest_s = every_s + LATE_S
        self._last_s, self._missed_s = time.monotonic(), 0.0

    def skip_suspension(self) -> float:
        """Return `now()`, after subtracting any gap since the last call that is too long to be
        scheduling delay.
        """
        now_s = time.monotonic()
        self._missed_s += max(0.0, now_s - self._last_s - self._longest_s)
        self._last_s = now_s
        return now_s - self._missed_s

    def now(self) -> float:
        """Return the seconds counted so far. A suspension since the last `skip_suspension` is still
        included.
        """
        return time.monotonic() - self._missed_s


def probe_disk_time(folder: Path) -> float | None:
    """Return the modification time (Unix seconds) that a file made in `folder` now would get, or
    None if no file can be made.

    A file server stamps files by its own clock. The probe is a temporary file, unnamed or deleted
    at once.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime
    return None


class HostClocks:
    """Compares this host's clock with other ranks' clocks, using the time stamps of the ranks'
    reports.

    A new report was made after the previous look, so a delay in transit is never mistaken for a
    clock difference.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._beats: dict[int, int] = {}
        # ranks whose last report was too old; one late report may only have been delayed
        self._behind: set[int] = set()
        self._named: set[int] = set()
        self._last_look_s: float | None = None

    def new_skew_warnings(
        self, reports: Mapping[int, Mapping[str, Json]], before_read_s: float
    ) -> Iterator[str]:
        """Yield a warning, once per rank, for each rank whose clock differs by more than `SKEW_S`
        seconds.

        before_read_s: Unix time before the reports were read.
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
        self._last_look_s = before_read_s
