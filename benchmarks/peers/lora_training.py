"""Compare fine-tuning steps with transformers and PEFT, in alternation.

    python benchmarks/peers/lora_training.py --peft ENVIRONMENT/bin/python

--peft: the Python of an environment with transformers, torch and peft. The model is that of
`qwen3moe_64e.json` of this folder with random weights, 1,024 tokens a step. adapters: the model is
frozen, and adapters of rank 16 are on attention and every expert. all: all parameters are trained;
transformers' bfloat16 has no float32 masters, ours has. Both sides have the same number of trained
parameters. A round runs every contestant once, in a process of its own; the ratio is the median of
the rounds' ratios to the peer in the same dtype. Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import itertools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.lib import report
from benchmarks.lib.peers import run_for_last_object
from benchmarks.lib.report import JsonObject

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "qwen3moe_64e.json"
TRAIN = ("adapters", "all")
DTYPES = ("bfloat16", "float32")
OURS = "jmoe"
PEERS = {"adapters": "transformers + PEFT", "all": "transformers"}


def rows_of(runs: Mapping[tuple[str, str, str], Sequence[JsonObject]]) -> list[JsonObject]:
    """Return a row for each contestant, from its runs by (what is trained, dtype, system)."""
    rows = []
    for (train, dtype, system), own in runs.items():
        theirs = runs[train, dtype, PEERS[train]]
        speeds, peer = ([run["tokens_per_s"] for run in side] for side in (own, theirs))
        last = own[-1]
        rows.append(
            {
                "trained": train,
                "system": system,
                "dtype": dtype,
                "tokens_per_s": report.median(speeds, 1),
                "ratio": report.ratio(speeds, peer),
                "rounds": speeds,
                "trained_parameters": last["trained_parameters"],
                "first_loss": last["first_loss"],
                "last_loss": last["last_loss"],
                "peak_rss_mib": round(last["peak_rss_bytes"][0] / 2**20),
                "versions": last["versions"],
            }
        )
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--peft", required=True, help="Python of its environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--train", nargs="+", choices=TRAIN, default=TRAIN)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    a = parser.parse_args()
    if a.rounds < 1:
        parser.error(f"--rounds {a.rounds}: must be at least 1")
    runs: dict[tuple[str, str, str], list[JsonObject]] = {}
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        writer = str(BENCHMARKS / "serve" / "random_model.py")
        run_for_last_object([sys.executable, writer, str(CONFIG), model])
        programs = {
            OURS: [sys.executable, str(BENCHMARKS / "train" / "lora_step.py")],
            "": [a.peft, str(HERE / "peft_training.py")],
        }
        for number, train, dtype, side in itertools.product(
            range(a.rounds), a.train, a.dtypes, programs
        ):
            loads.append(os.getloadavg()[0])
            options = ["--model", model, "--train", train, "--dtype", dtype]
            run = run_for_last_object([*programs[side], *options, "--steps", str(a.steps)])
            system = side or PEERS[train]
            runs.setdefault((train, dtype, system), []).append(run)
            shown = {"round": number, "trained": train, "system": system, "dtype": dtype}
            report.progress(shown | {"tokens_per_s": run["tokens_per_s"]})
    result = {"args": report.options(a, "peft"), "load": [round(load, 1) for load in loads]}
    report.finish({**result, "rows": rows_of(runs)})


if __name__ == "__main__":
    main()
