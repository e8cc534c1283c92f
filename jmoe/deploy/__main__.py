"""Prepare a model or a run for serving in one command: python -m jmoe.deploy MODEL --out BUNDLE.

The stages, each also a command of its own: merge (of a run), distil (--distil-steps, --text), prune
(--experts, --text), compress (--weights), segment (--machines), and bundle, or lower with
--portable. With --text the loss on a held-out part of the text is measured after each stage that
changes the model. BUNDLE appears once all stages are done. Intermediate folders are removed, except
the run in which a student is trained. Other options are passed to that run's train.py.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import get_args

from jmoe.config.engine import EngineConfig
from jmoe.deploy.cut import check_empty_or_new
from jmoe.deploy.expert_layouts import LAYOUTS
from jmoe.deploy.lower import PREFILL_TOKENS
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.deploy.prune import LENGTH, MAX_TOKENS
from jmoe.deploy.stages import DistilStage, Stages, deploy
from jmoe.planning.segmentation import SegmentBy
from jmoe.runtime import end_at_once_on_interrupt, reexec_with_env


def _build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not train.py's."""
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.deploy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation might be an option of train.py
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, or the output folder of a run"
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="where the bundle is written: no files yet"
    )
    parser.add_argument(
        "--text", help="file, folder or glob of UTF-8 text or JSONL to learn from and measure on"
    )
    _add_distil_arguments(parser)
    parser.add_argument("--experts", type=int, help="that each layer keeps; default: all")
    parser.add_argument(
        "--weights", choices=tuple(LAYOUTS), help="the format of the experts; default: as they are"
    )
    parser.add_argument(
        "--machines", type=Path, help="what the devices are, in TOML; default: one device"
    )
    parser.add_argument(
        "--by",
        choices=get_args(SegmentBy),
        help="what is split over them; default: what is fastest",
    )
    parser.add_argument(
        "--portable", action="store_true", help="programs that need JAX alone, in place of a bundle"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="of the text, a quarter of them held out"
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        help="of the windows that the text is cut into, also to learn",
    )
    _add_engine_arguments(parser)
    return parser


def _add_distil_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--distil-steps", type=int, help="of a student that learns from MODEL; default: no student"
    )
    parser.add_argument(
        "--distil-experts", type=int, help="of each layer of the student; default: MODEL's"
    )
    parser.add_argument("--distil-layers", type=int, help="of the student; default: MODEL's")
    parser.add_argument(
        "--distil-run", type=Path, help="folder of its training; default: BUNDLE.student"
    )
    parser.add_argument("--distil-preset", default="tiny", help="of train.py, but for the model")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-batch", type=int, default=EngineConfig.max_batch, help="sequences that run at once"
    )
    parser.add_argument(
        "--max-seq-len", type=int, help="tokens of one; default: 2048, or the model's positions"
    )
    parser.add_argument("--prefill-chunk-tokens", type=int, help="of a prompt at once")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of what runs; default: as stored"
    )


def main(arguments: list[str]) -> None:
    """Take the model that the command line names through its stages; print the results."""
    parser = _build_parser()
    known, train = parser.parse_known_args(arguments)
    options = vars(known)
    model, out, say = options.pop("model"), options.pop("out"), partial(print, flush=True)
    check_empty_or_new(out)
    distil = {
        name: options.pop(f"distil_{name}")
        for name in ("steps", "experts", "layers", "run", "preset")
    }
    if distil["steps"] is None and train:
        parser.error(f"unrecognized arguments without --distil-steps: {' '.join(train)}")
    for name in ("experts", "layers", "run"):
        if distil["steps"] is None and distil[name] is not None:
            parser.error(f"--distil-{name}: needs --distil-steps")
    length = options.pop("sequence_length")
    options["sequence_length"] = LENGTH if length is None else length
    if distil["steps"] is not None:
        train += ["--sequence-length", str(length)] if length is not None else []
        distil["run"] = distil["run"] or out.with_name(f"{out.name}.student")
        options["distil"] = DistilStage(**distil, train=tuple(train))
    default = PREFILL_TOKENS if options["portable"] else EngineConfig.prefill_chunk_tokens
    chunk = options.pop("prefill_chunk_tokens")
    sizes = {name: options.pop(name) for name in ("max_batch", "max_seq_len", "dtype")}
    engine = EngineConfig(**sizes, prefill_chunk_tokens=default if chunk is None else chunk)
    stages = Stages(**options)
    with hugging_face_folder(model, say, "MODEL") as folder:
        results = deploy(folder, out, stages, engine, say)
    for result in results:
        say(str(result))
    say(f"python {out}/run.py --help" if stages.portable else f"python serve.py {out}")


if __name__ == "__main__":
    reexec_with_env()
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"deploy: {error}")
