"""Draw the papers' figures from the committed results.

    python -m benchmarks.paper.pictures

Writes docs/papers_moesys.png and docs/papers_lina.png. Titles name the figures whose place they
take; what a paper has is in docs/papers.md.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import DOCS
from benchmarks.lib.report import JsonObject
from benchmarks.paper.index import BY_NAME
from benchmarks.paper.tables.row import Program

Result = JsonObject
Rows = list[JsonObject]
COLORS = {
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "optimizer": "tab:green",
    "all_to_all": "tab:red",
    "other_collectives": "tab:orange",
    "idle": "lightgray",
}


def _bars(axes: Axes, groups: dict[str, dict[str, float]], label: str) -> None:
    """Draw a group of bars for each name, from {group: {bar: height}}."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width = 0.8 / len(names)
    for j, name in enumerate(names):
        at = [i + (j - (len(names) - 1) / 2) * width for i in range(len(groups))]
        axes.bar(at, [bars.get(name, 0.0) for bars in groups.values()], width, label=name)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(label)
    axes.legend(fontsize=7)


def _speeds(
    rows: Rows, ratio: str, group: Callable[[JsonObject], str], bar: str
) -> dict[str, dict[str, float]]:
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(group(row), {})[row[bar]] = row[ratio]
    return groups


def _rate(row: JsonObject) -> str:
    return f"{row['mbit_per_s']:g} Mbit/s" if row["mbit_per_s"] else "no link"


def levels(axes: Axes, result: Result) -> None:
    """Draw the parts of a step's time, flat and in two levels, on two and four nodes."""
    axes.set_title("MoESys, Figure 10: parts of a step, 100 Mbit/s (measured)", fontsize=9)
    rows = [(2, row) for row in result["rows"]] + [(4, row) for row in result["four_nodes"]["rows"]]
    rows = [(nodes, row) for nodes, row in rows if row["mbit_per_s"] == 100]
    for i, (_, row) in enumerate(rows):
        bottom = 0.0
        for part, color in COLORS.items():
            axes.bar(
                i,
                row["parts_s"][part],
                0.7,
                bottom,
                color=color,
                label=None if i else part.replace("_", " "),
            )
            bottom += row["parts_s"][part]
    names = [
        f"{nodes} nodes\n{row['top_k']} of {row['experts']}\n{row['variant']}"
        for nodes, row in rows
    ]
    axes.set_xticks(range(len(rows)), names, fontsize=6)
    axes.set_ylabel("s")
    axes.legend(fontsize=7)


def fusion(axes: Axes, result: Result) -> None:
    """Draw the speed of a step for each combination of fusion and levels."""
    axes.set_title("MoESys, sections 1 and 6: fused and in two levels, crosswise", fontsize=9)

    def shape(row: JsonObject) -> str:
        return f"{_rate(row)}\n{'with experts' if row['experts'] else 'dense'}"

    _bars(
        axes,
        _speeds(result["rows"], "ratio_to_one_by_one_flat", shape, "variant"),
        "speed, one by one, flat = 1",
    )


def strategies(axes: Axes, result: Result) -> None:
    """Draw speed and memory of a step with each strategy alone."""
    axes.set_title("MoESys, Table 5 and Figure 11: each strategy alone", fontsize=9)
    rows = result["strategies"]["rows"]
    whole = rows[0]["device_bytes"]
    groups = {
        row["variant"].replace("_", " "): {
            "tokens/s": row["ratio_to_baseline"],
            "memory": row["device_bytes"] / whole,
        }
        for row in rows
    }
    _bars(axes, groups, "baseline = 1")


def ring(axes: Axes, result: Result) -> None:
    """Draw the speed of a ring of slots over that of resident weights."""
    axes.set_title("MoESys, Figure 12: prefill through a ring of half the layers", fontsize=9)
    _bars(
        axes,
        {row["experts"]: row["speed_of_resident"] for row in result["rows"]},
        "speed, resident = 1",
    )


def embedding(axes: Axes, result: Result) -> None:
    """Draw the speed of a step with a sharded embedding."""
    axes.set_title("MoESys, Table 4: speed with the embedding in parts", fontsize=9)
    rows = [
        row | {"speed": 1 / row["ratio_to_replicated"]}
        for row in result["rows"]
        if row["mbit_per_s"]
    ]
    _bars(
        axes,
        _speeds(rows, "speed", lambda row: f"hidden {row['hidden_size']}", "embedding"),
        "replicated = 1",
    )
    axes.set_yscale("log")


def step_times(axes: Axes, result: Result) -> None:
    """Draw the speed of a step in each order of collectives."""
    axes.set_title("Lina, section 7.2: speed of a step, each means by itself", fontsize=9)
    _bars(axes, _speeds(result["rows"], "ratio_to_ready", _rate, "variant"), "speed, ready = 1")
    axes.set_ylim(0.8, None)


