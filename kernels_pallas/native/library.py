"""Builds the native library with the machine's C++ compiler, once per processor type, and registers
it with XLA.
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

import jax

OPERATIONS = (
    "jmoe_matmul",
    "jmoe_rms_norm",
    "jmoe_slot_mlp",
    "jmoe_find_slots",
    "jmoe_attention",
    "jmoe_latent_attention",
    "jmoe_top_k",
    "jmoe_causal_attention",
    "jmoe_causal_attention_gradient",
    "jmoe_grouped_mlp",
    "jmoe_grouped_mlp_gradient",
    "jmoe_hold",
)
# Fused multiply-adds are wanted. -ffast-math would also flush denormals to zero in the whole
# process.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-pthread",
)
INSTRUCTION_SET_VARIABLE = "JMOE_NATIVE_ISA"
_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# By name: (what /proc/cpuinfo must list, the compiler's flags).
INSTRUCTION_SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "native": ((), ("-march=native",)),
    "sse4": (("ssse3", "sse4_2", "popcnt"), ("-march=x86-64-v2",)),
    "avx2": (_AVX2, ("-march=x86-64-v3",)),
    "avx_vnni": ((*_AVX2, "avx_vnni"), ("-march=x86-64-v3", "-mavxvnni")),
    "avx512": (_AVX512, ("-march=x86-64-v4",)),
    "avx512_vnni": ((*_AVX512, "avx512_vnni"), ("-march=x86-64-v4", "-mavx512vnni")),
    "avx512_bf16": (
        (*_AVX512, "avx512_vnni", "avx512_bf16"),
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    ),
}
BUILD_TIMEOUT_S = 1800  # per file: a minute of processor time, but the machine may be busy
SEAL_BYTES = hashlib.sha256().digest_size  # the checksum at a library's end, which loaders ignore
_PARTIAL = "building-"  # prefix of the folders of unfinished builds
_SOURCES = Path(__file__).parent

log = logging.getLogger("jmoe")


class NotBuiltError(RuntimeError):
    """The library cannot be built on this machine; the message says why."""


class NoWritableCacheError(NotBuiltError):
    """There is no writable folder for the library."""


_built: list[Path] = []  # the library named by `use_built_library`
_building: list[subprocess.Popen[str]] = []  # the background build


def use_built_library(path: Path) -> None:
    """Let `load` use the library at `path`, built earlier from the same sources for this type of
    processor, unless $JMOE_NATIVE_ISA asks for another instruction set than "native".
    """
    _built[:] = [path]


def usable_instruction_sets() -> tuple[str, ...]:
    """Return the names in `INSTRUCTION_SETS` that this processor has."""
    has = set(_processor_features().split())
    return tuple(name for name, (needed, _) in INSTRUCTION_SETS.items() if has.issuperset(needed))


def instruction_set() -> str:
    """Return the instruction set that the library is built for: $JMOE_NATIVE_ISA, by default
    "native", everything the processor has.

    Raises ValueError if the processor does not have it.
    """
    name = os.environ.get(INSTRUCTION_SET_VARIABLE) or "native"
    if name not in (usable := usable_instruction_sets()):
        raise ValueError(
            f"{INSTRUCTION_SET_VARIABLE} = {name!r}: must be one of {', '.join(usable)}, the"
            " instruction sets of this processor"
        )
    return name


def _uses_built_library() -> bool:
    return bool(_built) and instruction_set() == "native"


def _compiler_flags() -> tuple[str, ...]:
    return (*FLAGS, *INSTRUCTION_SETS[instruction_set()][1])


@cache
def load() -> Path:
    """Build the library if it is not in the cache, register its operations with XLA, and return its
    path.

    The path is in $XDG_CACHE_HOME/jmoe/native, or as set by `use_built_library`; without a writable
    cache folder it is in a temporary folder that this process removes at exit. Raises NotBuiltError
    if there is no compiler or the build fails.
    """
    path = _built[0] if _uses_built_library() else _build_in_cache_or_temporary()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuiltError(f"{path}: {error}") from error
    for name in OPERATIONS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return path


def is_built() -> bool:
    """Return whether `load` needs no build. Raises NotBuiltError if there is no compiler."""
    try:
        return _uses_built_library() or _is_complete(_cache_path(_find_compiler()))
    except NoWritableCacheError:
        return False


def build_in_background() -> None:
    """Start a low-priority process that builds the library for later starts; at most one per
    process.

    The result is logged. Raises NoWritableCacheError if there is no writable cache folder for
    the library.
    """
    if not _building and not _is_complete(_cache_path(_find_compiler())):
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
            target=_log_build_result, args=(process,), name="native-build", daemon=True
        )
        watch.start()


def _log_build_result(process: subprocess.Popen[str]) -> None:
    """Wait for a background build and log its result."""
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
    """Return whether native products of many bfloat16 rows are available: the processor has
    AVX512-BF16.
    """
    return bool(ctypes.CDLL(str(load())).jmoe_multiplies_many_rows())


@cache
def has_wide_vectors() -> bool:
    """Return whether the library's vectors have 8 floats or more: the processor has AVX2."""
    return bool(ctypes.CDLL(str(load())).jmoe_has_wide_vectors())


def start_recording_background() -> None:
    """Discard earlier records, and record background operations until `stop_recording_background`
    is called.
    """
    ctypes.CDLL(str(load())).jmoe_record_background()


