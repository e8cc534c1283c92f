"""`train.py ufo-tiny` on several processes: killed, resumed, on more and on fewer, also while it runs.

No layout changes a loss.
"""

import shutil
import signal
from pathlib import Path

import pytest

from jmoe.training.vision_session import DEVICES_FILE
from tests.processes import Child
from tests.test_train_vision import SMALL
from tests.train_runs import ENDLESS, Start, TrainRuns, committed, free_port, losses, records, resumes

pytestmark = pytest.mark.slow
ELASTIC = ("--layout", "elastic", "--checkpoint.keep", "1000", "--checkpoint.every-steps", "2")


def begin(
    runs: TrainRuns, start_python: Start, folder: Path, processes: int, *options: object, devices: int = 1
) -> list[Child]:
    folder.mkdir(exist_ok=True)
    address, ranks = f"127.0.0.1:{free_port()}", []
    for rank in range(processes):
        together = ("--distributed.coordinator-address", address, "--distributed.num-processes", str(processes))
        own = (*together, "--distributed.process-id", str(rank)) if processes > 1 else ()
        command = ("train.py", "ufo-tiny", *SMALL, *ELASTIC, *own, "--output-dir", str(folder), *map(str, options))
        ranks.append(start_python(command, folder / f"rank-{processes}-{rank}", runs.environment(devices)))
    return ranks


def finish(runs: TrainRuns, start_python: Start, folder: Path, processes: int, steps: int) -> None:
    for rank in begin(runs, start_python, folder, processes, "--num-steps", steps):
        rank.end(300)


def of_tasks(folder: Path, name: str) -> dict[str, float]:
    """What every task had at every step: its `task_loss`, or its `task_accuracy`."""
    lines = [record for record in records(folder) if "event" not in record]
    return {f"{task} {line['step']}": value for line in lines for task, value in line[name].items()}


def assert_learned_alike(folder: Path, other: Path) -> None:
    """At every step each task had the same loss, within 1e-5, and as many images right."""
    assert of_tasks(folder, "task_loss") == pytest.approx(of_tasks(other, "task_loss"), rel=0, abs=1e-5)
    assert of_tasks(folder, "task_accuracy") == pytest.approx(of_tasks(other, "task_accuracy"), rel=0, abs=1e-5)


def test_killed_and_resumed_on_the_same_and_on_another_layout(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """At least fifty steps; without a stop on one, two and four processes."""
    killed, same = tmp_path / "killed", tmp_path / "same"
    ranks = begin(runs, start_python, killed, 2, *ENDLESS)
    ranks[0].wait_until(lambda: committed(killed))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait(120)
    last = max(committed(killed))
    end = max(last + 30, 50)
    shutil.copytree(killed, same)
    finish(runs, start_python, same, 2, end)
    finish(runs, start_python, killed, 4, last + 15)  # 1 / 1 / 1 / 1
    finish(runs, start_python, killed, 1, end)
    for processes in (1, 2, 4):
        finish(runs, start_python, tmp_path / f"whole-{processes}", processes, end)
    whole = dict(losses(tmp_path / "whole-2"))
    assert len(whole) == end and len(of_tasks(tmp_path / "whole-2", "task_loss")) == 4 * end
    assert resumes(same) == [last] and resumes(killed) == [last, last + 15]
    assert dict(losses(same)) == whole
    assert dict(losses(tmp_path / "whole-1")) == pytest.approx(whole, rel=0, abs=1e-5)
    for folder in (killed, tmp_path / "whole-1", tmp_path / "whole-4"):
        assert_learned_alike(folder, tmp_path / "whole-2")

    more = tmp_path / "more"
    ranks = begin(runs, start_python, more, 2, "--num-steps", 2, "--init-from", tmp_path / "whole-1")
    screens = [rank.end(300) for rank in ranks]
    assert f"starting from {tmp_path / 'whole-1'}" in screens[0]
    assert losses(more)[0][1] < losses(tmp_path / "whole-1")[0][1]


def resize(rank: Child, folder: Path, devices: int) -> None:
    """Ask a run for another number of devices, and wait until it has taken ten steps more."""
    (folder / DEVICES_FILE).write_text(f"{devices}\n")
    rank.send_signal(signal.SIGUSR2)
    events = lambda: [record for record in records(folder) if record.get("event") == "layout"]  # noqa: E731
    rank.wait_until(lambda: any(event["reason"].startswith(f"{devices} devices") for event in events()))
    since = events()[-1]["step"]
    rank.wait_until(lambda: losses(folder)[-1][0] > since + 10)


def test_devices_come_and_go_and_a_task_ends_while_it_runs(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Two processes with two devices each, then one of each, then two again; either process may get the signal."""
    folder, whole, options = tmp_path / "changing", tmp_path / "whole", ("--tasks.fonts.num-steps", 3)
    ranks = begin(runs, start_python, folder, 2, *ENDLESS, *options, devices=2)
    ranks[0].wait_until(lambda: committed(folder))
    resize(ranks[1], folder, 2)
    resize(ranks[0], folder, 4)
    ranks[0].wait_until(lambda: losses(folder)[-1][0] >= 50)
    ranks[0].terminate()
    screens = [rank.end(120) for rank in ranks]
    assert "fonts ended" in screens[0]
    last = losses(folder)[-1][0] + 1
    for rank in begin(runs, start_python, whole, 1, "--num-steps", last, *options):
        rank.end(300)
    assert [step for step, _ in losses(folder)] == list(range(last))
    assert_learned_alike(folder, whole)
