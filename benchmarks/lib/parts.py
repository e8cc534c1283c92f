"""A benchmark in a process of its own, with a limit of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.report import JsonObject

STACK = "Stack ("  # begins what faulthandler prints
STACK_S = 2.0  # for printing it


def run_part(
    arguments: Sequence[str],
    limit_s: float,
    environment: dict[str, str],
    folder: Path | None = None,
) -> JsonObject:
    """Run Python with these arguments; return `seconds` and `result`, or how it `failed`.

    The result is the JSON object in its last line. A benchmark that runs into its limit is asked
    for its stack, which becomes `was_at`, the innermost call first. All processes that it started
    have ended.
    """
    begun = time.perf_counter()
    command = [sys.executable, *arguments]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as printed,
        tempfile.TemporaryFile("w+") as errors,
    ):
        process = subprocess.Popen(
            command,
            stdout=printed,
            stderr=errors,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"longer than {limit_s:.0f} s"
            process.send_signal(signal.SIGUSR1)  # `benchmarks/lib/script.py` answers it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0), errors.seek(0)
        lines, complaints = printed.read().strip().splitlines(), errors.read().strip().splitlines()
    seconds = round(time.perf_counter() - begun, 1)
    if code == 0 and lines:
        with contextlib.suppress(json.JSONDecodeError):
            return {"seconds": seconds, "result": json.loads(lines[-1])}
    asked = next(
        (n for n, line in enumerate(complaints) if line.startswith(STACK)), len(complaints)
    )
    failed = {"failed": f"{code}", "last_lines": [*lines[-3:], *complaints[:asked][-12:]]}
    stack = [line.strip() for line in complaints[asked + 1 :][:12]]
    return {"seconds": seconds} | failed | ({"was_at": stack} if stack else {})
