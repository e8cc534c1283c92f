"""Which GPUs JAX is given in every layout of a launcher's processes, with the variables that
SLURM 22.05 set there.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from jmoe.cluster import distributed, job
from jmoe.config import DistributedConfig

SEES_ALL = "0,1,2,3,4,5,6,7"


def slurm(
    tasks: int, index: int, *, sees: str = SEES_ALL, gpus: int = 8, nodes: int = 8
) -> dict[str, str]:
    """The variables of task `index` of the first of `nodes` nodes; sees: its
    CUDA_VISIBLE_DEVICES.
    """
    step = {
        "JOB_ID": "42",
        "STEP_NODELIST": f"n[0-{nodes - 1}]",
        "NTASKS": str(tasks * nodes),
        "PROCID": str(index),
    }
    step |= {
        "LOCALID": str(index),
        "NODEID": "0",
        "STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "STEP_GPUS": sees,
    }
    step |= {"GPUS_ON_NODE": str(gpus), "JOB_NUM_NODES": str(nodes), "JOB_GPUS": SEES_ALL}
    return {f"SLURM_{name}": value for name, value in step.items()} | {"CUDA_VISIBLE_DEVICES": sees}


def open_mpi(tasks: int, index: int, sees: str | None = None) -> dict[str, str]:
    ranks = {
        "SIZE": str(8 * tasks),
        "RANK": str(index),
        "LOCAL_SIZE": str(tasks),
        "LOCAL_RANK": str(index),
    }
    words = {f"OMPI_COMM_WORLD_{name}": value for name, value in ranks.items()}
    words["OMPI_MCA_orte_hnp_uri"] = "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911"
    return words | ({} if sees is None else {"CUDA_VISIBLE_DEVICES": sees})


LAYOUTS = {
    "SLURM, a task a node": (slurm(1, 0), list(range(8))),
    "SLURM, 8 tasks a node that see all": (slurm(8, 3), [3]),
    "SLURM, 8 tasks a node, --gpus-per-task 1": (slurm(8, 3, sees="3"), [0]),
    "SLURM, 8 tasks a node, cgroups number anew": (slurm(8, 3, sees="0"), [0]),
    "SLURM, 4 tasks a node that see all": (slurm(4, 3), [6, 7]),
    "SLURM, 4 tasks a node, --gpus-per-task 2": (slurm(4, 3, sees="6,7"), [0, 1]),
    "SLURM, a task a node, --gpus-per-node 2": (slurm(1, 0, sees="0,1", gpus=2), [0, 1]),
    "SLURM, JAX_LOCAL_DEVICE_IDS": (slurm(4, 0) | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
    "Open MPI, a rank a node": (open_mpi(1, 0), list(range(8))),
    "Open MPI, 8 ranks a node": (open_mpi(8, 5), [5]),
    "Open MPI, 2 ranks a node": (open_mpi(2, 1), [4, 5, 6, 7]),
    "Open MPI, 8 ranks a node, a GPU each": (open_mpi(8, 5, sees="5"), [0]),
}


def seen(environment: dict[str, str]) -> int:
    """How many GPUs of a node of eight a process sees."""
    return len(environment.get("CUDA_VISIBLE_DEVICES", SEES_ALL).split(","))


def jax_is_given(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], visible: int
) -> dict[str, Any]:
    """The arguments of `jax.distributed.initialize` in a process with these variables, which
    sees so many GPUs.
    """
    told: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: told.update(arguments))
    monkeypatch.setattr(distributed, "connect_ranks_to_rank_0", lambda *_: {})
    monkeypatch.setattr(distributed.atexit, "register", lambda *_: None)
    monkeypatch.setattr(job, "count_visible_gpus", lambda: visible)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = (
        "jax_cpu_collectives_implementation",
        "jax_enable_preemption_service",
        "jax_enable_recoverability",
    )
    before = {name: getattr(jax.config, name) for name in options}
    try:
        distributed.join_and_connect_processes(DistributedConfig())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jax_is_given_every_device_of_a_process(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    environment, expected = LAYOUTS[layout]
    told = jax_is_given(monkeypatch, environment, seen(environment))
    assert told["local_device_ids"] == expected
    assert told["cluster_detection_method"] == "deactivate"  # or JAX deals out what is None


LAUNCHED = {
    "slurm": {name: slurm(2, 1)[name] for name in job.SLURM},
    "ompi": {name: open_mpi(2, 1)[name] for name in job.OPEN_MPI},
    "k8s": {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},
}
# variables that say nothing of other processes, each by itself or together
SILENT = {"SLURM_NTASKS", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"}


@pytest.mark.parametrize("kind", LAUNCHED)
def test_half_of_a_launchers_variables_is_a_mistake(kind: str) -> None:
    """Never a process that trains by itself: each subset of the variables of rank 1 of several."""
    told = LAUNCHED[kind]
    assert job.find_launcher(told) == kind
    assert job.find_launcher(told | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == kind, (
        "SLURM in pods"
    )
    for count in range(len(told)):
        for names in itertools.combinations(told, count):
            part = {name: told[name] for name in names}
            if part.keys() <= SILENT:
                assert job.find_launcher(part) is None
            else:
                with pytest.raises(ValueError, match=r"^[A-Z_]+ is not set, but [A-Z_]+ = .*pass"):
                    job.find_launcher(part)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_NTASKS": "many"}, r"^SLURM_NTASKS = 'many': must be a number"),
        ({"SLURM_NTASKS": ""}, r"^SLURM_NTASKS = '': must be a number"),
        ({"SLURM_PROCID": "16"}, r"^SLURM_PROCID = 16: must be less than SLURM_NTASKS = 16$"),
    ],
)
def test_ranks_that_cannot_be(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        job.find_launcher(slurm(2, 1) | changes)


@pytest.mark.parametrize("program", ["mpiexec", "torchrun"])
def test_launchers_that_are_not_read_are_named(program: str) -> None:
    (count, rank) = next((count, rank) for count, rank, name in job.UNSUPPORTED if name == program)
    with pytest.raises(ValueError, match=rf"^{count} = 4: {program} started .*--distributed.coord"):
        job.find_launcher({count: "4", rank: "0"})
    assert job.find_launcher({count: "1", rank: "0"}) is job.find_launcher({count: "4"}) is None
    assert job.find_launcher(slurm(2, 1) | {count: "16", rank: "1"}) == "slurm", (
        "srun sets some too"
    )


def test_alone_in_a_step_is_alone() -> None:
    assert job.find_launcher(slurm(1, 0, nodes=1)) is None
    assert job.find_launcher({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (slurm(2, 1) | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"NODE = '2\(x': must read as"),
        (slurm(2, 1) | {"SLURM_NODEID": "8"}, "SLURM_NODEID = 8: must be less than the 8 nodes"),
        (slurm(2, 1) | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID = 'x': must be a number"),
        (slurm(2, 1) | {"SLURM_GPUS_ON_NODE": "all"}, "SLURM_GPUS_ON_NODE = 'all': must be a"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "LOCAL_SIZE is not set, but OMPI_COMM_WORLD_LOCAL_R"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "LOCAL_RANK is not set, but OMPI_COMM_WORLD_LOCAL_S"),
    ],
)
def test_places_that_cannot_be_read_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        job.local_device_ids(environment, 8)


def test_pods_take_all_that_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifests' own options; JAX's detection of an indexed job has no number on the node
    either.
    """
    monkeypatch.setattr(
        distributed, "_detect_address_size_and_rank", lambda _: ("job-0.pods:55527", 8, 3)
    )
    told = jax_is_given(
        monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}, 8
    )
    assert (told["local_device_ids"], told["process_id"]) == (list(range(8)), 3)


