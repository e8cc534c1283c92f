"""`train.py ufo-tiny` on several processes: killed, resumed, on more and on fewer, also while it
runs and supervised.

No layout changes a loss.
"""

import json
import shutil
import signal
import sys
from pathlib import Path

import flax.nnx as nnx
import jax
import numpy as np
import pytest

from jmoe.deploy.extract import load_task_model
from jmoe.training.tasks.session import DEVICES_FILE
from tests.cluster.test_supervise import LAUNCHER
from tests.processes import Child
from tests.test_train_vision import SMALL
from tests.train_runs import (
    ENDLESS,
    Run,
    Start,
    TrainRuns,
    committed,
    free_port,
    losses,
    ranks_of,
    records,
    resumes,
)

pytestmark = pytest.mark.slow
ELASTIC = ("--layout", "elastic", "--checkpoint.keep", "1000", "--checkpoint.every-steps", "2")


def begin(
    runs: TrainRuns,
    start_python: Start,
    folder: Path,
    processes: int,
    *options: object,
    devices: int = 1,
) -> list[Child]:
    folder.mkdir(exist_ok=True)
    address, ranks = f"127.0.0.1:{free_port()}", []
    for rank in range(processes):
        together = (
            "--distributed.coordinator-address",
            address,
            "--distributed.num-processes",
            str(processes),
        )
        own = (*together, "--distributed.process-id", str(rank)) if processes > 1 else ()
        command = (
            "train.py",
            "ufo-tiny",
            *SMALL,
            *ELASTIC,
            *own,
            "--output-dir",
            str(folder),
            *map(str, options),
        )
        ranks.append(
            start_python(command, folder / f"rank-{processes}-{rank}", runs.environment(devices))
        )
    return ranks


def kill_after_a_commit(ranks: list[Child], folder: Path) -> int:
    """SIGKILL all ranks once a checkpoint is there, and return the step of the newest one."""
    ranks[0].wait_until(lambda: committed(folder))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait(120)
    return max(committed(folder))


def finish(
    runs: TrainRuns, start_python: Start, folder: Path, processes: int, steps: int, *options: object
) -> None:
    for rank in begin(runs, start_python, folder, processes, "--num-steps", steps, *options):
        rank.end(300)


def of_tasks(folder: Path, name: str) -> dict[str, float]:
    """What every task had at every step: its `task_loss`, or its `task_accuracy`."""
    lines = [record for record in records(folder) if "event" not in record]
    return {f"{task} {line['step']}": value for line in lines for task, value in line[name].items()}


def assert_learned_alike(folder: Path, other: Path) -> None:
    """At every step each task had the same loss, within 1e-5, and as many images right."""
    assert of_tasks(folder, "task_loss") == pytest.approx(
        of_tasks(other, "task_loss"), rel=0, abs=1e-5
    )
    assert of_tasks(folder, "task_accuracy") == pytest.approx(
        of_tasks(other, "task_accuracy"), rel=0, abs=1e-5
    )


