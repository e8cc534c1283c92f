"""The simulators behind rows of more than two nodes, and how far they are off."""

from benchmarks.paper.simulator import check
from benchmarks.paper.tables.row import Result, Row, matching_row

SOURCES = {"ready": "a step of the same session", "no link": "a step without a link"}


def simulated_text(result: Result) -> str:
    rows = check(result)
    return f"{len(rows)} exchanges, off by {max(abs(row['error']) for row in rows):.1%} at most"


def simulated_steps_text(result: Result) -> str:
    parts = {
        f"orders from {words}": [row for row in result["orders"] if row["compute"] == source]
        for source, words in SOURCES.items()
    }
    parts["four nodes from two"] = result["four_nodes"]
    shown = [
        f"{name} {sum(abs(row['error']) <= 0.1 for row in rows)} of {len(rows)}, off by "
        f"{max(abs(row['error']) for row in rows):.0%} at most"
        for name, rows in parts.items()
    ]
    nodes = max(row["nodes"] for row in result["simulated"])
    steps = [row["simulated_s"] for row in result["simulated"] if row["nodes"] == nodes]
    return (
        f"steps within 10 % of measured ones: {'; '.join(shown)}. {nodes} nodes of two ranks, "
        f"simulated, not measured: "
        f"{min(steps):.1f} to {max(steps):.1f} s a step"
    )


def many_nodes_text(result: Result) -> str:
    parts = []
    numbers = {row["nodes"] for row in result["rows"]}
    for nodes in (min(numbers), max(numbers)):
        flat, dedup = (
            matching_row(result["rows"], what="exchange", kind=kind, nodes=nodes)
            for kind in ("flat", "dedup")
        )
        part = dedup["across_bytes"] / flat["across_bytes"]
        times = f"{1e3 * dedup['seconds']:.0f} ms (flat {1e3 * flat['seconds']:.0f})"
        parts.append(f"{nodes:,} nodes: dedup sends {part:.2f} of flat's bytes across, {times}")
    return f"simulated, not measured, an exchange of a layer; {'; '.join(parts)}"


ROWS = (
    Row(
        "exchanges",
        "the simulator against exchanges that were measured on two nodes",
        "-",
        "predicted over measured",
        "simulator",
        simulated_text,
    ),
    Row(
        "steps",
        "simulated steps: against measured ones, and on 4 to 64 nodes",
        "-",
        "predicted over measured; computing changes from session to session, and four nodes share "
        "the cores of two",
        "step-simulator",
        simulated_steps_text,
    ),
    Row(
        "the papers' scale",
        "simulated exchanges and embeddings on 8 to 1,024 nodes of 8 GPUs",
        "-",
        "formulas alone: none of it is measured",
        "communication-simulated",
        many_nodes_text,
    ),
)