def all_to_alls(axes: Axes, result: Result) -> None:
    """Draw how much sooner a backward pass ends its all-to-alls."""
    axes.set_title(
        "Lina, section 7.2: all-to-alls of the backward pass, how much sooner", fontsize=9
    )
    _bars(
        axes, _speeds(result["rows"], "ratio_all_to_alls_to_ready", _rate, "variant"), "ready = 1"
    )


def layers(axes: Axes, result: Result) -> None:
    """Draw the time of a layer, forward and backward."""
    axes.set_title(
        "Lina, section 7.2: time of a layer, forward (dark) and backward (light)", fontsize=9
    )
    rows = result["layers"]["rows"]
    for way, shift, alpha in (("forward", -0.2, 1.0), ("backward", 0.2, 0.5)):
        axes.bar(
            [i + shift for i in range(len(rows))],
            [row[f"{way}_layer_s"] for row in rows],
            0.4,
            alpha=alpha,
        )
    names = [f"{row['variant']}\n{row['mbit_per_s']:g}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=6, rotation=45)
    axes.set_ylabel("s")


def partition_sizes(axes: Axes, result: Result) -> None:
    """Draw the speed of a step by the size of a chunk."""
    axes.set_title("Lina, section 7.2: partition size", fontsize=9)
    for name in ("chunk_sweep", "chunk_sweep_50"):
        rows = [row for row in result[name]["rows"] if row["variant"] == "chunks"]
        points = sorted((row["chunk_bytes"] / 1e6, row["ratio_to_ready"]) for row in rows)
        axes.plot(*zip(*points, strict=True), "o-", label=_rate(rows[0]))
    axes.set(xlabel="MB of a chunk", ylabel="speed, ready = 1", xscale="log")
    axes.legend(fontsize=7)


def paths(axes: Axes, result: Result) -> None:
    """Draw the accuracy of guesses of the next layer's experts."""
    axes.set_title("Lina, Table 5 and Figure 9: guesses of the next layer's experts", fontsize=9)
    rows = {
        row["estimator"]: {"among 2": row["among_2"], "among 4": row["among_4"]}
        for row in result["text"]["accuracy"]
    }
    _bars(axes, rows, "right")
    axes.tick_params(axis="x", labelsize=7)


def inference(axes: Axes, result: Result) -> None:
    """Draw the speed of batches with experts placed by popularity."""
    axes.set_title(
        "Lina, Figures 16 to 19: time of a batch with even placement over its", fontsize=9
    )
    rows = [row for row in result["trained"]["batches"] if row["text"] == "Python"]
    groups = {
        row["contestant"].replace(", ", "\n"): {"median": row["ratio"], "p95": row["ratio_p95"]}
        for row in rows
    }
    _bars(axes, groups, "even = 1")
    axes.tick_params(axis="x", labelsize=6)


PANELS: dict[str, tuple[Callable[[Axes, Result], None], ...]] = {  # by program
    "moesys-table-4": (embedding,),
    "moesys-table-5": (strategies,),
    "moesys-fusion": (fusion,),
    "moesys-figure-10": (levels,),
    "moesys-figure-12": (ring,),
    "lina-order": (step_times, all_to_alls),
    "lina-layer": (layers,),
    "lina-partition-size": (partition_sizes,),
    "lina-popularity": (paths,),
    "lina-inference": (inference,),
}
PICTURES = {
    "papers_moesys.png": (
        "moesys-figure-10",
        "moesys-table-5",
        "moesys-table-4",
        "moesys-figure-12",
    ),
    "papers_lina.png": (
        "lina-order",
        "lina-layer",
        "lina-partition-size",
        "lina-popularity",
        "lina-inference",
    ),
}


def draw(programs: Sequence[Program], path: Path) -> Path:
    """Draw these programs' figures from their results, two a row; return the picture's path."""
    drawn = [(panel, program.committed()) for program in programs for panel in PANELS[program.name]]
    columns = min(2, len(drawn))
    figure = Figure(figsize=(6 * columns, 3.6 * len(drawn) / columns), layout="constrained")
    for axes, (panel, result) in zip(
        figure.subplots(len(drawn) // columns, columns, squeeze=False).flat, drawn, strict=True
    ):
        panel(axes, result)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
    return path


def draw_picture(name: str, folder: Path) -> Path:
    """Draw one of `PICTURES` into the folder; return its path."""
    return draw([BY_NAME[program] for program in PICTURES[name]], folder / name)


def main() -> None:
    for name in PICTURES:
        print(draw_picture(name, DOCS))


if __name__ == "__main__":
    main()
