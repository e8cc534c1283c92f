"""Command lines of `train.py`, `serve.py` and jmoe's other programs, parsed into configurations.

Imports no JAX, so that `--help` and mistakes are answered quickly.
"""

from __future__ import annotations

import dataclasses
import difflib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import tyro

from jmoe.config import TRAINING_ONLY, CommConfig, TrainConfig, VisionTrainConfig, check
from jmoe.config.engine import EngineConfig
from jmoe.config.serving import ReasoningParserName, ServeConfig, ToolParserName
from jmoe.config.supervise import SuperviseConfig
from jmoe.runtime import program_name

T = TypeVar("T")
Unsettable = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
TRAIN = "Train a Mixture-of-Experts language model: {program} PRESET [--section.field VALUE ...]."
SERVE = """Serve a Mixture-of-Experts model over HTTP, as OpenAI's API:
{program} MODEL [--option VALUE ...].

MODEL is a Hugging Face folder, a GGUF file, the output folder of a run of train.py, or a bundle of
jmoe.deploy.bundle.
"""
BUNDLE = """Write a model with all its compiled programs as one folder, which serve.py serves on
such a device.

The options are those of serve.py that concern the engine.
"""
BATCH = """Answer a file of requests in OpenAI's batch format; append the answers to another file.

The same command goes on after an end of any kind: requests with an answer are not asked again.
"""
SUPERVISE = """Start the processes of a run, and all of them again when one is lost:
{program} [--option VALUE ...] -- train.py PRESET [--section.field VALUE ...].
"""
STATUS = (
    "Show how a run is, which goes on or has ended: {program} RUN [--json]. RUN is its output"
    " folder."
)
OTHER_TRAINERS_NAMES = {
    "lr": "optimizer.learning-rate",
    "wd": "optimizer.weight-decay",
    "warmup": "optimizer.warmup-steps",
    "min-lr": "optimizer.final-learning-rate-fraction",
    "grad-clip": "optimizer.clip-norm",
    "max-grad-norm": "optimizer.clip-norm",
    "epsilon": "optimizer.eps",
    "steps": "num-steps",
    "max-steps": "num-steps",
    "bs": "batch-size",
    "seq-len": "sequence-length",
    "grad-accum": "gradient-accumulation-steps",
    "dtype": "compute-dtype",
}
SERVE_FIELDS = {field.name for field in dataclasses.fields(ServeConfig)}
UNLIMITED = 2**31  # sequences that wait
INIT_FROM, DATA = "--init-from", "--data.path"
ROPE_SCALING, ROPE_FACTOR = "--model.rope-scaling", "--model.rope-factor"
EXPERTS, OPTIMIZER = "--tiers.experts", "--tiers.optimizer"
UPCYCLED = {
    "--model.num-experts": "--upcycle.num-experts",
    "--model.num-experts-per-tok": "--upcycle.num-experts-per-tok",
}


@dataclasses.dataclass(frozen=True)
class _CommArguments(CommConfig):
    """Traffic between devices: its form and its order."""

    hierarchical: Unsettable[bool] = CommConfig.hierarchical
    shard_dense: Unsettable[bool] = CommConfig.shard_dense
    fuse_dense: Unsettable[bool] = CommConfig.fuse_dense


@dataclasses.dataclass(frozen=True)
class _ServeArguments(ServeConfig):
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = dataclasses.field(
        default_factory=EngineConfig
    )


@dataclasses.dataclass(frozen=True)
class _StatusArguments:
    run: tyro.conf.Positional[str]
    json: bool = False  # as one JSON object


