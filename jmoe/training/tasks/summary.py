"""The table printed at the end of an image run, and the linear baseline for its accuracies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jmoe.data.images import ImageSplit, ImageTask

RIDGE: Final = 1.0  # added to the diagonal of the normal equations


@dataclass(frozen=True)
class TaskResult:
    """One task's results; accuracies are on held-out images, from 0 to 1."""

    name: str
    num_classes: int
    before: float | None  # None: not measured
    accuracy: float
    linear: float
    images_per_s: float  # in training; nan: not measured
    path: tuple[int, ...] = ()  # the task's expert in each task-routed layer


def linear_baseline_accuracy(task: ImageTask) -> float:
    """Return the held-out accuracy of a linear classifier on raw pixels, fitted by ridge regression
    to one-hot targets.
    """

    def pixels_and_bias(split: ImageSplit) -> np.ndarray:
        x = split.pixels.reshape(len(split.labels), -1) / 255.0
        return np.concatenate([x, np.ones((len(x), 1))], axis=1)

    x, targets = pixels_and_bias(task.train), np.eye(len(task.classes))[task.train.labels]
    weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ targets)
    return float(
        np.mean(np.argmax(pixels_and_bias(task.held_out) @ weights, axis=1) == task.held_out.labels)
    )


def print_task_summary(
    results: Sequence[TaskResult], path: Path, stream: TextIO | None = None
) -> None:
    """Print a table with one row per task, and the path of the picture. stream: default stdout."""
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold"
    )
    table.add_column("task")
    for name in ("classes", "before", "accuracy", "linear model on pixels", "samples/s"):
        table.add_column(name, justify="right")
    routed = any(result.path for result in results)
    if routed:
        table.add_column("path")
    for result in results:
        before = "" if result.before is None else f"{result.before:.1%}"
        rate = f"{result.images_per_s:,.0f}" if math.isfinite(result.images_per_s) else ""
        cells = [
            str(result.num_classes),
            before,
            f"{result.accuracy:.1%}",
            f"{result.linear:.1%}",
            rate,
        ]
        cells += [" ".join(map(str, result.path))] if routed else []
        table.add_row(result.name, *cells)
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 80
    console.print()
    console.print(table)
    console.print(f"\nreport       {path}", soft_wrap=True)
