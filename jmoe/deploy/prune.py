"""Write a model with fewer experts: python -m jmoe.deploy.prune MODEL --out FOLDER --experts N
--text FILE.

Each layer keeps the N experts with the highest scores on the text: REAP's score (router weight x
norm of the expert's output, averaged over the tokens that chose it), or the number of tokens that
chose the expert. The text runs through the model layer by layer, with one expert in memory at a
time. The loss on a held-out tail of the text is printed before and after.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jmoe.deploy.calibration_text import calibration_text_for
from jmoe.deploy.cut import check_empty_or_new, cut_config, weight_bytes, write_cut_model
from jmoe.deploy.expert_scores import ScoreKind, best_experts, check_num_kept, measure_experts
from jmoe.deploy.layerwise import mean_loss
from jmoe.deploy.model_folder import hugging_face_folder
from jmoe.deploy.similar import ExpertMerger
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.status import status

MAX_TOKENS = 65_536
LENGTH = 512


@dataclass(frozen=True)
class PruneOptions:
    """Options of pruning.

    experts: number that each layer keeps. score: ranks the experts. merge_similar: merge dropped
    experts into similar kept ones. max_tokens: tokens of the text to read. dtype: of the written
    model; None: as stored.
    """

    experts: int
    text: str
    score: ScoreKind = "reap"
    merge_similar: bool = False
    max_tokens: int = MAX_TOKENS
    sequence_length: int = LENGTH
    dtype: str | None = None


@dataclass(frozen=True)
class PruneReport:
    """Loss and size of a model before and after pruning.

    bits_per_byte_before, bits_per_byte_after: of held-out text. bytes_before, bytes_after: of
    weights.
    """

    bits_per_byte_before: float
    bits_per_byte_after: float
    bytes_before: int
    bytes_after: int


def prune(
    folder: Path, out: Path, options: PruneOptions, say: Callable[[str], None]
) -> PruneReport:
    """Write the model of a Hugging Face folder with fewer experts to a new folder `out`; return
    loss and size before and after.

    Raises ValueError naming the option, before anything is computed or written.
    """
    check_empty_or_new(out)
    with LazyCheckpoint(folder, options.dtype, "wide") as source:
        source.config.check_no_linear_attention("pruning")
        check_num_kept(source.config, options.experts)
        text = calibration_text_for(
            source, options.text, options.sequence_length, options.max_tokens
        )
    with LazyCheckpoint(folder, "float32", "wide") as wide:
        with status(f"measuring experts on {text.calibration_BS.size:,} tokens", say):
            scores = measure_experts(wide, text.calibration_BS)
        with status(f"held-out loss of {wide.config.num_experts} experts", say):
            before = text.bits_per_byte(mean_loss(wide, text.held_out_BS))
    with LazyCheckpoint(folder, options.dtype, "wide") as source, status(f"writing {out}", say):
        config, layers = source.config, range(source.config.num_hidden_layers)
        kept_Nn = best_experts(
            scores.scores_of(options.score), options.experts, config.router.n_group
        )
        small = cut_config(config, layers, num_experts=options.experts)
        read = ExpertMerger(source, kept_Nn, scores.use) if options.merge_similar else None
        write_cut_model(source, out, small, layers, kept_Nn, read)
    with (
        LazyCheckpoint(out, "float32", "wide") as pruned,
        status(f"held-out loss of {options.experts} experts", say),
    ):
        after = text.bits_per_byte(mean_loss(pruned, text.held_out_BS))
    return PruneReport(before, after, weight_bytes(folder), weight_bytes(out))


def main(arguments: list[str]) -> None:
    """Write the model that the command line names with fewer experts; print loss and size."""
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.deploy.prune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, or the output folder of a run"
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="where the smaller model is written: no files yet"
    )
    parser.add_argument("--experts", required=True, type=int, help="that each layer keeps")
    parser.add_argument(
        "--text", required=True, help="file, folder or glob of UTF-8 text or JSONL to measure on"
    )
    parser.add_argument(
        "--score", choices=("reap", "usage"), default="reap", help="what an expert is worth"
    )
    parser.add_argument(
        "--merge-similar",
        action="store_true",
        help="merge dropped experts into those they are like",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="of the text, a quarter of them held out"
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        default=LENGTH,
        help="of the windows that the text is cut into",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of what is written; default: as stored"
    )
    options = vars(parser.parse_args(arguments))
    model, out = options.pop("model"), options.pop("out")
    say = partial(print, flush=True)
    check_empty_or_new(out)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(hugging_face_folder(model, say, "MODEL"))
        done = prune(folder, out, PruneOptions(**options), say)
    say(
        f"{done.bytes_before / 1e6:,.1f} -> {done.bytes_after / 1e6:,.1f} MB of weights; held-out"
        f" bits per byte {done.bits_per_byte_before:.4f} -> {done.bits_per_byte_after:.4f}; in"
        f" {out}"
    )


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"prune: {error}")