def stop_recording_background() -> list[tuple[float, float]]:
    """Stop recording; return (seconds waiting for a thread, seconds running) of each background
    operation, in order of start.

    XLA's profiles show only the start of such an operation. With several devices in a process,
    operations of all devices are mixed.
    """
    read = ctypes.CDLL(str(load())).jmoe_recorded_background
    read.restype, read.argtypes = ctypes.c_int64, (ctypes.POINTER(ctypes.c_double), ctypes.c_int64)
    seconds = (ctypes.c_double * read(None, 0))()
    read(seconds, len(seconds))
    return list(zip(seconds[::2], seconds[1::2], strict=True))


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/jmoe, by default ~/.cache/jmoe.

    Raises NoWritableCacheError if there is no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jmoe"
    except RuntimeError as error:
        raise NoWritableCacheError("there is no home folder: set HOME or XDG_CACHE_HOME") from error


def _build_in_cache_or_temporary() -> Path:
    """Return the cached library or, without a writable cache folder, one in a temporary folder of
    this process.
    """
    try:
        return build()
    except NoWritableCacheError as error:
        log.info("native operations are compiled at each start: %s", error)
        folder = Path(tempfile.mkdtemp(prefix="jmoe-native-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _compile(_find_compiler(), folder / "library.so")
        return folder / "library.so"


def build() -> Path:
    """Return the path of the library in the cache, and compile it first if it is missing or
    damaged.

    A file lock lets one of several processes compile. Raises NoWritableCacheError if the folder
    is not writable.
    """
    compiler = _find_compiler()
    path = _cache_path(compiler)
    if _is_complete(path):
        return path
    root = path.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(path):
                # left by killed builds: a running build would hold the lock
                for left in root.glob(f"{_PARTIAL}*"):
                    shutil.rmtree(left, ignore_errors=True)
                _compile(compiler, path)
    except OSError as error:
        raise NoWritableCacheError(f"{root}: {error.strerror}") from error
    return path


def _cache_path(compiler: str) -> Path:
    """Return the path in the cache of the library that this compiler builds.

    Raises NoWritableCacheError if it is missing and cannot be written.
    """
    path = cache_folder() / "native" / f"{_fingerprint(compiler)}.so"
    above = next(folder for folder in path.parents if folder.exists())
    if above.is_dir() and not _is_complete(path) and not os.access(above, os.W_OK | os.X_OK):
        raise NoWritableCacheError(f"{above}: cannot be written")
    return path


def _is_complete(path: Path) -> bool:
    """Return whether the library at `path` is complete: its last bytes are the SHA-256 of all bytes
    before them.

    A library truncated by a full disk or a power cut would crash the process that loads it.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-SEAL_BYTES]).digest() == content[-SEAL_BYTES:]


def _find_compiler() -> str:
    """Return the path of $CXX if it is set, else of g++, clang++ or c++. Raises NotBuiltError if
    there is none.
    """
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return path
    raise NotBuiltError(
        f"$CXX = {asked!r} is not there"
        if asked
        else "there is no g++ and no clang++ (or set $CXX)"
    )


def _source_files() -> list[Path]:
    return sorted(_SOURCES.glob("*.cc"))


def sources_digest() -> str:
    """Return 16 hex digits that change with the C++ sources."""
    return _hash_sources().hexdigest()[:16]


def _hash_sources() -> "hashlib._Hash":
    digest = hashlib.sha256()
    for path in (*_source_files(), *sorted(_SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest


def _fingerprint(compiler: str) -> str:
    """Return 16 hex digits that change with the sources, flags, compiler, processor and version of
    JAX.
    """
    digest = _hash_sources()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    digest.update(
        "\0".join(
            [*_compiler_flags(), compiler, version, jax.__version__, _processor_features()]
        ).encode()
    )
    return digest.hexdigest()[:16]


def _processor_features() -> str:
    """Return the lines of /proc/cpuinfo that identify the processor's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kinds)))


def _compile(compiler: str, path: Path) -> None:
    """Compile the library in a temporary folder, append its checksum (see `_is_complete`), and
    rename it to `path`.
    """
    with (
        tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=path.parent) as folder,
        ThreadPoolExecutor() as threads,
    ):
        made, options = (
            Path(folder) / path.name,
            [*_compiler_flags(), "-isystem", jax.ffi.include_dir()],
        )
        objects = {source: made.with_name(f"{source.stem}.o") for source in _source_files()}
        commands = [
            [compiler, *options, "-c", str(source), "-o", str(to)] for source, to in objects.items()
        ]
        list(threads.map(_run_compiler, commands))
        _run_compiler(
            [compiler, *_compiler_flags(), "-shared", *map(str, objects.values()), "-o", str(made)]
        )
        with made.open("r+b") as file:
            seal = hashlib.file_digest(file, "sha256").digest()
            file.write(seal)
            file.flush()
            os.fsync(file.fileno())
        made.rename(path)


def _run_compiler(command: list[str]) -> None:
    """Run the compiler. Raises NotBuiltError with its output if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotBuiltError(f"{command[0]} took more than {BUILD_TIMEOUT_S} s") from error
    if done.returncode:
        raise NotBuiltError(f"{command[0]} failed:\n{done.stderr[-2000:]}")
