"""Write a model as one folder that starts without compiling: python -m jmoe.deploy.bundle MODEL
--out BUNDLE.

BUNDLE contains the model as a Hugging Face folder, every program that an engine with these options
runs, compiled for this device, and plan.json, which states the versions and the device that the
programs need and lists all files with their checksums. `serve.py BUNDLE` serves it.
"""

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jmoe.command_line import parse_bundle, parse_with_default_sigpipe
from jmoe.config import check
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.deploy.cut import check_empty_or_new, copy_files, creating_folder, model_file_names
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.deploy.portable import PLAN, check_files, file_sizes_and_hashes, plan_json_text, read_plan
from jmoe.inference.engine import Engine
from jmoe.inference.loading import (
    load_native_if_used,
    open_checkpoint,
    plan_engine_memory,
    resolve_sequence_length,
    segment_placements,
)
from jmoe.memory.closing import Closing
from jmoe.mesh import expert_mesh
from jmoe.models.safetensors_io import replace_text_durably
from jmoe.models.tokenizer_file import tokenizer_file
from jmoe.offload.placed_experts import even_placement
from jmoe.offload.residency import PACK_FOLDER
from jmoe.offload.segments import placements_to_segments
from jmoe.runtime import end_at_once_on_interrupt, reexec_with_env
from jmoe.status import status
from jmoe.types import Json, JsonObject
from kernels_pallas import native

BUNDLE = "bundle"  # the value of `form` in plan.json
MODEL, PROGRAMS, NATIVE = "model", "programs", "native.so"  # folders of a bundle, and a file
# prefixes of the flags in /proc/cpuinfo that name instruction sets which compiled programs may use
INSTRUCTIONS = (
    "amx",
    "avx",
    "sse",
    "ssse",
    "fma",
    "f16c",
    "bmi",
    "aes",
    "vaes",
    "gfni",
    "popcnt",
    "movbe",
    "abm",
    "adx",
)
NEVER_S = 1e9
Segments = list[list[list[int]]]
_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # else autotuning adds files to the folder
    "jax_compilation_cache_max_size": -1,
}


def is_bundle(folder: str | os.PathLike[str]) -> bool:
    """Return whether the folder was written by `bundle` or `lower`, even if it is damaged."""
    path = Path(folder).expanduser()
    return (path / PLAN).is_file() or ((path / PROGRAMS).is_dir() and (path / MODEL).is_dir())


def bundle(folder: Path, out: Path, options: EngineConfig, say: Callable[[str], None]) -> int:
    """Write the model of a Hugging Face folder as a bundle for this device; return the number of
    its programs.

    Raises ValueError naming the option, before anything is compiled or written.
    """
    check_empty_or_new(out)
    check(not options.lora, "lora", options.lora, "must be empty: a bundle has no adapters")
    options, segments = _resolve_options_and_segments(folder, options)
    tokenizer_file(folder)
    with creating_folder(out) as partly:
        with status("copying the model", say):
            (partly / MODEL).mkdir()
            copy_files(folder, partly / MODEL, model_file_names(folder))
        jax.clear_caches()  # programs compiled earlier in this process would not be written
        with (
            status("compiling", say),
            _writing_programs_to(partly / PROGRAMS),
            Engine(partly / MODEL, options) as engine,
        ):
            engine.compile_all_programs()
        # the server creates this folder again
        shutil.rmtree(partly / MODEL / PACK_FOLDER, ignore_errors=True)
        if options.native == "on":
            shutil.copyfile(native.load(), partly / PROGRAMS / NATIVE)
        with status("checksums", say):
            plan = {
                "form": BUNDLE,
                "native": native.sources_digest() if options.native == "on" else None,
                "versions": _jax_versions(),
                "device": _describe_device(),
                "engine": asdict(_without_machine_paths(options)),
                "segments": segments,
                "files": file_sizes_and_hashes(partly),
            }
        replace_text_durably(partly / PLAN, plan_json_text(plan))
        return len(list((partly / PROGRAMS).glob("*-cache")))


def _without_machine_paths(options: EngineConfig) -> EngineConfig:
    """Return the options without paths of this machine."""
    return replace(options, cache_dir=None, mesh=replace(options.mesh, segments=None))


