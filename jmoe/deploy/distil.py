"""A smaller model that learns from a larger one: python -m jmoe.deploy.distil TEACHER --out RUN --experts N --text X.

The student begins as the N experts of each layer that the text uses most (or that have REAP's highest scores), of L
layers spread over the teacher's. Then train.py trains it, on cross-entropy and on the divergence from the teacher's
distribution; RUN is an ordinary run: the same command goes on after a stop, and `python -m jmoe.deploy.merge`
makes a folder of it. Further options are those of train.py.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jmoe.config import check
from jmoe.deploy.calibration_text import text_for
from jmoe.deploy.cut import check_new_folder, cut_config, write_cut
from jmoe.deploy.expert_scores import ScoreKind, best_experts, check_num_kept, measure_experts
from jmoe.deploy.merged import hugging_face_folder
from jmoe.deploy.prune import LENGTH, MAX_TOKENS
from jmoe.models.huggingface import changed_config
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.status import status

STUDENT = "student"  # in the run's folder: what it starts from


@dataclass(frozen=True)
class StudentOptions:
    """What a student is: see the module. layers, top_k: None for the teacher's."""

    experts: int
    text: str
    layers: int | None = None
    top_k: int | None = None
    score: ScoreKind = "usage"
    max_tokens: int = MAX_TOKENS
    sequence_length: int = LENGTH


def spread_layers(count: int, kept: int) -> list[int]:
    """Return the numbers of `kept` of `count` layers, as evenly as can be, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, kept).round().astype(int)).tolist() if kept > 1 else [0]


def make_student(teacher: Path, out: Path, options: StudentOptions, say: Callable[[str], None]) -> None:
    """Write the student that training starts from; `ValueError` naming the option before anything is computed."""
    check_new_folder(out)
    with LazyCheckpoint(teacher, "float32", "wide") as wide:
        whole = wide.config
        count, top_k = options.layers or whole.num_hidden_layers, options.top_k or whole.num_experts_per_tok
        constraint = f"must be between 1 and the teacher's {whole.num_hidden_layers} layers"
        check(1 <= count <= whole.num_hidden_layers, "layers", options.layers, constraint)
        has = whole.num_experts
        check(1 <= options.experts <= has, "experts", options.experts, f"must be between 1 and the teacher's {has}")
        allowed = f"must be between 1 and experts = {options.experts}"
        check(1 <= top_k <= options.experts, "top_k", top_k, allowed)
        layers = spread_layers(whole.num_hidden_layers, count)
        config = cut_config(whole, layers, num_experts=options.experts, num_experts_per_tok=top_k)
        check_num_kept(dataclasses.replace(whole, num_experts_per_tok=top_k), options.experts)
        changed_config(wide.fields, config)  # raises where the family has no such decoder
        text = text_for(wide, options.text, options.sequence_length, options.max_tokens)
        with status(f"measuring the teacher's experts on {text.calibration_BS.size:,} tokens", say):
            scores = measure_experts(wide, text.calibration_BS)
    moe_layers = [i for i, kind in enumerate(whole.layer_kinds) if kind == "moe"]
    of_kept = [moe_layers.index(i) for i in layers if i in moe_layers]
    kept_Nn = best_experts(scores.of(options.score)[of_kept], options.experts, whole.router.n_group)
    with LazyCheckpoint(teacher, None, "wide") as source, status(f"writing {out}", say):
        write_cut(source, out, config, layers, kept_Nn)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not train.py's."""
    result = argparse.ArgumentParser(
        prog="python -m jmoe.deploy.distil",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is like one of these may be an option of train.py
    )
    result.add_argument("teacher", metavar="TEACHER", help="a Hugging Face folder, or the output folder of a run")
    result.add_argument("--out", required=True, type=Path, help="the student's run; one that was stopped goes on")
    result.add_argument("--experts", required=True, type=int, help="of each layer of the student")
    result.add_argument("--text", required=True, help="file, folder or glob of UTF-8 text or JSONL to learn from")
    result.add_argument("--layers", type=int, help="of the student; default: the teacher's")
    result.add_argument("--top-k", type=int, help="experts of a token; default: the teacher's")
    result.add_argument("--score", choices=("usage", "reap"), default="usage", help="by which experts are chosen")
    result.add_argument(
        "--weight", type=float, default=0.5, help="of the divergence in the loss, the text has the rest"
    )
    result.add_argument("--temperature", type=float, default=2.0, help="of both distributions in the divergence")
    result.add_argument(
        "--ring-slots", type=int, help="layers of the teacher's experts at once; default: all if they fit"
    )
    result.add_argument("--preset", default="tiny", help="of train.py: all that is not set here, but for the model")
    return result


def train_arguments(options: argparse.Namespace, teacher: Path, rest: list[str]) -> list[str]:
    """Return the arguments of train.py for the student's run."""
    ring = ["--distil.policy", "ring", "--distil.ring-slots", str(options.ring_slots)] if options.ring_slots else []
    return [
        *(options.preset, "--init-from", str(options.out / STUDENT), "--output-dir", str(options.out)),
        *("--data.path", options.text, "--distil.teacher", str(teacher)),
        *("--distil.weight", str(options.weight), "--distil.temperature", str(options.temperature), *ring, *rest),
    ]


def main(arguments: list[str]) -> None:
    """Make the student, unless it is there, and become the program that trains it."""
    options, rest = parser().parse_known_args(arguments)
    say = partial(print, flush=True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(hugging_face_folder(options.teacher, say, "TEACHER"))
        student = options.out / STUDENT
        if not (student / "config.json").is_file():
            check_new_folder(options.out)
            asked = StudentOptions(options.experts, options.text, options.layers, options.top_k, options.score)
            options.out.mkdir(parents=True, exist_ok=True)
            make_student(folder, student, asked, say)
        command = [sys.executable, "-m", "jmoe.commands.train", *train_arguments(options, folder, rest)]
        os.execv(sys.executable, command)


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"distil: {error}")
