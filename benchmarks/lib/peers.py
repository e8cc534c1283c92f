"""Ours beside a peer's: programs whose last line is a JSON object, in turn, and what a row of a
result has of both.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject


def run_for_last_object(command: Sequence[str], folder: Path | None = None) -> JsonObject:
    """Return the JSON object in a program's last line; a program that fails ends this one."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
    last: JsonObject = json.loads(lines[-1])
    return last


def decoding_speeds(side: Mapping[str, Any]) -> dict[str, float]:
    """Return tokens a second: decoding one sequence, decoding eight, and prefill."""
    decoded = side["decode_tokens_per_s"]
    return {
        "one": decoded["1"],
        "eight": decoded["8"],
        "prefill_512": side["long_prefill_tokens_per_s"],
    }


def fastest_figures(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the best of several runs, figure by figure; each figure is a speed."""
    return {name: max(run[name] for run in runs) for name in runs[0]}


def compare_rounds(
    rounds: Sequence[tuple[Mapping[str, float], Mapping[str, float]]], peer: str
) -> JsonObject:
    """Return, by figure, both sides' medians, the median ratio, and the rounds (ours, theirs)."""
    row = {}
    for name in rounds[0][0]:
        mine, others = ([side[name] for side in sides] for sides in zip(*rounds, strict=True))
        row[name] = {
            "jmoe": report.median(mine, 1),
            peer: report.median(others, 1),
            "ratio": report.ratio(mine, others),
            "rounds": [[round(x, 1) for x in pair] for pair in zip(mine, others, strict=True)],
        }
    return row