@dataclasses.dataclass(frozen=True)
class BundleOptions:
    """Options of `python -m jmoe.deploy.bundle`, as fields."""

    # a Hugging Face folder, or the output folder of a run of train.py
    model: tyro.conf.Positional[str]
    out: str  # where the bundle is written: no files yet
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = dataclasses.field(
        default_factory=EngineConfig
    )


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Options of `python -m jmoe.programs.batch`, as fields."""

    requests: tyro.conf.Positional[str]  # a file with one request per line
    answers: tyro.conf.Positional[str]  # the file to which answers are appended
    model: str  # a Hugging Face folder, a GGUF file, the output folder of a run, or a bundle
    served_model_name: str | None = None  # what requests call the model; None: its folder's name
    request_timeout_s: float = 86_400.0  # a request that takes longer is aborted
    max_body_bytes: int = ServeConfig.max_body_bytes  # maximum size of a request's body
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = dataclasses.field(
        default_factory=EngineConfig
    )
    # defaults of sampling parameters that a request omits, as serve.py's
    sampling_defaults: Literal["model", "openai"] = "model"
    # formats in which the model writes tool calls and reasoning; auto: as its chat template shows
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    # run engines on this Ray cluster: HOST:PORT of its head, or auto; None: one engine here
    ray: str | None = None
    # with --ray, the number of engines; None: as many as the GPUs allow, or one a node without GPUs
    ray_engines: int | None = None

    def __post_init__(self) -> None:
        if self.ray_engines is not None:
            uses_ray = self.ray is not None and self.ray_engines > 0
            check(uses_ray, "ray_engines", self.ray_engines, "must be positive, and needs --ray")

    def serving_config(self) -> ServeConfig:
        """Return the settings of the server's service, whose queue takes every request.

        Raises ValueError as `ServeConfig` does.
        """
        fields = {name: value for name, value in vars(self).items() if name in SERVE_FIELDS}
        # bodies may have a priority; here all requests come from one file
        return ServeConfig(**fields, max_waiting=UNLIMITED, scheduling_policy="priority")


def parse_with_default_sigpipe(parse: Callable[[], T]) -> T:
    """Return `parse()`. `--help` and mistakes end the process inside it, before the program imports
    JAX.

    While `parse` runs, SIGPIPE has its default action, so that piping help into `head` prints no
    traceback.
    """
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parsed = parse()
    signal.signal(signal.SIGPIPE, before)
    return parsed


def parse_train(
    arguments: Sequence[str], presets: Mapping[str, tuple[str, TrainConfig]]
) -> TrainConfig:
    """Return the preset named by the first argument, changed by the options that follow.

    presets: (line of description, configuration) by name. `--help` and mistakes end the process.
    """
    name = arguments[0] if arguments else ""
    if name in ("", "-h", "--help"):
        listed = "".join(
            f"  {preset:{max(map(len, presets))}}  {line}\n"
            for preset, (line, _) in presets.items()
        )
        print(f"{TRAIN.format(program=program_name())}\n\npresets:\n{listed}")
        print(f"{program_name()} PRESET --help shows every option with the preset's value,")
        print(
            f"{program_name()} PRESET --plan what memory the run needs, by tier, and how long a"
            " step takes,"
        )
        print(
            f"{program_name()} PRESET --estimate h100 what a step would take on such a GPU, which"
            " need not be here."
        )
        sys.exit(0 if name else 2)
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=1, cutoff=0.3)
        hint = f" Did you mean {near[0]}?" if near else ""
        sys.exit(
            f"{program_name()}: no preset is named {name!r}.{hint} Presets: {', '.join(presets)}"
        )
    line, preset = presets[name]
    options = _with_upcycled_experts(_with_yarn_factor(arguments[1:]), preset.init_from)
    options_set = dict(_iterate_options(options))
    _reject_other_trainers_names(options_set)
    if preset.init_from and not {"-h", "--help"} & {*options}:
        _require_model_and_data(name, options_set)
    if EXPERTS in options_set and OPTIMIZER not in options_set:
        options += [OPTIMIZER, options_set[EXPERTS]]
    config = tyro.cli(
        type(preset),
        default=dataclasses.replace(preset, comm=_CommArguments(**vars(preset.comm))),
        args=options,
        prog=f"{program_name()} {name}",
        description=line,
        config=(tyro.conf.AvoidSubcommands,),
    )
    if config.init_from and not isinstance(config, VisionTrainConfig):
        _reject_model_options(options_set)
    comm = CommConfig(**vars(config.comm))
    return dataclasses.replace(config, comm=comm, output_dir=config.output_dir or f"runs/{name}")


def _with_yarn_factor(options: Sequence[str]) -> list[str]:
    """Return the options with `--yarn-factor F` in place of `--model.rope-scaling yarn` and
    `--model.rope-factor F`. One of the two without the other ends the process.
    """
    options_set = dict(_iterate_options(options))
    values = options_set.get(ROPE_SCALING), options_set.get(ROPE_FACTOR)
    if values == (None, None):
        return list(options)
    if values[0] != "yarn" or not values[1]:
        sys.exit(
            f"{program_name()}: {ROPE_SCALING} = {values[0]!r}: must be yarn, and have"
            f" {ROPE_FACTOR} F beside it"
        )
    return [*_without(options, ROPE_SCALING, ROPE_FACTOR), "--yarn-factor", values[1]]


def _with_upcycled_experts(options: Sequence[str], init_from: str) -> list[str]:
    """Return the options with `--upcycle.num-experts N` in place of `--model.num-experts N`, and
    likewise for the experts per token, if they or the preset have `init_from`.
    """
    options_set, left = dict(_iterate_options(options)), list(options)
    for name, own in UPCYCLED.items():
        if (init_from or INIT_FROM in options_set) and name in options_set:
            left = [*_without(left, name), own, options_set[name]]
    return left


def _without(options: Sequence[str], *names: str) -> list[str]:
    """Return the options but for those of these names and their values."""
    kept, skipped = list[str](), False
    for option in options:
        name, equals, _ = option.partition("=")
        if name.replace("_", "-") in names:
            skipped = not equals
        elif skipped:
            skipped = False
        else:
            kept.append(option)
    return kept


def _require_model_and_data(name: str, options_set: Iterable[str]) -> None:
    """End the process if a preset for fine-tuning is given no model or no data."""
    missing = [option for option in (INIT_FROM, DATA) if option not in options_set]
    if missing:
        sys.exit(
            f"{program_name()} {name}: {' and '.join(missing)} must be given:"
            f" {program_name()} {name} {INIT_FROM} MODEL {DATA} chats.jsonl"
        )


def _iterate_options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of every option, with the name spelled as in `--help`; the value is "" if
    none follows.
    """
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            yield name.replace("_", "-"), value if equals else following


