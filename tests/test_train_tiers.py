"""train.py with experts on other tiers: the ordinary run's losses, also after a SIGKILL in the middle of a save."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.train_runs import (
    ENDLESS,
    Run,
    Start,
    TrainRuns,
    committed,
    kill_while_saving,
    losses,
    records,
    resumes,
    run_split,
    wait_until,
)

STEPS = 24
NVME = ("--tiers.experts", "nvme", "--tiers.optimizer", "nvme", "--tiers.host-cache-bytes", "500000")
HOST = ("--tiers.experts", "host", "--tiers.optimizer", "host")


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


@pytest.mark.slow
def test_a_checkpoint_of_host_memory_is_an_ordinary_one(
    runs: TrainRuns, on_host: Path, tmp_path: Path, run_python: Run
) -> None:
    finish(runs, run_python, tmp_path, *HOST, "--num-steps", 10)
    finish(runs, run_python, tmp_path)
    ours, expected = dict(losses(tmp_path)), dict(losses(on_host))
    assert all(abs(ours[step] - expected[step]) <= 1e-5 * expected[step] for step in expected)


def test_a_run_on_nvme_is_served_exported_and_moved(
    runs: TrainRuns, on_host: Path, tmp_path: Path, run_python: Run
) -> None:
    """The weights are those of the run in host memory, and so is what the run does when it goes on on the device."""
    run = tmp_path / "run"
    finish(runs, run_python, run, *NVME)
    served = run_python(["serve.py", run, "--dry-run"], runs.environment(), timeout=200)
    assert served.returncode == 0, served.stderr
    exported = run_python(["-m", "jmoe.deploy.export", on_host, tmp_path / "model"], runs.environment(), timeout=200)
    assert exported.returncode == 0, exported.stderr
    folders = [tmp_path / "model", run / "exported" / f"step-{STEPS}"]
    ours, theirs = (folder / "model.safetensors" for folder in folders)
    assert ours.read_bytes() == theirs.read_bytes()

    shutil.copytree(on_host, tmp_path / "host")
    finish(runs, run_python, tmp_path / "host", *NVME, "--num-steps", STEPS + 4)  # memory to disk
    finish(runs, run_python, run, "--num-steps", STEPS + 4)  # disk to device
    assert [resumes(folder) for folder in (tmp_path / "host", run)] == [[STEPS], [STEPS]]
    ours, theirs = dict(losses(tmp_path / "host")), dict(losses(run))
    assert len(ours) == STEPS + 4
    assert ours == pytest.approx(theirs, rel=1e-5, abs=0)


def test_bad_tiers_are_refused_at_once(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    bad = runs.command(tmp_path, "--tiers.experts", "nvme", "--tiers.optimizer", "host")
    done = run_python(bad, runs.environment())
    assert done.returncode != 0
    assert "tiers.optimizer = 'host': must be nvme" in done.stderr
    assert not (tmp_path / "records").exists()


@pytest.mark.slow
def test_two_processes_are_killed_and_go_on_and_then_one(
    runs: TrainRuns, on_host: Path, tmp_path: Path, start_python: Start
) -> None:
    """Each with half of the experts: to the bit as without the kill; one process then goes on with all of them."""
    spread = ("--mesh.expert-inter", 2, "--checkpoint.every-steps", 4)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_split(runs, start_python, whole, 2, 1, *HOST, *spread, "--num-steps", STEPS)
    assert dict(losses(whole)) == pytest.approx(dict(losses(on_host)), rel=1e-5, abs=0)

    killed.mkdir()
    logs = [tmp_path / f"rank-{rank}" for rank in range(2)]
    commands = runs.ranks(killed, 2, *NVME, *spread, *ENDLESS)
    group = [start_python(command, log, runs.environment()) for command, log in zip(commands, logs, strict=True)]
    wait_until(lambda: committed(killed), group[0], logs[0])
    kill_while_saving(group[0], killed, logs[0])
    group[1].kill()
    group[1].wait(30)
    saved = committed(killed)
    assert saved and saved[-1] < STEPS
    run_split(runs, start_python, killed, 2, 1, *NVME, *spread, "--num-steps", STEPS)
    assert resumes(killed) == saved[-1:]
    assert {step: loss for step, loss in losses(killed) if step < STEPS} == dict(losses(whole))
    ends = [[r["loss"] for r in records(run) if r.get("event") == "evaluation"][-1] for run in (whole, killed)]
    assert ends[0] == ends[1]

    run = json.loads((killed / "run.json").read_text())["run"]
    folders = [killed / "records" / run / f"process-{rank}" for rank in range(2)]
    num_records = [sum(path.name[0].isdigit() for path in (folder / "moments").iterdir()) for folder in folders]
    assert min(num_records) > 0
    often = ("--checkpoint.every-steps", 2, "--checkpoint.keep", 2)
    run_split(runs, start_python, killed, 1, 1, *NVME, *often, "--num-steps", STEPS + 6)
    assert resumes(killed)[-1] == STEPS
    assert not folders[1].exists()  # no kept step needs what process 1 had
    run_split(runs, start_python, on_host, 1, 1, *HOST, "--num-steps", STEPS + 6)
    ours, expected = dict(losses(killed)), dict(losses(on_host))
    assert ours == pytest.approx(expected, rel=1e-5, abs=0)


def test_a_mesh_with_copies_of_experts_is_refused(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    done = run_python(runs.command(tmp_path, *HOST), runs.environment(2))
    assert done.returncode == 1
    assert "mesh.data = 2: must be 1 with experts on other tiers" in done.stderr


FAILING_DISK = """
import errno, os, sys

sys.path.insert(0, os.getcwd())
import train

folder, failing = sys.argv[1], False


def failing_in_the_folder(real):
    def call(descriptor, *arguments):
        if failing and f"{os.readlink(f'/proc/self/fd/{descriptor}')}/".startswith(folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *arguments)

    return call


for name in ("fsync", "fdatasync", "pwritev", "posix_fallocate"):
    setattr(os, name, failing_in_the_folder(getattr(os, name)))
train_step = train.train_step


def from_step_7_on(trainer, state, tokens):
    global failing
    failing = int(state.step) >= 7
    return train_step(trainer, state, tokens)


train.train_step = from_step_7_on
try:
    train.main(sys.argv[2:])
except (ValueError, OSError, FloatingPointError) as error:
    sys.exit(f"train.py: {error}")
"""


def test_a_disk_that_fails_is_named(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    """What fails first is what the run says last, not what fails when its folders are closed after it."""
    _, *arguments = runs.command(tmp_path, *NVME, "--num-steps", STEPS)
    done = run_python(["-c", FAILING_DISK, f"{tmp_path}/records/", *arguments], runs.environment(), timeout=200)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert re.search(rf"^train.py: \[Errno 5\] .*{tmp_path}/records/", lines[-1])
    assert "needs" in lines[-1]  # the write of a record, not the flush of a folder
    assert all(str(tmp_path) in line for line in lines if "[Errno" in line)
