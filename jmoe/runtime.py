"""Start and end of a process: environment variables to set before JAX starts, Ctrl-C, errors during
cleanup. Standard library only.

XLA:CPU allocates every temporary of a step by malloc, which returns large blocks to the system
after each step; the next step faults them in again, 4 KiB at a time. That took a quarter of a
step's time when measured. Transparent huge pages are faulted in 2 MiB at a time, and a single arena
keeps memory that threads free in one place.
"""

import contextlib
import gc
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
REEXEC_MARK = "JMOE_RUNTIME"  # set in a re-executed process, so that it is not re-executed again
# Exit codes of train.py besides 0 (done), 1 and 2 (mistakes):
# another process is missing, lost or stuck, or a time limit has passed: a restart may help
EXIT_LOST = 70
EXIT_STOPPED = 75  # EX_TEMPFAIL; launchers pass it as distributed.stopped_exit_code
# jaxlib reads either variable
MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Share of a GPU's memory that JAX allocates in jmoe's programs; by itself it would take 0.75. The
# rest holds the driver's context, the programs and NCCL's buffers.
GPU_MEMORY_FRACTION = 0.9
# XLA's thread pool: collectives between fake devices deadlock on fewer threads
FAKE_DEVICES = "NPROC"


def program_name() -> str:
    """Return the name that this program was started by, such as `train.py` or `jmoe-train`, for
    help and error messages.
    """
    return Path(sys.argv[0]).name


def first_missing_package(packages: Iterable[str]) -> str | None:
    """Return the first package that is not installed, or None. Nothing is imported."""
    return next((name for name in packages if find_spec(name) is None), None)


def may_use_nvidia_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether JAX's CUDA plugin is installed and JAX_PLATFORMS does not rule it out."""
    return environment.get("JAX_PLATFORMS", "") != "cpu" and any(
        find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)
    )


def gpu_memory_environment(current: Mapping[str, str]) -> dict[str, str]:
    """Return {variable: value} that lets JAX allocate `GPU_MEMORY_FRACTION` of a GPU's memory; an
    empty dict without a GPU, or if the user has set the fraction.
    """
    if not may_use_nvidia_gpu(current) or any(map(current.get, MEMORY_SHARE)):
        return {}
    return {MEMORY_SHARE[0]: str(GPU_MEMORY_FRACTION)}


def import_ahead(*modules: str) -> None:
    """Import modules without garbage collections, which take a fifth of the time of a start's
    imports. Later collections do not scan the objects that exist afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            import_module(module)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def reexec_environment(current: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to re-execute the process with, or an empty dict if `current` needs no
    change.

    Variables set by the user stay unchanged. Where JAX may use an NVIDIA GPU there is nothing to
    change.
    """
    if REEXEC_MARK in current or not sys.platform.startswith("linux"):
        return {}
    wanted = dict(current) | {REEXEC_MARK: "1"}
    if may_use_nvidia_gpu(current):
        return {}
    wanted.setdefault("GLIBC_TUNABLES", MALLOC)
    fake = (
        "host_platform_device_count" in current.get("XLA_FLAGS", "")
        or "JAX_NUM_CPU_DEVICES" in current
    )
    if fake:
        wanted.setdefault(FAKE_DEVICES, "16")
    return wanted


def open_closed_standard_streams() -> None:
    """Open /dev/null for each standard stream that the parent has closed.

    Otherwise the next files that are opened, such as a checkpoint's, get the streams' numbers, and
    what XLA or a traceback prints goes into them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            held = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(held, True)


def reexec_with_env() -> None:
    """Replace this process by the same command with the environment of `reexec_environment`, if
    that differs from the current one; on a GPU set the share of its memory that JAX takes. Standard
    streams are open afterwards.

    `python -m NAME` is re-executed in that form: run by its path, a module's own folder would come
    first in Python's search path.
    """
    open_closed_standard_streams()
    os.environ |= gpu_memory_environment(os.environ)
    wanted = reexec_environment(os.environ)
    if wanted:
        spec = sys.modules["__main__"].__spec__
        program = [sys.argv[0]]
        # otherwise __spec__ is that of a profiler which runs a script
        if spec is not None and spec.origin == sys.argv[0]:
            program = ["-m", spec.name]
        os.execve(sys.executable, [sys.executable, *program, *sys.argv[1:]], wanted)


def hide_devices() -> None:
    """Make JAX compile for GPUs but use none. Call this before JAX is imported and before
    `jmoe.run.ahead_of_time`.

    XLA's warnings that a program exceeds the GPU's memory are suppressed, because the estimate
    prints the memory that is needed.
    """
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def gpu_memory_fraction() -> float:
    """Return the fraction of a GPU's memory that JAX may allocate in jmoe's programs:
    `GPU_MEMORY_FRACTION` unless an environment variable sets it.

    Raises `ValueError` if the variable is not a positive number.
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
    return GPU_MEMORY_FRACTION


def end_at_once_on_interrupt() -> None:
    """Make Ctrl-C end this process immediately.

    Python's own handler raises `KeyboardInterrupt` only once the main thread returns from XLA,
    possibly minutes later, and then shuts the interpreter down under threads that still compile. If
    SIGINT is ignored, as in a shell's background jobs, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class _LossyStream(io.FileIO):
    """A standard stream that drops what it cannot write, and says so once on stderr."""

    has_lost = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self.has_lost:
                self.has_lost = True
                line = f"{program_name()}: goes on, but what it prints is lost: {error.strerror}\n"
                with contextlib.suppress(OSError):
                    os.write(2, line.encode())
            return memoryview(data).nbytes


def ignore_output_errors() -> None:
    """Make the process go on if what it prints cannot be written: the reader of a pipe or the
    terminal is gone, or the disk of a log is full.

    Characters that a stream's encoding lacks are escaped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the parent closed it: nothing is printed
            continue
        screen = _LossyStream(stream.fileno(), "w", closefd=False)
        written = io.TextIOWrapper(
            screen if stream.write_through else io.BufferedWriter(screen),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, written)
        setattr(sys, f"__{name}__", written)


def log_to_stderr() -> None:
    """Log jmoe's messages from level INFO on, and other libraries' warnings, to stderr. Replaces
    handlers that libraries installed.
    """
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=line, force=True)
    logging.getLogger("jmoe").setLevel(logging.INFO)


def exit_callback(close: Callable[[], None]) -> Callable[..., None]:
    """Return an exit callback for `ExitStack.push` that calls `close`.

    If the stack is already unwinding an error, an `OSError` of `close` is only printed.
    """

    def close_on_exit(
        kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            close()
        except OSError as later:
            if error is None:
                raise
            print(f"{program_name()}: while ending: {later}", file=sys.stderr, flush=True)

    return close_on_exit
