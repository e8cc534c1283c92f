"""train.py with several corpora in an elastic layout: real processes with experts split over them,
killed while they save, resumed on other devices.
"""

from pathlib import Path

import pytest

from tests.train_runs import (
    ENDLESS,
    Start,
    TrainRuns,
    committed,
    kill_while_saving,
    losses,
    records,
    resumes,
    run_split,
)

pytestmark = pytest.mark.slow

STEPS = 40


def three_corpora(runs: TrainRuns) -> tuple[object, ...]:
    """Options of one large and two small corpora, and of their shares."""
    names = ("argparse", "difflib", "pickle")
    paths = [runs.text / f"{name}.py" for name in names]
    return ("--data.path", *paths, "--data.weights", 0.625, 0.25, 0.125)


def test_corpora_on_devices_of_their_own_learn_as_one_device_does(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Experts split over all four devices, of which the largest corpus has the most; then over the
    two of another run; then the plain mixture goes on. All losses are one device's.
    """
    reference, output_dir = tmp_path / "reference", tmp_path / "run"
    corpora = three_corpora(runs)
    end = ("--num-steps", STEPS)
    runs.finish(reference, *corpora, *end)
    elastic = (*corpora, "--data.layout", "elastic")
    split = ("--mesh.expert-inter", 2, "--mesh.expert-intra", 2)
    pair = runs.start(start_python, output_dir, 2, *elastic, *split, *ENDLESS, devices=2)
    pair[0].wait_until(lambda: committed(output_dir))
    kill_while_saving(pair[0], output_dir, pair[1:])
    begin = committed(output_dir)[-1]
    assert begin + 10 < STEPS
    screen = (output_dir / "rank-2-0").read_text()
    assert "data.layout = elastic: of 4 devices or groups of them, " in screen
    middle = begin + 5
    other = (*elastic, "--mesh.expert-intra", 2, "--num-steps", middle)
    run_split(runs, start_python, output_dir, 2, 1, *other)
    runs.finish(output_dir, *corpora, *end, devices=2)
    assert resumes(output_dir) == [begin, middle]
    changed = [e["setting"] for e in records(output_dir) if e.get("event") == "changed"]
    assert any(line.startswith("data.layout: 'elastic' -> 'mixed'") for line in changed)
    expected = dict(losses(reference))
    got = {step: loss for step, loss in losses(output_dir) if step < STEPS}
    assert got == pytest.approx(expected, rel=1e-5, abs=0)


def test_corpora_keep_their_shares_in_every_micro_batch(runs: TrainRuns, tmp_path: Path) -> None:
    """The balance loss is of a micro-batch: it is near the plain mixture's."""
    corpora = (*three_corpora(runs), "--gradient-accumulation-steps", 2, "--num-steps", 10)
    split = ("--mesh.expert-intra", 4)
    runs.finish(tmp_path / "mixed", *corpora, *split, devices=4)
    runs.finish(tmp_path / "elastic", *corpora, *split, "--data.layout", "elastic", devices=4)
    mixed = dict(losses(tmp_path / "mixed"))
    assert dict(losses(tmp_path / "elastic")) == pytest.approx(mixed, rel=1e-3, abs=0)


def test_experts_change_devices_by_load_and_survive_a_kill(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Two processes renumber their experts every four steps, die while they save, and go on: the
    losses are those of one device whose experts stay.
    """
    reference, output_dir = tmp_path / "reference", tmp_path / "run"
    end = ("--num-steps", STEPS)
    runs.finish(reference, *end)
    balanced = ("--mesh.expert-intra", 2, "--comm.balance-every-steps", 4)
    pair = runs.start(start_python, output_dir, 2, *balanced, *ENDLESS)
    pair[0].wait_until(lambda: committed(output_dir))
    kill_while_saving(pair[0], output_dir, pair[1:])
    begin = committed(output_dir)[-1]
    assert begin + 10 < STEPS
    run_split(runs, start_python, output_dir, 2, 1, *balanced, "--num-steps", begin + 9)
    runs.finish(output_dir, *end)
    assert resumes(output_dir) == [begin, begin + 9]
    events = [e for e in records(output_dir) if e.get("event") == "expert_order"]
    assert any(event["step"] > begin for event in events)
    assert any(event["moved"] for event in events)
    assert all(event["load_after"] <= event["load_before"] for event in events)
    got = {step: loss for step, loss in losses(output_dir) if step < STEPS}
    assert got == pytest.approx(dict(losses(reference)), rel=1e-5, abs=0)
