"""Communication over a slow link between two nodes of some ranks each; the last line of output is one JSON object.

    sudo python benchmarks/communication.py exchange             50, 100, 200 Mbit/s; top-2 of 8, top-8 of 64 experts
    sudo python benchmarks/communication.py exchange --rates 100 --shapes 2:8:560 --kinds flat dedup
    sudo python benchmarks/communication.py fusion --rates 200      training steps: one buffer against many
    sudo python benchmarks/communication.py levels               training steps: two levels and dedup against flat
    sudo NPROC=4 python benchmarks/communication.py order        training steps: orders of collectives
    sudo python benchmarks/communication.py embedding            training steps with the embedding table in parts

exchange: tokens to their experts and back (`dispatch` and `combine`, the experts change nothing), forward alone and
with its backward pass, the exchanges in turn. A shape is K:E:T, K of E experts for each of a rank's T tokens of 1024
bfloat16. Seconds are medians from a barrier to a barrier; `ratio_to_flat` is the median of the ratios round by round.
Bytes are those that a node sends: by the interface's counter, with all headers, and by the formula of
`jmoe.planning.exchange.exchange_traffic`.

fusion, levels, order: see `benchmarks.steps`. --rates 0 is this machine without a link. XLA:CPU has as many threads as
cores, and one that waits for a collective computes nothing: on few cores give the ranks more with NPROC=4. The ranks
run in the environment that `train.py` gives itself (`jmoe.runtime`).
embedding: see `benchmarks.embedding`. --rates 0 is this machine without a link.
"""

if __name__ == "__main__":
    import script

    script.reexec_with_env()

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.comm import embedding, steps
from benchmarks.lib.two_nodes import ADDRESSES, TwoNodes, sent_bytes
from jmoe.planning.exchange import ExchangePlan, exchange_traffic, plan_exchange

NODES = 2
HIDDEN_SIZE = 1024
Program = Callable[..., Any]
DIRECTIONS = ("forward", "backward")  # backward: the forward pass too


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    exchange = commands.add_parser("exchange", help="the exchange alone")
    exchange.add_argument("--shapes", nargs="+", default=["2:8:560", "8:64:128"], help="K:E:T")
    exchange.add_argument("--kinds", nargs="+", default=["flat", "hierarchical", "dedup"])
    exchange.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    exchange.add_argument("--capacity-factor", type=float, default=1.0, help="buffers of this many fair shares")
    parts = commands.add_parser("embedding", help="training steps with the embedding table in parts")
    embedding.add_options(parts)
    comparisons = [commands.add_parser(name, help=text) for name, text in steps.COMMANDS.items()]
    for command in comparisons:
        steps.add_options(command)
    for command in (exchange, parts, *comparisons):
        rates = [0, 100] if command is parts else [50, 100, 200]
        command.add_argument(
            "--rates", type=float, nargs="+", default=rates, help="Mbit/s, both directions together; 0: no link"
        )
        command.add_argument("--rounds", type=int, default=7)
        command.add_argument("--ranks-per-node", type=int, default=1 if command is commands.choices["order"] else 2)
        command.add_argument("--cache-dir", help="keep compiled programs in this folder")
        command.add_argument("--rank", type=int, help=argparse.SUPPRESS)
        command.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_program(plan: ExchangePlan, mesh: Any, num_experts: int, capacity_factor: float, direction: str) -> Program:
    """(x [R T, D], topk_idx, topk_weights [R T, K]) -> (y or the gradients, assignments dropped by each device)."""
    import jax
    import jax.numpy as jnp

    from jmoe.collectives.exchange import make_exchange
    from jmoe.mesh import BATCH, EXPERT

    exchange = make_exchange(plan, EXPERT, capacity_factor)

    def body(x: jax.Array, idx: jax.Array, weights: jax.Array) -> Any:
        counts = (idx.reshape(-1, 1) == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)

        def there_and_back(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            arrived = exchange.dispatch(x, idx, weights, counts)
            return exchange.combine(arrived.rows_MD, arrived.handle), arrived.dropped[None]

        if direction == "forward":
            return there_and_back(x, weights)
        y, vjp, dropped = jax.vjp(there_and_back, x, weights, has_aux=True)
        return vjp(y), dropped

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=BATCH, out_specs=BATCH, check_vma=False))


