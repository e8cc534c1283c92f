"""Ray clusters of several nodes on this machine, all real processes, whose parts can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

OBJECT_STORE_BYTES = 80 << 20
# a driver whose head is lost ends after this many seconds instead of 60
SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@contextlib.contextmanager
def ray_cluster(num_nodes: int, environment: dict[str, str] | None = None) -> Iterator[Any]:
    """Yield a `Cluster` of one-core nodes, the first of which is the head."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, **(environment or {})}.items():
            patch.setenv(name, value)
        node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
        head = {**node, "include_dashboard": False}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(num_nodes - 1):
                cluster.add_node(**node)
            yield cluster
        finally:
            cluster.shutdown()


def kill_worker(cluster: Any, name: str, number: int = 0) -> bool:
    """SIGKILL a process that runs a task or an actor called `name`; return whether there was one.

    Ray titles such a process `ray::name`. number: which of them, by process id.
    """
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    workers = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        title = " ".join(process.info["cmdline"] or [])
        if process.info["pid"] in own and title.startswith("ray::") and name in title:
            workers.append(process.info["pid"])
    if not workers:
        return False
    os.kill(sorted(workers)[number % len(workers)], signal.SIGKILL)
    return True
