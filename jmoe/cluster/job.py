"""The cluster job: whether a launcher started this process as one of several, which of the node's
GPUs belong to it, and whether any stay unused.

JAX's own detection gives a process of SLURM or Open MPI one device, numbered by the process's local
rank, even if the process is alone on its node and sees eight. This module assigns all visible GPUs.
`jmoe.cluster.distributed` and `jmoe.cluster.supervise` call it before JAX starts. Standard library
only.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

LOCAL_IDS = "JAX_LOCAL_DEVICE_IDS"  # JAX's own variable, which takes precedence over this module

# The variables that a launcher sets for each of its processes: first the number of processes, then
# this process's rank, then others that are needed.
SLURM = (
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
)
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
# (number of processes, rank, program) of launchers whose variables jmoe does not read
UNSUPPORTED = (("PMI_SIZE", "PMI_RANK", "mpiexec"), ("WORLD_SIZE", "RANK", "torchrun"))
OPTIONS = (
    "give --distributed.coordinator-address HOST:PORT, --distributed.num-processes N and"
    " --distributed.process-id I"
)


def find_launcher(environment: Mapping[str, str]) -> Literal["k8s", "slurm", "ompi"] | None:
    """Return the launcher that started this process as one of several, by JAX's name where it has
    one (not "k8s"); None if the process is alone.

    Raises `ValueError` if a variable of the launcher is missing or wrong, so that no process of a
    job trains by itself.
    """
    if "JOB_COMPLETION_INDEX" in environment:
        if "KUBERNETES_SERVICE_HOST" not in environment:
            raise _missing_variable_error(
                "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", environment
            )
        return "k8s"
    if names := [name for name in environment if name.startswith("OMPI_COMM_WORLD_")]:
        return "ompi" if _has_several_processes(OPEN_MPI, names[0], environment) else None
    # sbatch gives its own script rank 0, and the count of the tasks that srun would start
    step = [name for name in environment if name.startswith("SLURM_STEP")]
    step += [name for name in SLURM[1:3] if environment.get(name, "0") != "0"]
    if step:
        return "slurm" if _has_several_processes(SLURM, step[0], environment) else None
    for count, rank, program in UNSUPPORTED:
        if rank in environment and environment.get(count, "1") != "1":
            raise ValueError(
                f"{count} = {environment[count]}: {program} started this process as one of several,"
                f" but its variables are not read; {OPTIONS}"
            )
    return None


def _has_several_processes(
    names: tuple[str, ...], launcher_variable: str, environment: Mapping[str, str]
) -> bool:
    """Return True if a launcher that sets the variables `names` (first the number of processes,
    then the rank) started more than one process.

    Raises `ValueError` if one of them is missing or the rank is too large. launcher_variable: the
    variable that shows that the launcher was used, for the message.
    """
    count, rank = names[:2]
    if environment.get(count) == "1":
        return False
    for name in names:
        if name not in environment:
            raise _missing_variable_error(name, launcher_variable, environment)
    if _parse_number(rank, environment) >= _parse_number(count, environment):
        raise ValueError(
            f"{rank} = {environment[rank]}: must be less than {count} = {environment[count]}"
        )
    return True


def _missing_variable_error(
    missing: str, launcher_variable: str, environment: Mapping[str, str]
) -> ValueError:
    return ValueError(
        f"{missing} is not set, but {launcher_variable} = {environment[launcher_variable]} says"
        " that this process is one of a job's; pass on all variables of the launcher, of which a"
        f" container may have dropped some, or {OPTIONS}"
    )


def _parse_number(name: str, environment: Mapping[str, str]) -> int:
    value = environment[name]
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{name} = {value!r}: must be a number, as the job's launcher sets it")
    return int(value)


class PlaceOnNode(NamedTuple):
    """Index of this process among the job's processes on its node (`number`, from 0), and their
    count (`processes`).
    """

    number: int  # from 0
    processes: int


def place_on_node(environment: Mapping[str, str]) -> PlaceOnNode:
    """Return this process's place on its node, from the variables of SLURM or Open MPI; (0, 1)
    without them. Raises ValueError if a variable is missing or wrong.
    """
    rank, size = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    if (rank in environment) != (size in environment):
        missing, launcher_variable = (size, rank) if rank in environment else (rank, size)
        raise _missing_variable_error(missing, launcher_variable, environment)
    if size in environment:
        return PlaceOnNode(_parse_number(rank, environment), _parse_number(size, environment))
    if "SLURM_STEP_TASKS_PER_NODE" in environment and "SLURM_LOCALID" in environment:
        return PlaceOnNode(
            _parse_number("SLURM_LOCALID", environment), _slurm_processes_on_node(environment)
        )
    return PlaceOnNode(0, 1)


def _slurm_processes_on_node(environment: Mapping[str, str]) -> int:
    """Return the number of the job step's processes on this node.

    SLURM lists the numbers of all nodes in a short form: `2(x3),1` stands for 2, 2, 2, 1. Raises
    ValueError if a variable is wrong.
    """
    name = "SLURM_STEP_TASKS_PER_NODE"
    node = _parse_number("SLURM_NODEID", {"SLURM_NODEID": "0", **environment})
    counts: list[int] = []
    for word in environment[name].split(","):
        if (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)) is None:
            raise ValueError(f"{name} = {environment[name]!r}: must read as `2(x3),1` does")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ValueError(
            f"SLURM_NODEID = {node}: must be less than the {len(counts)} nodes of {name} ="
            f" {environment[name]}"
        )
    return counts[node]


def count_visible_gpus() -> int:
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


def num_node_gpus_and_variable(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return (number of GPUs that the job has on this node, name of the variable that says so), or
    None if no variable does.
    """
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS"):
        value = environment.get(name, "")
        if value:
            by_count = name.endswith("NODE")
            return _parse_number(name, environment) if by_count else len(value.split(",")), name
    devices = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    if "KUBERNETES_SERVICE_HOST" in environment and devices not in ("", "all", "none", "void"):
        return len(devices.split(",")), "NVIDIA_VISIBLE_DEVICES"
    return None


