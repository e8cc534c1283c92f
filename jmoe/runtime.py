"""How a process begins and ends: the environment that JAX starts in, Ctrl-C, errors while closing.
Standard library.

XLA:CPU takes every temporary of a step from malloc, which hands large blocks back to the system
after each step and faults them in again, 4 KiB at a time, in the next: a quarter of a step's time
here. Transparent huge pages fault in 2 MiB at a time, and one arena keeps what the threads free in
one place.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
MARK = "JMOE_RUNTIME"  # set in a process that was run again, so that it is not run once more
# Exit codes of train.py beside 0 and those of mistakes, 1 and 2
# another process is missing, lost or stuck, or a limit is passed: a new start may mend it
EXIT_LOST = 70
EXIT_STOPPED = 75  # what launchers give as distributed.stopped_exit_code (EX_TEMPFAIL)
# of jaxlib, which takes either
MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# XLA's thread pool: collectives between fake devices deadlock on fewer threads
FAKE_DEVICES = "NPROC"


def program_name() -> str:
    """Return the name that this program was started by, `train.py` or `jmoe-train`, for its help
    and its errors.
    """
    return Path(sys.argv[0]).name


def lacking(packages: Iterable[str]) -> str | None:
    """Return the first of these packages that is not installed, None if all are; nothing is
    imported.
    """
    return next((name for name in packages if find_spec(name) is None), None)


def environment(current: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to run again with, or an empty dict if `current` needs no change.

    Whatever the user set stays. On a machine with JAX's CUDA plugin only the mark is added.
    """
    if MARK in current or not sys.platform.startswith("linux"):
        return {}
    wanted = dict(current) | {MARK: "1"}
    if current.get("JAX_PLATFORMS", "") != "cpu" and any(
        find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)
    ):
        return {}
    wanted.setdefault("GLIBC_TUNABLES", MALLOC)
    fake = (
        "host_platform_device_count" in current.get("XLA_FLAGS", "")
        or "JAX_NUM_CPU_DEVICES" in current
    )
    if fake:
        wanted.setdefault(FAKE_DEVICES, "16")
    return wanted


def reexec_with_env() -> None:
    """Replace this process by the same command in the right environment, if that is not the one it
    has.

    `python -m NAME` stays that: by its path, a module's folder would come first where Python looks
    for others.
    """
    wanted = environment(os.environ)
    if wanted:
        spec = sys.modules["__main__"].__spec__
        program = [sys.argv[0]]
        # else it is that of a profiler that runs a script
        if spec is not None and spec.origin == sys.argv[0]:
            program = ["-m", spec.name]
        os.execve(sys.executable, [sys.executable, *program, *sys.argv[1:]], wanted)


def without_devices() -> None:
    """Make JAX, which is not imported yet, compile for GPUs and use none: before
    `jmoe.run.ahead_of_time`.

    XLA's complaints that a program is larger than the GPU's memory are left out: what it needs is
    printed.
    """
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def device_memory_share() -> float:
    """Return the share of a GPU's memory that JAX takes for arrays and programs: three quarters
    unless it is set.
    """
    for name in MEMORY_SHARE:
        if value := os.environ.get(name):
            try:
                share = float(value)
            except ValueError:
                share = 0.0
            if share <= 0:
                raise ValueError(f"{name} = {value!r}: must be a number greater than 0")
            return min(1.0, share)
    return 0.75


def end_at_once_on_interrupt() -> None:
    """Let Ctrl-C end this process where it stands.

    Python's own handler raises `KeyboardInterrupt` when the main thread is back from XLA, minutes
    after Ctrl-C, and then ends the interpreter under threads that still compile. A signal that is
    ignored, as in a shell's background jobs, stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def log_to_screen() -> None:
    """Print jmoe's messages from INFO on, and others' warnings; a library's handlers go."""
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=line, force=True)
    logging.getLogger("jmoe").setLevel(logging.INFO)


def closing(close: Callable[[], None]) -> Callable[..., None]:
    """Make an exit for an `ExitStack` of `close`; its error is only printed where the run ends
    with one already.
    """

    def leave(
        kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            close()
        except OSError as later:
            if error is None:
                raise
            print(f"{program_name()}: while ending: {later}", file=sys.stderr, flush=True)

    return leave