def test_killed_and_resumed_on_the_same_and_on_another_layout(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """At least fifty steps; without a stop on one, two and four processes."""
    killed, same = tmp_path / "killed", tmp_path / "same"
    ranks = begin(runs, start_python, killed, 2, *ENDLESS)
    last = kill_after_a_commit(ranks, killed)
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
    ranks = begin(
        runs, start_python, more, 2, "--num-steps", 2, "--init-from", tmp_path / "whole-1"
    )
    screens = [rank.end(300) for rank in ranks]
    assert f"starting from {tmp_path / 'whole-1'}" in screens[0]
    assert losses(more)[0][1] < losses(tmp_path / "whole-1")[0][1]


@pytest.mark.parametrize(
    "dense", [(), (0, 1)], ids=["all experts everywhere", "experts where their tasks run"]
)
def test_killed_and_resumed_with_experts_on_tiers(
    runs: TrainRuns, tmp_path: Path, start_python: Start, run_python: Run, dense: tuple[int, ...]
) -> None:
    """Two processes, with experts on NVMe; then one, in host memory; and the losses of experts on
    the device.

    dense: layers, if others than the preset's: where tokens choose experts, every process has all
    of them.
    """
    killed, whole, device = (tmp_path / name for name in ("killed", "whole", "device"))
    model = ("--model.mlp-only-layers", *dense) if dense else ()
    nvme = ("--tiers.experts", "nvme", "--tiers.optimizer", "nvme", *model)
    host = ("--tiers.experts", "host", "--tiers.optimizer", "host", *model)
    ranks = begin(runs, start_python, killed, 2, *nvme, *ENDLESS)
    last = kill_after_a_commit(ranks, killed)
    end = max(last + 10, 20)
    finish(runs, start_python, killed, 2, end, *nvme)
    assert resumes(killed) == [last]
    finish(runs, start_python, whole, 2, end, *host)
    assert dict(losses(killed)) == dict(losses(whole))
    assert of_tasks(killed, "task_accuracy") == of_tasks(whole, "task_accuracy")
    finish(runs, start_python, killed, 1, end + 4, *host)
    assert resumes(killed) == [last, end]
    finish(runs, start_python, device, 1, end + 4, *model)
    assert_learned_alike(killed, device)
    for folder in (killed, device):
        done = run_python(
            (
                "-m",
                "jmoe.deploy.extract",
                folder,
                tmp_path / f"{folder.name}-fonts",
                "--task",
                "fonts",
            )
        )
        assert done.returncode == 0, done.stderr
    tensors = [
        load_task_model(tmp_path / f"{name}-fonts").model.dense_layers
        for name in ("killed", "device")
    ]
    for ours, theirs in zip(
        *(jax.tree.leaves(nnx.state(layers)) for layers in tensors), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def resize(rank: Child, folder: Path, devices: int) -> None:
    """Ask a run for another number of devices, and wait until it has taken ten steps more."""
    (folder / DEVICES_FILE).write_text(f"{devices}\n")
    rank.send_signal(signal.SIGUSR2)
    events = lambda: [record for record in records(folder) if record.get("event") == "layout"]  # noqa: E731
    rank.wait_until(
        lambda: any(event["reason"].startswith(f"{devices} devices") for event in events())
    )
    since = events()[-1]["step"]
    rank.wait_until(lambda: losses(folder)[-1][0] > since + 10)


def test_devices_come_and_go_and_a_task_ends_while_it_runs(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Two processes with two devices each, then one of each, then two again; either process may
    get the signal.
    """
    folder = tmp_path / "changing"
    whole = tmp_path / "whole"
    options = ("--tasks.fonts.num-steps", 3)
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


def layouts_of(log: str) -> list[list[str]]:
    """What each device runs, of every layout that a log shows: `glyphs 0:8`, or `digits 0:4 +
    fonts 0:2`.
    """
    shown: list[list[str]] = []
    for line in log.splitlines():
        if line.startswith("device "):
            if line.split()[1] == "0":
                shown.append([])
            shown[-1].append(line.split(" MB  ")[1])
    return shown


def test_a_lost_rank_leaves_its_tasks_to_those_that_are_left(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """SIGKILL of one of two supervised processes, whose host stays away: one goes on, on two
    devices.
    """
    run, away, launcher = tmp_path / "run", tmp_path / "away", tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    away.write_text("")
    launch = f"{sys.executable} {launcher} {away} {{host}}"
    hosts = (
        "--hosts",
        "a=127.0.0.1",
        "b",
        "--min-processes",
        "1",
        "--launch",
        launch,
        "--backoff-s",
        "0",
    )
    training = ("train.py", "ufo-tiny", *SMALL, *ELASTIC, *ENDLESS, "--output-dir", str(run))
    command = ("-m", "jmoe.cluster.supervise", *hosts, "--", *training)
    supervisor = start_python(command, tmp_path / "supervisor.log", runs.environment(2))
    supervisor.wait_until(lambda: committed(run))
    away.write_text("b")
    ranks_of(supervisor.pid)[1].kill()
    supervisor.wait_until(lambda: resumes(run))
    supervisor.wait_until(lambda: losses(run)[-1][0] >= max(50, resumes(run)[0] + 10))
    supervisor.send_signal(signal.SIGTERM)
    supervisor.end(120)
    events = [
        json.loads(line) for line in (run / "supervise" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["processes"] for event in events if event["event"] == "start"] == [2, 1]
    assert [event["kind"] for event in events if event["event"] == "end"] == ["lost", "stopped"]
    assert layouts_of((run / "supervise" / "rank-0.log").read_text()) == [
        ["glyphs 0:8", "digits 0:4", "fonts 0:2", "photographs 0:2"],
        ["glyphs 0:8", "digits 0:4 + fonts 0:2 + photographs 0:2"],
    ]
    whole = tmp_path / "whole"
    finish(runs, start_python, whole, 1, losses(run)[-1][0] + 1)
    assert len(resumes(run)) == 1
    assert_learned_alike(run, whole)