def local_device_ids(environment: Mapping[str, str], num_visible: int) -> list[int] | None:
    """Return the indices, among the `num_visible` GPUs that this process sees, of those it uses.

    None leaves the choice to JAX. A process that sees fewer GPUs than the job has on the node was
    bound to its own GPUs and uses all of them. Processes that see the same GPUs use equal shares.
    Raises `ValueError` if equal shares are impossible, or if it is unclear which GPUs are shared.
    """
    task, job = place_on_node(environment), num_node_gpus_and_variable(environment)
    if environment.get(LOCAL_IDS):
        return None
    if not num_visible:  # CPU only, or GPUs of another vendor
        return [task.number] if task.processes > 1 else None
    gpus = f"{num_visible} GPU{'s' * (num_visible > 1)}"
    together = f"{task.processes} processes on this node see {gpus} each"
    if job is not None and num_visible > job[0]:
        raise ValueError(
            f"{job[1]} = {job[0]}: this process sees {num_visible} GPUs, some of which are not the"
            " job's; leave CUDA_VISIBLE_DEVICES as SLURM sets it"
        )
    bound = num_visible < (task.processes if job is None else job[0])
    if bound:
        if job is not None and num_visible * task.processes > job[0]:
            raise ValueError(
                f"{job[1]} = {job[0]}: {together}, and so share some; give each its own (srun"
                " --gpus-per-task N), or let all see all (srun --gpu-bind none)"
            )
        return list(range(num_visible))
    if job is None and task.processes > 1 and "CUDA_VISIBLE_DEVICES" in environment:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES = {environment['CUDA_VISIBLE_DEVICES']}: {together}, each its"
            f" own ones or all the same; set {LOCAL_IDS} to the numbers, from 0 on, of those that"
            " are its own"
        )
    if num_visible % task.processes:
        raise ValueError(
            f"{together}, which cannot be dealt out evenly; start one process a node, or as many as"
            f" divide {num_visible}"
        )
    share = num_visible // task.processes
    return list(range(task.number * share, (task.number + 1) * share))


def describe_hosts(device_counts_of_hosts: list[int]) -> str:
    """Return text such as `64 devices on 8 hosts`, listing the counts if hosts differ."""
    hosts, even = len(device_counts_of_hosts), len({*device_counts_of_hosts}) == 1
    each = "" if even else f": {', '.join(map(str, device_counts_of_hosts))}"
    return f"{sum(device_counts_of_hosts)} devices on {hosts} host{'s' * (hosts > 1)}{each}"


def check_all_gpus_used(
    used: int, environment: Mapping[str, str] = os.environ, *, option_for_more: str = ""
) -> None:
    """Raise `ValueError` if the job has more GPUs on this node than the run uses, unless
    JAX_PLATFORMS excludes GPUs.

    used: GPUs of this process; every other process of the job on this node uses as many.
    option_for_more: command-line option that would make the run use more, for the message.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    job, tasks = num_node_gpus_and_variable(environment), place_on_node(environment).processes
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
    elif option_for_more:
        why = f"give {option_for_more}"
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
    name = "SLURM_JOB_NUM_NODES"
    nodes = _parse_number(name, {name: "1", **environment})
    if (
        nodes > 1
        and "SLURM_STEP_NODELIST" not in environment
        and num_node_gpus_and_variable(environment) is not None
    ):
        raise ValueError(
            f"SLURM_JOB_NUM_NODES = {nodes}: this process was not started by srun, and would use"
            " one node; start it with srun, as launch/slurm/train.sbatch does"
        )
