"""JAX as every test sees it: 8 fake CPU devices, strict dtype promotion; and fixtures that run
real processes.
"""

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

# XLA sizes its thread pools from this when the backend starts. 8 fake devices that meet in a
# collective need more threads than a small machine has cores, or they wait for each other for ever.
# Child processes inherit both.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs compile in a third of the time without most of XLA's optimisations, in child processes
# too. What is about the optimised program asks for the fixture `full_compilation`, or takes the
# variable from its child's environment.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

from tests.processes import QUICK_XLA_FLAGS, Child, kill_group, start_logged, start_process
from tests.train_runs import Run, TrainRuns

NUM_DEVICES = 8
# XLA ends a process whose fake devices do not all reach a collective within 40 s, which a busy
# machine can take.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def pytest_configure(config: pytest.Config) -> None:
    """Set JAX up before any test module is imported."""
    # a plugin may have imported jax before us
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    # the last one of a name counts
    flags = (QUICK_XLA_FLAGS, os.environ.get("XLA_FLAGS", ""), PATIENCE)
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))  # read when the backend starts
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    # JAX does not write cache entries atomically: parallel workers must not read each other's.
    cache = (
        config.rootpath / ".pytest_cache" / "jax" / os.environ.get("PYTEST_XDIST_WORKER", "main")
    )
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A shell starts its background jobs with Ctrl-C ignored, and nohup with SIGHUP; our child
    # processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_report_header() -> str:
    """Name the versions that the tests run with."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return ", ".join(f"{name} {version(name)}" for name in packages)


def pytest_collection_finish() -> None:
    """Leave what imports have made out of garbage collections: a third of a million objects that
    stay anyway.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module() -> Iterator[None]:
    """Forget a module's compiled programs: they map memory, and a process may have 65,530 maps
    (vm.max_map_count).

    The garbage of the module before is collected first, when its last test holds nothing any
    more. What is left then stays to the end, and no later collection looks at it again.
    """
    gc.collect()
    gc.freeze()
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def full_compilation() -> Iterator[None]:
    """All of XLA's optimisations, as users have them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_python(args, env=None, timeout=300)` runs `python *args` from the repository root to its
    end.

    env: changes to this process's environment, None takes a variable away. After `timeout` seconds
    the process and its children get SIGKILL and the test fails with the output so far. Returns
    returncode, stdout, stderr (text).
    """

    def run(
        args: Sequence[str | Path],
        env: Mapping[str, str | None] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        with start_process(args, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                kill_group(process)
                stdout, stderr = process.communicate()
                pytest.fail(
                    f"{process.args} ran longer than {timeout}"
                    f" s\n{stdout[-4000:]}\n{stderr[-4000:]}"
                )
            finally:
                kill_group(process)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run


@pytest.fixture
def start_python() -> Iterator[Callable[..., Child]]:
    """`start_python(args, log, env=None)` starts `python *args` from the repository root and
    returns at once.

    stdout and stderr go to the file `log`. What still runs when the test ends gets SIGKILL, its
    children too.
    """
    started: list[Child] = []

    def start(
        args: Sequence[str | Path], log: Path, env: Mapping[str, str | None] | None = None
    ) -> Child:
        started.append(start_logged(args, log, env))
        return started[-1]

    yield start
    for process in started:
        kill_group(process)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, run_python: Run) -> TrainRuns:
    """Return what the runs of train.py in one test session share."""
    return TrainRuns(tmp_path_factory.mktemp("runs"), run_python)
