"""Draw the report of an image run, `report.png`, from its `metrics.jsonl`."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jmoe.config import VisionTrainConfig
from jmoe.data.shards import replace_content_durably
from jmoe.planning.elastic import TaskLayout
from jmoe.run.metrics import METRICS_FILE, REPORT_FILE, read_steps_and_events

COLORS: Final = (
    "#2563eb",
    "#ea580c",
    "#0d9488",
    "#be123c",
    "#7c3aed",
    "#65a30d",
    "#0891b2",
    "#a16207",
)


def draw_task_report(output_dir: Path, config: VisionTrainConfig, layout: TaskLayout) -> Path:
    """Draw OUTPUT_DIR/report.png and return its path. It shows accuracies by step, each task's
    experts, and idle time by device.
    """
    names = list(config.tasks)

    def task_accuracies(record: dict[str, dict[str, float]]) -> list[float]:
        return [record.get("task_accuracy", {}).get(name, math.nan) for name in names]

    steps, events = read_steps_and_events(output_dir / METRICS_FILE, task_accuracies)
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
        curves.plot(
            [step for step, _ in points],
            [value for _, value in points],
            "o-",
            color=color,
            label=name,
        )
    curves.set_ylim(0, 1.02)
    curves.legend(frameon=False, loc="lower right")
    _set_title_and_unit(curves, "Accuracy (points: held out, lines: training)", "step")
    learned = [event["paths"] for event in evaluations if "paths" in event]
    _draw_paths(
        experts,
        config,
        learned[-1] if learned else {name: task.path for name, task in config.tasks.items()},
    )
    measured = [event["idle"] for event in events if event["event"] == "idle"]
    _draw_idle(idle, layout.idle_fractions(), measured[-1] if measured else [])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    replace_content_durably(output_dir / REPORT_FILE, buffer.getvalue())
    return output_dir / REPORT_FILE


def _draw_idle(ax: Axes, planned: Sequence[float], measured: Sequence[float | None]) -> None:
    """Draw each device's idle time in percent: as planned and, if known for this layout, as
    measured.
    """
    devices = np.arange(len(planned))
    ax.barh(
        devices - 0.2,
        [100 * share for share in planned],
        0.36,
        color=COLORS[0],
        label="by the plan",
    )
    if len(measured) == len(planned):
        ax.barh(
            devices + 0.2,
            100 * np.array(measured, np.float64),
            0.36,
            color=COLORS[1],
            label="measured",
        )
    ax.set_yticks(devices, [f"device {device}" for device in devices])
    ax.set_xlim(0, 100)
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="lower right")
    _set_title_and_unit(ax, "Idle time", "% of a step")


def _draw_paths(
    ax: Axes, config: VisionTrainConfig, path_by_task: Mapping[str, Sequence[int]]
) -> None:
    """Draw the expert of each task in each task-routed layer."""
    layers = config.model.task_layers
    paths = np.array([path_by_task[name] for name in config.tasks]).reshape(len(config.tasks), -1)
    for (row, column), expert in np.ndenumerate(paths):
        shared = (paths[:, column] == expert).sum() > 1
        face = "#e5e7eb" if shared else COLORS[row % len(COLORS)]
        ax.text(
            column,
            row,
            f"expert {expert}",
            ha="center",
            va="center",
            bbox={"facecolor": face, "alpha": 0.6},
        )
    ax.set_xlim(-0.6, max(1, len(layers)) - 0.4)
    ax.set_ylim(len(paths) - 0.4, -0.6)
    ax.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
    ax.set_yticks(range(len(paths)), list(config.tasks))
    _set_title_and_unit(ax, "Experts of tasks (grey: shared)", "")


def _set_title_and_unit(ax: Axes, title: str, unit: str) -> None:
    """Set the title and the unit of the horizontal axis, and hide the top and right borders."""
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.set_xlabel(unit)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
