"""Ray clusters of several nodes on this machine, all real processes, whose parts can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.train_runs import free_port

OBJECT_STORE_BYTES = 80 << 20
# a driver whose head is lost ends after this many seconds instead of 60
SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # workers yield to all other processes of the machine, and a busy one lets them wait for ever
    "RAY_worker_niceness": "0",
    # a busy machine needs longer to start processes
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
NODE_START_S = 300.0  # Ray itself gives up after 30
# Of a node's agents, which write them into files. The node ends if it misses one of these for 15 s.
PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


@contextlib.contextmanager
def ray_cluster(
    num_nodes: int, environment: dict[str, str] | None = None, *, cores: int = 1
) -> Iterator[Any]:
    """Yield a `Cluster` of nodes of so many cores each, the first of which is the head."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    services = pytest.importorskip("ray._private.services")
    node_module = pytest.importorskip("ray._private.node")
    get_node, start_raylet = services.get_node, node_module.Node.start_raylet

    def wait_for_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + NODE_START_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # it has not started yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def start_with_ports(node: Any, *arguments: Any, **options: Any) -> None:
        for name in PORTS:
            file = Path(node.get_session_dir_path(), f"{name}_{node.node_id}")
            file.write_text(str(getattr(node._ray_params, name)))
        start_raylet(node, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", wait_for_node)
        patch.setattr(node_module.Node, "start_raylet", start_with_ports)
        for name, value in {**SETTINGS, **(environment or {})}.items():
            patch.setenv(name, value)
        node = {"num_cpus": cores, "object_store_memory": OBJECT_STORE_BYTES}

        def with_ports(options: dict[str, Any]) -> dict[str, Any]:
            return options | {name: free_port() for name in PORTS}

        head = with_ports({**node, "include_dashboard": False, "no_monitor": True})
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(num_nodes - 1):
                cluster.add_node(**with_ports(node))
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
