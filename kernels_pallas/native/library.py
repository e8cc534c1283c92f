"""Builds the native library with the machine's C++ compiler, once for a processor, and gives it
to XLA.
"""

import atexit
import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jax

OPERATIONS = (
    "jmoe_matmul",
    "jmoe_rms_norm",
    "jmoe_slot_mlp",
    "jmoe_find_slots",
    "jmoe_attention",
    "jmoe_top_k",
    "jmoe_causal_attention",
    "jmoe_causal_attention_gradient",
    "jmoe_grouped_mlp",
    "jmoe_grouped_mlp_gradient",
    "jmoe_hold",
)
# contractions to fused multiply-adds are wanted; -ffast-math would change how the whole process
# rounds tiny numbers
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-pthread",
)
BUILD_TIMEOUT_S = 1800  # of one file: a minute of processor time, which a busy machine gives slowly
SEAL_BYTES = hashlib.sha256().digest_size  # at the end of a library, where the loader ignores them
_PARTIAL = "building-"  # folders of builds that are not whole
_SOURCES = Path(__file__).parent

log = logging.getLogger("jmoe")


class NotBuiltError(RuntimeError):
    """The library cannot be built on this machine; the message says why."""


class NoCacheError(NotBuiltError):
    """There is no folder in which the library can be kept."""


_built: list[Path] = []  # the library to take, where one was named
_building: list[subprocess.Popen[str]] = []  # the process that builds it in the background


def take_built(path: Path) -> None:
    """Let the first `load` take a library that was built before, of the same sources for such a
    processor.
    """
    _built[:] = [path]


@cache
def load() -> Path:
    """Build the library if this machine has not done so before, and register its operations with
    XLA.

    Returns its path, in $XDG_CACHE_HOME/jmoe/native or as `take_built` has said; where there is no
    home folder, or it cannot be written, in a folder that ends with this process. Raises
    `NotBuiltError` where there is no compiler, or it fails.
    """
    path = _built[0] if _built else _build_somewhere()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuiltError(f"{path}: {error}") from error
    for name in OPERATIONS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return path


def is_built() -> bool:
    """Return whether `load` has nothing to build. Raises `NotBuiltError` where it could not
    build anything.
    """
    try:
        return bool(_built) or _is_whole(_place(_compiler()))
    except NoCacheError:
        return False


def build_in_background() -> None:
    """Let another process build the library, with a low priority, so that a later start finds it;
    once a process.

    The log says how the build has ended. Raises `NoCacheError` where no later start could find the
    library.
    """
    if not _building and not _is_whole(_place(_compiler())):
        root = str(_SOURCES.parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "kernels_pallas.native", "--background"]
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment, stdin=nothing, stdout=nothing, stderr=pipe, text=True
        )
        _building.append(process)
        watch = threading.Thread(
            target=_say_how_it_ends, args=(process,), name="native-build", daemon=True
        )
        watch.start()


def _say_how_it_ends(process: subprocess.Popen[str]) -> None:
    """Wait for a build in the background, and log its outcome."""
    _, said = process.communicate()
    if process.returncode == 0:
        log.info("the native operations are built: the next start takes them")
    else:
        why = said.strip() or f"the build ended with {process.returncode}"
        log.warning(
            "no native operations at the next start, which tries to build them again: %s", why
        )


@cache
def multiplies_many_rows() -> bool:
    """Return whether products of many rows are native too: of bfloat16, where the processor has
    them (AVX512-BF16).
    """
    return bool(ctypes.CDLL(str(load())).jmoe_multiplies_many_rows())


def record_background() -> None:
    """Forget what `recorded_background` returned, and record until it is called again."""
    ctypes.CDLL(str(load())).jmoe_record_background()


