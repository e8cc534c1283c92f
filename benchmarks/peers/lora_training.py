"""Compare LoRA training steps with transformers and PEFT, in alternation.

    python benchmarks/peers/lora_training.py --peft ENVIRONMENT/bin/python

--peft: the Python of an environment with transformers, torch and peft. The model is that of
`qwen3moe_64e.json` of this folder with random weights, frozen; adapters of rank 16 are on attention
and every expert, 1,024 tokens a step. Both sides have the same number of trained parameters. A
round runs every contestant once, in a process of its own; the ratio is the median of the rounds'
ratios to the peer in the same dtype. Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import os
import sys
import tempfile
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.lib import report
from benchmarks.lib.peers import run_for_last_object
from benchmarks.lib.report import JsonObject

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "qwen3moe_64e.json"
OURS, PEER = "jmoe", "transformers + PEFT"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--peft", required=True, help="Python of its environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    a = parser.parse_args()
    runs: dict[tuple[str, str], list[JsonObject]] = {}
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        writer = str(BENCHMARKS / "serve" / "random_model.py")
        run_for_last_object([sys.executable, writer, str(CONFIG), model])
        commands = {
            OURS: [sys.executable, str(BENCHMARKS / "train" / "lora_step.py")],
            PEER: [a.peft, str(HERE / "peft_training.py")],
        }
        for number in range(a.rounds):
            for dtype in a.dtypes:
                for system, command in commands.items():
                    loads.append(os.getloadavg()[0])
                    options = ["--model", model, "--dtype", dtype, "--steps", str(a.steps)]
                    run = run_for_last_object([*command, *options])
                    runs.setdefault((system, dtype), []).append(run)
                    shown = {"round": number, "system": system, "dtype": dtype}
                    report.progress(shown | {"tokens_per_s": run["tokens_per_s"]})
    rows = []
    for (system, dtype), own in runs.items():
        speeds, peer = ([run["tokens_per_s"] for run in side] for side in (own, runs[PEER, dtype]))
        rows.append(
            {
                "system": system,
                "dtype": dtype,
                "tokens_per_s": report.median(speeds, 1),
                "ratio": report.ratio(speeds, peer),
                "rounds": speeds,
                "trained_parameters": own[-1]["trained_parameters"],
                "first_loss": own[-1]["first_loss"],
                "last_loss": own[-1]["last_loss"],
                "peak_rss_mib": round(own[-1]["peak_rss_bytes"][0] / 2**20),
                "versions": own[-1]["versions"],
            }
        )
    result = {"args": report.options(a, "peft"), "load": [round(load, 1) for load in loads]}
    report.finish({**result, "rows": rows})


if __name__ == "__main__":
    main()
