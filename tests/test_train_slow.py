"""train.py end to end, the long cases: many kills, every split of processes and devices, dead
ranks, a full disk.
"""

import contextlib
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.train_runs import (
    ENDLESS,
    Run,
    Start,
    TrainRuns,
    committed,
    losses,
    records,
    resumes,
    run_split,
    unfinished,
)

pytestmark = pytest.mark.slow

KILLS = 12


def test_killed_again_and_again(
    runs: TrainRuns, tmp_path: Path, run_python: Run, start_python: Start
) -> None:
    """SIGKILL at any moment: start, tokenisation, compilation (into the shared cache), steps,
    saves, evaluations.
    """
    options = (
        *("--num-steps", 120, "--compute-dtype", "bfloat16", "--optimizer.schedule", "cosine"),
        *(
            "--gradient-accumulation-steps",
            2,
            "--evaluation.every-steps",
            15,
            "--model.router.jitter-noise",
            0.01,
        ),
        *("--checkpoint.every-steps", 4, "--data.held-out-bytes", 20000),
    )
    own = {
        name: TrainRuns(tmp_path / name, run_python).environment()
        | {"JAX_DISABLE_MOST_OPTIMIZATIONS": None}
        for name in ("whole", "killed")
    }
    whole = runs.command(tmp_path / "whole", *options, data=runs.text)
    began = time.monotonic()
    done = run_python(whole, own["whole"], timeout=200)
    assert done.returncode == 0, done.stderr
    took_s = time.monotonic() - began
    reference = dict(losses(tmp_path / "whole"))
    assert len(reference) == 120

    output_dir = tmp_path / "killed"
    command = runs.command(output_dir, *options, data=runs.text)
    last = -1
    for attempt in range(KILLS):
        log = tmp_path / f"log-{attempt}"
        process = start_python(command, log, own["killed"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(random.uniform(0.2, 0.8 * took_s))
            assert process.returncode == 0, log.read_text()
            break  # it came to its end
        process.kill_now()
        said = re.findall(r"^resuming from step (\d+) ", log.read_text(), re.MULTILINE)
        assert said in ([], [str(last)]), "resumed from another step than the last commit"
        last = max(committed(output_dir), default=-1)
    done = run_python(command, own["killed"], timeout=200)
    assert done.returncode == 0, done.stderr
    assert resumes(output_dir) == sorted(resumes(output_dir))
    assert {step for step, _ in losses(output_dir)} == set(reference)
    assert [(step, loss) for step, loss in losses(output_dir) if loss != reference[step]] == []
    assert unfinished(output_dir) == set()


@pytest.mark.parametrize("option", [("kind", "muon"), ("moments", "8bit")], ids="=".join)
def test_another_optimizer_is_killed_and_goes_on_to_the_bit(
    runs: TrainRuns, tmp_path: Path, start_python: Start, option: tuple[str, str]
) -> None:
    """On four devices; the options cannot change afterwards, and the plan counts the moments."""
    own = (f"--optimizer.{option[0]}", option[1], "--num-steps", 30)
    mesh = ("--mesh.expert-inter", 2, "--mesh.expert-intra", 2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    screen = runs.finish(whole, *own, *mesh, devices=4)
    assert "AdamW with float32 moments" in screen
    process = start_python(
        runs.command(killed, *own, *mesh), tmp_path / "log", runs.environment(devices=4)
    )
    process.wait_until(lambda: len(losses(killed)) >= 14)
    process.kill_now()
    newest = committed(killed)[-1]
    said = runs.fail(killed, "--num-steps", 30, *mesh, devices=4)
    assert f"optimizer.{option[0]}: {option[1]!r} -> " in said
    runs.finish(killed, *own, *mesh, devices=4)
    assert resumes(killed) == [newest]
    assert set(losses(killed)) == set(losses(whole))


def test_process_count_changes(runs: TrainRuns, tmp_path: Path, start_python: Start) -> None:
    """Two processes, then four, then one on one device: the losses of one process with all
    devices.
    """
    mesh = ("--mesh.expert-inter", 2, "--mesh.expert-intra", 2)
    moved, stayed = tmp_path / "moved", tmp_path / "stayed"
    run_split(runs, start_python, moved, 2, 2, "--num-steps", 12, *mesh)
    run_split(runs, start_python, moved, 4, 1, "--num-steps", 16, *mesh)
    run_split(runs, start_python, moved, 1, 1, "--num-steps", 20)
    run_split(runs, start_python, stayed, 1, 4, "--num-steps", 20, *mesh)
    assert resumes(moved) == [12, 16]
    assert dict(losses(moved)) == pytest.approx(dict(losses(stayed)), rel=1e-5, abs=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_every_rank(
    runs: TrainRuns, tmp_path: Path, start_python: Start, number: signal.Signals
) -> None:
    """As a cluster does it, and while the first step compiles: one step, saved, and everyone out
    within 30 s of it.
    """
    group = runs.start(start_python, tmp_path, 2, *ENDLESS, devices=2)
    group[0].wait_until(lambda: records(tmp_path))  # the evaluation before the first step
    time.sleep(0.5)
    for process in group:
        process.send_signal(number)
    group[0].wait_until(lambda: losses(tmp_path) or group[0].poll() is not None)
    for process in group:
        process.end(30)
    stop = committed(tmp_path)[-1]
    assert losses(tmp_path)[-1][0] == stop - 1


LIMITS = ("--distributed.heartbeat-timeout-s", 5, "--distributed.step-timeout-s", 20)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_run(
    runs: TrainRuns, tmp_path: Path, start_python: Start, victim: int, number: signal.Signals
) -> None:
    """Dead or frozen, the coordinator or another: the survivor names it and ends; the next start
    goes on.
    """
    group = runs.start(start_python, tmp_path, 2, *ENDLESS, *LIMITS)
    group[0].wait_until(lambda: committed(tmp_path))
    group[victim].send_signal(number)
    survivor = group[1 - victim]
    assert survivor.wait(60) != 0
    named = rf"rank {victim}\b.*(no sign of life|does not answer|is behind)"
    if victim == 0:  # JAX may notice first, and ends the process there and then
        named += "|the leader task was preempted/died"
    assert re.search(named, survivor.screen), survivor.screen
    group[victim].kill_now()
    newest = committed(tmp_path)[-1]
    run_split(runs, start_python, tmp_path, 1, 1, "--num-steps", newest + 2)
    assert resumes(tmp_path) == [newest]
