"""Processes of one JAX job: on this machine, or on nodes with a limited link between them."""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from benchmarks.lib.linked_nodes import ADDRESSES, LinkedNodes, sent_bytes
from benchmarks.lib.report import JsonObject, median, progress, ratio

if TYPE_CHECKING:
    from jax.sharding import Mesh

NUM_NODES = 2  # where nothing else is said


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def wait_for_all(
    ranks: Sequence[subprocess.Popen[str] | subprocess.Popen[bytes]],
) -> list[int | None]:
    """Return the exit statuses; if a rank fails, kill the others, which would wait for it."""
    try:
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in ranks]
        return codes
    finally:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def rank_command(rank: int, port: int, *options: str) -> list[str]:
    """Return the command that runs this program as one rank."""
    return [sys.executable, *sys.argv, *options, "--rank", str(rank), "--port", str(port)]


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rank_command`."""
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)


def launch_ranks(
    mbit_per_s: float, cache_dir: str, ranks_per_node: int, num_nodes: int = NUM_NODES
) -> list[JsonObject]:
    """Make the nodes (0 Mbit/s: none), run this program as their ranks; return rank 0's rows."""
    options = ("--rates", str(mbit_per_s), "--cache-dir", cache_dir)
    rows: list[JsonObject] = run_ranks(
        num_nodes * ranks_per_node, mbit_per_s, *options, num_nodes=num_nodes
    )
    return [progress(row) for row in rows]


def run_ranks(num_ranks: int, mbit_per_s: float, *options: str, num_nodes: int = NUM_NODES) -> Any:
    """Run this program as ranks over the nodes (0 Mbit/s: all here); return rank 0's output."""
    port, ranks, linked = free_port(), [], LinkedNodes(mbit_per_s, num_nodes)
    with linked if mbit_per_s else nullcontext() as nodes, tempfile.TemporaryFile("w+") as output:
        for rank in range(num_ranks):
            command = rank_command(rank, port, *options)
            command = (
                nodes.command_inside(rank * num_nodes // num_ranks, command) if nodes else command
            )
            out: IO[str] | int = output if rank == 0 else subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, stdout=out, text=True))
        codes = wait_for_all(ranks)
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        output.seek(0)
        return json.loads(output.read().splitlines()[-1])


def join_as_rank(
    a: argparse.Namespace, ranks_per_node: int, num_nodes: int = NUM_NODES
) -> tuple["Mesh", "Clock"]:
    """Join the job as rank `a.rank` of those that `launch_ranks` started; return its mesh and a
    clock.
    """
    import jax

    from jmoe.mesh import make_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_compilation_cache_dir", a.cache_dir)
    address = ADDRESSES[0] if a.rates[0] else "127.0.0.1"
    jax.distributed.initialize(f"{address}:{a.port}", num_nodes * ranks_per_node, a.rank)
    mesh = make_mesh((1, num_nodes, ranks_per_node))
    clock = Clock(mesh, has_link=a.rates[0] > 0)
    clock.barrier()  # connects the ranks while none is busy: gloo waits no longer than 30 s
    return mesh, clock


class Clock:
    """Times a program from a barrier to a barrier, and counts what the node sends meanwhile."""

    def __init__(self, mesh: "Mesh", has_link: bool) -> None:
        import jax
        from jax.sharding import NamedSharding

        from jmoe.mesh import BATCH

        one = np.ones(1, np.float32)
        self.ones = jax.make_array_from_process_local_data(NamedSharding(mesh, BATCH), one)
        self.total = jax.jit(lambda x: x.sum())
        self.has_link, self.sent_bytes = has_link, sent_bytes if has_link else lambda: 0

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.total(self.ones).block_until_ready()

    def __call__(self, program: Callable[..., object], *args: object) -> tuple[float, int]:
        """Return (seconds, bytes that the node sent)."""
        import jax

        self.barrier()
        sent, begun = self.sent_bytes(), time.perf_counter()
        jax.block_until_ready(program(*args))
        self.barrier()
        return time.perf_counter() - begun, self.sent_bytes() - sent


class Rounds:
    """Seconds and sent bytes of one contestant's rounds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.sent_bytes: list[int] = []

    def add(self, seconds: float, sent: int) -> None:
        self.seconds.append(seconds)
        self.sent_bytes.append(sent)

    def result_row(self, reference_name: str, reference: "Rounds") -> JsonObject:
        """Return median seconds, the median of their ratios to the reference, and median bytes."""
        return {
            "seconds": median(self.seconds),
            f"ratio_to_{reference_name}": ratio(self.seconds, reference.seconds),
            "sent_bytes": round(median(self.sent_bytes)),
            "all_seconds": [round(s, 4) for s in self.seconds],
        }


def run_in_turn(
    runs: Mapping[str, Callable[[], object]], clock: Clock, rounds: int, *, report: bool
) -> dict[str, Rounds]:
    """Return the rounds of each contestant of `runs`, run A B C A B C; report: print each one."""
    taken = {name: Rounds() for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds, sent = clock(run)
            taken[name].add(seconds, sent)
            if report:
                print(f"{name}: {seconds:.2f} s, {sent} bytes sent", file=sys.stderr, flush=True)
    return taken