def test_options_for_open_mpi_5_deal_out_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes give their ranks as options; JAX without detection would let each take all
    eight GPUs.
    """
    del (words := open_mpi(4, 1))["OMPI_MCA_orte_hnp_uri"]
    assert job.local_device_ids(words, 8) == [2, 3]


@pytest.mark.parametrize(
    ("environment", "visible", "words"),
    [
        (
            slurm(3, 0),
            8,
            "3 processes on this node see 8 GPUs each, which cannot be dealt out evenly; start one",
        ),
        (
            slurm(2, 0, gpus=1, sees="0"),
            1,
            "2 processes on this node see 1 GPU each, which cannot be dealt out",
        ),
        (
            slurm(4, 0, sees="0,1,2,3"),
            4,
            "SLURM_GPUS_ON_NODE = 8: 4 processes on this node see 4 GPUs each, and so sh",
        ),
        (
            slurm(1, 0, gpus=4),
            8,
            "SLURM_GPUS_ON_NODE = 4: this process sees 8 GPUs, some of which are not the job's",
        ),
        (
            open_mpi(2, 0, sees="0,1,2,3"),
            4,
            "CUDA_VISIBLE_DEVICES = 0,1,2,3: 2 processes .* set JAX_LOCAL_DEVICE_IDS",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(
    environment: dict[str, str], visible: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        job.local_device_ids(environment, visible)


def test_on_a_processor_jax_has_no_use_for_numbers() -> None:
    assert job.local_device_ids(slurm(1, 0), 0) is None
    assert job.local_device_ids({}, 0) is None
    assert job.local_device_ids({}, 2) == [0, 1]


def test_tasks_of_unequal_nodes() -> None:
    """Four tasks on three nodes: SLURM counts those of the process's own node."""
    words = slurm(2, 1) | {"SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}
    assert job.place_on_node(words) == (1, 2)
    assert job.place_on_node(words | {"SLURM_NODEID": "2", "SLURM_LOCALID": "0"}) == (0, 1)


# More GPUs than the run uses

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}


