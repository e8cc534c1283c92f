"""What a run's folder says of it: running, ended, stopped, killed, half-written, with and
without a supervisor.
"""

import fcntl
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jmoe.cluster import show_status
from jmoe.cluster.heartbeat import CLOSED, Heartbeat, heartbeat_file
from jmoe.cluster.overview import RankHeartbeat, find_slowest_rank, overview_lines, read_overview
from tests.train_runs import Run, TrainRuns

Hold = Callable[[str], None]
TIERS = {
    "nvme_read_bytes": 3e9,
    "nvme_written_bytes": 2e9,
    "host_bytes": 5e9,
    "waited_s": 1.5,
    "hit_rate": 0.75,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 20 steps that has done 7, of which 5 are saved; no process is left."""
    folder = tmp_path / "mine"
    (folder / "checkpoints" / "5").mkdir(parents=True)
    (folder / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
    (folder / "config.json").write_text(
        json.dumps({"num_steps": 20, "distributed": {"step_timeout_s": 60}})
    )
    (folder / "run.json").write_text(json.dumps({"run": "mine-1a2b", "output_dir": str(folder)}))
    write_owner(folder, socket.gethostname())
    write_steps(folder, 7)
    return folder


def write_owner(folder: Path, host: str) -> None:
    (folder / "run.lock").write_text(
        json.dumps({"host": host, "pid": 7, "since": "now", "token": "x"})
    )


def write_steps(folder: Path, number: int, **last: Any) -> None:
    steps = [
        {"step": s, "loss": 5.0 - s / 10, "tokens_per_s": 100.0, "step_s": 0.5}
        for s in range(number)
    ]
    steps[0] |= {"tokens_per_s": 1.0, "step_s": 50.0, "compiled": True}
    steps[-1] |= last
    events = [{"event": "evaluation", "step": 0, "loss": 6.0}, {"event": "resume", "step": 5}]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*events, *steps])
    )


@pytest.fixture
def hold(folder: Path) -> Iterator[Hold]:
    """`hold(NAME)` locks a file of the folder until the test ends, as a process of the run
    would.
    """
    files = []

    def lock(name: str) -> None:
        files.append((folder / name).open("a"))
        fcntl.flock(files[-1], fcntl.LOCK_SH)

    yield lock
    for file in files:
        file.close()


def test_more_steps_than_the_last_command_asked_for(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"num_steps": 4}))
    (said,) = [line for line in overview_lines(read_overview(folder)) if line.startswith("steps")]
    assert (
        said.startswith("steps         7, more than the 4 that it was last told")
        and "%" not in said
    )
    assert read_overview(folder).state == "ended"


def test_a_run_that_was_killed_is_dead(folder: Path) -> None:
    run = read_overview(folder)
    assert (run.state, run.why) == ("dead", "no process is left, goes on from step 5")
    assert (run.run, run.steps, run.num_steps, run.checkpoint, run.restarts) == (
        "mine-1a2b",
        7,
        20,
        5,
        1,
    )
    # without the step that compiled
    assert (run.loss, run.tokens_per_s, run.step_s) == (4.4, 100.0, 0.5)
    assert run.step_age_s is not None and run.checkpoint_age_s is not None
    assert run.tiers is None and run.ranks == () and run.last_end == "" and run.attempt is None


def test_who_holds_the_lock_runs(folder: Path, hold: Hold) -> None:
    hold("run.lock")
    run = read_overview(folder)
    assert (run.state, run.why) == (
        "running",
        f"process 7 on {socket.gethostname()} holds the folder",
    )


def test_all_steps_are_done(folder: Path) -> None:
    write_steps(folder, 20)
    assert read_overview(folder).state == "dead"  # the last checkpoint is missing
    (folder / "checkpoints" / "20").mkdir()
    run = read_overview(folder)
    assert (run.state, run.steps, run.checkpoint) == ("ended", 20, 20)


def test_a_run_that_was_stopped_has_saved_all(folder: Path) -> None:
    (folder / "checkpoints" / "7").mkdir()
    assert read_overview(folder).state == "stopped"


@pytest.mark.parametrize("cut", [1, 20, 90])
def test_a_last_line_that_is_cut_is_not_there_yet(folder: Path, cut: int) -> None:
    log = folder / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-cut])
    run = read_overview(folder)
    assert run.steps == (6 if cut < 90 else 5)
    assert run.loss == (4.5 if cut < 90 else 4.6)


def test_half_of_every_file(folder: Path) -> None:
    """A disk that is full, or a kill between two writes, leaves any of them empty or cut."""
    (folder / "supervise").mkdir()
    events = '{"event": "start", "attempt": 1}\n{"event": "end", "kind": "lost", "why": "rank 1'
    (folder / "supervise" / "events.jsonl").write_text(events)
    for name in ("config.json", "run.json", "run.lock", "metrics.jsonl"):
        text = (folder / name).read_bytes()
        for size in (0, len(text) // 2):
            (folder / name).write_bytes(text[:size])
            run = read_overview(folder)
            assert run.state == "dead" and list(overview_lines(run))
    assert (run.num_steps, run.run, run.steps, run.attempt) == (None, "mine", 2, 1)


def test_a_loss_that_is_not_finite_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(folder, 7, loss=None, non_finite={"loss": "nan"})
    assert "loss          nan" in list(overview_lines(read_overview(folder)))
    monkeypatch.setattr(sys, "argv", ["jmoe-status", str(folder), "--json"])
    with pytest.raises(SystemExit) as ended:
        show_status.main()
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["loss"] == "nan"


def test_a_run_on_another_host_is_judged_by_its_signs(folder: Path) -> None:
    """Its lock may not be seen here; a step may take `distributed.step_timeout_s`, or the start
    its own limit, 300.
    """
    write_owner(folder, "elsewhere")
    assert read_overview(folder).state == "running"
    for name in ("metrics.jsonl", "run.lock"):
        os.utime(folder / name, (1.0, 1.0))
    run = read_overview(folder)
    assert run.state == "dead" and run.why.startswith("no sign of life for ")
    beats = folder / "supervise" / "heartbeat-1"
    beats.mkdir(parents=True)
    Heartbeat(beats, 0, 1).beat("step 7", 12)
    assert read_overview(folder).state == "running"


def test_a_supervised_run(folder: Path, hold: Hold) -> None:
    for attempt in (9, 10):
        beats = folder / "supervise" / f"heartbeat-{attempt}"
        beats.mkdir(parents=True)
        for rank in range(2):
            Heartbeat(beats, rank, 1).beat(f"step {attempt}", 12)
    os.utime(heartbeat_file(beats, 1), (1.0, 1.0))
    why = "rank 1: killed by SIGKILL, at step 6"
    events = [
        {"event": "start", "attempt": 9},
        {"event": "end", "kind": "lost", "code": 137, "why": why},
        {"event": "start", "attempt": 10},
    ]
    (folder / "supervise" / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events)
    )
    assert read_overview(folder).state == "dead"
    hold("supervise/lock")
    assert read_overview(folder).state == "starting"
    hold("run.lock")
    run = read_overview(folder)
    assert (run.state, run.attempt, run.restarts, run.last_end) == ("running", 10, 1, why)
    assert [(sign.rank, sign.at) for sign in run.ranks] == [(0, "step 10"), (1, "step 10")]
    assert run.slowest_rank == 1
    said = "\n".join(overview_lines(run))
    assert f"restarts      1; the last attempt that ended: {why}\n" in said
    assert "slowest rank  1, at step 10; heard " in said


@pytest.mark.parametrize(
    ("signs", "rank"),
    [
        ([(0, 12, 2.5, 3.0, 0.1), (1, 12, 2.55, 3.5, 0.1)], None),
        # it began what rank 0 had begun before
        ([(0, 12, 2.5, 3.0, 0.1), (1, 12, 2.7, 3.5, 0.1)], 1),
        # rank 0 had begun more before rank 1 told
        ([(0, 13, 2.5, 3.0, 0.1), (1, 12, 2.4, 3.5, 0.1)], 1),
        ([(0, 13, 3.4, 3.5, 0.1), (1, 12, 2.9, 3.0, 0.1)], None),  # rank 1 may have begun it since
        ([(0, 13, 2.5, 3.0, 0.1), (1, 12, 2.4, 3.5, 0.1), (2, 9, 1.0, 3.2, 0.1)], 2),
        ([(0, 13, 2.5, 3.0, 9.0), (1, 12, 2.4, 3.5, 7.0)], 0),
        ([], None),
    ],
)
def test_the_slowest_rank(
    signs: list[tuple[int, int, float, float, float]], rank: int | None
) -> None:
    assert (
        find_slowest_rank(tuple(RankHeartbeat(number, "step", *rest) for number, *rest in signs))
        == rank
    )  # type: ignore[arg-type]


def test_a_rank_that_is_done_is_not_slow() -> None:
    assert (
        find_slowest_rank(
            (
                RankHeartbeat(0, CLOSED, 0, 1.0, 2.0, 100.0),
                RankHeartbeat(1, "step 3", 9, 1.0, 1.0, 0.1),
            )
        )
        is None
    )


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_clock_that_differs_from_that_of_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """As on a laptop that looks at a cluster's disk: ages are by the disk, and the run is not
    taken for dead.
    """
    write_owner(folder, "elsewhere")
    beats = folder / "supervise" / "heartbeat-1"
    beats.mkdir(parents=True)
    Heartbeat(beats, 0, 1).beat("step 7", 12)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    run = read_overview(folder)
    assert (
        run.state == "running"
        and run.ranks[0].silent_s < 1800
        and run.clock_ahead_s == pytest.approx(ahead_s, 0.5)
    )
    how = "ahead of" if ahead_s > 0 else "behind"
    (line,) = [line for line in overview_lines(run) if line.startswith("clock")]
    assert re.fullmatch(
        rf"clock {{9}}this machine's is [\d,]+ s {how} the disk's, which ages are by", line
    )
    # it may not write there
    monkeypatch.setattr("jmoe.cluster.overview.probe_disk_time", lambda folder: None)
    run = read_overview(folder)
    assert (
        (run.clock_ahead_s < -1800) == (ahead_s < 0)
        and run.step_age_s is not None
        and run.step_age_s >= 0
    )


def test_what_is_no_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, words in (
        (tmp_path, "has no run.json, run.lock, "),
        (tmp_path / "absent", "must be a folder"),
    ):
        with pytest.raises(ValueError, match=f"must be the output folder of a run, and {words}"):
            read_overview(path)
    monkeypatch.setattr(sys, "argv", ["jmoe-status", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        show_status.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        f"jmoe-status: run = '{tmp_path}': must be the output folder of a run"
    )


def test_tiers_are_shown(folder: Path) -> None:
    write_steps(folder, 7, tiers=TIERS)
    (line,) = [line for line in overview_lines(read_overview(folder)) if line.startswith("tiers")]
    assert (
        "hit rate 75.0 %, NVMe 3.00 GB read, 2.00 GB written, host memory 5.00 GB, 1.5 s waited"
        in line
    )


def test_snapshots_in_this_hosts_memory_are_shown(folder: Path, tmp_path: Path) -> None:
    """The newest step's, whole files alone, of this run alone."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"checkpoint": {"memory_dir": str(tmp_path / "memory")}})
    )
    assert read_overview(folder).snapshot is None
    for name in ("3-of-0", "3-of-2", "6-of-2", "6-of-0", "9-of-0.new"):
        path = tmp_path / "memory" / "jmoe-mine-1a2b" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "memory" / "jmoe-other-1a2b").mkdir()
    (tmp_path / "memory" / "jmoe-other-1a2b" / "12-of-0").touch()
    overview = read_overview(folder)
    assert overview.snapshot is not None
    assert (overview.snapshot.step, overview.snapshot.ranks) == (6, (0, 2))
    said = "\n".join(overview_lines(overview))
    assert re.search(
        r"^in memory     step 6, \d+ s ago; on this host the shards of process 0, 2$",
        said,
        re.MULTILINE,
    )


@pytest.mark.slow
def test_a_whole_run_without_jax(runs: TrainRuns, run_python: Run) -> None:
    """The program, on what a real run has left."""
    folder, _ = runs.reference
    code = (
        "import sys; from jmoe.cluster.show_status import main\ntry: main()\nfinally: print('jax'"
        " in sys.modules)"
    )
    done = run_python(["-c", code, folder])
    assert done.returncode == 0, done.stderr
    assert (
        f"in {folder}: ended (all steps are done and saved)\nsteps         80 of 80 (100 %)"
        in done.stdout
    )
    assert "\ncheckpoint    step 80, " in done.stdout and "\nrestarts      0\n" in done.stdout
    assert done.stdout.endswith("\nFalse\n")
