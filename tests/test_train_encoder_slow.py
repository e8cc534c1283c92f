"""train.py with an encoder: real processes, killed while they save, resumed on another number of
devices.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train_runs import (
    ENDLESS,
    Start,
    TrainRuns,
    committed,
    evaluations,
    kill_while_saving,
    records,
    resumes,
)

pytestmark = pytest.mark.slow

ENCODER = (
    *("--model.bidirectional", "--evaluation.sample-tokens", 0),
    *("--model.vocab-size", 513),  # one more than the text has, for masked tokens
)
STEPS = 120


def test_an_encoder_learns_and_goes_on_after_a_kill(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    end = ("--num-steps", STEPS)
    runs.finish(whole, *ENCODER, *end)
    before, *_, after = evaluations(whole)
    assert after < before - 0.5
    held_out = [record for record in records(whole) if record.get("event") == "evaluation"]
    assert all(record["bits_per_byte"] is None for record in held_out)  # of masked tokens alone
    pair = runs.start(start_python, run, 2, *ENCODER, *ENDLESS)
    pair[0].wait_until(lambda: committed(run))
    kill_while_saving(pair[0], run, pair[1:])
    begin = committed(run)[-1]
    assert begin < STEPS
    runs.finish(run, *ENCODER, *end, devices=2)
    assert resumes(run) == [begin]
    assert_same_until_a_token_changes_experts(whole, run)


def assert_same_until_a_token_changes_experts(
    whole: Path, run: Path, afterwards: float = 2e-3
) -> None:
    """Other devices round otherwise, by 4e-7. Sooner or later that sends a token whose two experts
    tie elsewhere: until then losses are equal to 1e-5, and from then on to `afterwards`, which
    other masks would exceed by far.
    """
    expected, got = (
        {
            record["step"]: record
            for record in records(folder)
            if "event" not in record and record["step"] < STEPS
        }
        for folder in (whole, run)
    )
    assert expected.keys() == got.keys()
    tied = next((s for s in sorted(got) if not has_same_load(expected[s], got[s])), STEPS)
    assert tied > STEPS // 4
    for step, record in got.items():
        allowed = 1e-5 if step < tied else afterwards
        assert record["loss"] == pytest.approx(expected[step]["loss"], rel=allowed, abs=0), step


def has_same_load(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two steps sent as many tokens to every expert: one of 1,024 would be 1e-3 apart."""
    loads = np.asarray(one["expert_load"]), np.asarray(other["expert_load"])
    return bool(np.abs(loads[0] - loads[1]).max() < 1e-4)


def test_an_encoder_is_refused_where_tokens_are_generated(runs: TrainRuns, tmp_path: Path) -> None:
    done = runs.run(tmp_path / "run", "--model.bidirectional")
    assert done.returncode == 2, done.stdout
    words = " ".join(done.stderr.replace("│", " ").split())  # as the frame of tyro wraps them
    assert "evaluation.sample_tokens = 4: is not supported with model.bidirectional" in words