def draw(mesh: Any, rank: int, shape: tuple[int, int, int]) -> tuple[Any, ...]:
    """Random tokens, uniformly drawn experts and weights; one part on each rank."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jmoe.mesh import BATCH

    k, num_experts, num_tokens = shape
    rng = np.random.default_rng([rank, *shape])
    idx = rng.random((num_tokens, num_experts)).argsort(axis=1)[:, :k].astype(np.int32)
    x = rng.standard_normal((num_tokens, HIDDEN_SIZE), np.float32).astype(jnp.bfloat16)
    weights = np.full(idx.shape, 1 / k, np.float32)
    sharding = NamedSharding(mesh, BATCH)
    return tuple(jax.make_array_from_process_local_data(sharding, part) for part in (x, idx, weights))


class Clock:
    """Times a program from a barrier to a barrier, and counts what the node sends meanwhile."""

    def __init__(self, mesh: Any, has_link: bool) -> None:
        import jax
        from jax.sharding import NamedSharding

        from jmoe.mesh import BATCH

        one = np.ones(1, np.float32)
        self.ones = jax.make_array_from_process_local_data(NamedSharding(mesh, BATCH), one)
        self.total = jax.jit(lambda x: x.sum())
        self.sent_bytes = sent_bytes if has_link else lambda: 0

    def barrier(self) -> None:
        self.total(self.ones).block_until_ready()

    def __call__(self, program: Program, args: tuple[Any, ...]) -> tuple[float, int]:
        import jax

        self.barrier()
        sent, begun = self.sent_bytes(), time.perf_counter()
        jax.block_until_ready(program(*args))
        self.barrier()
        return time.perf_counter() - begun, self.sent_bytes() - sent


def formula_bytes(plan: ExchangePlan, shape: tuple[int, int, int], a: argparse.Namespace, direction: str) -> int:
    """Bytes that the ranks of one node send to the other."""
    return (
        a.ranks_per_node
        * exchange_traffic(
            plan,
            num_tokens=shape[2],
            num_experts=shape[1],
            num_experts_per_tok=shape[0],
            row_bytes=2 * HIDDEN_SIZE,
            capacity_factor=a.capacity_factor,
            backward=direction == "backward",
        ).across_bytes
    )


def measure(a: argparse.Namespace, mesh: Any, clock: Clock, shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """One row for every direction and kind of exchange."""
    import jax

    k, num_experts, num_tokens = shape
    args = draw(mesh, a.rank, shape)
    plans = {
        kind: plan_exchange(
            kind,
            num_nodes=NODES,
            devices_per_node=a.ranks_per_node,
            num_experts=num_experts,
            num_experts_per_tok=k,
        )
        for kind in a.kinds
    }
    programs, dropped = {}, {}
    for kind, plan in plans.items():
        for direction in a.directions:
            program = make_program(plan, mesh, num_experts, a.capacity_factor, direction)
            counts = jax.jit(lambda d: d.sum())(program(*args)[1])
            dropped[kind] = int(counts) / (mesh.size * num_tokens * k)
            programs[direction, kind] = program
    found: dict[Any, list[tuple[float, int]]] = {key: [] for key in programs}
    for _ in range(a.rounds):
        for key, program in programs.items():
            found[key].append(clock(program, args))
    rows, reference = [], a.kinds[0]
    for (direction, kind), seen in found.items():
        seconds, sent = zip(*seen, strict=True)
        first, _ = zip(*found[direction, reference], strict=True)
        formula = formula_bytes(plans[kind], shape, a, direction)
        rows.append(
            {
                "mbit_per_s": a.rates[0],
                "top_k": k,
                "experts": num_experts,
                "tokens_per_rank": num_tokens,
                "direction": direction,
                "exchange": kind,
                "seconds": round(statistics.median(seconds), 4),
                f"ratio_to_{reference}": round(statistics.median(s / f for s, f in zip(seconds, first)), 3),
                "sent_bytes": round(statistics.median(sent)),
                "formula_bytes": formula,
                "sent_to_formula": round(statistics.median(sent) / formula, 3),
                "formula_ratio": round(formula / formula_bytes(plans[reference], shape, a, direction), 3),
                "dropped_fraction": round(dropped[kind], 4),
                "all_seconds": [round(s, 4) for s in seconds],
            }
        )
    return rows


def worker(a: argparse.Namespace) -> list[dict[str, Any]]:
    """What one rank does; rank 0's rows are the result."""
    import jax

    from jmoe.mesh import make_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_compilation_cache_dir", a.cache_dir)
    address = ADDRESSES[0] if a.rates[0] else "127.0.0.1"
    jax.distributed.initialize(f"{address}:{a.port}", NODES * a.ranks_per_node, a.rank)
    mesh = make_mesh((1, NODES, a.ranks_per_node))
    clock = Clock(mesh, has_link=a.rates[0] > 0)
    clock.barrier()  # connects the ranks while none is busy: gloo waits no longer than 30 s
    if a.command == "embedding":
        return embedding.measure(a, mesh, clock)
    if a.command in steps.COMMANDS:
        return steps.measure(a, mesh, clock)
    rows = []
    for shape in a.shapes:
        k, num_experts, num_tokens = map(int, shape.split(":"))
        rows += measure(a, mesh, clock, (k, num_experts, num_tokens))
    return rows


def launch(rate: float, cache_dir: str, ranks_per_node: int) -> list[dict[str, Any]]:
    """Make the two nodes, start every rank in its own, with this command's arguments; rank 0's rows."""
    with socket.socket() as s:
        s.bind(("", 0))
        port = str(s.getsockname()[1])
    ranks: list[subprocess.Popen[str]] = []
    with TwoNodes(rate) if rate else nullcontext() as nodes, tempfile.TemporaryFile("w+") as output:
        try:
            for rank in range(NODES * ranks_per_node):
                command = [sys.executable, *sys.argv, "--rates", str(rate), "--rank", str(rank), "--port", port]
                command += ["--cache-dir", cache_dir]
                command = nodes.inside(rank // ranks_per_node, command) if nodes else command
                out = output if rank == 0 else subprocess.DEVNULL
                ranks.append(subprocess.Popen(command, stdout=out, text=True))
            codes: list[int | None] = [None]
            while None in codes and not any(codes):  # one that failed leaves the others waiting
                time.sleep(0.1)
                codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        output.seek(0)
        rows: list[dict[str, Any]] = json.loads(output.read().splitlines()[-1])
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def main() -> int:
    a = parse()
    if a.rank is not None:
        print(json.dumps(worker(a)), flush=True)
        return 0
    hidden_options = ("command", "rates", "rank", "port", "cache_dir")
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for rate in a.rates for row in launch(rate, a.cache_dir or folder, a.ranks_per_node)]
    result = {
        "benchmark": a.command,
        "nodes": NODES,
        "options": {name: value for name, value in vars(a).items() if name not in hidden_options},
        "rows": rows,
        "versions": {name: version(name) for name in ("jax", "jaxlib")} | {"python": sys.version.split()[0]},
    }
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
