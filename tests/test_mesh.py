"""What the processes of a run tell each other about the hosts they are on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jmoe.mesh import device_counts_of_hosts
from tests.train_runs import free_port

# each process claims to be on the host it is given
PROCESS = """
import socket
import sys
import jax
rank, port, host = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 4, int(rank))
socket.gethostname = lambda: host
from jmoe.mesh import device_counts_of_hosts
print("devices of hosts:", device_counts_of_hosts())
"""


def test_one_process() -> None:
    assert device_counts_of_hosts() == [8]


@pytest.mark.parametrize(("hosts", "expected"), [("abba", [2, 2]), ("abbb", [3, 1])])
def test_processes_on_two_hosts(
    hosts: str,
    expected: list[int],
    start_python: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    port = str(free_port())
    logs = [tmp_path / str(rank) for rank in range(4)]
    ranks = [
        start_python(["-c", PROCESS, str(i), port, host], logs[i]) for i, host in enumerate(hosts)
    ]
    for process, log in zip(ranks, logs):
        try:
            code: int | None = process.wait(240)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, "\n".join(log.read_text() for log in logs)
        assert f"devices of hosts: {expected}\n" in log.read_text()
