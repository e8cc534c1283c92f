"""The report of a run on images: a table of its tasks, and `report.png`, drawn from `metrics.jsonl`."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jmoe.config import VisionTrainConfig
from jmoe.data.images import ImageTask, Split
from jmoe.data.shards import write_atomic
from jmoe.planning.elastic import Layout
from jmoe.run.metrics import METRICS_FILE, read_run
from jmoe.run.report import REPORT_FILE

RIDGE: Final = 1.0  # added to the diagonal of the normal equations
COLORS: Final = ("#2563eb", "#ea580c", "#0d9488", "#be123c", "#7c3aed", "#65a30d", "#0891b2", "#a16207")


@dataclass(frozen=True)
class TaskResult:
    """The figures of a run in one task; accuracies are those of held-out images."""

    name: str
    num_classes: int
    before: float | None  # None: not measured
    accuracy: float
    linear: float
    images_per_s: float  # in training; nan: not measured
    path: tuple[int, ...] = ()  # the expert that it takes in each layer routed by task


def linear_accuracy(task: ImageTask) -> float:
    """Return what a linear model by least squares on the pixels, with a ridge of 1, gets right of the held-out images.

    Its targets are 1 for an image's class and 0 for others; the largest output is the class.
    """

    def inputs(split: Split) -> np.ndarray:
        x = split.pixels.reshape(len(split.labels), -1) / 255.0
        return np.concatenate([x, np.ones((len(x), 1))], axis=1)

    x, targets = inputs(task.train), np.eye(len(task.classes))[task.train.labels]
    weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ targets)
    return float(np.mean(np.argmax(inputs(task.held_out) @ weights, axis=1) == task.held_out.labels))


def print_task_summary(results: Sequence[TaskResult], path: Path, stream: TextIO | None = None) -> None:
    """Print a table with a row a task, and where the picture is."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("task")
    for name in ("classes", "before", "accuracy", "linear model on pixels", "samples/s"):
        table.add_column(name, justify="right")
    routed = any(result.path for result in results)
    if routed:
        table.add_column("path")
    for result in results:
        before = "" if result.before is None else f"{result.before:.1%}"
        rate = f"{result.images_per_s:,.0f}" if math.isfinite(result.images_per_s) else ""
        cells = [str(result.num_classes), before, f"{result.accuracy:.1%}", f"{result.linear:.1%}", rate]
        cells += [" ".join(map(str, result.path))] if routed else []
        table.add_row(result.name, *cells)
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 80
    console.print()
    console.print(table)
    console.print(f"\nreport       {path}", soft_wrap=True)


def write_task_report(output_dir: Path, config: VisionTrainConfig, layout: Layout) -> Path:
    """Draw OUTPUT_DIR/report.png: accuracies by step, who uses which expert, idle time by device; return its path."""
    names = list(config.tasks)

    def of_step(record: dict[str, dict[str, float]]) -> list[float]:
        return [record.get("task_accuracy", {}).get(name, math.nan) for name in names]

    steps, events = read_run(output_dir / METRICS_FILE, of_step)
    figure = Figure(figsize=(13.5, 5.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    curves, experts, idle = figure.subplots(1, 3, width_ratios=(2, 1.2, 1))
    training = np.array(list(steps.values()), np.float64).reshape(-1, len(names))
    evaluations = [event for event in events if event["event"] == "evaluation"]
    for number, name in enumerate(names):
        color = COLORS[number % len(COLORS)]
        if len(training):
            window = max(1, len(training) // 25)
            mean = np.convolve(training[:, number], np.ones(window) / window, "valid")
            curves.plot(list(steps)[window - 1 :], mean, color=color, alpha=0.35, linewidth=1)
        points = [(event["step"], event["task_accuracy"][name]) for event in evaluations]
        curves.plot([step for step, _ in points], [value for _, value in points], "o-", color=color, label=name)
    curves.set_ylim(0, 1.02)
    curves.legend(frameon=False, loc="lower right")
    _titled(curves, "Accuracy (points: held out, lines: training)", "step")
    learned = [event["paths"] for event in evaluations if "paths" in event]
    _draw_paths(experts, config, learned[-1] if learned else {name: task.path for name, task in config.tasks.items()})
    measured = [event["idle"] for event in events if event["event"] == "idle"]
    _draw_idle(idle, layout.idle(), measured[-1] if measured else [])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomic(output_dir / REPORT_FILE, buffer.getvalue())
    return output_dir / REPORT_FILE


def _draw_idle(ax: Axes, planned: Sequence[float], measured: Sequence[float | None]) -> None:
    """Draw each device's idle time: by the plan and, where it was measured in this layout, what it was."""
    devices = np.arange(len(planned))
    ax.barh(devices - 0.2, [100 * share for share in planned], 0.36, color=COLORS[0], label="by the plan")
    if len(measured) == len(planned):
        ax.barh(devices + 0.2, 100 * np.array(measured, np.float64), 0.36, color=COLORS[1], label="measured")
    ax.set_yticks(devices, [f"device {device}" for device in devices])
    ax.set_xlim(0, 100)
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="lower right")
    _titled(ax, "Idle time", "% of a step")


def _draw_paths(ax: Axes, config: VisionTrainConfig, of_task: Mapping[str, Sequence[int]]) -> None:
    """Draw which expert of each layer routed by task each task takes."""
    layers = config.model.task_layers
    paths = np.array([of_task[name] for name in config.tasks]).reshape(len(config.tasks), -1)
    for (row, column), expert in np.ndenumerate(paths):
        shared = (paths[:, column] == expert).sum() > 1
        face = "#e5e7eb" if shared else COLORS[row % len(COLORS)]
        ax.text(column, row, f"expert {expert}", ha="center", va="center", bbox={"facecolor": face, "alpha": 0.6})
    ax.set_xlim(-0.6, max(1, len(layers)) - 0.4)
    ax.set_ylim(len(paths) - 0.4, -0.6)
    ax.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
    ax.set_yticks(range(len(paths)), list(config.tasks))
    _titled(ax, "Experts of tasks (grey: shared)", "")


def _titled(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.set_xlabel(unit)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