def _reject_other_trainers_names(options_set: Iterable[str]) -> None:
    """End the process if an option has a name that other trainers use, such as `--lr`: the parser
    would guess another setting.
    """
    for option in options_set:
        section, _, name = option.removeprefix("--").rpartition(".")
        meant = OTHER_TRAINERS_NAMES.get(name)
        if meant is not None and section in ("", meant.rpartition(".")[0]):
            sys.exit(f"{program_name()}: {option}: no such option. Did you mean --{meant}?")


def _reject_model_options(options_set: Iterable[str]) -> None:
    """End the process if an option would change the model of the checkpoint given by
    `--init-from`.
    """
    allowed = {f"--model.{name.replace('_', '-')}" for name in TRAINING_ONLY}
    refused = [
        option for option in options_set if option.startswith("--model.") and option not in allowed
    ]
    if refused:
        sys.exit(
            f"{program_name()}: {', '.join(refused)}: must not be given with --init-from, whose"
            f" config.json says it; of the model only {', '.join(sorted(allowed))} may be"
        )


def parse_serve(arguments: Sequence[str]) -> ServeConfig:
    """Return the settings of `serve.py`. `--help` and mistakes end the process."""
    return tyro.cli(
        _ServeArguments,
        args=arguments,
        prog=program_name(),
        description=SERVE.format(program=program_name()),
        config=(
            tyro.conf.PositionalRequiredArgs,
            tyro.conf.AvoidSubcommands,
            tyro.conf.FlagCreatePairsOff,
        ),
    )


def parse_bundle(arguments: Sequence[str]) -> BundleOptions:
    """Return the settings of `jmoe.deploy.bundle`. `--help` and mistakes end the process."""
    return tyro.cli(
        BundleOptions,
        args=arguments,
        prog="python -m jmoe.deploy.bundle",
        description=BUNDLE,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )


def parse_batch(arguments: Sequence[str]) -> BatchOptions:
    """Return the settings of `jmoe.programs.batch`. `--help` and mistakes end the process."""
    return tyro.cli(
        BatchOptions,
        args=arguments,
        prog="python -m jmoe.programs.batch",
        description=BATCH,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )


def parse_supervise(arguments: Sequence[str]) -> tuple[SuperviseConfig, list[str]]:
    """Return (settings before `--`, command after it) of `jmoe-supervise`. `--help` and mistakes
    end the process.
    """
    at = arguments.index("--") if "--" in arguments else len(arguments)
    program = program_name()
    config = tyro.cli(
        SuperviseConfig,
        args=arguments[:at],
        prog=program,
        description=SUPERVISE.format(program=program),
    )
    if not arguments[at + 1 :]:
        sys.exit(
            f"{program}: give the command after `--`: {program} --processes 4 -- train.py"
            " PRESET ..."
        )
    return config, list(arguments[at + 1 :])


def parse_status(arguments: Sequence[str]) -> tuple[str, bool]:
    """Return (output folder of the run, whether to print JSON) of `jmoe-status`. `--help` and
    mistakes end the process.
    """
    description, flags = STATUS.format(program=program_name()), (tyro.conf.FlagCreatePairsOff,)
    options = tyro.cli(
        _StatusArguments, args=arguments, prog=program_name(), description=description, config=flags
    )
    return options.run, options.json
