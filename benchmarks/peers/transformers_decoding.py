"""Compare decoding and prefill with transformers on the same weights, in alternation.

    python benchmarks/peers/transformers_decoding.py --python ENVIRONMENT/bin/python \
        --models DIR OTHER

--python: of an environment with `pip install torch transformers`. Every model is run in every
dtype, everything in memory, one sequence and eight, and one prompt of 512 tokens. A round runs both
sides of every row, in processes of their own; medians, and of a round's ratios.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import itertools
import sys
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.lib import report
from benchmarks.lib.peers import compare_rounds, decoding_speeds, run_for_last_object

HERE = Path(__file__).resolve().parent
OURS = BENCHMARKS / "serve" / "decoding.py"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--python", required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="one round of few tokens: a smoke test"
    )
    a = parser.parse_args()
    rows = list(itertools.product(a.models, a.dtypes))
    rounds: list[list[tuple[dict[str, float], dict[str, float]]]] = [[] for _ in rows]
    new_tokens, inner, outer = (4, 1, 1) if a.quick else (32, 2, a.rounds)
    versions: dict[str, str] = {}
    for _ in range(outer):
        for (model, dtype), both in zip(rows, rounds, strict=True):
            common = [
                "--model",
                str(model),
                "--dtype",
                dtype,
                "--batch",
                "1",
                "8",
                "--long-prompt",
                "512",
            ]
            common += ["--new-tokens", str(new_tokens + 1), "--rounds", str(inner)]
            here = run_for_last_object([sys.executable, str(OURS), *common, "--policy", "resident"])
            there = run_for_last_object([a.python, str(HERE / "transformers_side.py"), *common])
            versions = there["versions"]
            both.append((decoding_speeds(here), decoding_speeds(there)))
            report.progress(
                {
                    "model": model.name,
                    "dtype": dtype,
                    "here": both[-1][0],
                    "transformers": both[-1][1],
                }
            )
    results = [
        {"model": model.name, "dtype": dtype} | compare_rounds(both, "transformers")
        for (model, dtype), both in zip(rows, rounds, strict=True)
    ]
    report.finish({"versions": report.versions("jax") | versions, "rows": results})


if __name__ == "__main__":
    main()
