"""Child processes of the tests: none outlives the test run."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# A process that starts another one this way takes it along when it dies, however it dies: a killed pytest leaves none.
_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


def python_command(args: Sequence[str | Path]) -> list[str]:
    """The command `python *args` of this interpreter, ended with SIGKILL when the thread that starts it is gone."""
    return [sys.executable, "-c", _DIE_WITH_PARENT, sys.executable, *map(str, args)]


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL a process started here and everything it started, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
