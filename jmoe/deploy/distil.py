"""Train a smaller model (student) from a larger one: python -m jmoe.deploy.distil TEACHER --out RUN
--experts N --text X.

The student starts with L layers, spread evenly over the teacher's, and in each with the N experts
that the text uses most (or that have REAP's highest scores). train.py then trains it on
cross-entropy and on the divergence from the teacher's distribution. RUN is an ordinary run: the
same command resumes it, and `python -m jmoe.deploy.merge` writes it as a Hugging Face folder. Other
options are train.py's.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from jmoe.command_line import parse_train
from jmoe.config import ModelConfig, check
from jmoe.configs import PRESETS
from jmoe.deploy.calibration_text import calibration_text_for
from jmoe.deploy.cut import check_empty_or_new, cut_config, write_cut_model
from jmoe.deploy.dense_layer import DenseFrom, dense_width_and_num_joined, make_dense_mlp
from jmoe.deploy.expert_scores import ScoreKind, best_experts, check_num_kept, measure_experts
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.deploy.prune import LENGTH, MAX_TOKENS
from jmoe.models.huggingface import updated_hf_config
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.status import status
from jmoe.types import JsonObject

STUDENT = "student"  # folder inside the run's folder: the model that training starts from


@dataclass(frozen=True)
class StudentOptions:
    """Size and origin of a student, and the text by which its experts are chosen.

    experts: number per layer. layers, top_k: None for the teacher's. score: ranks the teacher's
    experts. dense: numbers of student layers that get an MLP in place of experts, made from the
    most used experts as `dense_from` says. max_tokens: tokens of the text to read.
    """

    experts: int
    text: str
    layers: int | None = None
    top_k: int | None = None
    score: ScoreKind = "usage"
    dense: tuple[int, ...] = ()
    dense_from: DenseFrom = "most_used"
    max_tokens: int = MAX_TOKENS
    sequence_length: int = LENGTH


def evenly_spaced_layers(num_layers: int, num_kept: int) -> list[int]:
    """Return `num_kept` numbers out of `num_layers` layers, evenly spaced, with the first and the
    last among them.
    """
    return (
        np.unique(np.linspace(0, num_layers - 1, num_kept).round().astype(int)).tolist()
        if num_kept > 1
        else [0]
    )


def student_config_and_layers(
    teacher: ModelConfig, fields: JsonObject, options: StudentOptions
) -> tuple[ModelConfig, list[int]]:
    """Return (the student's configuration, the teacher's layers that it keeps).

    teacher, fields: the teacher's configuration and config.json. Raises ValueError naming the
    option, also if the model family has no such decoder.
    """
    count = teacher.num_hidden_layers if options.layers is None else options.layers
    constraint = f"must be between 1 and the teacher's {teacher.num_hidden_layers} layers"
    check(1 <= count <= teacher.num_hidden_layers, "layers", options.layers, constraint)
    has = teacher.num_experts
    check(
        1 <= options.experts <= has,
        "experts",
        options.experts,
        f"must be between 1 and the teacher's {has}",
    )
    top_k = teacher.num_experts_per_tok if options.top_k is None else options.top_k
    allowed = f"must be between 1 and experts = {options.experts}"
    check(1 <= top_k <= options.experts, "top_k", top_k, allowed)
    layers = evenly_spaced_layers(teacher.num_hidden_layers, count)
    changes = {"num_experts": options.experts, "num_experts_per_tok": top_k}
    if options.dense:
        changes["intermediate_size"] = _student_dense_width_and_num_joined(
            teacher, layers, options
        )[0]
    config = cut_config(teacher, layers, options.dense, **changes)
    check_num_kept(dataclasses.replace(teacher, num_experts_per_tok=top_k), options.experts)
    updated_hf_config(fields, config)
    return config, layers


def _student_dense_width_and_num_joined(
    teacher: ModelConfig, layers: list[int], options: StudentOptions
) -> tuple[int, int]:
    """Return (hidden size, number of joined experts) of the student's dense layers. Raises
    ValueError if one of them has no experts.
    """
    of_whole = [teacher.layers[i] for i in layers]
    for n in options.dense:
        known = f"must be numbers of the student's {len(layers)} layers, of those with experts"
        check(0 <= n < len(layers) and of_whole[n].has_experts, "dense", options.dense, known)
    return dense_width_and_num_joined(teacher, not all(layer.has_experts for layer in of_whole))


def make_student(
    teacher: Path, out: Path, options: StudentOptions, say: Callable[[str], None]
) -> None:
    """Write the model that the student's training starts from.

    Raises ValueError naming the option, before anything is computed.
    """
    check_empty_or_new(out)
    with LazyCheckpoint(teacher, "float32", "wide") as wide:
        whole = wide.config
        whole.check_no_linear_attention("distillation into a smaller model")
        config, layers = student_config_and_layers(whole, wide.fields, options)
        text = calibration_text_for(wide, options.text, options.sequence_length, options.max_tokens)
        with status(f"measuring the teacher's experts on {text.calibration_BS.size:,} tokens", say):
            scores = measure_experts(wide, text.calibration_BS)
    of_kept = [
        whole.layers[i].record
        for i, layer in zip(layers, config.layers, strict=True)
        if layer.has_experts
    ]
    kept_Nn = best_experts(
        scores.scores_of(options.score)[of_kept], options.experts, whole.router.n_group
    )
    with LazyCheckpoint(teacher, None, "wide") as source, status(f"writing {out}", say):
        dense = {}
        for n in options.dense:
            count = _student_dense_width_and_num_joined(whole, layers, options)[1]
            dense[n] = make_dense_mlp(
                source, whole.layers[layers[n]].record, scores.use, count, options.dense_from
            )
        write_cut_model(source, out, config, layers, kept_Nn, dense=dense)


def has_student(run: Path, student: ModelConfig, option_name: str = "out") -> bool:
    """Return whether the run's folder has a student. Raises ValueError if it is another student, or
    if the folder holds something else.

    option_name: the option that names the run.
    """
    if not (run / STUDENT / "config.json").is_file():
        check_empty_or_new(run, option_name)
        return False
    with LazyCheckpoint(run / STUDENT) as begun:
        begun_with = begun.config
    for option, name in (("experts", "num_experts"), ("layers", "num_hidden_layers")):
        asked, has = getattr(student, name), getattr(begun_with, name)
        check(
            asked == has,
            option,
            asked,
            f"must be {has}, with which {run} has begun, or the run another folder",
        )
    return True


def write_student_into_run(
    teacher: Path, run: Path, options: StudentOptions, say: Callable[[str], None]
) -> None:
    """Write the student into its run's folder, unless the folder has it already."""
    with LazyCheckpoint(teacher) as whole:
        student, _ = student_config_and_layers(whole.config, whole.fields, options)
    if not has_student(run, student):
        run.mkdir(parents=True, exist_ok=True)
        make_student(teacher, run / STUDENT, options, say)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not train.py's."""
    result = argparse.ArgumentParser(
        prog="python -m jmoe.deploy.distil",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation might be an option of train.py
    )
    result.add_argument(
        "teacher", metavar="TEACHER", help="a Hugging Face folder, or the output folder of a run"
    )
    result.add_argument(
        "--out", required=True, type=Path, help="the student's run; one that was stopped goes on"
    )
    result.add_argument("--experts", required=True, type=int, help="of each layer of the student")
    result.add_argument(
        "--text", required=True, help="file, folder or glob of UTF-8 text or JSONL to learn from"
    )
    result.add_argument("--layers", type=int, help="of the student; default: the teacher's")
    result.add_argument("--top-k", type=int, help="experts of a token; default: the teacher's")
    result.add_argument(
        "--score", choices=("usage", "reap"), default="usage", help="by which experts are chosen"
    )
    result.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="of the text, to choose experts by"
    )
    result.add_argument(
        "--dense", type=int, nargs="+", default=[], help="layers of the student without experts"
    )
    result.add_argument(
        "--dense-from",
        choices=get_args(DenseFrom),
        default="most_used",
        help="what these have instead",
    )
    _add_training_arguments(result)
    return result


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weight",
        type=float,
        default=StudentTraining.weight,
        help="of the divergence in the loss, the text has the rest",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=StudentTraining.temperature,
        help="of both distributions in the divergence",
    )
    parser.add_argument(
        "--ring-slots",
        type=int,
        help="layers of the teacher's experts at once; default: all if they fit",
    )
    parser.add_argument(
        "--preset", default="tiny", help="of train.py: all that is not set here, but for the model"
    )