def _resolve_options_and_segments(
    folder: Path, options: EngineConfig
) -> tuple[EngineConfig, Segments | None]:
    """Return (the options with automatic choices made, experts [device][layer] or None).

    With these options every machine makes the same programs. The second result is set if several
    devices hold all experts in their memory (policy `resident`).
    """
    segments: Segments | None = None
    if options.mesh.devices > 1:
        expert_mesh(options.mesh.devices)  # raises if there are too few devices
    with open_checkpoint(folder, options) as checkpoint:
        options = resolve_sequence_length(checkpoint, options)
        memory = plan_engine_memory(checkpoint, options)
        config = checkpoint.config
        mesh = options.mesh
        if mesh.devices > 1 and mesh.placement == "even" and memory.policy == "resident":
            even = [even_placement(config.num_experts, mesh.devices)] * config.num_moe_layers
            segments = placements_to_segments(segment_placements(checkpoint, options) or even)
    if options.policy == "auto" and memory.policy == "resident":
        options = replace(options, policy="resident")
    if jax.devices()[0].platform == "cpu" and options.mesh.devices == 1:
        options = replace(
            options, native="on" if load_native_if_used(options, waits=True) else "off"
        )
    return options, segments


@contextlib.contextmanager
def _writing_programs_to(folder: Path) -> Iterator[None]:
    """Make JAX write every program compiled in this context, and nothing else, to a folder.

    A write that fails, as on a full disk, raises; by default JAX would warn and leave a truncated
    file.
    """
    settings = {"jax_compilation_cache_dir": str(folder), "jax_raise_persistent_cache_errors": True}
    before = _swap_cache_options(settings | _SETTINGS)
    try:
        yield
    finally:
        _swap_cache_options(before)


def _swap_cache_options(settings: JsonObject) -> JsonObject:
    """Set the options of JAX's compilation cache; return {option: its previous value}."""
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # the cache reads its folder only when it is created
    return before


def _jax_versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "jaxlib")}


def _describe_device() -> JsonObject:
    """Return platform, kind and, of a CPU, instruction sets of the first device."""
    device = jax.devices()[0]
    lines: list[str] = []
    if device.platform == "cpu":
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(
        (line.split(":")[1].split() for line in lines if line.startswith(("flags", "Features"))), []
    )
    instructions = sorted(
        flag for flag in flags if flag.startswith(INSTRUCTIONS) or platform.machine() != "x86_64"
    )
    kind = device.device_kind if device.platform != "cpu" else platform.machine()
    return {"platform": device.platform, "kind": kind, "instructions": instructions}


class OpenBundle(Closing):
    """A bundle from which JAX reads compiled programs until `close`.

    model: its Hugging Face folder. engine: its `EngineConfig`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], engine: EngineConfig, *, check_contents: bool = True
    ) -> None:
        """Check the bundle, and make JAX read its programs.

        engine: the options asked for; each must be the bundle's or the default. check_contents:
        verify every file's checksum, not only its size. Raises ValueError naming a missing or
        damaged file, the JAX version or device that the programs need, or an option that the
        programs do not support.
        """
        path = Path(folder).expanduser()
        plan = read_plan(path)
        runner = path / "run.py"
        form = f"must be {BUNDLE!r}" + (f"; {runner} runs this one" if runner.is_file() else "")
        check(plan["form"] == BUNDLE, f"{path / PLAN}: form", plan["form"], form)
        try:
            _check_machine(path / PLAN, plan)
            mesh = EngineMesh(**plan["engine"]["mesh"])
            kept = EngineConfig(**plan["engine"] | {"mesh": mesh, "lora": ()})
            segments, digest = plan["segments"], plan["native"]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path / PLAN}: is damaged or of another version of jmoe: {error!r}"
            ) from error
        self.model, self.engine = path / MODEL, _combine_options(engine, kept)
        check(
            kept == _without_machine_paths(kept),
            f"{path / PLAN}: engine",
            plan["engine"],
            "must name no place on a machine",
        )
        if segments is not None:  # the engine reads them from this file
            self.engine = replace(
                self.engine, mesh=replace(self.engine.mesh, segments=str(path / PLAN))
            )
        check_files(path, plan["files"], contents=check_contents)
        _check_no_unlisted_files(path, plan["files"])
        self.read = self.requests = 0
        self._before: JsonObject = {}
        jax.monitoring.register_event_listener(self._count_program)
        if jax.process_count() > 1:  # the bundle's programs are for a single process
            return
        library = path / PROGRAMS / NATIVE
        if library.is_file() and digest == native.sources_digest():
            native.use_built_library(library)
        # JAX must not add programs to a folder with checksums
        settings = _SETTINGS | {"jax_persistent_cache_min_compile_time_secs": NEVER_S}
        self._before = _swap_cache_options(
            {"jax_compilation_cache_dir": str(path / PROGRAMS)} | settings
        )

    def _count_program(self, event: str, **_: object) -> None:
        self.read += event == "/jax/compilation_cache/cache_hits"
        self.requests += event == "/jax/compilation_cache/compile_requests_use_cache"

    @property
    def num_compiled(self) -> int:
        """Number of programs so far that were compiled because the bundle does not have them."""
        return self.requests - self.read

    def __str__(self) -> str:
        if not self._before:
            return f"{self.requests} programs for several processes, none from the bundle"
        return f"{self.read} programs from the bundle, {self.num_compiled} compiled"

    def close(self) -> None:
        """Restore JAX's compilation cache and stop counting programs."""
        _swap_cache_options(self._before)
        jax.monitoring.unregister_event_listener(self._count_program)


