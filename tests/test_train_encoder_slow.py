"""train.py with an encoder: real processes, killed while they save, resumed on another number of
devices.
"""

from pathlib import Path

import pytest

from tests.train_runs import (
    ENDLESS,
    Start,
    TrainRuns,
    committed,
    evaluations,
    kill_while_saving,
    losses,
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
    expected = dict(losses(whole))
    # a rounding that sends a token to another expert grows; other masks would differ by percents
    assert {step: expected[step] for step, _ in losses(run) if step < STEPS} == pytest.approx(
        dict(losses(run)), rel=2e-3, abs=0
    )


def test_an_encoder_is_refused_where_tokens_are_generated(runs: TrainRuns, tmp_path: Path) -> None:
    assert "evaluation.sample_tokens = 4: is not supported with model.bidirectional" in runs.fail(
        tmp_path / "run", "--model.bidirectional"
    )
