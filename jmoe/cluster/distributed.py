"""Joining of the processes of a run: they meet at rank 0, and every missing rank is named.

`train.py` and `serve.py` call `join_processes` or `join_and_connect_processes`, then work inside a
`Watchdog` (`jmoe.cluster.watchdog`); the training loop adds a `PreemptionSignal`
(`jmoe.cluster.signals`).

JAX's own failure handling stays in force: if a rank's heartbeats stop, JAX ends the whole run after
`distributed.heartbeat_timeout_s`. An outside supervisor (`jmoe-supervise`, SLURM requeue,
Kubernetes JobSet) then restarts every rank, and the run resumes from its checkpoint.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Mapping

import jax

from jmoe.cluster import job
from jmoe.cluster.rendezvous import connect_ranks_to_rank_0
from jmoe.config import DistributedConfig
from jmoe.status import first_error_line


def join_processes(config: DistributedConfig) -> None:
    """Join the other processes of the run, if there are any. Call this before any other use of JAX.

    The processes are the ones that the configuration names; otherwise the ones of the SLURM, Open
    MPI or Kubernetes job that JAX detects; otherwise only this process. Raises `TimeoutError` after
    `start_timeout_s`, on every rank that is present, naming the missing ranks. Raises `ValueError`
    if two processes claim the same rank, or if the job has more GPUs than the run uses.
    """
    for line in join_and_connect_processes(config).values():
        line.close()
    check_gpus_found_and_used(config)


def start_jax_backend() -> None:
    """Let JAX find its devices. Raises `ValueError` with the reason if it finds none."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # of JAX_PLATFORMS=cuda without a GPU
        wanted = os.environ.get("JAX_PLATFORMS", "")
        reason = (
            first_error_line(error)
            if str(error)
            else "the driver or JAX's plugin for it is missing"
        )
        raise ValueError(
            f"JAX_PLATFORMS = {wanted!r}: must name devices that JAX finds here, or be unset:"
            f" {reason}"
        ) from error


def check_gpus_found_and_used(config: DistributedConfig, devices: int | None = None) -> None:
    """Raise `ValueError` if JAX finds no devices, or if the job was given more GPUs than the run
    uses.

    devices: number of devices that a run of one process uses; None means every device JAX sees. The
    check is skipped under `jmoe-supervise` (`heartbeat_folder` is set), which has already assigned
    GPUs to its processes.
    """
    start_jax_backend()
    if config.heartbeat_folder is not None:
        return
    alone = jax.process_count() == 1
    if alone and config.coordinator_address is None:
        job.check_all_nodes_used()
    used = _num_local_gpus()
    if devices is not None and alone and devices < used:
        job.check_all_gpus_used(devices, option_for_more=f"--devices {used}")
    job.check_all_gpus_used(used)


def _num_local_gpus() -> int:
    return 0 if jax.default_backend() == "cpu" else jax.local_device_count()


def join_and_connect_processes(
    config: DistributedConfig, *, rank_0_outlives: bool = False
) -> dict[int, socket.socket]:
    """Join the other processes like `join_processes`, without the GPU check, and return the open
    connections of `connect_ranks_to_rank_0`.

    The result maps rank to socket, and is empty in a run of one process. The caller closes the
    sockets. rank_0_outlives: keep JAX from ending rank 0 when another rank dies, so that rank 0 can
    still report the loss to its clients.
    """
    if config.coordinator_address is not None:
        assert config.num_processes is not None and config.process_id is not None
        address = config.coordinator_address
        processes = config.num_processes
        rank = config.process_id
    else:
        detected = _detect_address_size_and_rank(config.start_timeout_s)
        if detected is None:
            return {}
        address, processes, rank = detected
    if processes == 1:
        return {}
    device_ids = job.local_device_ids(os.environ, job.count_visible_gpus())
    deadline = time.monotonic() + config.start_timeout_s
    lines = connect_ranks_to_rank_0(address, processes, rank, config.start_timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.config.update("jax_enable_recoverability", rank_0_outlives)
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=processes,
        process_id=rank,
        local_device_ids=device_ids,
        cluster_detection_method="deactivate",  # JAX would assign one device per process
        initialization_timeout=max(10, int(deadline - time.monotonic())),
        heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        shutdown_timeout_seconds=config.step_timeout_s,
    )
    # runs before JAX's own handler, which waits for all ranks
    atexit.register(exit_if_failed)
    return lines


def exit_if_failed(code: int = 0, linger_s: float = 0.0) -> None:
    """End this rank at interpreter exit if it failed, skipping JAX's shutdown barrier, which would
    wait for the other ranks.
    """
    if code or getattr(sys, "last_value", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(linger_s)
        os._exit(code or 1)


def print_to_stderr(line: str) -> None:
    print(f"jmoe: {line}", file=sys.stderr, flush=True)


def _detect_address_size_and_rank(
    timeout_s: float, environment: Mapping[str, str] = os.environ
) -> tuple[str, int, int] | None:
    """Return (coordinator address, processes, rank) of the cluster job that JAX detects, or None
    outside a job of several processes.

    Raises `ValueError` if a launcher started several processes but its variables are incomplete, or
    JAX cannot find the others.
    """
    launcher = job.find_launcher(environment)
    if launcher is None:
        return None
    if launcher == "k8s":
        _require_kubernetes_client()
    # jax.distributed.initialize() detects these values too, but does not return them
    from jax._src.clusters import ClusterEnv

    problem: RuntimeError | None = None
    try:
        if launcher != "ompi" or "OMPI_MCA_orte_hnp_uri" in environment:
            unset = (None, None, None, None)
            # JAX's Kubernetes has no name to ask for it by; nothing else is found in its pods
            method = None if launcher == "k8s" else launcher
            address, processes, rank, _ = ClusterEnv.auto_detect_unset_distributed_params(
                *unset, method, int(timeout_s)
            )
            if address is not None and processes is not None and rank is not None:
                return address, processes, rank
    # Open MPI 5 without mpi4py, or a pod without permission to list the job's pods
    except RuntimeError as error:
        problem = error
    raise ValueError(
        "JAX cannot find the other processes of this job"
        f" ({problem or 'unknown version of Open MPI'}); {job.OPTIONS} (Open MPI:"
        " $OMPI_COMM_WORLD_SIZE and $OMPI_COMM_WORLD_RANK)"
    ) from problem


def _require_kubernetes_client() -> None:
    try:
        import kubernetes  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "JOB_COMPLETION_INDEX is set (an indexed Kubernetes job), but JAX needs the package"
            f" `kubernetes` to find the job's other pods: pip install 'jax[k8s]', or {job.OPTIONS}"
        ) from error
