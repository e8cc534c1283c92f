"""Child processes of the tests: none outlives the test run."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A program compiled in one part takes less processor time than in several. XLA's older emitters of
# fused loops compile in half of the time; later versions have the new ones alone and end a process
# that names this flag.
_OLD_FUSIONS = (
    " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
)
QUICK_XLA_FLAGS = "--xla_cpu_parallel_codegen_split_count=1" + _OLD_FUSIONS

# A process that starts another one this way takes it along when it dies, however it dies: a killed
# pytest leaves none.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)


def python_command(args: Sequence[str | Path]) -> list[str]:
    """The command `python *args` of this interpreter, ended with SIGKILL when the thread that
    starts it is gone.
    """
    return [sys.executable, "-c", _DIE_WITH_PARENT, sys.executable, *map(str, args)]


def without_home(
    args: Sequence[str | Path], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """`python *args` to its end as a user whom the machine does not know, as in a container:
    without a home folder.
    """
    nobody = ["unshare", "--user", "--map-user=12345"]
    if subprocess.run([*nobody, "true"], capture_output=True, check=False).returncode:
        pytest.skip("users cannot be mapped here")
    known = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")
    }
    known.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [*nobody, *python_command(args)]
    return subprocess.run(
        command, env=known | environment, capture_output=True, text=True, check=False, timeout=300
    )


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """The folder of a new cgroup whose processes may have so much memory; the test is skipped where
    none can be made.
    """
    root = Path("/sys/fs/cgroup")
    name = f"jmoe-test-{os.getpid()}"
    old = (root / "memory" / "memory.limit_in_bytes").is_file()
    folder = root / "memory" / name if old else root / name
    limit = folder / ("memory.limit_in_bytes" if old else "memory.max")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not limit.exists():
            pytest.skip("no memory cgroup can be made here")
        limit.write_text(str(limit_bytes))
        yield folder
    finally:
        for number in (folder / "cgroup.procs").read_text().split():
            os.kill(int(number), signal.SIGKILL)
        deadline_s = time.monotonic() + 30
        while (folder / "cgroup.procs").read_text():
            assert time.monotonic() < deadline_s, f"{folder} still has processes"
            time.sleep(0.01)
        folder.rmdir()


class Child(subprocess.Popen[str]):
    """A process that a test started; log: the file that has what it writes."""

    log: Path

    @property
    def screen(self) -> str:
        """What the process has written so far."""
        return self.log.read_text()

    def wait_until(self, ready: Callable[[], object], timeout_s: float = 300) -> None:
        """Wait for `ready()`; the test fails with the log when the process ends before, or after
        `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"return code {self.poll()} while waiting\n{self.screen[-4000:]}")
            time.sleep(0.002)

    def end(self, timeout_s: float, returncode: int = 0) -> str:
        """What the process wrote until its end, which must come within `timeout_s` and with this
        return code.
        """
        try:
            self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s\n{self.screen[-4000:]}")
        assert self.returncode == returncode, self.screen
        return self.screen

    def kill_now(self) -> None:
        """SIGKILL, and wait for the end."""
        self.kill()
        assert self.wait(120) == -signal.SIGKILL


def start_process(
    args: Sequence[str | Path], changes: Mapping[str, str | None] | None, **streams: Any
) -> Child:
    """Start `python *args` with changes to this process's environment; None takes a variable
    away.
    """
    env = {
        name: value
        for name, value in {**os.environ, **(changes or {})}.items()
        if value is not None
    }
    # a session of its own, so that its children can be killed with it
    options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True} | streams
    return Child(python_command(args), cwd=ROOT, env=env, **options)


def start_logged(
    args: Sequence[str | Path], log: Path, changes: Mapping[str, str | None] | None = None
) -> Child:
    """Start `python *args`; what it says goes to a file, so that it waits for no reader."""
    with log.open("w") as output:
        process = start_process(args, changes, stdout=output, stderr=subprocess.STDOUT)
    process.log = log
    return process


def one_device(compile_cache: Path) -> dict[str, str | None]:
    """Changes to the environment for a program as a user runs it, on one device, with a shared
    compile cache.

    But for its programs, which compile with few optimisations, as in the tests themselves.
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_NUM_CPU_DEVICES": None,
        "XLA_FLAGS": QUICK_XLA_FLAGS,
        "NPROC": None,  # programs set it by themselves
        "JMOE_RUNTIME": None,
    }


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL a process started here and everything it started, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def forked(work: Callable[[], object]) -> int:
    """Start `work()` in a child process and return its number; it ends with status 1 and a
    traceback on an error.

    Only for programs that `run_python` has started: a process with JAX's threads must not be
    forked.
    """
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def kill_at_every_call(
    root: Path,
    calls: Sequence[tuple[Any, str]],
    work: Callable[[Path], object],
    examine: Callable[[Path], object],
    every: int = 1,
) -> int:
    """Let `work(folder)` be killed at its first call of any of these functions, its second one,
    ...: until it is not.

    Each time in a folder of its own, which `examine` looks at afterwards. every: of so many calls,
    only the first one is a death. Returns how many calls there were, rounded up to that.
    """

    def work_until(folder: Path, last: int) -> None:
        seen = itertools.count(1)

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(seen) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        for owner, name in calls:
            setattr(owner, name, counted(getattr(owner, name)))
        work(folder)

    for last in itertools.count(1, every):
        folder = root / str(last)
        folder.mkdir()
        status = os.waitpid(forked(partial(work_until, folder, last)), 0)[1]
        examine(folder)
        if not status:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, (last, status)
    return last - 1
