"""Jobs in a real SLURM of two nodes: warned, requeued or robbed of a node, a run goes on bit for
bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from tests.processes import ROOT, one_device
from tests.serving.conftest import SIZES
from tests.slurm_cluster import SlurmCluster, why_not
from tests.train_runs import ENDLESS, TrainRuns, committed, free_port, losses, resumes

LAUNCH = ROOT / "launch" / "slurm"
NUM_STEPS = 60
STEPS = ("--num-steps", str(NUM_STEPS))
SLOWER = ("--sequence-length", "256", "--batch-size", "32")
Losses = list[tuple[int, float]]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


class Job:
    """A job of train.sbatch; run: its output folder, log: what it and SLURM write."""

    def __init__(
        self, cluster: SlurmCluster, runs: TrainRuns, run: Path, *options: str, sbatch: str = ""
    ) -> None:
        self.cluster, self.run, self.log = cluster, run, run.with_name(f"{run.name}.log")
        arguments = list(map(str, runs.command(run, *SLOWER)[1:]))
        at = arguments.index("--output-dir")
        del arguments[at : at + 2]
        changes = runs.environment() | {"JMOE": f"{sys.executable} train.py", "JMOE_RUN": str(run)}
        script = str(LAUNCH / "train.sbatch")
        self.number = cluster.submit(
            self.log, *sbatch.split(), script, *arguments, *options, changes=changes
        )

    def reaches(self, step: int) -> None:
        """Wait until a checkpoint of `step` or a later one is there."""
        self.cluster.wait_until(
            lambda: committed(self.run) and committed(self.run)[-1] >= step, log=self.log
        )

    def ends(self, state: str = "COMPLETED") -> str:
        """Wait for its end in `state`, and return what it wrote."""
        assert self.cluster.end(self.number, self.log) == state, self.log.read_text()[-6000:]
        return self.log.read_text()


@pytest.fixture(scope="module")
def undisturbed(
    cluster: SlurmCluster, runs: TrainRuns, tmp_path_factory: pytest.TempPathFactory
) -> Losses:
    """The losses of a run that nothing happens to."""
    job = Job(cluster, runs, tmp_path_factory.mktemp("undisturbed") / "run", *STEPS)
    screen = job.ends()
    assert "start 0 on n[0-1], from step \n" in screen and "all steps are done" in screen
    assert "; 2 cpu device(s)" in screen and screen.count("tokens to train on") == 1
    return losses(job.run)


def test_two_nodes_train_to_the_end(undisturbed: Losses) -> None:
    assert [step for step, _ in undisturbed] == list(range(NUM_STEPS))


def test_a_signal_saves_and_requeues(
    cluster: SlurmCluster, runs: TrainRuns, tmp_path: Path, undisturbed: Losses
) -> None:
    job = Job(cluster, runs, tmp_path / "run", *STEPS)
    job.reaches(10)
    cluster.call("scancel", "--signal=USR1", str(job.number))
    screen = job.ends()
    assert (
        "SIGUSR1: the run finishes this step" in screen
        and "stopped by a signal after step" in screen
    )
    assert "start 1 on n[0-1]" in screen and len(resumes(job.run)) == 1
    assert losses(job.run) == undisturbed


def test_a_requeued_job_goes_on(
    cluster: SlurmCluster, runs: TrainRuns, tmp_path: Path, undisturbed: Losses
) -> None:
    job = Job(cluster, runs, tmp_path / "run", *STEPS)
    job.reaches(10)
    cluster.call("scontrol", "requeue", str(job.number))
    screen = job.ends()
    assert "SIGTERM: the run finishes this step" in screen and "start 1 on n[0-1]" in screen
    assert losses(job.run) == undisturbed


@pytest.mark.parametrize("name", ["n1", "n0"])
def test_a_node_is_lost_and_comes_back(
    cluster: SlurmCluster, runs: TrainRuns, tmp_path: Path, undisturbed: Losses, name: str
) -> None:
    """n0 also runs the batch script."""
    job = Job(cluster, runs, tmp_path / "run", *STEPS)
    job.reaches(10)
    cluster.kill(name)
    cluster.wait_until(lambda: cluster.job(job.number)["JobState"] != "RUNNING", log=job.log)
    cluster.start_node(name)
    assert "start 1 on n[0-1]" in job.ends()
    assert losses(job.run) == undisturbed


def test_slurmd_is_killed_and_the_ranks_are_left_behind(
    cluster: SlurmCluster, runs: TrainRuns, tmp_path: Path, undisturbed: Losses
) -> None:
    """SLURM gives the job's node up while its rank still trains: the new start must not train
    beside it.
    """
    job = Job(cluster, runs, tmp_path / "run", *STEPS)
    job.reaches(10)
    cluster.kill_slurmd("n1")
    cluster.wait_until(
        lambda: cluster.states()["n1"] == "DOWN" or "all steps are done" in job.log.read_text()
    )
    cluster.return_slurmd("n1")
    job.ends()
    assert losses(job.run) == undisturbed


def test_time_limits_are_reached_again_and_again(
    cluster: SlurmCluster, runs: TrainRuns, tmp_path: Path, undisturbed: Losses
) -> None:
    job = Job(cluster, runs, tmp_path / "run", *ENDLESS, sbatch="--time=2 --signal=B:USR1@60")
    cluster.wait_until(lambda: len(resumes(job.run)) >= 2, 900, job.log)
    job.reaches(NUM_STEPS)
    cluster.call("scancel", str(job.number))
    screen = job.ends("CANCELLED")
    assert "SIGUSR1, passed on" in screen and "DUE TO TIME LIMIT" not in screen
    assert losses(job.run)[:NUM_STEPS] == undisturbed


def test_what_no_start_mends_is_not_started_again(
    cluster: SlurmCluster, runs: TrainRuns, tmp_path: Path
) -> None:
    screen = Job(cluster, runs, tmp_path / "a", "--mesh.expert-inter", "3").ends("FAILED")
    assert "mesh" in screen and "exit code 1, which a new start does not mend" in screen
    screen = Job(cluster, runs, tmp_path / "b", "--output-dir", "runs/x").ends("FAILED")
    assert "train.sbatch: --output-dir: give the folder as JMOE_RUN" in screen
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_run_that_does_not_advance_is_given_up(
    cluster: SlurmCluster, runs: TrainRuns, tmp_path: Path
) -> None:
    environment_without_cache = ("--model.hidden-size", "48", "--distributed.step-timeout-s", "1")
    screen = Job(cluster, runs, tmp_path / "run", *STEPS, *environment_without_cache).ends("FAILED")
    assert (
        "has waited 1 s for" in screen
        and "no new checkpoint since the last time: given up" in screen
    )
    assert "start 1 on n[0-1]" in screen and "start 2" not in screen


def test_a_model_is_served_on_two_nodes(
    cluster: SlurmCluster,
    model_folder: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    log, port = tmp_path / "log", free_port()
    changes = one_device(tmp_path_factory.mktemp("compile_cache")) | {
        "JMOE": f"{sys.executable} serve.py"
    }
    options = [str(option) for option in (model_folder, *SIZES, "--devices", 2, "--port", port)]
    script = str(LAUNCH / "serve.sbatch")
    number = cluster.submit(log, "--nodes=2", script, *options, changes=changes)
    cluster.wait_until(lambda: "serving" in log.read_text() if log.exists() else False, log=log)
    body = {"model": "tiny-moe", "prompt": "abc", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
    cluster.call("scancel", "--signal=TERM", "--batch", str(number))
    assert cluster.end(number, log) == "COMPLETED", log.read_text()[-6000:]
    assert "the server is on n0" in log.read_text()
