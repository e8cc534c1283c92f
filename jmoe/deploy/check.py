"""Say what of a model would load, before its weights are here: python -m jmoe.deploy.check FOLDER.

FOLDER needs `config.json` alone; with `model.safetensors.index.json` the names of its tensors are
compared too, and once all weights are there, their headers. It may also be a GGUF file. Prints the
family, the parameters, what is refused and why, the memory, and where an engine on this machine, or
on the one that --machine.accelerator, --machine.host-bytes and --devices describe, would put the
experts. Ends with 1 if something is refused or does not fit.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jmoe.config import MachineConfig, ModelConfig
from jmoe.config.engine import EngineConfig
from jmoe.config.tiers import ACCELERATORS
from jmoe.inference.dry_run import engine_machine_from_config
from jmoe.inference.loading import (
    EngineMachine,
    plan_engine_memory,
    resolve_sequence_length,
    this_machine,
)
from jmoe.mesh import is_expert
from jmoe.models.announced import (
    AnnouncedCheckpoint,
    has_all_weights,
    read_announced,
    read_index,
)
from jmoe.models.config_fields import ignored_training_fields, unsupported_fields
from jmoe.models.gguf.folder import gguf_folder
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.other_tokenizers import READERS
from jmoe.models.pretrained import abstract_decoder, read_config_file
from jmoe.models.quantization import quantized_cache_note
from jmoe.models.tokenizer_file import TOKENIZER
from jmoe.models.weight_files import read_weight_headers
from jmoe.models.weights import predicts_further_tokens
from jmoe.planning.memory_plan import MemoryPlan
from jmoe.runtime import end_at_once_on_interrupt, reexec_with_env
from jmoe.types import JsonObject
from kernels_pallas.formats import EXPERT_DTYPES

SHOWN = 3  # tensor names of an error


@dataclass(frozen=True)
class ModelSize:
    """The parameters of a decoder; active_parameters: all but the experts that a token does not
    choose.
    """

    parameters: int
    active_parameters: int

    @classmethod
    def measure(cls, config: ModelConfig) -> "ModelSize":
        total = experts = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_decoder(config)[2]):
            total += math.prod(leaf.shape)
            experts += math.prod(leaf.shape) * is_expert(path)
        unused = config.num_experts - config.num_experts_per_tok
        return cls(total, total - experts * unused // max(1, config.num_experts))


@dataclass(frozen=True)
class LoadedSizes:
    """The bytes of a model in memory, and where an engine would put them.

    conversion: what is said of experts held in another format than stored. engine: the engine's
    options with its sequence length. plan: None if the model does not fit, for the reason
    `no_plan`.
    """

    stored_experts: str
    experts_in_memory: str
    expert_bytes: int
    other_bytes: int
    conversion: str
    engine: EngineConfig
    plan: MemoryPlan | None
    no_plan: str = ""


@dataclass(frozen=True)
class ModelReport:
    """A folder's model: what loads of it, and what is refused.

    family: "" if it is unknown. refused: messages that name the field or tensor. notes: what loads,
    with a difference that a user should know. config, size, loaded: None if that is refused.
    """

    family: str
    refused: tuple[str, ...]
    notes: tuple[str, ...] = ()
    config: ModelConfig | None = None
    size: ModelSize | None = None
    loaded: LoadedSizes | None = None

    @property
    def fits(self) -> bool:
        """Whether the model loads and fits the machine."""
        return not self.refused and self.loaded is not None and self.loaded.plan is not None

    def __str__(self) -> str:
        lines = [f"family: {self.family or 'unknown'}"]
        if self.config is not None and self.size is not None:
            c = self.config
            lines += [
                f"layers: {c.num_hidden_layers}, {c.num_moe_layers} of them with {c.num_experts}"
                f" experts, {c.num_experts_per_tok} a token",
                f"parameters: {self.size.parameters:,}, of which a token uses"
                f" {self.size.active_parameters:,}",
            ]
        if self.loaded is not None:
            lines += _describe_loaded(self.loaded)
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"refused: {message}" for message in self.refused]
        lines.append("loads: " + ("no" if self.refused else "yes"))
        return "\n".join(lines)

    def as_json(self) -> JsonObject:
        """Return the report as a table of plain values."""
        loaded: JsonObject | None = None
        if self.loaded is not None:
            loaded = dataclasses.asdict(self.loaded)
            del loaded["engine"]
            loaded |= {"max_seq_len": self.loaded.engine.max_seq_len}
        size = None if self.size is None else dataclasses.asdict(self.size)
        return {
            "family": self.family,
            "loads": not self.refused,
            "fits": self.fits,
            "refused": list(self.refused),
            "notes": list(self.notes),
            "size": size,
            "loaded": loaded,
        }


def _describe_loaded(loaded: LoadedSizes) -> Iterator[str]:
    yield (
        f"experts: stored in {loaded.stored_experts}, in memory {loaded.experts_in_memory}:"
        f" {loaded.expert_bytes / 1e9:,.1f} GB; other weights {loaded.other_bytes / 1e9:,.1f} GB"
    )
    if loaded.conversion:
        yield loaded.conversion
    if loaded.plan is None:
        yield f"does not fit: {loaded.no_plan}"
        return
    yield (
        f"plan: {loaded.engine.max_batch} sequences of {loaded.engine.max_seq_len:,} tokens;"
        f" {loaded.plan}"
    )


def check_model(folder: Path, engine: EngineConfig, machine: EngineMachine) -> ModelReport:
    """Return what would load of a folder that has at least a `config.json`.

    engine: options of the engine that is planned. Raises ValueError or OSError if the `config.json`
    or the index cannot be read.
    """
    fields = read_config_file(folder)
    try:
        family = family_of(fields)
    except ValueError as error:
        return ModelReport("", (str(error),))
    refused = list(unsupported_fields(fields, family))
    try:
        config = model_config(fields)
    except ValueError as error:
        if str(error) not in refused:
            refused.append(str(error))
        return ModelReport(family, tuple(refused))
    announced = None if has_all_weights(folder) else read_announced(folder)
    notes = list(_report_notes(folder, fields, family, announced, engine.kv_cache_dtype))
    notes += _note_further_tokens(folder, config, announced)
    refused += _describe_refused_tensors(announced)
    size = ModelSize.measure(config)
    try:
        loaded = _measure_loaded(folder, engine, machine, announced)
    except ValueError as error:
        refused.append(str(error))
        loaded = None
    return ModelReport(family, tuple(refused), tuple(notes), config, size, loaded)


def _report_notes(
    folder: Path,
    fields: JsonObject,
    family: str,
    announced: AnnouncedCheckpoint | None,
    kv_cache_dtype: str,
) -> Iterator[str]:
    for name, value in ignored_training_fields(fields, family).items():
        yield f"{name} = {value!r} is not applied in training"
    if cache_note := quantized_cache_note(fields, kv_cache_dtype):
        yield cache_note
    if not (folder / TOKENIZER).is_file() and not any(
        (folder / name).is_file() for name in READERS
    ):
        yield f"there is no {TOKENIZER}, nor {' or '.join(READERS)} to make it from"
    if announced is None:
        return
    yield "from config.json alone: not all weights are there"
    if not (fields.get("dtype") or fields.get("torch_dtype")):
        yield "config.json names no dtype: bfloat16 is assumed"
    if announced.file_bytes is not None:
        yield f"the files named by the index have {announced.file_bytes / 1e9:,.1f} GB"


def _note_further_tokens(
    folder: Path, config: ModelConfig, announced: AnnouncedCheckpoint | None
) -> list[str]:
    """Return a note if the folder has tensors of layers that predict further tokens."""
    names = read_weight_headers(folder) if announced is None else read_index(folder) or {}
    count = sum(predicts_further_tokens(name, config) for name in names)
    if not count:
        return []
    return [
        f"{count} tensors of layers that predict further tokens: only --speculation mtp reads them"
    ]


def _describe_refused_tensors(announced: AnnouncedCheckpoint | None) -> Iterator[str]:
    if announced is None:
        return
    for names, problem in (
        (announced.absent, "are missing from the index"),
        (announced.unexpected, "are unexpected: the configuration has no place for them"),
    ):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield f"tensors {', '.join(names[:SHOWN])}{more} {problem}"


def _measure_loaded(
    folder: Path,
    engine: EngineConfig,
    machine: EngineMachine,
    announced: AnnouncedCheckpoint | None,
) -> LoadedSizes:
    with LazyCheckpoint(
        folder, engine.dtype, engine.expert_dtype, announced=announced
    ) as checkpoint:
        config, kept = checkpoint.config, checkpoint.expert_format
        wide = str(checkpoint.dtype)
        plan, no_plan = None, ""
        try:
            engine = resolve_sequence_length(checkpoint, engine, machine)
            plan = plan_engine_memory(checkpoint, engine, machine)
        except ValueError as error:
            no_plan = str(error)
        stored = checkpoint.stored_format
        label = checkpoint.stored_expert_label if stored is None else stored.name
        return LoadedSizes(
            stored_experts=label or wide,
            experts_in_memory=wide if kept is None else kept.name,
            expert_bytes=config.num_moe_layers * config.num_experts * checkpoint.expert_bytes,
            other_bytes=checkpoint.dense_bytes_per_device(),
            conversion=checkpoint.expert_conversion_note,
            engine=engine,
            plan=plan,
            no_plan=no_plan,
        )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.deploy.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a Hugging Face folder")
    parser.add_argument(
        "--machine.accelerator",
        dest="accelerator",
        choices=tuple(ACCELERATORS),
        default="",
        help="default: this machine",
    )
    parser.add_argument(
        "--machine.host-bytes",
        dest="host_bytes",
        type=int,
        default=0,
        metavar="BYTES",
        help="its free host memory; default: as here",
    )
    parser.add_argument("--devices", type=int, default=1, help="accelerators of the machine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    parser.add_argument(
        "--expert-dtype", choices=EXPERT_DTYPES, help="format of the experts; default: as stored"
    )
    parser.add_argument("--max-batch", type=int, default=EngineConfig.max_batch)
    parser.add_argument("--max-seq-len", type=int, help="default: as memory allows")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: list[str]) -> int:
    """Print what would load of the folder that the command line names; return the exit status."""
    options = _build_parser().parse_args(arguments)
    engine = EngineConfig(
        max_batch=options.max_batch,
        max_seq_len=options.max_seq_len,
        dtype=options.dtype,
        expert_dtype=options.expert_dtype,
    )
    engine = replace(engine, mesh=replace(engine.mesh, devices=options.devices))
    options_set = {"--devices": options.devices != 1, "--machine.host-bytes": options.host_bytes}
    for name, is_given in options_set.items():
        if is_given and not options.accelerator:
            raise ValueError(f"{name}: needs --machine.accelerator")
    named = MachineConfig(accelerator=options.accelerator, host_bytes=options.host_bytes)
    machine = engine_machine_from_config(named, options.devices) or this_machine()
    folder = options.folder.expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        folder = gguf_folder(folder)
    report = check_model(folder, engine, machine)
    print(json.dumps(report.as_json(), indent=2) if options.json else report)
    return 0 if report.fits else 1


if __name__ == "__main__":
    reexec_with_env()
    end_at_once_on_interrupt()
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"check: {error}")