def recorded_background() -> list[tuple[float, float]]:
    """Return how many seconds each operation in the background waited for a thread and ran, by when
    it was started.

    XLA's profiles show only the start. With several devices in a process the order is that of no
    one device.
    """
    read = ctypes.CDLL(str(load())).jmoe_recorded_background
    read.restype, read.argtypes = ctypes.c_int64, (ctypes.POINTER(ctypes.c_double), ctypes.c_int64)
    seconds = (ctypes.c_double * read(None, 0))()
    read(seconds, len(seconds))
    return list(zip(seconds[::2], seconds[1::2], strict=True))


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/jmoe, by default below the home folder; `NoCacheError` where there
    is none.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jmoe"
    except RuntimeError as error:
        raise NoCacheError("there is no home folder: set HOME or XDG_CACHE_HOME") from error


def _build_somewhere() -> Path:
    """Return the library that is kept, or one of this process's own where none can be."""
    try:
        return build()
    except NoCacheError as error:
        log.info("native operations are compiled at each start: %s", error)
        folder = Path(tempfile.mkdtemp(prefix="jmoe-native-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _compile(_compiler(), folder / "library.so")
        return folder / "library.so"


def build() -> Path:
    """Compile the library into its place, unless it is there as it was written; of several
    processes one does.
    """
    compiler = _compiler()
    path = _place(compiler)
    if _is_whole(path):
        return path
    root = path.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(path):
                # of builds that were killed: one that runs has the lock
                for left in root.glob(f"{_PARTIAL}*"):
                    shutil.rmtree(left, ignore_errors=True)
                _compile(compiler, path)
    except OSError as error:
        raise NoCacheError(f"{root}: {error.strerror}") from error
    return path


def _place(compiler: str) -> Path:
    """Return where the library that this compiler builds is kept; `NoCacheError` where none can
    be.
    """
    path = cache_folder() / "native" / f"{_fingerprint(compiler)}.so"
    above = next(folder for folder in path.parents if folder.exists())
    if above.is_dir() and not _is_whole(path) and not os.access(above, os.W_OK | os.X_OK):
        raise NoCacheError(f"{above}: cannot be written")
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a library is there as it was written: its last bytes are the SHA-256 of all
    before them.

    One that a full disk or a power cut has shortened would end the process that loads it, without a
    word.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-SEAL_BYTES]).digest() == content[-SEAL_BYTES:]


def _compiler() -> str:
    """Return the path of $CXX, g++ or clang++."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return path
    raise NotBuiltError(
        f"$CXX = {asked!r} is not there"
        if asked
        else "there is no g++ and no clang++ (or set $CXX)"
    )


def _sources() -> list[Path]:
    return sorted(_SOURCES.glob("*.cc"))


def sources_digest() -> str:
    """Return a name that changes with the sources."""
    return _digest_of_sources().hexdigest()[:16]


def _digest_of_sources() -> Any:
    digest = hashlib.sha256()
    for path in (*_sources(), *sorted(_SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest


def _fingerprint(compiler: str) -> str:
    """Return a name that changes with the sources, the compiler, the processor and the version
    of JAX.
    """
    digest = _digest_of_sources()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    digest.update("\0".join([*FLAGS, compiler, version, jax.__version__, _processor()]).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Return what tells processors apart whose instructions differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kinds)))


def _compile(compiler: str, path: Path) -> None:
    """Write the library and its seal beside its place and rename it: see `_is_whole`."""
    with (
        tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=path.parent) as folder,
        ThreadPoolExecutor() as threads,
    ):
        made, options = Path(folder) / path.name, [*FLAGS, "-isystem", jax.ffi.include_dir()]
        objects = {source: made.with_name(f"{source.stem}.o") for source in _sources()}
        commands = [
            [compiler, *options, "-c", str(source), "-o", str(to)] for source, to in objects.items()
        ]
        list(threads.map(_run, commands))
        _run([compiler, *FLAGS, "-shared", *map(str, objects.values()), "-o", str(made)])
        with made.open("r+b") as file:
            seal = hashlib.file_digest(file, "sha256").digest()
            file.write(seal)
            file.flush()
            os.fsync(file.fileno())
        made.rename(path)


def _run(command: list[str]) -> None:
    """Run the compiler; raises `NotBuiltError` with what it says."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotBuiltError(f"{command[0]} took more than {BUILD_TIMEOUT_S} s") from error
    if done.returncode:
        raise NotBuiltError(f"{command[0]} failed:\n{done.stderr[-2000:]}")
