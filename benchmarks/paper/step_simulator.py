"""Predict measured training steps from a model, and steps on up to 64 nodes.

    python -m benchmarks.paper.step_simulator    also writes benchmarks/results/steps_simulated.json

A step takes link_s + shown x compute_s. link_s: what the link takes for the step's bytes, for many
nodes with the latency of all-to-alls; it carries one collective at a time. compute_s: what all else
takes. An all-to-all waits for what it sends, and what follows waits for it. In ready, none, fixed
and priority that holds for all collectives: nothing computes while one travels, and shown = 1. In
chunks and pipelined gathers and reductions (with pipelined parts of an all-to-all too) travel
beside matrix products; shown is the part of compute_s in which the link rests. This form was chosen
after the measured rows were seen.

orders: steps of `order_two_nodes_cpu.json`, one rank a node, with the bytes that each sent.
compute_s is another row's: `no link`, a step in the order priority without a link (for `rows` and
`slower_hour`, which are of the same code); or `ready`, that order's step of the same session, rate
and chunk size, less its link_s; seconds are then that step's over the median of the rounds' ratios
to it, since the machine's speed changes between rounds. shown is fitted to `rows` at 200 Mbit/s.
What something was fitted to is not predicted from it.

four_nodes: steps of `levels_cpu.json` on four nodes of two ranks, from those on two. shown x
compute_s is the step on two nodes less its link_s, and doubles (shown_s), as twice as many ranks
share the two cores. The bytes of all-to-alls are those of `exchange_traffic`. The rest of what two
nodes sent is gathers and reductions of B bytes: in two levels B (N - 1) / N leave a node, in one B
(2 N - 1) / 2 N.

simulated: nothing of it is measured. The same on more nodes, each with a core and a port of its
own, of the rate of the link that two nodes shared, for both directions together; as many experts as
were measured, or one for every rank. Not in the model: latency of gathers and reductions, products
with the empty rows of buffers, routers of more experts, and ranks that wait for slower ones.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.paper.simulator import NODES, RANKS, links_of
from jmoe.config.parallel import ExchangeKind
from jmoe.planning.exchange import ExchangePlan, exchange_s, exchange_traffic, nodes_per_token

OVERLAPPED = ("chunks", "pipelined")
EXCHANGES: dict[str, ExchangeKind] = {
    "flat": "flat",
    "hierarchical": "dedup",
}  # of the variants of `levels`
CAPACITY_FACTOR = 1.25  # of `benchmarks/comm/steps.py`
HEAD = {"benchmark": "simulated steps", "command": "python -m benchmarks.paper.step_simulator"}
NOTES = [
    "orders and four_nodes: measured steps beside predicted ones; simulated: nothing of it is "
    "measured"
]
NOTES += [
    "computing takes another time in every session, so `no link`, a step of one of them, misses "
    "slower ones"
]
Row = JsonObject


def step_s(compute_s: float, link_s: float, shown: float = 1.0) -> float:
    """Return the seconds of a step; `shown` is the share of computing that is not hidden."""
    return link_s + shown * compute_s


def predicted(row: Row, names: tuple[str, ...], seconds: float, **known: float | str) -> Row:
    known |= {"predicted_s": round(seconds, 4), "error": round(seconds / row["seconds"] - 1, 3)}
    return {name: row[name] for name in names} | known


def _first_matching_row(rows: list[Row], **wanted: Any) -> Row:
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


def _computing(row: Row) -> float:
    return row["seconds"] - row["link_s"]


def orders(measured: Row) -> Iterator[Row]:
    """Yield each step over a link once for every row that can predict it, in sessions that
    compare with `ready`.
    """
    sessions = {
        name: part["rows"]
        for name, part in measured.items()
        if isinstance(part, dict) and "rows" in part
    }
    without_link_s = _first_matching_row(sessions.pop("overhead_of_cutting"), variant="priority")[
        "seconds"
    ]
    sessions.pop("queue")  # its steps shared the processor with other programs
    sessions = {name: rows for name, rows in sessions.items() if "ratio_to_ready" in rows[0]}
    fitted = [row for row in measured["rows"] if row["mbit_per_s"] == 200]
    ready_s = _computing(_first_matching_row(fitted, variant="ready"))
    parts = {
        name: _computing(_first_matching_row(fitted, variant=name)) / ready_s for name in OVERLAPPED
    }
    names = "mbit_per_s", "variant", "chunk_bytes", "link_s", "seconds"
    for session, rows in ({"rows": measured["rows"]} | sessions).items():
        for row in rows:
            variant, sources = (
                row["variant"],
                dict[str, tuple[float, float]](),
            )  # seconds of computing, of the step
            if session in ("rows", "slower_hour") and variant not in OVERLAPPED:
                sources["no link"] = without_link_s, row["seconds"]
            if variant != "ready" and not (variant in OVERLAPPED and row in fitted):
                same = {key: row[key] for key in ("mbit_per_s", "chunk_bytes")}
                ready = _first_matching_row(rows, variant="ready", **same)
                sources["ready"] = (
                    _computing(ready),
                    round(ready["seconds"] / row["ratio_to_ready"], 4),
                )
            for source, (compute_s, seconds) in sources.items():
                shown = parts.get(variant, 1.0)
                known = {
                    "compute": source,
                    "compute_s": round(compute_s, 4),
                    "shown": round(shown, 3),
                }
                step = step_s(compute_s, row["link_s"], shown)
                yield {"session": session} | predicted(
                    row | {"seconds": seconds}, names, step, **known
                )


def exchanged(row: Row, nodes: int, on_link: int) -> tuple[int, float]:
    """Return the bytes that a node sends in a step's all-to-alls, and the seconds they take."""
    kind = EXCHANGES[row["variant"]]
    experts = max(row["experts"], nodes * RANKS)
    top_k = row["top_k"]
    sizes = {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "row_bytes": 2 * row["hidden_size"],
    }
    sizes["num_tokens"] = row["tokens_per_rank"]
    plan = ExchangePlan(kind, "", nodes, RANKS, nodes_per_token(nodes, experts, top_k))
    sent = exchange_traffic(plan, **sizes, capacity_factor=CAPACITY_FACTOR, backward=True)
    seconds = exchange_s(plan, sent, links_of(row["mbit_per_s"], on_link), backward=True)
    return row["layers"] * RANKS * sent.across_bytes, row["layers"] * seconds


