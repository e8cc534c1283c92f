"""Two nodes on one machine: network namespaces joined by a bridge, with a limited link between them. Needs root.

Processes of one node talk over its loopback, which is fast; those of different nodes share the limited link.
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType

BRIDGE = "jmoebench"
NODES = ("jmoebench0", "jmoebench1")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
INTERFACE = "eth0"  # of the link, inside each node


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)


def limit_link(rate_mbit: float) -> None:
    """Set what this node sends to this many Mbit/s; call inside each node."""
    limit = ("rate", f"{rate_mbit}mbit", "burst", "128kb", "latency", "50ms")
    _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limit)


def sent_bytes() -> int:
    """Bytes that this node has sent over the link, all headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(line.split(":")[1].split()[8])


class TwoNodes:
    """`with TwoNodes() as nodes: subprocess.Popen(nodes.inside(1, command))`."""

    def __enter__(self) -> "TwoNodes":
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
            raise OSError("two nodes on one machine need root and iproute2 (the commands ip and tc)")
        self._down()
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        for node, address in zip(NODES, ADDRESSES):
            _run("ip", "netns", "add", node)
            _run("ip", "link", "add", f"{node}v", "type", "veth", "peer", "name", INTERFACE, "netns", node)
            _run("ip", "link", "set", f"{node}v", "master", BRIDGE, "up")
            _run("ip", "-n", node, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", node, "link", "set", "lo", "up")
            _run("ip", "-n", node, "link", "set", INTERFACE, "up")
            # gloo binds to what the hostname stands for; `ip netns exec` mounts this file over /etc/hosts
            folder = Path("/etc/netns") / node
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._down()

    def inside(self, node: int, command: list[str]) -> list[str]:
        """The command that runs `command` inside this node."""
        return ["ip", "netns", "exec", NODES[node], *command]

    def _down(self) -> None:
        for node in NODES:
            _run("ip", "netns", "del", node, check=False)
            shutil.rmtree(Path("/etc/netns") / node, ignore_errors=True)
        _run("ip", "link", "del", BRIDGE, check=False)
