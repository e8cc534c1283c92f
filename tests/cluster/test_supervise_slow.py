"""Supervised runs of four processes under random faults, on hosts that come and go, over a link
that is lost.

JMOE_FAULTS sets the number of faults. With JMOE_FAULTS_FOLDER the run is kept there, and one that
is there goes on: a long one can be had in several sittings, each with a greater number.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.lib.linked_nodes import ADDRESSES, NODES, LinkedNodes
from tests.cluster.test_supervise import LAUNCHER
from tests.processes import Child
from tests.train_runs import (
    ENDLESS,
    Run,
    Start,
    TrainRuns,
    committed,
    losses,
    ranks_of,
    resumes,
    run_split,
    unfinished,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

FAULTS = int(os.environ.get("JMOE_FAULTS", "50"))
SEED = random.SystemRandom().randrange(1 << 30)
EVERY = 5  # steps between checkpoints
SPREAD = ("--mesh.expert-inter", "2", "--mesh.expert-intra", "2")
NVME = (
    "--tiers.experts",
    "nvme",
    "--tiers.optimizer",
    "nvme",
    "--tiers.host-cache-bytes",
    "500000",
)
PATIENT = ("--same-step-limit", "1000", "--max-restarts", "1000", "--backoff-s", "0")
# to notice what is stopped
QUICK = ("--distributed.start-timeout-s", "60", "--distributed.heartbeat-timeout-s", "6")
SLOWER = ("--sequence-length", "256", "--batch-size", "32")


def supervise(
    runs: TrainRuns, start_python: Start, run: Path, settings: tuple[str, ...], *options: object
) -> Child:
    command = (
        "-m",
        "jmoe.cluster.supervise",
        *PATIENT,
        *settings,
        "--",
        *runs.command(run, *ENDLESS, *options),
    )
    return start_python(command, run.with_suffix(".log"), runs.environment())


def stop(supervisor: Child) -> None:
    supervisor.send_signal(signal.SIGTERM)
    supervisor.end(900)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "supervise" / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def undisturbed(
    runs: TrainRuns, start_python: Start, run: Path, *options: object
) -> dict[int, float]:
    """The losses of as many steps as this run has made, with nothing in their way; exchanged as
    its links made best.
    """
    whole, links = run.with_name("undisturbed"), [str(path) for path in run.glob("links-*.toml")]
    options += ("--comm.links", links[0]) if links else ()
    run_split(runs, start_python, whole, 4, 1, *options, "--num-steps", losses(run)[-1][0] + 1)
    return dict(losses(whole))


@pytest.mark.parametrize("kind", ["device", "nvme"])
def test_random_faults(runs: TrainRuns, tmp_path: Path, start_python: Start, kind: str) -> None:
    """SIGKILL or SIGSTOP of any rank at any time, also while all start: every loss is that of an
    undisturbed run.

    At most one checkpoint has to be written anew, the one that was being written: training goes on
    meanwhile, and the next one begins only after it, so that its steps and those since, at most
    twice `EVERY`, are done again.
    """
    options = (*SPREAD, *(NVME if kind == "nvme" else ()), *QUICK)
    folder = Path(os.environ.get("JMOE_FAULTS_FOLDER", tmp_path)).absolute() / kind
    folder.mkdir(parents=True, exist_ok=True)
    rng, run, noted = random.Random(f"{SEED} {kind}"), folder / "run", folder / "faults.json"
    # [{fault, attempt, the checkpoints that the attempt's end has left unfinished}]
    faults: list[dict[str, Any]] = json.loads(noted.read_text()) if noted.exists() else []
    # attempts that ended with their supervisor
    cut_off = len(events(run, "start")) - len(events(run, "end"))
    supervisor = supervise(runs, start_python, run, ("--processes", "4"), *options)

    def wait_for_attempt(number: int) -> None:
        supervisor.wait_until(
            lambda: (
                len(ranks_of(supervisor.pid)) == 4 and len(events(run, "start")) > number + cut_off
            ),
            900,
        )

    def wait_for_step_beyond(number: int) -> None:
        supervisor.wait_until(lambda: len(losses(run)) not in (0, number), 900)

    def wait_for_end(number: int) -> None:
        supervisor.wait_until(lambda: len(events(run, "end")) > number, 900)

    while len(faults) < FAULTS:
        attempt, steps = len(events(run, "end")), len(losses(run))
        wait_for_attempt(attempt)
        if rng.random() < 0.7:
            wait_for_step_beyond(steps)
            time.sleep(rng.uniform(0, 5))
        else:
            time.sleep(rng.uniform(0, 10))
        victim = ranks_of(supervisor.pid).get(rng.randrange(4))
        number = rng.choice([signal.SIGKILL, signal.SIGSTOP])
        if victim is None:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
            wait_for_end(attempt)
            being_written = [int(path.name.partition(".")[0]) for path in unfinished(run)]
            faults.append(
                {
                    "signal": number.name,
                    "attempt": attempt,
                    "being_written": being_written,
                    "seed": SEED,
                }
            )
            noted.write_text(json.dumps(faults))
    before = len(resumes(run))
    supervisor.wait_until(lambda: len(resumes(run)) > before or not committed(run), 900)
    steps = len(losses(run))
    supervisor.wait_until(lambda: len(losses(run)) > steps, 900)
    stop(supervisor)  # a signal while all start would end them at once
    ends = events(run, "end")
    repeated = [event["step"] + 1 - max(0, event["checkpoint"]) for event in ends]
    anew = [attempt for attempt, steps in enumerate(repeated) if steps > EVERY]
    told = {
        "experts": kind,
        "faults": len(faults),
        "signals": Counter(fault["signal"] for fault in faults),
    }
    told |= {"seeds": sorted({fault["seed"] for fault in faults}), "attempts": len(ends)}
    told |= {
        "steps": losses(run)[-1][0] + 1,
        "steps_done_again": sum(repeated),
        "most_at_once": max(repeated),
    }
    print(
        f"\n{json.dumps(told | {'checkpoints_written_anew': len(anew)})}\nsteps done again:"
        f" {repeated}",
        flush=True,
    )
    assert max(repeated) <= 2 * EVERY
    left = {fault["attempt"]: fault["being_written"] for fault in faults}
    for attempt in (attempt for attempt in anew if attempt in left):
        assert max(0, ends[attempt]["checkpoint"]) + EVERY in left[attempt], (
            ends[attempt],
            left[attempt],
        )
    assert dict(losses(run)) == undisturbed(runs, start_python, run, *options)


def test_hosts_go_and_come_back(runs: TrainRuns, tmp_path: Path, start_python: Start) -> None:
    """Four processes, two after two hosts are lost, four again."""
    run, away, launcher = tmp_path / "run", tmp_path / "away", tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    away.write_text("")
    launch = f"{sys.executable} {launcher} {away} {{host}}"
    hosts = (
        "--hosts",
        "a=127.0.0.1",
        "b",
        "c",
        "d",
        "--min-processes",
        "2",
        "--return-check-s",
        "1",
    )
    supervisor = supervise(runs, start_python, run, (*hosts, "--launch", launch), *SLOWER)
    supervisor.wait_until(lambda: committed(run), 900)
    away.write_text("c d")
    for rank in (2, 3):
        ranks_of(supervisor.pid)[rank].parent().kill()
    supervisor.wait_until(lambda: len(resumes(run)) == 1, 900)
    supervisor.wait_until(lambda: committed(run)[-1] > resumes(run)[0], 900)
    away.write_text("")
    supervisor.wait_until(lambda: len(resumes(run)) == 2, 900)
    supervisor.wait_until(lambda: committed(run)[-1] > resumes(run)[1], 900)
    stop(supervisor)
    assert [event["processes"] for event in events(run, "start")] == [4, 2, 4]
    assert [event["kind"] for event in events(run, "end")] == ["lost", "stopped", "stopped"]
    last, ours = resumes(run)[1], dict(losses(run))
    expected = undisturbed(runs, start_python, run, *SLOWER)
    assert {step: ours[step] for step in range(last)} == pytest.approx(
        {step: expected[step] for step in range(last)}, rel=1e-4, abs=0
    )


@contextlib.contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """A process that runs for a tenth of the time."""
    over = threading.Event()

    def hold_back() -> None:
        while not over.is_set():
            process.suspend()
            over.wait(0.45)
            process.resume()
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        held_back = pool.submit(hold_back)
        try:
            yield
        finally:
            over.set()
    held_back.result()


def test_a_slow_rank_is_named_and_survived(
    runs: TrainRuns, tmp_path: Path, start_python: Start, run_python: Run
) -> None:
    """A rank that gets a tenth of its processor holds the others up; it is no reason to start
    again.
    """
    run = tmp_path / "run"
    supervisor = supervise(
        runs,
        start_python,
        run,
        ("--processes", "4"),
        *SPREAD,
        "--distributed.heartbeat-timeout-s",
        60,
    )
    supervisor.wait_until(lambda: committed(run), 900)
    slow, named, end = 3, Counter[int | None](), losses(run)[-1][0] + 10
    deadline = time.monotonic() + 900
    with slowed(ranks_of(supervisor.pid)[slow]):
        while losses(run)[-1][0] < end or named[slow] < 10:
            assert supervisor.poll() is None and time.monotonic() < deadline, named
            status = run_python(["-m", "jmoe.cluster.show_status", run, "--json"], timeout=300)
            named[json.loads(status.stdout)["slowest_rank"]] += 1
    print(f"\nnamed as the slowest, of ranks: {dict(named)}")
    assert max(named[rank] for rank in range(4) if rank != slow) < named[slow], named
    stop(supervisor)
    assert len(events(run, "start")) == 1 and resumes(run) == []
    assert dict(losses(run)) == undisturbed(runs, start_python, run, *SPREAD)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="two nodes on one machine need root and iproute2",
)
def test_a_link_is_lost_for_half_a_minute(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Each rank is alone in its node: they say who is missing, and start again until the link is
    back.
    """
    run = tmp_path / "run"
    hosts = [f"{node}={address}" for node, address in zip(NODES[:2], ADDRESSES[:2], strict=True)]
    settings = ("--hosts", *hosts, "--launch", "ip netns exec {host}", "--max-backoff-s", "5")
    with LinkedNodes(1000):
        supervisor = supervise(
            runs, start_python, run, settings, *SLOWER, "--distributed.start-timeout-s", 60
        )
        supervisor.wait_until(lambda: committed(run), 900)
        subprocess.run(["ip", "link", "set", f"{NODES[1]}v", "down"], check=True)
        time.sleep(30)
        subprocess.run(["ip", "link", "set", f"{NODES[1]}v", "up"], check=True)
        before = committed(run)[-1]
        supervisor.wait_until(lambda: committed(run)[-1] > before + EVERY, 900)
        stop(supervisor)
    whys = [event["why"] for event in events(run, "end")]
    print("\n".join(whys))
    assert any(NODES[0] in why or NODES[1] in why for why in whys)
    whole = tmp_path / "whole"
    run_split(runs, start_python, whole, 2, 1, *SLOWER, "--num-steps", losses(run)[-1][0] + 1)
    assert dict(losses(run)) == dict(losses(whole))


def test_a_suspended_job_goes_on(runs: TrainRuns, tmp_path: Path, start_python: Start) -> None:
    """All of it is stopped for longer than any limit, as by `scontrol suspend`: nobody takes
    another for dead.

    Of several processes JAX's coordination service ends the run, which starts again from its
    checkpoint.
    """
    run = tmp_path / "run"
    limits = ("--distributed.heartbeat-timeout-s", 10, "--distributed.step-timeout-s", 25)
    command = (
        "-m",
        "jmoe.cluster.supervise",
        "--processes",
        "1",
        "--",
        *runs.command(run, *limits, *ENDLESS),
    )
    supervisor = start_python(command, tmp_path / "log", runs.environment())
    supervisor.wait_until(lambda: committed(run))
    job = [psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children(recursive=True)]
    for process in job:
        process.suspend()
    time.sleep(40)
    for process in job:
        process.resume()
    before = len(losses(run))
    supervisor.wait_until(lambda: len(losses(run)) > before + 20)
    supervisor.send_signal(signal.SIGTERM)
    screen = supervisor.end(300)
    assert "restart" not in screen and "has waited" not in screen and resumes(run) == []
