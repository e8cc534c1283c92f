"""Signs of life of a run's processes, as files in a folder that its supervisor looks at. Standard
library.

The supervisor asks only whether a file has changed since it last looked, by its own clock: the
hosts' clocks need not agree, and a process that is stopped, or whose host is lost, changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLOSED = "closed"  # the run is over: only the end of the process is still to come


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's signs of life."""
    return folder / f"rank-{rank}.json"


class Heartbeat:
    """Writes a rank's file anew at every beat, by a rename; where that fails the supervisor sees
    no sign of life.
    """

    def __init__(self, folder: Path, rank: int, local_devices: int) -> None:
        self._path = heartbeat_file(folder, rank)
        self._devices = local_devices
        self._beats = 0

    def beat(self, at: str, waits: int = 0, since_s: float = 0.0) -> None:
        """Say that this process is alive, what it does, how many waits it has begun, the last of
        them `since_s` ago.
        """
        self._beats += 1
        beat = {
            "beat": self._beats,
            "at": at,
            "waits": waits,
            "since_s": since_s,
            "devices": self._devices,
        }
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(beat))
            os.replace(new, self._path)

    def close(self) -> None:
        """Say that the run is over, so that no further beats are expected."""
        self.beat(CLOSED)


class Listener:
    """Looks for signs of life of an attempt's ranks, from its start on."""

    def __init__(
        self, folder: Path, processes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: seconds, by which silence is measured."""
        self._paths = [heartbeat_file(folder, rank) for rank in range(processes)]
        self._clock = clock
        # (time stamp of the file, when that was first seen)
        self._changed = [(0, clock())] * processes

    def look(self) -> None:
        now = self._clock()
        for rank, path in enumerate(self._paths):
            try:
                stamp = path.stat().st_mtime_ns
            except OSError:
                continue
            if stamp != self._changed[rank][0]:
                self._changed[rank] = (stamp, now)

    def silence_s(self, rank: int) -> float:
        """Return how long the rank has shown no sign of life; 0 before its first one."""
        stamp, since = self._changed[rank]
        return self._clock() - since if stamp else 0.0

    def has_begun(self, rank: int) -> bool:
        return self._changed[rank][0] != 0

    def at(self, rank: int) -> str:
        """Return what the rank did when it last said so; "" if it never has."""
        return str(read_heartbeat(self._paths[rank]).get("at", ""))

    def local_devices(self) -> int | None:
        """Return how many devices each process has; None before any has said so."""
        said = [read_heartbeat(path).get("devices") for path in self._paths]
        return next((int(number) for number in said if number), None)


def read_heartbeat(path: Path) -> dict[str, Any]:
    """Return a rank's last beat; an empty dict if there is none."""
    try:
        beat = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return beat if isinstance(beat, dict) else {}
