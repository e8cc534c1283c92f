"""Runs of two and four processes that are killed and go on from snapshots in memory."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.processes import Child
from tests.run.test_snapshots import in_memory
from tests.train_runs import (
    ENDLESS,
    Start,
    TrainRuns,
    committed,
    losses,
    ranks_of,
    resumes,
    run_split,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EVERY = 3
RARE = ("--checkpoint.every-steps", "1000000")


def start(
    runs: TrainRuns, start_python: Start, run: Path, processes: int, *options: object
) -> list[Child]:
    """Ranks whose memory folders are their own, as on hosts of their own."""
    memory = ("--checkpoint.memory-every-steps", EVERY, "--checkpoint.memory-dir")
    commands = runs.ranks(run, processes, *RARE, *options)
    run.mkdir(exist_ok=True)
    return [
        start_python(
            [*command, *map(str, memory), run / f"memory-{rank}"],
            run / f"rank-{rank}",
            runs.environment(),
        )
        for rank, command in enumerate(commands)
    ]


def kill(runs: TrainRuns, start_python: Start, run: Path, processes: int) -> None:
    """A run with a checkpoint of step 4, whose last rank is killed by SIGKILL after step 12, and
    then the others.
    """
    run_split(runs, start_python, run, processes, 1, "--num-steps", 4)
    ranks = start(runs, start_python, run, processes, *ENDLESS)
    ranks[0].wait_until(lambda: len(losses(run)) > 12)
    kill_all(ranks)
    assert committed(run) == [4]


def kill_all(ranks: list[Child]) -> None:
    """SIGKILL of the last rank first; the others may end by themselves before it is their turn."""
    for rank in reversed(ranks):
        rank.kill()
        rank.wait(120)


def newest_whole(run: Path, processes: int) -> int:
    """The newest step of which the shards of every rank are in some rank's folder."""
    names = {path.name for path in run.glob("memory-*/*/*")}
    steps = {int(name.partition("-")[0]) for name in names}
    return max(
        step for step in steps if {f"{step}-of-{rank}" for rank in range(processes)} <= names
    )


def finish(runs: TrainRuns, start_python: Start, run: Path, processes: int) -> list[str]:
    """The screens of the ranks of a run that goes on to its end; its losses are those of an
    undisturbed one.
    """
    steps = losses(run)[-1][0] + 6
    ranks = start(runs, start_python, run, processes, "--num-steps", steps)
    screens = [rank.end(600) for rank in ranks]
    whole = run.with_name("undisturbed")
    run_split(runs, start_python, whole, processes, 1, "--num-steps", steps)
    assert losses(run) == losses(whole) and len(losses(run)) == steps
    assert all(in_memory(run / f"memory-{rank}") == [] for rank in range(processes))
    return screens


@pytest.mark.parametrize("processes", [2, 4])
def test_a_lost_host_is_restored_from_its_partner(
    runs: TrainRuns, tmp_path: Path, start_python: Start, processes: int
) -> None:
    run = tmp_path / "run"
    kill(runs, start_python, run, processes)
    shutil.rmtree(run / "memory-1")
    newest = newest_whole(run, processes)
    assert newest >= 4 * EVERY - EVERY
    screens = finish(runs, start_python, run, processes)
    assert f"resuming from step {newest} of {run / 'memory-0'}" in screens[0]
    assert resumes(run) == [4, newest]


def test_damaged_snapshots_fall_back(runs: TrainRuns, tmp_path: Path, start_python: Start) -> None:
    """Both copies of the newest are damaged: to the snapshot before. Those of that too: to the
    checkpoint.
    """
    run = tmp_path / "run"
    kill(runs, start_python, run, 2)
    newest = newest_whole(run, 2)
    for path in run.glob(f"memory-*/*/{newest}-of-1"):
        path.write_bytes(path.read_bytes()[:-1])
    ranks = start(runs, start_python, run, 2, *ENDLESS)
    ranks[0].wait_until(lambda: len(resumes(run)) == 2)
    ranks[0].wait_until(lambda: losses(run)[-1][0] > newest + 2 * EVERY)
    kill_all(ranks)
    assert (
        f"step {newest - EVERY} is used: {newest}-of-1 on " in ranks[0].screen
        and "damaged" in ranks[0].screen
    )
    for path in run.glob("memory-*/*/*-of-0"):
        path.write_bytes(b"")
    screens = finish(runs, start_python, run, 2)
    assert resumes(run) == [4, 4]  # the file forgets what came after
    assert (
        "warning: of the snapshots in memory none is used: " in screens[0]
        and "it has no header" in screens[0]
    )


def test_another_number_of_processes_reads_the_checkpoint(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    run = tmp_path / "run"
    kill(runs, start_python, run, 2)
    ranks = start(runs, start_python, run, 1, "--num-steps", 6)
    assert "is of 2 processes; there are 1" in ranks[0].end(600)
    assert resumes(run) == [4, 4]


def test_supervised_ranks_go_on_from_the_memory_of_their_host(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    run = tmp_path / "run"
    memory = (
        "--checkpoint.memory-dir",
        tmp_path / "memory",
        "--checkpoint.memory-every-steps",
        EVERY,
    )
    command = runs.command(run, *RARE, *memory, *ENDLESS)
    supervisor = start_python(
        ("-m", "jmoe.cluster.supervise", "--processes", "2", "--", *command),
        tmp_path / "log",
        runs.environment(),
    )
    for number in range(3):
        supervisor.wait_until(
            lambda number=number: (
                len(resumes(run)) == number and len(losses(run)) > 8 * (number + 1)
            )
        )
        ranks_of(supervisor.pid)[1].send_signal(signal.SIGKILL)
    supervisor.wait_until(lambda: len(resumes(run)) == 3 and len(losses(run)) > 32)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.end(600)
    assert min(resumes(run)) >= EVERY and not list((tmp_path / "memory").iterdir())
    whole = tmp_path / "whole"
    run_split(runs, start_python, whole, 2, 1, "--num-steps", losses(run)[-1][0] + 1)
    assert losses(run) == losses(whole)


def test_a_copy_of_a_run_that_was_moved_has_snapshots_of_its_own(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """`cp -r A B; mv A C`, and B goes on with another weight decay: C goes on from what A had,
    with A's losses.
    """
    first, copy, moved, memory = tmp_path / "A", tmp_path / "B", tmp_path / "C", tmp_path / "memory"
    options = (*RARE, "--checkpoint.memory-dir", memory, "--checkpoint.memory-every-steps", EVERY)

    def killed_after(run: Path, steps: int, *more: object) -> int:
        process = start_python(
            runs.command(run, *options, *more, *ENDLESS), tmp_path / "log", runs.environment()
        )
        process.wait_until(lambda: len(losses(run)) > steps)
        process.kill_now()
        return len(losses(run))

    had = killed_after(first, 8)
    shutil.copytree(first, copy)
    first.rename(moved)
    killed_after(copy, had + 8, "--optimizer.weight-decay", 0.5)
    screen = runs.finish(moved, *options, "--num-steps", had + 20)
    newest = resumes(moved)[-1]
    assert f"resuming from step {newest} of {memory}" in screen and 6 <= newest <= had
    assert "is of a clone" not in screen
    expected = dict(losses(runs.reference[0]))
    assert all(loss == expected[step] for step, loss in losses(moved) if step in expected)
