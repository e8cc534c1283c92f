"""train.py with another exchange at every start: real processes, killed, resumed."""

from pathlib import Path

import pytest

from tests.train_runs import ENDLESS, Start, TrainRuns, committed, losses, resumes, run_split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 50
ONCE = ("--evaluation.every-steps", 1000)  # a run with other steps would evaluate at other times
NODES = ("--mesh.expert-inter", 2, "--mesh.expert-intra", 2)


def test_fifty_steps_with_another_exchange_at_every_start(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Four processes send ragged rows and are killed; two processes of two devices each pad, with
    each token once a node; two copies of the whole state send ragged rows; one process pads.
    """
    reference, output_dir = tmp_path / "reference", tmp_path / "run"
    runs.finish(reference, "--num-steps", STEPS, *ONCE)
    ragged = ("--comm.exchange", "ragged")
    ranks = runs.start(start_python, output_dir, 4, *ENDLESS, *ONCE, *NODES, *ragged)
    ranks[0].wait_until(lambda: 5 in committed(output_dir))
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait(60)
    begin = committed(output_dir)[-1]
    assert begin < 20
    assert "ragged exchange: " in (output_dir / "rank-4-0").read_text()
    dedup = ("--comm.exchange", "dedup")
    run_split(runs, start_python, output_dir, 2, 2, "--num-steps", 22, *ONCE, *NODES, *dedup)
    copies = ("--mesh.data", 2, "--mesh.expert-intra", 2, "--mesh.replicate", 2)
    run_split(runs, start_python, output_dir, 4, 1, "--num-steps", 36, *ONCE, *copies, *ragged)
    flat = (*NODES, "--comm.exchange", "flat")
    runs.finish(output_dir, "--num-steps", STEPS, *ONCE, *flat, devices=4)
    assert resumes(output_dir) == [begin, 22, 36]
    expected = dict(losses(reference))
    assert sorted(expected) == list(range(STEPS))
    assert dict(losses(output_dir)) == pytest.approx(expected, rel=1e-5, abs=0)
