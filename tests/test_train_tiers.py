"""train.py with experts on other tiers: the ordinary run's losses, also after a SIGKILL in the middle of a save."""

from pathlib import Path

import pytest
from train_runs import (
    ENDLESS,
    Run,
    Start,
    TrainRuns,
    committed,
    kill_while_saving,
    losses,
    records,
    resumes,
    wait_until,
)

STEPS = 24
NVME = ("--tiers.experts", "nvme", "--tiers.optimizer", "nvme", "--tiers.host-cache-bytes", "500000")
HOST = ("--tiers.experts", "host", "--tiers.optimizer", "host")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_python: Run) -> TrainRuns:
    """What the runs of this file share."""
    return TrainRuns(tmp_path_factory.mktemp("tiers"), run_python)


def finish(runs: TrainRuns, run_python: Run, output_dir: Path, *options: object) -> str:
    """The screen of a run to its end."""
    command = runs.command(output_dir, "--num-steps", STEPS, *options)
    done = run_python(command, runs.environment(), timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def on_host(runs: TrainRuns, run_python: Run) -> Path:
    """A run with all experts in host memory that nothing disturbed."""
    output_dir = runs.folder / "host"
    finish(runs, run_python, output_dir, *HOST)
    return output_dir


def test_tiers_change_no_loss_but_by_rounding(runs: TrainRuns, on_host: Path, run_python: Run) -> None:
    finish(runs, run_python, runs.folder / "device")
    ours, ordinary = dict(losses(on_host)), dict(losses(runs.folder / "device"))
    assert ours.keys() == ordinary.keys()
    assert all(abs(ours[step] - ordinary[step]) <= 1e-5 * ordinary[step] for step in ordinary)


def test_a_run_on_nvme_that_is_killed_goes_on_to_the_bit(
    runs: TrainRuns, on_host: Path, tmp_path: Path, run_python: Run, start_python: Start
) -> None:
    log = tmp_path / "log"
    process = start_python(runs.command(tmp_path, *NVME, *ENDLESS), log, runs.environment())
    wait_until(lambda: committed(tmp_path), process, log)
    kill_while_saving(process, tmp_path, log)
    saved = committed(tmp_path)
    screen = finish(runs, run_python, tmp_path, *NVME)
    assert resumes(tmp_path) == saved[-1:]
    assert f"resuming from step {saved[-1]}" in screen
    expected = dict(losses(on_host))
    assert {step: loss for step, loss in losses(tmp_path) if step < STEPS} == expected
    ends = [[r["loss"] for r in records(run) if r.get("event") == "evaluation"][-1] for run in (on_host, tmp_path)]
    assert ends[0] == ends[1]


def test_a_checkpoint_of_host_memory_is_an_ordinary_one(
    runs: TrainRuns, on_host: Path, tmp_path: Path, run_python: Run
) -> None:
    finish(runs, run_python, tmp_path, *HOST, "--num-steps", 10)
    finish(runs, run_python, tmp_path)
    ours, expected = dict(losses(tmp_path)), dict(losses(on_host))
    assert all(abs(ours[step] - expected[step]) <= 1e-5 * expected[step] for step in expected)


def test_another_tier_on_disk_is_refused(runs: TrainRuns, on_host: Path, run_python: Run) -> None:
    done = run_python(runs.command(on_host, *NVME), runs.environment())
    assert done.returncode == 1
    assert "tiers.experts: 'device' -> 'nvme'" in done.stderr


def test_bad_tiers_are_refused_at_once(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    bad = runs.command(tmp_path, "--tiers.experts", "nvme", "--tiers.optimizer", "host")
    done = run_python(bad, runs.environment())
    assert done.returncode != 0
    assert "must be nvme with tiers.experts" in done.stderr
    assert not (tmp_path / "records").exists()
