"""Nodes on one machine: network namespaces joined by a bridge, with a limited link between them.
Needs root.

Processes of one node talk over its loopback, which is fast; those of different nodes share one
link, however many nodes there are. Its rate is that of all directions together. gloo tells a peer
that it may send behind whatever it sends itself, so that two blocks which should pass each other
often go one after the other; with a rate for each direction, chance would decide how much of the
link lies idle.
"""

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

LOCK = Path(tempfile.gettempdir()) / "jmoebench.lock"
BRIDGE = "jmoebench"
PIPE = "jmoebenchpipe"  # what both directions go through
NODES = tuple(f"jmoebench{i}" for i in range(4))
ADDRESSES = tuple(f"10.78.0.{i + 1}" for i in range(4))
INTERFACE = "eth0"  # of the link, inside each node
# What waits for the link is limited by its senders' buffers, so nothing is ever dropped, and
# nothing is sent again because its acknowledgement waits too.
SOCKETS = ("net.ipv4.tcp_wmem=4096 262144 262144", "net.ipv4.tcp_congestion_control=reno")
PATIENCE = ("rto_min", "10s")


def _run_command(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)


def link_bytes() -> tuple[int, int]:
    """Return the bytes that this node has (received, sent) over the link, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    fields = line.split(":")[1].split()
    return int(fields[0]), int(fields[8])


def sent_bytes() -> int:
    """Return the bytes that this node has sent over the link, headers included."""
    return link_bytes()[1]


class LinkWatch:
    """When a node's traffic over the link begins and ends, between entry and exit.

    before_s: until more than QUIET_BYTES have come or gone; after_s: since no more than that was
    left. What this node sends is counted before it waits for the link, what it receives after that.
    A thread looks every 5 ms.
    """

    QUIET_BYTES = 20_000  # a barrier sums one number of each rank
    before_s = after_s = 0.0

    def __enter__(self) -> "LinkWatch":
        self._ends = threading.Event()
        self._seen = [(time.perf_counter(), sum(link_bytes()))]
        self._thread = threading.Thread(target=self._sample_link_bytes, daemon=True)
        self._thread.start()
        return self

    def _sample_link_bytes(self) -> None:
        """Record the time and the bytes of the link every 5 ms, until the block ends."""
        while not self._ends.wait(0.005):
            self._seen.append((time.perf_counter(), sum(link_bytes())))

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        (begun, first), (ended, last) = self._seen[0], (time.perf_counter(), sum(link_bytes()))
        starts = next((t for t, n in self._seen if n > first + self.QUIET_BYTES), ended)
        stops = next((t for t, n in self._seen if n >= last - self.QUIET_BYTES), ended)
        self.before_s, self.after_s = starts - begun, ended - stops


class LinkedNodes:
    """`with LinkedNodes(200) as nodes: subprocess.Popen(nodes.command_inside(1, command))`.

    Waits while another process has the nodes. number: of nodes, two to four.
    """

    def __init__(self, mbit_per_s: float, number: int = 2) -> None:
        if not 2 <= number <= len(NODES):
            raise ValueError(f"number = {number}: must be from 2 to {len(NODES)}")
        self.mbit_per_s, self.number = mbit_per_s, number

    def __enter__(self) -> "LinkedNodes":
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
            raise OSError("nodes on one machine need root and iproute2 (the commands ip and tc)")
        self._lock = LOCK.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._remove_nodes()
        _run_command("ip", "link", "add", BRIDGE, "up", "type", "bridge")
        _run_command("ip", "link", "add", PIPE, "up", "type", "ifb")
        limit = ("rate", f"{self.mbit_per_s}mbit", "burst", "128kb", "limit", "64mb")
        _run_command("tc", "qdisc", "add", "dev", PIPE, "root", "tbf", *limit)
        for node, address in zip(NODES[: self.number], ADDRESSES, strict=False):
            port = f"{node}v"
            _run_command("ip", "netns", "add", node)
            _run_command(
                "ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", node
            )
            _run_command("ip", "link", "set", port, "master", BRIDGE, "up")
            _run_command("tc", "qdisc", "add", "dev", port, "ingress")
            redirect = ("action", "mirred", "egress", "redirect", "dev", PIPE)
            everything = ("protocol", "all", "u32", "match", "u32", "0", "0")
            _run_command(
                "tc", "filter", "add", "dev", port, "parent", "ffff:", *everything, *redirect
            )
            _run_command("ip", "-n", node, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run_command("ip", "-n", node, "link", "set", "lo", "up")
            _run_command("ip", "-n", node, "link", "set", INTERFACE, "up")
            subnet = f"{address.rsplit('.', 1)[0]}.0/24"
            _run_command(
                "ip",
                "-n",
                node,
                "route",
                "replace",
                subnet,
                "dev",
                INTERFACE,
                "src",
                address,
                *PATIENCE,
            )
            for setting in SOCKETS:
                _run_command("ip", "netns", "exec", node, "sysctl", "-q", "-w", setting)
            # gloo binds to what the hostname stands for; `ip netns exec` mounts this file over
            # /etc/hosts
            folder = Path("/etc/netns") / node
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._remove_nodes()
        self._lock.close()

    def command_inside(self, node: int, command: list[str]) -> list[str]:
        """Return the command that runs `command` inside this node."""
        return ["ip", "netns", "exec", NODES[node], *command]

    def _remove_nodes(self) -> None:
        """Remove the namespaces and devices of all nodes, if there are any."""
        for node in NODES:
            _run_command("ip", "link", "del", f"{node}v", check=False)
            _run_command("ip", "netns", "del", node, check=False)
            shutil.rmtree(Path("/etc/netns") / node, ignore_errors=True)
        for device in (PIPE, BRIDGE):
            _run_command("ip", "link", "del", device, check=False)
