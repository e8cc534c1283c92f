"""Run commands in turn, A B C A B C …, and compare what the last line of each says; prints one JSON object.

    python benchmarks/alternate.py --rounds 5 'python benchmarks/training.py' 'python other.py'

Each command's last line must be a JSON object with `tokens_per_s`. Ratios are of each command to the first, round by
round, so that a machine whose speed drifts does not decide the outcome.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from typing import Any


def run(command: str, timeout_s: float) -> dict[str, Any]:
    """The JSON object in the last line of a command's output; the command must succeed."""
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=600)
    a = parser.parse_args()
    results: list[list[dict[str, Any]]] = [[] for _ in a.commands]
    for round_ in range(a.rounds):
        for command, seen in zip(a.commands, results, strict=True):
            seen.append(run(command, a.timeout_s))
            print(f"round {round_}: {seen[-1]['tokens_per_s']:10.1f} tokens/s  {command}", file=sys.stderr, flush=True)
    first = [result["tokens_per_s"] for result in results[0]]
    keep = ("first_loss", "last_loss", "dropped_fraction", "peak_rss_bytes", "versions")
    rows = []
    for command, seen in zip(a.commands, results, strict=True):
        rates = [result["tokens_per_s"] for result in seen]
        rows.append(
            {
                "command": command,
                "tokens_per_s": statistics.median(rates),
                "all": rates,
                "ratio_to_first": round(statistics.median(r / f for r, f in zip(rates, first, strict=True)), 3),
            }
            | {key: seen[-1][key] for key in keep if key in seen[-1]}
        )
    print(json.dumps({"rounds": a.rounds, "rows": rows}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
