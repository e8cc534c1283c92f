"""Run commands in turn, A B C A B C, and compare the figures that each prints.

    python benchmarks/lib/alternate.py \
        --rounds 5 'python benchmarks/train/step.py' 'python other.py'

Each command's last line must be a JSON object with the `--metrics`, where a.b is b in the object a.
Ratios are of each command to the first, round by round, so that a machine whose speed drifts does
not decide the outcome.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from typing import Any


def run_for_result(command: str, timeout_s: float) -> dict[str, Any]:
    """Return the JSON object in the last line of a command's output; the command must succeed."""
    done = subprocess.run(
        shlex.split(command), stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def metric_value(result: dict[str, Any], metric: str) -> float:
    """Return the number at a dotted name."""
    found: Any = result
    for key in metric.split("."):
        found = found[key]
    return float(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--metrics", nargs="+", default=["tokens_per_s"])
    parser.add_argument("--timeout-s", type=float, default=600)
    a = parser.parse_args()
    results: list[list[dict[str, Any]]] = [[] for _ in a.commands]
    for round_ in range(a.rounds):
        for command, seen in zip(a.commands, results, strict=True):
            seen.append(run_for_result(command, a.timeout_s))
            found = "  ".join(
                f"{metric} {metric_value(seen[-1], metric):.4g}" for metric in a.metrics
            )
            print(f"round {round_}: {found}  {command}", file=sys.stderr, flush=True)
    keep = ("first_loss", "last_loss", "dropped_fraction", "peak_rss_bytes", "versions")
    rows = []
    for command, seen in zip(a.commands, results, strict=True):
        row: dict[str, Any] = {"command": command}
        for metric in a.metrics:
            found = [metric_value(result, metric) for result in seen]
            ratios = [
                v / metric_value(first, metric) for v, first in zip(found, results[0], strict=True)
            ]
            row[metric] = {
                "median": statistics.median(found),
                "all": found,
                "ratio_to_first": round(statistics.median(ratios), 3),
            }
        rows.append(row | {key: seen[-1][key] for key in keep if key in seen[-1]})
    print(json.dumps({"rounds": a.rounds, "rows": rows}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
