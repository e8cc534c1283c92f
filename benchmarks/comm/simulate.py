"""Predict the bytes and seconds of exchanges on 8 to 1,024 nodes from a model of their links.

    python benchmarks/comm/simulate.py
    python benchmarks/comm/simulate.py --nodes 8 --across-gb-per-s 25 --result '' --plot ''

Writes benchmarks/results/communication_simulated.json and draws docs/communication_simulated.png
from it.

Nodes of 8 GPUs, NVLink inside, one InfiniBand port a GPU across, 32 nodes below each leaf switch
and the spine between these; every GPU has its own tokens, whatever the number of nodes. Bytes are
those of `exchange_traffic` and `embedding_traffic` of `jmoe.planning`, the formulas that tests
compare with the compiled programs and benchmarks with the counters of a real link; an exchange's
time is that by which a run chooses it, `exchange_s`. A collective takes its latency once, a
while for every message of a device, and its bytes at the link's full rate; messages of different
levels of one collective overlap, collectives do not. Not in the model: congestion, uneven routing,
and compute, which hides part of all this. Uniform routing is the worst case of dedup.

exchange: dispatch and combine of one layer, forwards, one expert on each GPU; `auto` is what a run
chooses for both passes. (Buffers hold rows in eights: with few rows for each of thousands of GPUs,
the flat exchange sends them half empty.) embedding: lookup and head with their gradients, of one
pass.

The last line of output is one JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks import DOCS, RESULTS
from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.config.cluster import LinkConfig, LinksConfig
from jmoe.planning.embedding import EmbeddingPlan, EmbeddingSizes, embedding_traffic, plan_embedding
from jmoe.planning.exchange import (
    ExchangeLoad,
    Traffic,
    exchange_s,
    exchange_traffic,
    plan_exchange,
)

GPUS_PER_NODE = 8
ROUNDS = 2  # of rows: as many as ids that are all different need
EXCHANGES = ("flat", "hierarchical", "dedup", "dedup, 4 nodes a token", "auto")
EMBEDDINGS = ("replicated", "columns", "rows", "columns, parallel head")


def level_seconds(
    link: LinkConfig, message_s: float, sent_bytes: float, messages: int, collectives: int
) -> float:
    """Return the seconds of consecutive collectives for these bytes and messages."""
    if messages == 0:
        return 0.0
    return collectives * link.latency_s + messages * message_s + sent_bytes / link.bytes_per_s


def embedding_seconds(
    links: LinksConfig, plan: EmbeddingPlan, sent: Traffic, tied: bool, rounds: int
) -> float:
    """Return the seconds of an embedding's collectives in a step.

    All-to-alls go to all GPUs, other collectives over two levels; between nodes all take the
    farthest link. A whole parameter is gathered, and its gradient scattered, by rings with one hop
    a peer. A parallel head gathers hidden states and scatters gradients, and in each of eight
    chunks three numbers of the softmax.
    """
    peers = plan.num_nodes - 1, plan.devices_per_node - 1
    all_to_alls = {"replicated": 0, "columns": 3, "rows": 3 * rounds}[plan.kind]
    all_to_alls += 2 if plan.parallel_head and tied and plan.kind == "columns" else 0
    whole = (plan.kind == "replicated") + (
        not plan.parallel_head and not (tied and plan.kind == "replicated")
    )
    levels = 2 * whole + (10 if plan.parallel_head else 0)
    flat = all_to_alls * peers[0] * plan.devices_per_node, all_to_alls * peers[1]
    messages = flat[0] + levels * peers[0], flat[1] + levels * peers[1]
    collectives = all_to_alls + levels
    across = links.spine if plan.num_nodes > links.nodes_per_leaf else links.leaf
    sizes = (across, sent.across_bytes, messages[0]), (links.inside, sent.inside_bytes, messages[1])
    return sum(
        level_seconds(link, links.message_s, size, count, collectives)
        for link, size, count in sizes
    )


def simulate_exchange(
    a: argparse.Namespace, links: LinksConfig, kind: str, nodes: int
) -> JsonObject:
    name, limited, _ = kind.partition(",")
    experts = nodes * GPUS_PER_NODE
    groups = {"n_group": nodes, "topk_group": min(nodes, 4)} if limited and nodes > 4 else {}
    sizes = {"num_experts": experts, "num_experts_per_tok": a.top_k}
    load = ExchangeLoad(links, a.tokens, 2 * a.hidden_size, capacity_factor=1.0)
    topology = {"num_nodes": nodes, "devices_per_node": GPUS_PER_NODE, "load": load}
    plan = plan_exchange(name, **topology, **sizes, **groups)  # type: ignore[arg-type]
    sent = exchange_traffic(
        plan, num_tokens=a.tokens, row_bytes=load.row_bytes, capacity_factor=1.0, **sizes
    )
    return _row("exchange", kind, nodes, sent, exchange_s(plan, sent, links)) | {
        "exchange": plan.kind
    }


def simulate_embedding(
    a: argparse.Namespace, links: LinksConfig, kind: str, nodes: int
) -> JsonObject:
    vocabulary = EmbeddingSizes(
        a.vocab_size, a.hidden_size, a.tied, a.tokens, activation_bytes=2, sharded=True
    )
    name, parallel, _ = kind.partition(",")
    plan = plan_embedding(name, vocabulary, num_nodes=nodes, devices_per_node=GPUS_PER_NODE)  # type: ignore[arg-type]
    plan = (
        EmbeddingPlan(plan.kind, "", nodes, GPUS_PER_NODE, parallel_head=True) if parallel else plan
    )
    sent = embedding_traffic(plan, vocabulary, ROUNDS)
    seconds = embedding_seconds(links, plan, sent, a.tied, ROUNDS)
    return _row("embedding", kind, nodes, sent, seconds) | {"parallel_head": plan.parallel_head}


def _row(what: str, kind: str, nodes: int, sent: Traffic, seconds: float) -> JsonObject:
    sizes = {"across_bytes": sent.across_bytes, "inside_bytes": sent.inside_bytes}
    return {"what": what, "kind": kind, "nodes": nodes} | sizes | {"seconds": seconds}


def draw(result: JsonObject, path: Path) -> None:
    """Plot the bytes that leave a GPU's node, and the seconds, over the number of nodes."""
    from matplotlib.figure import Figure

    rows, a = result["rows"], argparse.Namespace(**result["options"])
    caption = (
        f"NVLink {a.inside_gb_per_s:g} GB/s, InfiniBand {a.across_gb_per_s:g} GB/s a GPU; "
        f"{a.tokens} tokens a GPU, hidden {a.hidden_size}, top-{a.top_k}, vocabulary "
        f"{a.vocab_size}, bfloat16"
    )
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    figure.suptitle(f"Simulated, not measured\n{caption}", fontsize=10)
    titles = {
        "exchange": "Tokens to their experts and back, one layer",
        "embedding": "Embedding and head, one pass",
    }
    scales = (("across_bytes", 1e6, "MB a GPU sends to other nodes"), ("seconds", 1e-3, "ms"))
    for j, (what, kinds) in enumerate((("exchange", EXCHANGES), ("embedding", EMBEDDINGS))):
        axes[0, j].set_title(titles[what], fontsize=10)
        for i, (name, unit, label) in enumerate(scales):
            for kind, style in zip(kinds, ("o-", "s--", "^-", "D:", "*:"), strict=False):
                points = [
                    (r["nodes"], r[name] / unit)
                    for r in rows
                    if (r["what"], r["kind"]) == (what, kind)
                ]
                axes[i, j].plot(*zip(*points, strict=True), style, label=kind, markersize=4)
            axes[i, j].set(xscale="log", ylabel=label)
            axes[i, j].set(**({"ylim": (0, None)} if what == "exchange" else {"yscale": "log"}))
            axes[i, j].grid(alpha=0.3)
        axes[1, j].set_xlabel("nodes of 8 GPUs")
        nodes = sorted({r["nodes"] for r in rows})
        axes[1, j].set_xticks(nodes, [str(n) for n in nodes])
        axes[1, j].set_xticks([], minor=True)
        axes[0, j].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2**i for i in range(3, 11)])
    parser.add_argument("--tokens", type=int, default=4096, help="of a GPU in one pass")
    parser.add_argument("--hidden-size", type=int, default=8192)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=131072)
    parser.add_argument("--tied", action="store_true", help="the head is the table")
    parser.add_argument(
        "--across-gb-per-s", type=float, default=50, help="of a GPU: 400 Gbit/s InfiniBand"
    )
    parser.add_argument("--inside-gb-per-s", type=float, default=450, help="of a GPU: NVLink 4")
    parser.add_argument(
        "--spine-gb-per-s",
        type=float,
        help="of a GPU, to nodes below other leaf switches; as across",
    )
    parser.add_argument("--nodes-per-leaf", type=int, default=32)
    parser.add_argument("--across-latency-us", type=float, default=20)
    parser.add_argument("--spine-latency-us", type=float, default=25)
    parser.add_argument("--inside-latency-us", type=float, default=8)
    parser.add_argument(
        "--message-us", type=float, default=0.5, help="of each message of a collective"
    )
    result = RESULTS / "communication_simulated.json"
    parser.add_argument(
        "--result",
        default=str(result),
        help="where the result goes; default: over the committed one; empty: nowhere",
    )
    plot = DOCS / "communication_simulated.png"
    parser.add_argument(
        "--plot", default=str(plot), help="where the plot of it goes; empty: nowhere"
    )
    return parser.parse_args(arguments)