def _check_no_unlisted_files(folder: Path, files: Mapping[str, Json]) -> None:
    """Raise ValueError naming a file in the bundle that plan.json does not list, such as a program
    or a chat template, which would otherwise be used unchecked.
    """
    for part in (MODEL, PROGRAMS):
        for path in sorted((folder / part).rglob("*")):
            name = path.relative_to(folder).as_posix()
            # files that a server wrote, which have checksums of their own
            packed = name.startswith(f"{MODEL}/{PACK_FOLDER}")
            if not packed and (path.is_symlink() or path.is_file()) and name not in files:
                raise ValueError(
                    f"{path}: is not a file of the bundle: {PLAN} does not list it; remove it"
                )


def _check_machine(file: Path, plan: JsonObject) -> None:
    """Raise ValueError unless the JAX versions, the device and its instruction sets are those that
    the programs need.
    """
    for name, here in _jax_versions().items():
        if (needed := plan["versions"][name]) != here:
            raise ValueError(
                f"{file}: needs {name} {needed}, this is {here}; make the bundle again here"
            )
    device, wanted = _describe_device(), plan["device"]
    if (device["platform"], device["kind"]) != (wanted["platform"], wanted["kind"]):
        is_here, needs = (f"{one['platform']} {one['kind']}" for one in (device, wanted))
        raise ValueError(
            f"{file}: needs the device {needs}, this is {is_here}; make the bundle again here"
        )
    if missing := sorted(set(wanted["instructions"]) - set(device["instructions"])):
        raise ValueError(
            f"{file}: needs a processor with {', '.join(missing)}; make the bundle again here"
        )


def _combine_options(asked: EngineConfig, bundled: EngineConfig) -> EngineConfig:
    """Return the bundle's options with this machine's `cache_dir`. Raises ValueError naming an
    option that differs from the bundle's.
    """
    default = EngineConfig()
    for field in fields(EngineConfig):
        value, own = getattr(asked, field.name), getattr(bundled, field.name)
        fits = field.name == "cache_dir" or value in (own, getattr(default, field.name))
        check(
            fits,
            field.name,
            value,
            f"must be {own}, which the bundle's programs are made for, or left out",
        )
    return replace(bundled, cache_dir=asked.cache_dir)


def main() -> None:
    """Write the bundle that the command line asks for, and print its number of programs."""
    options = parse_with_default_sigpipe(lambda: parse_bundle(sys.argv[1:]))
    out, say = Path(options.out).expanduser(), partial(print, flush=True)
    check_empty_or_new(out)
    with hugging_face_folder(options.model, say, "MODEL") as folder:
        programs = bundle(folder, out, options.engine, say)
    device = _describe_device()
    say(
        f"{out}: {programs} programs for {device['platform']} {device['kind']} and JAX"
        f" {jax.__version__}"
    )


if __name__ == "__main__":
    reexec_with_env()
    end_at_once_on_interrupt()
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"bundle: {error}")
