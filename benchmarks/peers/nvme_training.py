"""Compare a training step with weights on NVMe with DeepSpeed's ZeRO-3, in alternation.

    python benchmarks/peers/nvme_training.py --python ENVIRONMENT/bin/python --folder FOLDER

One model for both: 6 dense layers of hidden size 512 whose feed-forwards of 12,288 are the most of
it (here each is the one expert of its layer, which every token uses), float32, AdamW, the same
number of tokens a step, and as much host memory for what lies on NVMe: DeepSpeed's 20 buffers for
parameters, in bytes our whole cache (its optimizer has buffers of its own beside them). nvme: as
said; memory: everything in memory. With `--update host` our AdamW runs on the host's cores, as
DeepSpeed's does. A round runs both sides of both, each in a process of its own; ratio: theirs over
ours, round by round. --folder: on the disk that is meant.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import resource
import shutil
import statistics
import sys
from pathlib import Path

from benchmarks.lib import report
from benchmarks.lib.peers import run_for_last_object
from benchmarks.lib.report import JsonObject
from benchmarks.offload.session import Session
from jmoe.config import ModelConfig, OptimizerConfig, RouterConfig, TiersConfig, TrainConfig

PLACES = ("nvme", "memory")
SHAPE = {
    "layers": 6,
    "hidden-size": 512,
    "heads": 8,
    "intermediate-size": 12288,
    "vocab-size": 1024,
}
THEIRS = Path(__file__).resolve().parent / "deepspeed_training.py"
LARGEST = 4 * SHAPE["hidden-size"] * SHAPE["intermediate-size"]  # bytes of a matrix


def config(a: argparse.Namespace) -> TrainConfig:
    """Return our run of the model."""
    model = ModelConfig(
        vocab_size=SHAPE["vocab-size"],
        hidden_size=SHAPE["hidden-size"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["heads"],
        max_position_embeddings=a.tokens,
        moe_intermediate_size=SHAPE["intermediate-size"],
        num_experts=1,
        num_experts_per_tok=1,
        hidden_act="gelu",
        norm="layernorm",
        position="learned",
        attention_bias=True,
        mlp_bias=True,
        capacity_factor=1.0,
        router=RouterConfig(kind="switch", aux_loss_coef=0.0),
    )
    tiers = TiersConfig()
    if a.side == "nvme":
        tiers = TiersConfig(
            *("nvme", "nvme", "nvme"),
            path=str(a.folder),
            host_cache_bytes=a.buffers * LARGEST,
            update=a.update,
        )
    return TrainConfig(
        model=model,
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup_steps=0),
        batch_size=1,
        sequence_length=a.tokens,
        compute_dtype="float32",
        tiers=tiers,
    )


def ours(a: argparse.Namespace) -> JsonObject:
    """Take the steps in this process."""
    from jmoe.training.trainer import make_trainer

    session = Session(config(a), make=make_trainer)
    steps = [session.step(number) for number in range(a.warmup + a.steps)][a.warmup :]
    session.program.close()
    return {
        "seconds": [round(step.seconds, 4) for step in steps],
        "read_bytes": steps[-1].read_bytes,
        "written_bytes": steps[-1].written_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": report.versions("jax", "jaxlib"),
    }


def run_ours(a: argparse.Namespace, place: str, folder: Path) -> JsonObject:
    options = (
        "--side",
        place,
        "--folder",
        folder,
        "--tokens",
        a.tokens,
        "--steps",
        a.steps,
        "--buffers",
        a.buffers,
        "--update",
        a.update,
    )
    return run_for_last_object([sys.executable, __file__, *map(str, options)])


def run_theirs(a: argparse.Namespace, place: str, folder: Path) -> JsonObject:
    shape = [part for name, size in SHAPE.items() for part in (f"--{name}", str(size))]
    one = [
        "--processes",
        "1",
        "--ep",
        "1",
        "--experts",
        "0",
        "--batch",
        "1",
        "--seq",
        str(a.tokens),
    ]
    zero = [
        "--zero",
        "3",
        *(["--offload", str(folder), "--buffers", str(a.buffers)] if place == "nvme" else []),
        *(["--optimizer-buffers", str(a.optimizer_buffers)] if a.optimizer_buffers else []),
    ]
    rest = ["--dtype", "float32", "--warmup", str(a.warmup), "--steps", str(a.steps)]
    done = run_for_last_object([a.python, str(THEIRS), *shape, *one, *zero, *rest])
    return done | {"peak_rss_bytes": max(done["peak_rss_bytes"])}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--python", help="of DeepSpeed's environment")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--buffers", type=int, default=20, help="in the size of the largest matrix")
    parser.add_argument(
        "--optimizer-buffers",
        type=int,
        help="of DeepSpeed's optimizer, each for all parameters, 4 at least; default: --buffers",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--update", choices=("device", "host"), default="device", help="of ours")
    parser.add_argument("--side", choices=PLACES, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.side:
        report.finish(ours(a))
        return
    if a.python is None or a.rounds < 1:
        parser.error("--python: must be given, and --rounds at least 1")
    sides = {"DeepSpeed": run_theirs, "jmoe": run_ours}
    runs: dict[tuple[str, str], list[JsonObject]] = {
        (place, side): [] for place in a.places for side in sides
    }
    for number in range(a.rounds):
        for (place, side), seen in runs.items():
            folder = a.folder / f"{side}-{number}"
            folder.mkdir(parents=True)
            seen.append(sides[side](a, place, folder))
            shutil.rmtree(folder)
            step_s = statistics.median(seen[-1]["seconds"])
            report.progress(
                {"round": number, "place": place, "system": side, "step_s": round(step_s, 4)}
            )
    rows = []
    for (place, side), seen in runs.items():
        own, others = (
            [statistics.median(run["seconds"]) for run in runs[place, name]]
            for name in (side, "DeepSpeed")
        )
        kept = {
            name: seen[-1][name] for name in ("read_bytes", "written_bytes") if name in seen[-1]
        }
        row = {
            "place": place,
            "system": side,
            "step_s": report.median(own),
            "ratio": report.ratio(others, own),
        }
        row |= kept | {
            "peak_rss_mib": round(max(run["peak_rss_bytes"] for run in seen) / 2**20),
            "rounds": own,
        }
        rows.append(row | {"versions": seen[-1]["versions"]})
    about = {"tokens": a.tokens, "update": a.update}
    report.finish(about | {"cache_bytes": a.buffers * LARGEST, "rows": rows})


if __name__ == "__main__":
    main()
