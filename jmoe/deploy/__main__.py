"""From a run or a model to what is served, in one command: python -m jmoe.deploy MODEL --out BUNDLE.

The stages, each of which is a command of its own too: merge (of a run), prune (--experts, --text), compress
(--weights), segment (--machines), and bundle, or with --portable lower. With --text the loss on its held-out part is
measured after every stage. BUNDLE appears when all is done; what lies between is removed.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jmoe.config import check
from jmoe.config.cluster import read_machines
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.deploy.bundle import bundle
from jmoe.deploy.calibration_text import text_for
from jmoe.deploy.compress import compress_model
from jmoe.deploy.cut import check_new_folder, weight_bytes
from jmoe.deploy.expert_layouts import LAYOUTS
from jmoe.deploy.layerwise import mean_loss
from jmoe.deploy.lower import PREFILL_TOKENS, lower
from jmoe.deploy.merged import hugging_face_folder
from jmoe.deploy.prune import LENGTH, MAX_TOKENS, PruneOptions, prune
from jmoe.deploy.segment import segment
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.runtime import end_at_once_on_interrupt, reexec_with_env
from jmoe.status import status

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stages:
    """What is done to a model before it is bundled, and in which form. None: nothing of that kind.

    text: file, folder or glob, to prune by and to measure on. experts: that each layer keeps. weights: a format of
    `jmoe.deploy.compress`. machines: the file of unlike devices.
    """

    text: str | None = None
    experts: int | None = None
    weights: str | None = None
    machines: Path | None = None
    portable: bool = False
    max_tokens: int = MAX_TOKENS
    sequence_length: int = LENGTH

    def __post_init__(self) -> None:
        check(self.experts is None or self.text is not None, "experts", self.experts, "needs a text to prune by")
        known = self.weights is None or self.weights in LAYOUTS
        check(known, "weights", self.weights, f"must be one of {', '.join(LAYOUTS)}")
        one = self.machines is None or not self.portable
        check(one, "portable", self.portable, "must be left out with machines: its programs are for one device")
        if self.machines is not None:
            read_machines(self.machines)


@dataclass(frozen=True)
class StageResult:
    """A model after a stage: bytes of its weights, and bits per byte of the held-out text, if there is one."""

    stage: str
    weight_bytes: int
    bits_per_byte: float | None

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f"{self.bits_per_byte:8.4f} bits per byte"
        return f"{self.stage:20}{self.weight_bytes / 1e6:12,.1f} MB{bits}"


def deploy(folder: Path, out: Path, stages: Stages, engine: EngineConfig, say: Say) -> list[StageResult]:
    """Take the model in a Hugging Face folder through the stages; return what it was like after each.

    engine: what the bundle is for; its devices are those of the machines, if there are any. Raises `ValueError` naming
    the option, most of them before anything is computed.
    """
    check_new_folder(out)
    between = out.with_name(f".{out.name}.stages")
    shutil.rmtree(between, ignore_errors=True)  # of a process that was killed
    try:
        between.mkdir(parents=True)
        results = [StageResult("merged", weight_bytes(folder), _bits(folder, stages, say))]
        if stages.experts is not None and stages.text is not None:
            options = PruneOptions(
                stages.experts, stages.text, max_tokens=stages.max_tokens, sequence_length=stages.sequence_length
            )
            source, folder = folder, between / "pruned"
            pruned = prune(source, folder, options, say)
            results.append(StageResult(f"{stages.experts} experts", pruned.bytes_after, pruned.bits_after))
        if stages.weights is not None:
            source, folder = folder, between / "compressed"
            with status(f"compressing experts to {stages.weights}", say):
                compress_model(source, folder, stages.weights)
            results.append(StageResult(stages.weights, weight_bytes(folder), _bits(folder, stages, say)))
        if stages.machines is not None:
            engine = _on_machines(folder, between / "segments.json", stages.machines, engine)
        make = lower if stages.portable else bundle
        make(folder, out, engine, say)
    finally:
        shutil.rmtree(between, ignore_errors=True)
    return results


def _bits(folder: Path, stages: Stages, say: Say) -> float | None:
    """Return the loss on the held-out text; None without one."""
    if stages.text is None:
        return None
    with LazyCheckpoint(folder, "float32", "wide") as checkpoint, status(f"held-out loss of {folder.name}", say):
        text = text_for(checkpoint, stages.text, stages.sequence_length, stages.max_tokens)
        return text.bits_per_byte(mean_loss(checkpoint, text.held_out_BS))


def _on_machines(folder: Path, segments: Path, machines: Path, engine: EngineConfig) -> EngineConfig:
    """Return the engine on these devices, with experts where `segment` says."""
    devices = sum(one.devices for one in read_machines(machines))
    changes: dict[str, Any] = {"mesh": EngineMesh(devices=devices)}
    if engine.max_batch % devices:  # each device has as many rows of the cache
        changes["max_batch"] = -(-engine.max_batch // devices) * devices
    engine = replace(engine, **changes)
    segment(folder, machines, segments, max_batch=engine.max_batch, max_seq_len=engine.max_seq_len, dtype=engine.dtype)
    return replace(engine, mesh=EngineMesh(devices=devices, segments=str(segments)))


def main(arguments: list[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jmoe.deploy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or the output folder of a run")
    parser.add_argument("--out", required=True, type=Path, help="where the bundle is written: no files yet")
    parser.add_argument("--text", help="file, folder or glob of UTF-8 text or JSONL to prune by and measure on")
    parser.add_argument("--experts", type=int, help="that each layer keeps; default: all")
    parser.add_argument("--weights", choices=tuple(LAYOUTS), help="the format of the experts; default: as they are")
    parser.add_argument("--machines", type=Path, help="what the devices are, in TOML; default: one device")
    parser.add_argument("--portable", action="store_true", help="programs that need JAX alone, in place of a bundle")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of the text, a quarter of them held out")
    parser.add_argument("--sequence-length", type=int, default=LENGTH, help="of the windows that the text is cut into")
    parser.add_argument("--max-batch", type=int, default=EngineConfig.max_batch, help="sequences that run at once")
    parser.add_argument("--max-seq-len", type=int, help="tokens of one; default: 2048, or the model's positions")
    parser.add_argument("--prefill-chunk-tokens", type=int, help="of a prompt at once")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of what runs; default: as stored")
    options = vars(parser.parse_args(arguments))
    model, out, say = options.pop("model"), options.pop("out"), partial(print, flush=True)
    default = PREFILL_TOKENS if options["portable"] else EngineConfig.prefill_chunk_tokens
    chunk = options.pop("prefill_chunk_tokens")
    sizes = {name: options.pop(name) for name in ("max_batch", "max_seq_len", "dtype")}
    engine = EngineConfig(**sizes, prefill_chunk_tokens=default if chunk is None else chunk)
    stages = Stages(**options)
    check_new_folder(out)
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
