"""Heartbeat files: each process rewrites one file, and its supervisor watches the file's time
stamp. Standard library only.

The supervisor only asks, by its own clock, whether a file has changed since its last look. The
hosts' clocks need not agree, and a process that is stopped or whose host is lost changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from jmoe.types import JsonObject

CLOSED = "closed"  # the `at` of a rank whose run is over and whose process is about to end


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat file in `folder`."""
    return folder / f"rank-{rank}.json"


class Heartbeat:
    """Rewrites a rank's heartbeat file at every beat, by an atomic rename. If even its time cannot
    be written, the supervisor sees silence.
    """

    def __init__(self, folder: Path, rank: int, local_devices: int) -> None:
        self._path = heartbeat_file(folder, rank)
        self._devices = local_devices
        self._beats = 0

    def beat(self, activity: str, num_waits: int = 0, wait_s: float = 0.0) -> None:
        """Write one beat, or only its time if the disk is full. activity: what the process is
        doing; num_waits: number of waits it has begun; wait_s: seconds since the last one began.
        """
        self._beats += 1
        beat = {
            "beat": self._beats,
            "at": activity,
            "waits": num_waits,
            "since_s": wait_s,
            "devices": self._devices,
        }
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(beat))
            os.replace(new, self._path)
        except OSError:  # a full disk still takes a time, which is the sign of life
            with contextlib.suppress(OSError):
                self._path.touch()

    def close(self) -> None:
        """Write that the run is over, so that the supervisor expects no further beats."""
        self.beat(CLOSED)


class HeartbeatListener:
    """Watches the heartbeat files of one attempt's ranks, from the attempt's start."""

    def __init__(
        self, folder: Path, processes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: returns seconds; silence is measured by this clock."""
        self._paths = [heartbeat_file(folder, rank) for rank in range(processes)]
        self._clock = clock
        # (time stamp of the file, when that was first seen)
        self._changed = [(0, clock())] * processes

    def update_beat_times(self) -> None:
        """Note which ranks' files have changed since the last call, and the time of this call."""
        now = self._clock()
        for rank, path in enumerate(self._paths):
            try:
                stamp = path.stat().st_mtime_ns
            except OSError:
                continue
            if stamp != self._changed[rank][0]:
                self._changed[rank] = (stamp, now)

    def silence_s(self, rank: int) -> float:
        """Return the seconds since the rank's file last changed; 0 before its first beat."""
        stamp, since = self._changed[rank]
        return self._clock() - since if stamp else 0.0

    def has_begun(self, rank: int) -> bool:
        """Return whether a beat of the rank has been seen."""
        return self._changed[rank][0] != 0

    def last_activity(self, rank: int) -> str:
        """Return what the rank was doing at its last beat; "" before its first beat."""
        return str(read_heartbeat(self._paths[rank]).get("at", ""))

    def devices_per_process(self) -> int | None:
        """Return the number of devices per process, or None before any rank has reported it."""
        said = [read_heartbeat(path).get("devices") for path in self._paths]
        return next((int(number) for number in said if number), None)


def read_heartbeat(path: Path) -> JsonObject:
    """Return the content of a heartbeat file; an empty dict if the file is missing or damaged."""
    try:
        beat = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return beat if isinstance(beat, dict) else {}
