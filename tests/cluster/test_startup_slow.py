"""Many processes start together: 16 train, 64 meet at the rendezvous alone, and one that never
comes is named.
"""

import json
from pathlib import Path

import pytest

from benchmarks.train import startup
from tests.train_runs import Start, TrainRuns, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROCESSES, CALLERS = 16, 64
LIMIT_S = 60


def test_sixteen_processes_train_two_steps_and_end(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    run = tmp_path / "run"
    options = (
        "--batch-size",
        PROCESSES,
        "--num-steps",
        2,
        "--distributed.heartbeat-timeout-s",
        300,
    )
    command = (
        "-m",
        "jmoe.cluster.supervise",
        "--processes",
        str(PROCESSES),
        "--",
        *runs.command(run, *options),
    )
    start_python(command, tmp_path / "log", runs.environment()).end(3000)
    assert [step for step, _ in losses(run)] == [0, 1]
    lines = (run / "supervise" / "events.jsonl").read_text().splitlines()
    assert [event["event"] for event in map(json.loads, lines)] == ["start", "end"]


def test_sixty_four_processes_meet() -> None:
    """A process that does not meet the others within its limit has no times to tell."""
    assert startup.all_join(CALLERS).keys() == {"import", "meet"}


def test_one_of_sixty_four_never_comes() -> None:
    """Each of the 63 names it, once the limit is over."""
    missing = startup.one_never_joins(CALLERS, LIMIT_S)
    assert (
        missing["said"] == f"rank 63 did not start within distributed.start_timeout_s = {LIMIT_S} s"
    )
    assert missing["first_s"] >= LIMIT_S - 5  # those that come after rank 0 wait a little less