@pytest.mark.parametrize(
    ("environment", "used", "words"),
    [
        (
            slurm(1, 0),
            1,
            (
                "SLURM_GPUS_ON_NODE = 8: the run would use 1 of the job's GPUs on this node:"
                " CUDA_VISIBLE"
            ),
        ),
        (
            slurm(1, 0),
            0,
            "would use 0 of .* JAX finds none: install it with CUDA .* or set JAX_PLATFORMS=cpu",
        ),
        (
            slurm(4, 0, sees="0"),
            1,
            "would use 4 of .* give every process its share .srun --gpus-per-task N",
        ),
        (POD, 0, "NVIDIA_VISIBLE_DEVICES = 2: the run would use 0"),
    ],
)
def test_gpus_left_over_are_refused(environment: dict[str, str], used: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        job.check_all_gpus_used(used, environment)
    job.check_all_gpus_used(used, environment | {"JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(
    ("environment", "used"),
    [
        (slurm(1, 0), 8),
        (slurm(8, 0), 1),
        (slurm(4, 0, sees="0,1"), 2),
        (POD, 2),
        (open_mpi(8, 0), 0),
        ({}, 0),
    ],
)
def test_all_used_is_right(environment: dict[str, str], used: int) -> None:
    job.check_all_gpus_used(used, environment)


def test_a_server_on_one_of_a_jobs_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm(1, 0, nodes=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(distributed, "_num_local_gpus", lambda: 8)
    with pytest.raises(
        ValueError,
        match=r"would use 1 of the job's GPUs on this node: give --devices 8; or ask",
    ):
        distributed.check_gpus_found_and_used(DistributedConfig(), 1)
    distributed.check_gpus_found_and_used(DistributedConfig(), 8)


def test_a_process_alone_in_a_job_of_several_nodes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a batch script without srun: JAX sees no step, and the run would use one node of
    eight.
    """
    batch = {name: value for name, value in slurm(1, 0).items() if "STEP" not in name}
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(distributed, "_num_local_gpus", lambda: 8)
    for name, value in batch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match="SLURM_JOB_NUM_NODES = 8: this process was not started by srun"
    ):
        distributed.join_processes(DistributedConfig())
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    distributed.join_processes(DistributedConfig())


def test_hosts_are_said() -> None:
    assert job.describe_hosts([8] * 8) == "64 devices on 8 hosts"
    assert job.describe_hosts([4, 2]) == "6 devices on 2 hosts: 4, 2"


FAKE_DRIVER = """
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 5; return 0; }
"""


def test_cuda_is_asked_what_a_process_sees(tmp_path: Path, run_python: Any) -> None:
    """A library that stands in for NVIDIA's driver; without one there are no GPUs."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    (tmp_path / "driver.c").write_text(FAKE_DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"],
        check=True,
    )
    show = ["-c", "from jmoe.cluster.job import count_visible_gpus; print(count_visible_gpus())"]
    assert run_python(show, {"LD_LIBRARY_PATH": str(tmp_path)}, timeout=60).stdout == "5\n"
