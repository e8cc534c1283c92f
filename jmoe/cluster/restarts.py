"""Policy of `jmoe-supervise`: when to restart a run whose processes have ended, and how far the run
has come. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jmoe.config.supervise import SuperviseConfig
from jmoe.runtime import EXIT_LOST

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
TAIL_BYTES = 1 << 20  # read from the end of metrics.jsonl, which has one line per step
ABORTED = 128 + signal.SIGABRT  # how JAX ends a process whose coordinator is gone
NONE = -1  # no step yet, no checkpoint yet


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run: the last finished `step`, and the step of the newest complete
    `checkpoint`; `NONE` (-1) if there is none.
    """

    step: int = NONE
    checkpoint: int = NONE


def read_progress(output_dir: Path) -> RunProgress:
    """Return the progress of the run in `output_dir`, read from `metrics.jsonl` and the names of
    the checkpoints.
    """
    return RunProgress(
        _last_finished_step(output_dir / METRICS), _newest_checkpoint(output_dir / CHECKPOINTS)
    )


def _newest_checkpoint(checkpoints: Path) -> int:
    """Return the newest step among checkpoints with their final name, which are complete; `NONE`
    without one.
    """
    try:
        return max((int(name) for name in os.listdir(checkpoints) if name.isdigit()), default=NONE)
    except OSError:
        return NONE


def _last_finished_step(metrics: Path) -> int:
    """Return the last finished step in metrics.jsonl; `NONE` without one."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # a kill can tear the last line
    except OSError:
        return NONE
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == "resume":
            return int(record["step"]) - 1
        if "event" not in record:
            return int(record["step"])
    return NONE


@dataclass(frozen=True)
class AttemptEnding:
    """How the processes of one attempt ended.

    kind: `lost` if a rank was lost, killed or stuck; `mistake` if a rank ended with an error of its
    own. why: clause that describes the rank that ended first.
    """

    kind: Literal["done", "stopped", "lost", "mistake"]
    code: int
    why: str = ""


def exit_code_text(code: int) -> str:
    """Return an exit code as text: `exit code 1`, `killed by SIGKILL`."""
    if code > 128 and code - 128 in set(signal.Signals):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def failure_kind(code: int) -> Literal["lost", "mistake"]:
    """Return `lost` if a restart may cure this exit code of the rank that ended first, else
    `mistake`.
    """
    return "lost" if code == EXIT_LOST or code > 128 else "mistake"


class RestartPolicy:
    """Decides whether and when another attempt follows a failed one."""

    def __init__(self, config: SuperviseConfig, now: RunProgress) -> None:
        self._config = config
        self._last = RunProgress(NONE - 1, now.checkpoint)
        self.in_a_row = 0  # restarts without a new checkpoint
        self._at_same_step = 0

    def delay_s_or_stop_reason(self, ending: AttemptEnding, now: RunProgress) -> float | str:
        """Return the seconds to wait before the next attempt, or a text that says why there is
        none.
        """
        if ending.kind == "mistake":
            return "which a new start does not mend"
        if now.checkpoint > self._last.checkpoint:
            self.in_a_row = self._at_same_step = 0
        self._at_same_step = self._at_same_step + 1 if now.step == self._last.step else 1
        self._last = now
        config = self._config
        if self._at_same_step >= config.same_step_limit:
            where = f"after step {now.step}" if now.step >= 0 else "before the first step"
            return (
                f"given up: {self._at_same_step} attempts in a row have ended {where}"
                " (same_step_limit)"
            )
        if self.in_a_row >= config.max_restarts:
            return (
                f"given up: {self.in_a_row} restarts in a row have made no checkpoint"
                " (max_restarts)"
            )
        self.in_a_row += 1
        return (
            0.0
            if self.in_a_row == 1
            else min(config.max_backoff_s, config.backoff_s * 2.0 ** (self.in_a_row - 2))
        )