@dataclass(frozen=True)
class StudentTraining:
    """How a student is trained.

    run: its folder, which contains the student. preset: of train.py, for all options not set here.
    weight: of the divergence in the loss; cross-entropy has 1 - weight. temperature: of both
    distributions in the divergence. ring_slots: layers of the teacher's experts in memory at once;
    None: all if they fit.
    """

    teacher: Path
    run: Path
    text: str
    preset: str = "tiny"
    weight: float = 0.5
    temperature: float = 2.0
    ring_slots: int | None = None


def train_arguments(training: StudentTraining, others: Sequence[str]) -> list[str]:
    """Return the arguments of train.py for the student's run. others: further arguments."""
    ring = (
        ["--distil.policy", "ring", "--distil.ring-slots", str(training.ring_slots)]
        if training.ring_slots is not None
        else []
    )
    return [
        *(
            training.preset,
            "--init-from",
            str(training.run / STUDENT),
            "--output-dir",
            str(training.run),
        ),
        *("--data.path", training.text, "--distil.teacher", str(training.teacher)),
        *(
            "--distil.weight",
            str(training.weight),
            "--distil.temperature",
            str(training.temperature),
            *ring,
            *others,
        ),
    ]


def main(arguments: list[str]) -> None:
    """Write the student, unless it exists, and replace this process by train.py."""
    options, others = build_parser().parse_known_args(arguments)
    say = partial(print, flush=True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(hugging_face_folder(options.teacher, say, "TEACHER"))
        asked = StudentOptions(
            options.experts,
            options.text,
            options.layers,
            options.top_k,
            options.score,
            tuple(options.dense),
            options.dense_from,
            options.max_tokens,
        )
        names = ("text", "preset", "weight", "temperature", "ring_slots")
        how = StudentTraining(
            folder, options.out, **{name: getattr(options, name) for name in names}
        )
        arguments = train_arguments(how, others)
        parse_train(arguments, PRESETS)  # mistakes end the process before anything is computed
        write_student_into_run(folder, options.out, asked, say)
        command = [sys.executable, "-m", "jmoe.commands.train", *arguments]
        os.execv(sys.executable, command)


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"distil: {error}")