def simulate(a: argparse.Namespace) -> list[JsonObject]:
    """Return a row for every kind of exchange and embedding and number of nodes."""
    across = LinkConfig(a.across_gb_per_s * 1e9, a.across_latency_us / 1e6)
    inside = LinkConfig(a.inside_gb_per_s * 1e9, a.inside_latency_us / 1e6)
    spine = LinkConfig((a.spine_gb_per_s or a.across_gb_per_s) * 1e9, a.spine_latency_us / 1e6)
    links = LinksConfig(inside, across, across, spine, a.message_us / 1e6, a.nodes_per_leaf)
    rows = [simulate_exchange(a, links, kind, nodes) for kind in EXCHANGES for nodes in a.nodes]
    return rows + [
        simulate_embedding(a, links, kind, nodes) for kind in EMBEDDINGS for nodes in a.nodes
    ]


def main() -> None:
    a = parse()
    command = shlex.join(["python", "benchmarks/comm/simulate.py", *sys.argv[1:]])
    options = report.options(a, "result", "plot")
    result = {
        "benchmark": "simulate_communication",
        "command": command,
        "simulated": True,
        "options": options,
    }
    result["rows"] = [report.progress(row) for row in simulate(a)]
    if a.result:
        report.write(result, Path(a.result))
    if a.plot:
        draw(result, Path(a.plot))
    report.finish(result)


if __name__ == "__main__":
    main()
