"""train.py with sequences on several devices, another number at every start: real processes,
killed, resumed; and batches of fewer sequences than devices.
"""

from pathlib import Path

import pytest

from tests.train_runs import (
    ENDLESS,
    Start,
    TrainRuns,
    committed,
    evaluations,
    losses,
    resumes,
    run_split,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 50
ONCE = ("--evaluation.every-steps", 1000)  # a run with other steps would evaluate at other times
NODES = ("--mesh.expert-inter", 2, "--mesh.expert-intra", 2)


def test_fifty_steps_with_another_context_at_every_start(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Four processes share each sequence and are killed; two processes of two devices each, which
    share theirs alone; pairs of four processes, with replicas of the experts; one process with all
    four devices to a sequence.
    """
    reference, output_dir = tmp_path / "reference", tmp_path / "run"
    runs.finish(reference, "--num-steps", STEPS, *ONCE)
    ranks = runs.start(start_python, output_dir, 4, *ENDLESS, *ONCE, *NODES, "--mesh.context", 4)
    ranks[0].wait_until(lambda: 5 in committed(output_dir))
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait(60)
    begin = committed(output_dir)[-1]
    assert begin < 20
    pairs = ("--mesh.context", 2)
    run_split(runs, start_python, output_dir, 2, 2, "--num-steps", 22, *ONCE, *NODES, *pairs)
    replicas = ("--mesh.data", 2, "--mesh.expert-intra", 2)
    run_split(runs, start_python, output_dir, 4, 1, "--num-steps", 36, *ONCE, *replicas, *pairs)
    runs.finish(output_dir, "--num-steps", STEPS, *ONCE, *NODES, "--mesh.context", 4, devices=4)
    assert resumes(output_dir) == [begin, 22, 36]
    expected = dict(losses(reference))
    assert sorted(expected) == list(range(STEPS))
    assert dict(losses(output_dir)) == pytest.approx(expected, rel=1e-5, abs=0)
    assert evaluations(output_dir)[-1] == pytest.approx(evaluations(reference)[-1], rel=1e-5)


def test_batches_of_fewer_sequences_than_devices(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """One sequence a step, over one device and over two processes of two devices each."""
    one = ("--num-steps", 6, *ONCE, "--batch-size", 1, "--data.mask-documents")
    runs.finish(tmp_path / "alone", *one)
    run_split(runs, start_python, tmp_path / "shared", 2, 2, *one, "--mesh.expert-intra", 2)
    screen = (tmp_path / "shared" / "rank-2-0").read_text()
    assert "mesh.context = 0: 4 devices to a sequence" in screen
    assert dict(losses(tmp_path / "shared")) == pytest.approx(
        dict(losses(tmp_path / "alone")), rel=1e-5, abs=0
    )
    said = runs.fail(tmp_path / "none", *one, "--sequence-length", 62, devices=4)
    assert "batch_size = 1: must be a multiple of 4 devices x 1 accumulation steps" in said
