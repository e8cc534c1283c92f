"""GPUs of the cluster job: which of the node's GPUs belong to this process, and whether any stay
unused.

JAX's own detection gives a process of SLURM or Open MPI one device, numbered by the process's local
rank, even if the process is alone on its node and sees eight. This module assigns all visible GPUs.
`jmoe.cluster.distributed` and `jmoe.cluster.supervise` call it before JAX starts. Standard library
only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

LOCAL_IDS = "JAX_LOCAL_DEVICE_IDS"  # JAX's own variable, which takes precedence over this module


class NodeTask(NamedTuple):
    """Index of this process among the job's processes on its node (`number`, from 0), and their
    count (`processes`).
    """

    number: int  # from 0
    processes: int


def node_task(environment: Mapping[str, str]) -> NodeTask:
    """Return this process's place on its node, from the variables of SLURM or Open MPI; (0, 1)
    without them.
    """
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        return NodeTask(
            int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]),
            int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        )
    if "SLURM_STEP_TASKS_PER_NODE" in environment and "SLURM_LOCALID" in environment:
        counts = _counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        return NodeTask(
            int(environment["SLURM_LOCALID"]), counts[int(environment.get("SLURM_NODEID", "0"))]
        )
    return NodeTask(0, 1)


def _counts(text: str) -> list[int]:
    """Return the numbers that SLURM writes in its short form: `2(x3),1` gives [2, 2, 2, 1]."""
    counts: list[int] = []
    for word in text.split(","):
        number, _, times = word.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts


def visible_gpus() -> int:
    """Return how many GPUs CUDA shows this process; 0 without NVIDIA's driver. JAX may be
    initialized afterwards.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def node_gpus(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return (number of GPUs that the job has on this node, name of the variable that says so), or
    None if no variable does.
    """
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS"):
        value = environment.get(name, "")
        if value:
            return int(value) if name.endswith("NODE") else len(value.split(",")), name
    devices = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    if "KUBERNETES_SERVICE_HOST" in environment and devices not in ("", "all", "none", "void"):
        return len(devices.split(",")), "NVIDIA_VISIBLE_DEVICES"
    return None


def local_device_ids(environment: Mapping[str, str], visible: int) -> list[int] | None:
    """Return the indices of the `visible` GPUs that this process uses; None leaves the choice to
    JAX.

    A process that sees fewer GPUs than the job has on the node was bound to its own GPUs and uses
    all of them. Processes that see the same GPUs use equal shares. Raises `ValueError` if equal
    shares are impossible, or if it is unclear which GPUs are shared.
    """
    task, job = node_task(environment), node_gpus(environment)
    if environment.get(LOCAL_IDS):
        return None
    if not visible:  # CPU only, or GPUs of another vendor
        return [task.number] if task.processes > 1 else None
    together = (
        f"{task.processes} processes on this node see {visible} GPU{'s' * (visible > 1)} each"
    )
    if job is not None and visible > job[0]:
        raise ValueError(
            f"{job[1]} = {job[0]}: this process sees {visible} GPUs, some of which are not the"
            " job's; leave CUDA_VISIBLE_DEVICES as SLURM sets it"
        )
    bound = visible < (task.processes if job is None else job[0])
    if bound:
        if job is not None and visible * task.processes > job[0]:
            raise ValueError(
                f"{job[1]} = {job[0]}: {together}, and so share some; give each its own (srun"
                " --gpus-per-task N), or let all see all (srun --gpu-bind none)"
            )
        return list(range(visible))
    if job is None and task.processes > 1 and "CUDA_VISIBLE_DEVICES" in environment:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES = {environment['CUDA_VISIBLE_DEVICES']}: {together}, each its"
            f" own ones or all the same; set {LOCAL_IDS} to the numbers, from 0 on, of those that"
            " are its own"
        )
    if visible % task.processes:
        raise ValueError(
            f"{together}, which cannot be dealt out evenly; start one process a node, or as many as"
            f" divide {visible}"
        )
    share = visible // task.processes
    return list(range(task.number * share, (task.number + 1) * share))


def hosts_line(devices_of_hosts: list[int]) -> str:
    """Return text such as `64 devices on 8 hosts`, listing the counts if hosts differ."""
    hosts, even = len(devices_of_hosts), len({*devices_of_hosts}) == 1
    each = "" if even else f": {', '.join(map(str, devices_of_hosts))}"
    return f"{sum(devices_of_hosts)} devices on {hosts} host{'s' * (hosts > 1)}{each}"


def check_all_used(
    used: int, environment: Mapping[str, str] = os.environ, *, more: str = ""
) -> None:
    """Raise `ValueError` if the job has more GPUs on this node than the run uses, unless
    JAX_PLATFORMS excludes GPUs.

    used: GPUs of this process; every other process of the job on this node uses as many. more:
    command-line option that would make the run use more, for the message.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    job, tasks = node_gpus(environment), node_task(environment).processes
    if (
        job is None
        or job[0] <= used * tasks
        or (platforms and not {"cuda", "gpu", "rocm"} & {*platforms.split(",")})
    ):
        return
    if not used:
        why = (
            "JAX finds none: install it with CUDA (pip install 'jmoe[cuda12]'), or set"
            " JAX_PLATFORMS=cpu"
        )
    elif more:
        why = f"give {more}"
    elif tasks > 1:
        why = "give every process its share (srun --gpus-per-task N)"
    else:
        why = f"CUDA_VISIBLE_DEVICES = {environment.get('CUDA_VISIBLE_DEVICES')} shows no more"
    raise ValueError(
        f"{job[1]} = {job[0]}: the run would use {used * tasks} of the job's GPUs on this node:"
        f" {why}; or ask for as many as the run is to use"
    )


def check_all_nodes_used(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `ValueError` if this process was started without srun in a SLURM job that has GPUs on
    several nodes.
    """
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    if (
        nodes > 1
        and "SLURM_STEP_NODELIST" not in environment
        and node_gpus(environment) is not None
    ):
        raise ValueError(
            f"SLURM_JOB_NUM_NODES = {nodes}: this process was not started by srun, and would use"
            " one node; start it with srun, as launch/slurm/train.sbatch does"
        )
