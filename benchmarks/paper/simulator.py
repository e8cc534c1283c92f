"""Predict exchanges that were measured on two nodes with the simulator of many nodes.

    python -m benchmarks.paper.simulator

`benchmarks/comm/simulate.py` says how long exchanges take on up to 1,024 nodes. Here the same
formula, with the measured link's rate, predicts every exchange of
`results/exchange_two_nodes_cpu.json`: `error` is predicted / measured - 1. The link carries the
bytes of both nodes' two ranks, one after the other.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import json
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.config.cluster import LinkConfig, LinksConfig
from jmoe.planning.exchange import ExchangePlan, Traffic, exchange_s

MEASURED = RESULTS / "exchange_two_nodes_cpu.json"
NODES, RANKS = 2, 2  # of which each; every node sends `formula_bytes`
LATENCY_S = 1e-4  # of a collective on this link, and of a message


def links_of(mbit_per_s: float, nodes: int = NODES) -> LinksConfig:
    """Return a rank's share of a link that carries the bytes of these nodes."""
    link = LinkConfig(mbit_per_s * 1e6 / 8 / nodes / RANKS, LATENCY_S)
    return LinksConfig(LinkConfig(1e38, 0.0), link, link, link, LATENCY_S)


def predicted_s(row: JsonObject) -> float:
    """Return the seconds of an exchange and its return over the row's link, twice if backward."""
    plan = ExchangePlan(row["exchange"], "", NODES, RANKS, 1.0)
    sent = Traffic(across_bytes=row["formula_bytes"] // RANKS, inside_bytes=0)
    return exchange_s(
        plan, sent, links_of(row["mbit_per_s"]), backward=row["direction"] == "backward"
    )


def check(measured: JsonObject) -> list[JsonObject]:
    """Return a row for each exchange that was measured over a link."""
    rows = []
    for row in measured["rows"]:
        if row["mbit_per_s"] > 0:
            kept = {
                name: row[name]
                for name in ("mbit_per_s", "top_k", "experts", "direction", "exchange", "seconds")
            }
            seconds = predicted_s(row)
            rows.append(
                kept
                | {
                    "predicted_s": round(seconds, 4),
                    "error": round(seconds / row["seconds"] - 1, 3),
                }
            )
    return rows


def main() -> None:
    report.parser(__doc__).parse_args()
    rows = check(json.loads(MEASURED.read_text()))
    largest = max((row["error"] for row in rows), key=abs)
    report.finish(
        {
            "benchmark": "simulated against measured exchanges",
            "largest_error": largest,
            "rows": rows,
        }
    )


if __name__ == "__main__":
    main()
