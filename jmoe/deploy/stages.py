"""All stages from a trained model to a served bundle, in one call: `deploy`.

`python -m jmoe.deploy` is its command line.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jmoe.command_line import parse_train
from jmoe.config import ModelConfig, check
from jmoe.config.cluster import read_machines
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.configs import PRESETS
from jmoe.deploy.bundle import bundle
from jmoe.deploy.calibration_text import calibration_text_for
from jmoe.deploy.compress import check_expert_sizes_fit_blocks, compress_model
from jmoe.deploy.cut import check_empty_or_new, cut_config, scratch_folder, weight_bytes
from jmoe.deploy.distil import (
    StudentOptions,
    StudentTraining,
    has_student,
    student_config_and_layers,
    train_arguments,
    write_student_into_run,
)
from jmoe.deploy.expert_layouts import LAYOUTS, expert_layout
from jmoe.deploy.expert_scores import check_num_kept
from jmoe.deploy.layerwise import mean_loss
from jmoe.deploy.lower import lower
from jmoe.deploy.merge import merge_run_to_hugging_face
from jmoe.deploy.prune import LENGTH, MAX_TOKENS, PruneOptions, prune
from jmoe.deploy.segment import segment
from jmoe.inference.loading import open_checkpoint
from jmoe.mesh import cpu_devices_hint
from jmoe.models.huggingface import family_of, updated_hf_config
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.tokenizer_file import tokenizer_file
from jmoe.planning.segmentation import SegmentBy
from jmoe.status import status

Say = Callable[[str], None]


@dataclass(frozen=True)
class DistilStage:
    """Options of the first stage: train a student of the model.

    experts, layers: of the student; None for the teacher's. run: the folder of its training, which
    a repeated call resumes and which is kept. train: further options of train.py.
    """

    steps: int
    run: Path
    experts: int | None = None
    layers: int | None = None
    preset: str = "tiny"
    train: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self.steps > 0, "distil_steps", self.steps, "must be greater than 0")


@dataclass(frozen=True)
class Stages:
    """Options of all stages; a stage whose option is None is left out.

    text: file, folder or glob, used for training a student, pruning and measuring the loss.
    experts: number that each layer keeps (prune). weights: format of `jmoe.deploy.compress`.
    machines: TOML file of unequal devices (segment). by: how layers and experts are split over
    them; None: the fastest way. portable: `lower` in place of `bundle`. Raises ValueError naming
    the option if options contradict each other.
    """

    text: str | None = None
    experts: int | None = None
    weights: str | None = None
    machines: Path | None = None
    by: SegmentBy | None = None
    portable: bool = False
    distil: DistilStage | None = None
    max_tokens: int = MAX_TOKENS
    sequence_length: int = LENGTH

    def __post_init__(self) -> None:
        check(
            self.experts is None or self.text is not None,
            "experts",
            self.experts,
            "needs a text to prune by",
        )
        learns = self.distil is None or self.text is not None
        check(
            learns, "distil_steps", self.distil and self.distil.steps, "needs a text to learn from"
        )
        known = self.weights is None or self.weights in LAYOUTS
        check(known, "weights", self.weights, f"must be one of {', '.join(LAYOUTS)}")
        one = self.machines is None or not self.portable
        check(
            one,
            "portable",
            self.portable,
            "must be left out with machines: its programs are for one device",
        )
        check(
            self.by is None or self.machines is not None,
            "by",
            self.by,
            "needs machines to segment the model over",
        )
        if self.machines is not None:
            read_machines(self.machines)


@dataclass(frozen=True)
class StageResult:
    """The model's size after a stage and, if measured, bits per byte of held-out text.

    num_bytes: of the weights; after segmentation of the weights on the device with the most; after
    `lower` or `bundle` of all files.
    """

    stage: str
    num_bytes: int
    bits_per_byte: float | None = None

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f"{self.bits_per_byte:8.4f} bits per byte"
        return f"{self.stage:26}{self.num_bytes / 1e6:12,.1f} MB{bits}"


def deploy(
    folder: Path, out: Path, stages: Stages, engine: EngineConfig, say: Say
) -> list[StageResult]:
    """Take the model of a Hugging Face folder through the stages, write the bundle `out`, and
    return one result per stage.

    engine: options that the bundle is compiled for; with machines, its number of devices is theirs.
    Raises ValueError naming the option, in most cases before anything is computed.
    """
    check_empty_or_new(out)
    _check_stages(folder, out, stages, engine)
    with scratch_folder(out.with_name(f".{out.name}.stages"), out) as between:
        results = [
            StageResult(
                "merged", weight_bytes(folder), _held_out_bits_per_byte(folder, stages, say)
            )
        ]
        if stages.distil is not None:
            folder = _train_student(folder, between / "distilled", stages, stages.distil, say)
            results.append(
                StageResult(
                    "distilled", weight_bytes(folder), _held_out_bits_per_byte(folder, stages, say)
                )
            )
        if stages.experts is not None and stages.text is not None:
            options = PruneOptions(
                stages.experts,
                stages.text,
                max_tokens=stages.max_tokens,
                sequence_length=stages.sequence_length,
            )
            source, folder = folder, between / "pruned"
            pruned = prune(source, folder, options, say)
            results.append(
                StageResult(
                    f"{stages.experts} experts", pruned.bytes_after, pruned.bits_per_byte_after
                )
            )
        if stages.weights is not None:
            source, folder = folder, between / "compressed"
            with status(f"compressing experts to {stages.weights}", say):
                compress_model(source, folder, stages.weights)
            results.append(
                StageResult(
                    stages.weights,
                    weight_bytes(folder),
                    _held_out_bits_per_byte(folder, stages, say),
                )
            )
        if stages.machines is not None:
            engine, device_bytes = _segment_over_machines(
                folder, between / "segments.json", stages, engine
            )
            results.append(StageResult(f"segmented, each of {engine.mesh.devices}", device_bytes))
        make = lower if stages.portable else bundle
        make(folder, out, engine, say)
        num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        results.append(
            StageResult(
                "lowered, all files" if stages.portable else "bundled, all files", num_bytes
            )
        )
    return results


def _check_stages(folder: Path, out: Path, stages: Stages, engine: EngineConfig) -> None:
    """Raise ValueError naming the first option that does not fit the model. Nothing is computed."""
    with open_checkpoint(folder, engine) as checkpoint:
        config, fields = checkpoint.config, checkpoint.fields
        config.check_no_linear_attention("these stages")
        checkpoint.choose_sequence_length(engine.max_seq_len)
    tokenizer_file(folder)
    if stages.distil is not None and stages.text is not None:
        student = _student_options(config, stages, stages.distil)
        config, _ = student_config_and_layers(config, fields, student)
        places = [place.expanduser().resolve() for place in (stages.distil.run, out)]
        apart = not any(one.is_relative_to(other) for one, other in (places, places[::-1]))
        check(
            apart,
            "distil_run",
            str(stages.distil.run),
            f"must not lie in out = {str(out)!r}, nor that in it",
        )
        has_student(stages.distil.run, config, "distil_run")
        parse_train(_train_arguments(stages.distil, student, folder), PRESETS)
    if stages.experts is not None:
        check_num_kept(config, stages.experts)
        config = cut_config(config, range(config.num_hidden_layers), num_experts=stages.experts)
        updated_hf_config(fields, config)
    if stages.weights is not None:
        check_expert_sizes_fit_blocks(
            config, expert_layout(stages.weights, family_of(fields)), stages.weights
        )
    if stages.machines is not None:
        devices, here = _count_devices_in_file(stages.machines), jax.device_count()
        check(devices > 1, "machines", str(stages.machines), "has one device: must have several")
        most = f"must have at most the {here} of this process{cpu_devices_hint(devices)}"
        constraint = f"has {devices} devices: {most}"
        check(devices <= here, "machines", str(stages.machines), constraint)


def _count_devices_in_file(machines: Path) -> int:
    return sum(one.devices for one in read_machines(machines).machines)


def _student_options(teacher: ModelConfig, stages: Stages, distil: DistilStage) -> StudentOptions:
    assert stages.text is not None
    experts = teacher.num_experts if distil.experts is None else distil.experts
    return StudentOptions(
        experts,
        stages.text,
        distil.layers,
        max_tokens=stages.max_tokens,
        sequence_length=stages.sequence_length,
    )


def _train_arguments(distil: DistilStage, student: StudentOptions, teacher: Path) -> list[str]:
    more = ["--num-steps", str(distil.steps), *distil.train]
    return train_arguments(StudentTraining(teacher, distil.run, student.text, distil.preset), more)


def _train_student(folder: Path, out: Path, stages: Stages, distil: DistilStage, say: Say) -> Path:
    """Train a student of the model with train.py; return `out`, the Hugging Face folder of its
    newest checkpoint.

    Raises ValueError if training ends early.
    """
    with LazyCheckpoint(folder) as checkpoint:
        student = _student_options(checkpoint.config, stages, distil)
    write_student_into_run(folder, distil.run, student, say)
    command = [
        sys.executable,
        "-m",
        "jmoe.commands.train",
        *_train_arguments(distil, student, folder),
    ]
    code = subprocess.run(command, check=False).returncode
    step = 0 if code else merge_run_to_hugging_face(distil.run, out)
    if step != distil.steps:
        raise ValueError(
            f"distil_steps = {distil.steps}: the training in {distil.run} ended with exit status"
            f" {code} after step {step}; the same command goes on with it"
        )
    return out


def _held_out_bits_per_byte(folder: Path, stages: Stages, say: Say) -> float | None:
    """Return bits per byte of the held-out text; None without a text."""
    if stages.text is None:
        return None
    with (
        LazyCheckpoint(folder, "float32", "wide") as checkpoint,
        status(f"held-out loss of {folder.name}", say),
    ):
        text = calibration_text_for(
            checkpoint, stages.text, stages.sequence_length, stages.max_tokens
        )
        return text.bits_per_byte(mean_loss(checkpoint, text.held_out_BS))


def _segment_over_machines(
    folder: Path, segments: Path, stages: Stages, engine: EngineConfig
) -> tuple[EngineConfig, int]:
    """Return (engine options with the devices and the placement of experts from `segment`, largest
    bytes of weights on a device).
    """
    assert stages.machines is not None
    devices = _count_devices_in_file(stages.machines)
    changes: dict[str, Any] = {"mesh": EngineMesh(devices=devices)}
    if engine.max_batch % devices:  # every device has the same number of cache rows
        changes["max_batch"] = -(-engine.max_batch // devices) * devices
    engine = replace(engine, **changes)
    sizes = {
        "max_batch": engine.max_batch,
        "max_seq_len": engine.max_seq_len,
        "dtype": engine.dtype,
    }
    plan = segment(folder, stages.machines, segments, stages.by, **sizes)
    placed = replace(engine, mesh=EngineMesh(devices=devices, segments=str(segments)))
    return placed, plan.device_bytes
