"""Jobs with counted GPUs in a real SLURM: every one of them is used, or the run does not start.

A GPU of the cluster does nothing. A process takes as many CPU devices as JAX is told GPUs, of those
that a library in the place of NVIDIA's driver counts in CUDA_VISIBLE_DEVICES, which SLURM sets.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.processes import ROOT, one_device
from tests.serving.conftest import SIZES
from tests.slurm_cluster import SlurmCluster, why_not
from tests.train_runs import TrainRuns, committed, free_port

LAUNCH = ROOT / "launch" / "slurm"
DRIVER = """
#include <stdlib.h>
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = visible && *visible;
  for (; visible && *visible; visible++) *count += *visible == ',';
  return 0;
}
"""
PROGRAM = """
import os, runpy, sys
import jax
from jmoe.cluster import distributed
initialize = jax.distributed.initialize
def with_as_many_devices(**arguments):
    ids, sees = arguments["local_device_ids"], os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    print("rank", arguments["process_id"], "takes", [int(sees[i]) for i in ids], flush=True)
    jax.config.update("jax_num_cpu_devices", len(ids))
    initialize(**arguments)
jax.distributed.initialize = with_as_many_devices
distributed._num_local_gpus = jax.local_device_count
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


class Jobs:
    """Jobs of two nodes with four GPUs each; `train` and `serve` return a job's log."""

    def __init__(
        self, cluster: SlurmCluster, folder: Path, environment: dict[str, str | None]
    ) -> None:
        self.cluster, self._folder = cluster, folder
        (folder / "driver.c").write_text(DRIVER)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"],
            check=True,
        )
        (folder / "program.py").write_text(PROGRAM)
        # JMOE_RUNTIME: the program stays this one
        self._changes = environment | {
            "LD_LIBRARY_PATH": str(folder),
            "JMOE_RUNTIME": "1",
            "NPROC": "16",
        }
        self._changes |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": None,
            "JAX_NUM_CPU_DEVICES": None,
        }

    def submit(
        self, log: Path, script: str, sbatch: str, *options: object, **variables: str
    ) -> int:
        program = f"{sys.executable} {self._folder / 'program.py'} {script}.py"
        changes = self._changes | {"JMOE": program} | variables
        words = ("--nodes=2", *sbatch.split(), str(LAUNCH / f"{script}.sbatch"), *map(str, options))
        return self.cluster.submit(log, *words, changes=changes)

    def train(self, runs: TrainRuns, run: Path, sbatch: str, state: str, srun: str = "") -> str:
        options = list(map(str, runs.command(run, "--num-steps", 2)[1:]))
        at, log = options.index("--output-dir"), run.with_name(f"{run.name}.log")
        del options[at : at + 2]
        number = self.submit(log, "train", sbatch, *options, JMOE_RUN=str(run), JMOE_SRUN=srun)
        assert self.cluster.end(number, log) == state, log.read_text()[-6000:]
        return log.read_text()


@pytest.fixture(scope="module")
def jobs(runs: TrainRuns, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    folder = tmp_path_factory.mktemp("gpus")
    with SlurmCluster(folder / "cluster", cpus=4, gpus=4) as cluster:
        yield Jobs(cluster, folder, runs.environment() | one_device(folder / "compile_cache"))


def takes(screen: str) -> dict[int, list[int]]:
    """The GPUs of its node that each rank takes."""
    lines = [
        line.split(maxsplit=3)
        for line in screen.split("\n")
        if line.startswith("rank ") and " takes " in line
    ]
    return {int(rank): list(map(int, ids.strip("[]").split(", "))) for _, rank, _, ids in lines}


def test_one_process_a_node_trains_on_all_gpus(jobs: Jobs, runs: TrainRuns, tmp_path: Path) -> None:
    """The documented command; JAX's own detection would give each process GPU 0 alone."""
    screen = jobs.train(runs, tmp_path / "run", "--gpus-per-node 4", "COMPLETED")
    assert takes(screen) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert "8 devices on 2 hosts\n" in screen and "; 8 cpu device(s) as" in screen
    assert committed(tmp_path / "run") == [2]


@pytest.mark.parametrize("sbatch", ["--gpus-per-node 4", "--gpus-per-task 2"])
def test_several_processes_a_node_share_its_gpus(
    jobs: Jobs, runs: TrainRuns, tmp_path: Path, sbatch: str
) -> None:
    """With --gpus-per-task SLURM shows each process its own; else all see all."""
    screen = jobs.train(runs, tmp_path / "run", f"--ntasks-per-node 2 {sbatch}", "COMPLETED")
    assert takes(screen) == {0: [0, 1], 1: [2, 3], 2: [0, 1], 3: [2, 3]}
    assert "8 devices on 2 hosts\n" in screen


def test_gpus_that_no_process_would_use_are_refused(
    jobs: Jobs, runs: TrainRuns, tmp_path: Path
) -> None:
    each = "--ntasks-per-node 2 --gpus-per-node 4"
    screen = jobs.train(runs, tmp_path / "a", each, "FAILED", srun="--gpu-bind=single:1")
    assert (
        "SLURM_GPUS_ON_NODE = 4: the run would use 2 of the job's GPUs on this node: give every"
        " process" in screen
    )
    screen = jobs.train(runs, tmp_path / "b", "--ntasks-per-node 3 --gpus-per-node 4", "FAILED")
    assert "3 processes on this node see 4 GPUs each, which cannot be dealt out evenly" in screen
    assert screen.count("which a new start does not mend") == 1
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_model_is_served_on_all_gpus(jobs: Jobs, model_folder: Path, tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    options = (model_folder, *SIZES, "--max-batch", 8, "--devices", 8, "--port", port)
    number = jobs.submit(log, "serve", "--gpus-per-node 4", *options)
    jobs.cluster.wait_until(lambda: log.exists() and "serving http" in log.read_text(), log=log)
    assert takes(log.read_text()) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    body = {"model": "tiny-moe", "prompt": "abc", "max_tokens": 4, "temperature": 0}
    assert (
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300).status_code
        == 200
    )
    jobs.cluster.call("scancel", "--signal=TERM", "--batch", str(number))
    assert jobs.cluster.end(number, log) == "COMPLETED", log.read_text()[-6000:]