def traffic(row: Row, nodes: int, on_link: int) -> tuple[float, float]:
    """Return a node's bytes in a step, and the seconds of a link that `on_link` nodes share.

    row: measured on two nodes.
    """

    def leave(nodes: int) -> float:
        members = nodes * (RANKS if row["variant"] == "flat" else 1)
        return (members - 1) / members

    others = (row["sent_bytes"] - exchanged(row, NODES, NODES)[0]) * leave(nodes) / leave(NODES)
    sent_bytes, seconds = exchanged(row, nodes, on_link)
    return sent_bytes + others, seconds + on_link * others * 8e-6 / row["mbit_per_s"]


def four_nodes(measured: Row) -> Iterator[Row]:
    """Yield the steps on four nodes, which share the link and the cores that two had."""
    names = ("mbit_per_s", "experts", "top_k", "variant", "seconds", "sent_bytes")
    for row in measured["four_nodes"]["rows"]:
        two = _first_matching_row(measured["rows"], **{name: row[name] for name in names[:4]})
        sent_bytes, link_s = traffic(two, 4, on_link=4)
        compute_s = (two["seconds"] - traffic(two, NODES, on_link=NODES)[1]) * 4 / NODES
        known = {
            "predicted_bytes": round(sent_bytes),
            "link_s": round(link_s, 4),
            "shown_s": round(compute_s, 4),
        }
        yield predicted(row, names, step_s(compute_s, link_s), **known)


def simulated(measured: Row) -> Iterator[Row]:
    """Yield steps on more nodes than were measured."""
    for row in measured["rows"]:
        for nodes in (4, 8, 16, 32, 64):
            sent_bytes, link_s = traffic(row, nodes, on_link=NODES)
            kept = {
                "simulated": True,
                "nodes": nodes,
                "experts": max(row["experts"], nodes * RANKS),
            }
            kept |= {name: row[name] for name in ("mbit_per_s", "top_k", "variant")}
            kept |= {"sent_bytes": round(sent_bytes), "link_s": round(link_s, 4)}
            shown_s = row["seconds"] - traffic(row, NODES, on_link=NODES)[1]
            yield kept | {"simulated_s": round(step_s(shown_s, link_s), 4)}


def predict() -> JsonObject:
    """Return the committed result: all rows, and the number within 10 % of the measurement."""
    order, levels = (
        json.loads((RESULTS / f"{name}_cpu.json").read_text())
        for name in ("order_two_nodes", "levels")
    )
    found = {
        "orders": [*orders(order)],
        "four_nodes": [*four_nodes(levels)],
        "simulated": [*simulated(levels)],
    }
    parts = {
        f"orders, {name}": [r for r in found["orders"] if r["compute"] == name]
        for name in ("no link", "ready")
    }
    parts["four nodes"] = found["four_nodes"]
    good = {
        name: f"{sum(abs(r['error']) <= 0.1 for r in rows)} of {len(rows)}"
        for name, rows in parts.items()
    }
    return HEAD | {"notes": NOTES, "within_10_percent": good} | found


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--result",
        default=str(RESULTS / "steps_simulated.json"),
        help="default: over the committed one; empty: nowhere",
    )
    path, result = parser.parse_args().result, predict()
    if path:
        report.write(result, Path(path))
    report.finish(result)


if __name__ == "__main__":
    main()
