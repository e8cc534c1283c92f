"""Time exchanges and training steps of nodes that share a slow link.

    sudo python benchmarks/comm/slow_link.py exchange
        50, 100, 200 Mbit/s; top-2 of 8, top-8 of 64 experts
    sudo python benchmarks/comm/slow_link.py exchange --rates 100 --shapes 2:8:560 \
        --kinds flat dedup
    sudo python benchmarks/comm/slow_link.py padding --rates 100
        rows that are padded, or sent by a ragged all-to-all; balanced and skewed
    sudo python benchmarks/comm/slow_link.py fusion --rates 200
        training steps: one buffer or many, one level or two
    sudo python benchmarks/comm/slow_link.py fusion --shapes experts
        the same, of the model with experts alone
    sudo python benchmarks/comm/slow_link.py levels
        training steps: two levels and dedup against flat
    sudo python benchmarks/comm/slow_link.py levels --nodes 4
        the same on four nodes that share the link
    sudo NPROC=4 python benchmarks/comm/slow_link.py order    training steps: orders of collectives
    sudo NPROC=4 python benchmarks/comm/slow_link.py ddp    the same, dense gradients all-reduced
    sudo python benchmarks/comm/slow_link.py strategies
        training steps: collectives in two levels, and the partitioned embedding, each alone
    sudo python benchmarks/comm/slow_link.py embedding
        training steps with the embedding table in parts
    sudo python benchmarks/comm/slow_link.py context --rates 200
        training steps with sequences on one node or on both

`comm/exchange.py`, `comm/padding.py`, `comm/steps.py` (fusion, levels, order, ddp, strategies),
`comm/embedding.py` and `comm/context.py` say what is measured. Seconds are medians from a barrier
to a barrier; `ratio_to_...` is the median of the ratios round by round. Bytes are those that a node
sends: by the interface's counter, with all headers, and by the formulas of `jmoe.planning`. --rates
0 is this machine without a link. XLA:CPU has as many threads as cores, and one that waits for a
collective computes nothing: on few cores give the ranks more with NPROC=4. The ranks run in the
environment that `train.py` gives itself.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import tempfile

from benchmarks.comm import context, embedding, exchange, padding, steps
from benchmarks.lib import report
from benchmarks.lib.linked_nodes import NODES
from benchmarks.lib.ranks import NUM_NODES, add_rank_options, join_as_rank, launch_ranks

MEASUREMENTS = {
    "exchange": exchange,
    "padding": padding,
    "embedding": embedding,
    "context": context,
    **dict.fromkeys(steps.COMMANDS, steps),
}


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in MEASUREMENTS.items():
        command = commands.add_parser(name, help=module.COMMANDS[name])
        module.add_options(command)
        rates = [0, 100] if name == "embedding" else [50, 100, 200]
        command.add_argument(
            "--rates",
            type=float,
            nargs="+",
            default=rates,
            help="Mbit/s, both directions together; 0: no link",
        )
        command.add_argument("--rounds", type=int, default=7)
        command.add_argument(
            "--ranks-per-node", type=int, default=1 if name in (*steps.ORDERINGS, "context") else 2
        )
        command.add_argument(
            "--nodes", type=int, choices=range(2, len(NODES) + 1), default=NUM_NODES
        )
        command.add_argument("--cache-dir", help="keep compiled programs in this folder")
        add_rank_options(command)
    a = parser.parse_args()
    if a.command in steps.COMMANDS:
        for option, known in (
            ("shapes", steps.SHAPES[a.command]),
            ("variants", steps.VARIANTS[a.command]),
        ):
            for name in getattr(a, option) or ():
                if name not in known:
                    parser.error(f"--{option} {name}: must be among {', '.join(known)}")
    return a


def main() -> None:
    a = parse()
    if a.rank is not None:
        report.finish(
            MEASUREMENTS[a.command].measure(a, *join_as_rank(a, a.ranks_per_node, a.nodes))
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for rate in a.rates
            for row in launch_ranks(rate, a.cache_dir or folder, a.ranks_per_node, a.nodes)
        ]
    options = report.options(a, "command", "rates", "rank", "port", "cache_dir")
    result = {"benchmark": a.command, "nodes": a.nodes, "options": options, "rows": rows}
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
