"""Compare the loss curves of runs that differ in one setting.

    python benchmarks/train/curves.py WHAT [PRESET]

float16        float32 against float16 with dynamic loss scaling, and bfloat16
second_expert  GShard's router: every token to its second expert, or as often as its weight says

Runs `train.py PRESET` (tiny) for --steps steps in every variant, from the same parameters, on the
same text. rows: the mean of --mean losses in turn, and by how many percent of the first variant's
the others differ from it. With float16 also how many steps overflowed, which run again with half
the loss scale, and the scale at the end.

Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import ROOT
from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.run.metrics import read_step_records

GSHARD = ("--model.num-experts-per-tok", "2", "--model.router.kind", "gshard")
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "float16": {dtype: ("--compute-dtype", dtype) for dtype in ("float32", "float16", "bfloat16")},
    "second_expert": {
        policy: (*GSHARD, "--model.router.second-expert-policy", policy)
        for policy in ("all", "random")
    },
}
# no text is drawn, only as much held out as an evaluation needs, and little lost where a run is cut
# off
SHORT = (
    "--data.held-out-bytes",
    "20000",
    "--evaluation.sample-tokens",
    "0",
    "--checkpoint.every-steps",
    "50",
)


def run(a: argparse.Namespace, options: tuple[str, ...], folder: Path) -> list[JsonObject]:
    """Train, and return the records of all steps."""
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        a.preset,
        *options,
        *SHORT,
        "--num-steps",
        str(a.steps),
    ]
    subprocess.run([*command, "--output-dir", str(folder)], check=True, stdout=sys.stderr)
    return read_step_records(folder / "metrics.jsonl")


def compare(steps: Mapping[str, list[JsonObject]], mean: int) -> JsonObject:
    """Return the curves of all variants, compared with the first."""
    losses = {name: np.array([line["loss"] for line in lines]) for name, lines in steps.items()}
    means = {name: values.reshape(-1, mean).mean(axis=1) for name, values in losses.items()}
    first, *others = means
    differ: dict[str, NDArray[np.float64]] = {
        name: 100 * np.abs(means[name] / means[first] - 1) for name in others
    }
    rows = [
        {"steps": f"{mean * i + 1} to {mean * (i + 1)}"}
        | {f"loss_{name}": round(float(values[i]), 5) for name, values in means.items()}
        | {f"{name}_differs_percent": round(float(values[i]), 4) for name, values in differ.items()}
        for i in range(means[first].size)
    ]
    result: JsonObject = {
        f"{name}_differs_at_most_percent": round(float(values.max()), 4)
        for name, values in differ.items()
    }
    for name, lines in steps.items():
        if "loss_scale" in lines[-1]:
            result[f"{name}_overflows"] = sum(line["skipped_steps"] for line in lines)
            result[f"{name}_last_loss_scale"] = lines[-1]["loss_scale"]
    curves = {name: [round(float(loss), 5) for loss in values] for name, values in losses.items()}
    return result | {"rows": rows, "losses": curves}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("what", choices=VARIANTS)
    parser.add_argument("preset", nargs="?", default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--folder", type=Path, help="keep the runs here; one that was cut off goes on"
    )
    parser.add_argument("--mean", type=int, default=25, help="losses of one mean; divides --steps")
    a = parser.parse_args()
    if a.mean <= 0 or a.steps % a.mean:
        parser.error(f"--mean = {a.mean}: must divide --steps = {a.steps}")
    variants = VARIANTS[a.what]
    with (
        nullcontext(a.folder)
        if a.folder
        else tempfile.TemporaryDirectory(prefix="jmoe-curves-") as folder
    ):
        steps = {name: run(a, options, Path(folder) / name) for name, options in variants.items()}
    report.finish(
        {"steps": a.steps, "losses_of_a_mean": a.mean}
        | compare(steps, a.mean)
        | {"versions": report.versions("jax", "jaxlib")}
    )


if __name__ == "__main__":
    main()
