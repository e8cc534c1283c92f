"""Report of a run as a picture: `report.png`, drawn from `metrics.jsonl`. The import is slow,
because it loads matplotlib.

Axis legend:

S  recorded steps
L  MoE layers
E  experts of a layer
C  columns of the heat map
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from jmoe.data.shards import replace_content_durably
from jmoe.run.metrics import METRICS_FILE, REPORT_FILE, least_loaded_expert, read_steps_and_events
from jmoe.types import JsonObject

# per curve; a longer curve is drawn as the range of values of groups of steps
MAX_POINTS: Final = 2000
MAX_COLUMNS: Final = 240  # columns of the heat map
MAP_HEIGHT_PX: Final = 380  # height that the layout gives the heat map
MIN_ROW_PX: Final = 2.5
LAST_RECORDS: Final = 20  # "at the end" is the mean of this many records
SMALL_RUN: Final = 30  # a curve of at most this many steps is drawn with points

_INK, _GREY, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_BLUE, _ORANGE, _TEAL, _RED = "#2563eb", "#ea580c", "#0d9488", "#be123c"
_LOAD_COLORS: Final = LinearSegmentedColormap.from_list(
    "load", ["#1e3a8a", "#3b82f6", "#bfdbfe", "#eceef1", "#fecaca", "#ef4444", "#7f1d1d"]
).with_extremes(bad="#ffffff")
_LOAD_TICKS: Final = {0.25: "¼", 0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4"}


@dataclass(frozen=True)
class _RunCurves:
    """Series of a run, each [S] with one value per step; non-finite values mark steps without
    one.
    """

    step: np.ndarray
    loss: np.ndarray
    tokens_per_s: np.ndarray
    dropped_fraction: np.ndarray
    # (step, [num_moe_layers, num_experts] multiples of the fair share)
    loads: list[tuple[int, np.ndarray]]
    evaluations: list[JsonObject]  # by step
    resumes: list[int]
    experts_per_device: int | None = None  # as packed last; None: never measured
    tiers: JsonObject | None = None  # the event of `summarize_and_log_tiers`


def _load_run(path: Path) -> _RunCurves:
    """Return the curves of the run whose metrics.jsonl is at `path`."""
    names = ("loss", "tokens_per_s", "dropped_fraction")

    def curve_values_and_load(record: JsonObject) -> tuple[list[float], np.ndarray]:
        values = [
            float("nan") if record.get(name) is None else float(record[name]) for name in names
        ]
        if record.get("compiled"):
            values[1] = float("nan")  # the step's time includes compilation
        load_LE = np.asarray(record.get("expert_load") or [], np.float32)
        return values, load_LE * load_LE.shape[-1]

    steps, events = read_steps_and_events(path, curve_values_and_load)
    loss, tokens_per_s, dropped_fraction = (
        np.array([values for values, _ in steps.values()]).reshape(-1, len(names)).T
    )
    evaluations = {int(e["step"]): e for e in events if e["event"] == "evaluation"}
    resumes = sorted(
        {int(e["step"]) for e in events if e["event"] == "resume" and int(e["step"]) > 0}
    )
    return _RunCurves(
        np.array(list(steps), np.int64),
        loss,
        tokens_per_s,
        dropped_fraction,
        loads=[(step, load_LE) for step, (_, load_LE) in steps.items() if load_LE.size],
        evaluations=[e for _, e in sorted(evaluations.items())],
        resumes=resumes,
        experts_per_device=next(
            (e["experts_per_device"] for e in reversed(events) if e["event"] == "packing"), None
        ),
        tiers=next((e for e in reversed(events) if e["event"] == "tiers"), None),
    )


def write_report(output_dir: Path) -> Path:
    """Draw OUTPUT_DIR/report.png from OUTPUT_DIR/metrics.jsonl, replacing it atomically; return its
    path.

    Raises `FileNotFoundError` without metrics.jsonl, and `OSError` if the picture cannot be
    written.
    """
    run = _load_run(output_dir / METRICS_FILE)
    layout = ConstrainedLayoutEngine(
        w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04, rect=(0, 0, 1, 0.9)
    )
    figure = Figure(figsize=(13.5, 8.4), dpi=130, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(
        0.012,
        0.955,
        output_dir.resolve().name,
        fontsize=17,
        fontweight="bold",
        color=_INK,
        parse_math=False,
    )
    figure.text(0.012, 0.925, _headline_text(run), fontsize=10.5, color=_GREY)
    if run.tiers is not None:
        figure.text(0.012, 0.9, _tiers_text(run.tiers), fontsize=10.5, color=_GREY)
    axes = figure.subplots(2, 2)
    panels = (
        (axes[0, 0], "Loss", "nats per token", _draw_loss),
        (axes[0, 1], "Tokens per second", "", _draw_tokens_per_s),
        (axes[1, 0], "Expert load by layer", "", _draw_expert_load),
        (axes[1, 1], "Dropped tokens", "% of assignments", _draw_dropped_fraction),
    )
    for ax, title, unit, draw in panels:
        _style_axes(ax, title, unit, run)
        draw(ax, run)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    replace_content_durably(output_dir / REPORT_FILE, buffer.getvalue())
    return output_dir / REPORT_FILE


def _loss_text(loss: float, bits_per_byte: float) -> str:
    """Return a loss as text: nats per token, and bits per byte if finite."""
    return f"{loss:.3f}" + (
        f" ({bits_per_byte:.3f} bits per byte)" if math.isfinite(bits_per_byte) else ""
    )


def _headline_text(run: _RunCurves) -> str:
    """Return a line of text: steps, median tokens/s, last training and held-out loss, and the
    load of the least loaded expert, as far as the run has them.
    """
    if not run.step.size:
        return "no step yet"
    parts = [f"{run.step.size:,} step{'s' if run.step.size > 1 else ''}"]
    if np.isfinite(run.tokens_per_s).any():
        parts.append(f"{np.nanmedian(run.tokens_per_s):,.0f} tokens/s (median)")
    if np.isfinite(run.loss).any():
        parts.append(
            f"training loss {np.mean(run.loss[np.isfinite(run.loss)][-LAST_RECORDS:]):.3f}"
        )
    if run.evaluations:
        last = run.evaluations[-1]
        parts.append(f"held-out loss {_loss_text(last['loss'], last['bits_per_byte'])}")
    if run.loads:
        share, _, _ = least_loaded_expert(
            np.mean([load_LE for _, load_LE in run.loads[-LAST_RECORDS:]], axis=0)
        )
        parts.append(f"least loaded expert at the end {share:.2f} of fair share")
    if run.experts_per_device is not None:
        parts.append(f"{run.experts_per_device} experts a device")
    return "   ·   ".join(parts)


def _tiers_text(tiers: JsonObject) -> str:
    """Return predictions of a run with experts on tiers beside what was measured."""
    predicted_s = tiers.get("predicted_step_s_measured_share", tiers["predicted_step_s"])
    text = (
        f"experts on tiers: a step {tiers['measured_step_s']:.3g} s, predicted {predicted_s:.3g} s"
    )
    if "waited_share" in tiers:
        shares = (100 * tiers[name] for name in ("waited_share", "predicted_waited_share"))
        text += "   ·   devices waited {:.1f} % of it, predicted {:.1f} %".format(*shares)
    return text


def _style_axes(ax: Axes, title: str, unit: str, run: _RunCurves) -> None:
    """Draw title, unit and a thin grid, and a dotted line at each step where the run was
    resumed.
    """
    ax.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=_INK, pad=10)
    ax.set_title(unit, loc="right", fontsize=9.5, color=_GREY, pad=10)
    ax.set_xlabel("step", fontsize=9.5, color=_GREY)
    ax.tick_params(colors=_GREY, labelsize=9.5, length=0, pad=5)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#9ca3af")
    ax.grid(axis="y", color=_GRID, linewidth=0.9)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    first, last = (int(run.step[0]), int(run.step[-1])) if run.step.size else (0, 0)
    last = max([last, *(int(e["step"]) for e in run.evaluations)])
    ax.set_xlim(*((first, last) if last > first else (first - 0.5, last + 0.5)))
    for i, step in enumerate(run.resumes):
        dots: tuple[float, tuple[float, float]] = (0, (1, 2.5))
        ax.axvline(
            step, color=_GREY, linewidth=0.9, linestyle=dots, zorder=1, label="" if i else "resumed"
        )


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return the centred triangular mean of the finite values, over a window of about 4 % of the
    series.
    """
    half = max(1, round(0.02 * values.size))
    weights = np.concatenate([np.arange(1, half + 1), np.arange(half + 1, 0, -1)]).astype(
        np.float64
    )
    known = np.isfinite(values)
    padded = np.pad(np.where(known, values, 0.0), half)
    total = np.convolve(padded, weights, "valid")
    count = np.convolve(np.pad(known.astype(np.float64), half), weights, "valid")
    return np.where(count > 0, total / np.maximum(count, 1e-12), np.nan)


def _running_median(values: np.ndarray) -> np.ndarray:
    """Return the centred median of the finite values, over a window of about 4 % of the series."""
    half = max(1, round(0.02 * values.size))
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.ma.masked_invalid(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1))
    return np.ma.median(windows, axis=1).filled(np.nan)


def _reduce_groups(
    x: np.ndarray, y: np.ndarray, reduce: Callable[..., np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (first x, reduced y) of groups of neighbouring points, at most `MAX_POINTS` groups.

    reduce: a function that returns one value for each group, from y and the groups' first indices.
    """
    if x.size <= MAX_POINTS:
        return x, y
    starts = np.linspace(0, x.size, MAX_POINTS, endpoint=False).astype(np.int64)
    return x[starts], reduce(y, starts)


def _group_means(y: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each group; nan for a group without any."""
    known = np.isfinite(y)
    total = np.add.reduceat(np.where(known, y, 0.0), starts)
    count = np.add.reduceat(known.astype(np.int64), starts)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _draw_curve(
    ax: Axes,
    run: _RunCurves,
    y: np.ndarray,
    color: str,
    label: str,
    smooth: Callable[[np.ndarray], np.ndarray] = _smoothed,
) -> None:
    """Draw every step in a light colour and the smoothed curve in a strong one; a short run as
    points.
    """
    if not np.isfinite(y).any():
        note = "no finite value" if y.size else "no step yet"
        ax.text(0.5, 0.5, note, transform=ax.transAxes, ha="center", color=_GREY, fontsize=11)
        return
    if y.size <= SMALL_RUN:
        ax.plot(
            run.step,
            y,
            color=color,
            linewidth=1.6,
            marker="o",
            markersize=4.5,
            label=label,
            zorder=3,
            clip_on=False,
        )
        return
    if y.size <= MAX_POINTS:
        ax.plot(run.step, y, color=color, alpha=0.28, linewidth=0.9, zorder=2)
    else:
        x, low = _reduce_groups(run.step, y, np.fmin.reduceat)
        high = _reduce_groups(run.step, y, np.fmax.reduceat)[1]
        ax.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0, zorder=2)
    x, mean = _reduce_groups(run.step, y, _group_means)
    ax.plot(
        x, smooth(mean), color=color, linewidth=2.0, label=label, zorder=3, solid_capstyle="round"
    )


def _draw_loss(ax: Axes, run: _RunCurves) -> None:
    _draw_curve(ax, run, run.loss, _BLUE, "training")
    points = [
        (int(e["step"]), e["loss"], e["bits_per_byte"])
        for e in run.evaluations
        if math.isfinite(e["loss"])
    ]
    if points:
        steps, losses, bits = zip(*points)
        ax.plot(
            steps,
            losses,
            color=_ORANGE,
            linewidth=1.2,
            linestyle=(0, (4, 2)),
            marker="o",
            markersize=6.5,
            markeredgecolor="white",
            markeredgewidth=1.2,
            label=f"held-out, at the end {_loss_text(losses[-1], bits[-1])}",
            zorder=4,
            clip_on=False,
        )
    bad = run.step[~np.isfinite(run.loss)]
    if bad.size:
        ax.axvline(
            int(bad[0]), color=_RED, linewidth=1.4, label=f"not finite at step {int(bad[0]):,}"
        )
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=9.5, labelcolor=_INK, loc="best")


def _draw_tokens_per_s(ax: Axes, run: _RunCurves) -> None:
    _draw_curve(ax, run, run.tokens_per_s, _TEAL, "tokens/s", _running_median)
    known = run.tokens_per_s[np.isfinite(run.tokens_per_s)]
    # A few fast steps are far above the rest and must not set the scale.
    ax.set_ylim(0, 1.2 * float(np.quantile(known, 0.98)) if known.size and known.max() > 0 else 1)
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 10 or y == 0 else f"{y:.3g}")
    )


def _draw_dropped_fraction(ax: Axes, run: _RunCurves) -> None:
    percent = 100 * run.dropped_fraction
    _draw_curve(ax, run, percent, _RED, "dropped")
    highest = float(np.nanmax(percent)) if np.isfinite(percent).any() else 0.0
    ax.set_ylim(0, max(1.12 * highest, 0.1) if highest > 0 else 1)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g} %"))
    if highest == 0 and np.isfinite(percent).any():
        ax.text(
            0.5,
            0.5,
            "no token dropped",
            transform=ax.transAxes,
            ha="center",
            color=_GREY,
            fontsize=11,
        )


def _expert_load_map(run: _RunCurves) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (values [rows, columns] in log2 of the fair share, x edges, y edges) of the heat map
    of expert load.

    A column is the mean of neighbouring records. Each layer is a strip of rows, with an empty row
    between strips. If a layer has too many experts for visible rows, neighbouring experts share a
    row, which shows the expert farthest from its fair share.
    """
    steps = np.array([step for step, _ in run.loads])
    num_columns = min(MAX_COLUMNS, steps.size)
    starts = np.linspace(0, steps.size, num_columns, endpoint=False).astype(np.int64)
    ends = [*starts[1:], steps.size]
    means = [np.mean([load for _, load in run.loads[a:b]], axis=0) for a, b in zip(starts, ends)]
    share_LEC = np.log2(np.maximum(np.stack(means, axis=-1, dtype=np.float64), 1e-3))
    layers, experts, _ = share_LEC.shape
    strip_px = MAP_HEIGHT_PX / layers
    gap_px = max(2.0, 0.1 * strip_px) if layers > 1 else 0.0
    rows = min(experts, max(1, int((strip_px - gap_px) / MIN_ROW_PX)))
    groups = np.linspace(0, experts, rows, endpoint=False).astype(np.int64)
    low = np.minimum.reduceat(share_LEC, groups, axis=1)
    high = np.maximum.reduceat(share_LEC, groups, axis=1)
    strips = np.where(-low > high, low, high)
    values = np.concatenate([strips, np.full((layers, 1, num_columns), np.nan)], axis=1)
    heights = np.tile([max(strip_px - gap_px, 1.0) / rows] * rows + [gap_px], layers)
    y_edges = np.concatenate([[0.0], np.cumsum(heights)])
    return values.reshape(-1, num_columns), np.append(steps[starts], run.step[-1] + 1), y_edges


def _draw_expert_load(ax: Axes, run: _RunCurves) -> None:
    ax.grid(visible=False)
    ax.spines["bottom"].set_visible(False)
    if not run.loads:
        ax.set(xticks=[], yticks=[], xlabel="")
        ax.text(
            0.5,
            0.5,
            "no layer with experts",
            transform=ax.transAxes,
            ha="center",
            color=_GREY,
            fontsize=11,
        )
        return
    layers, experts = run.loads[0][1].shape
    values, x_edges, y_edges = _expert_load_map(run)
    mesh = ax.pcolormesh(
        x_edges,
        y_edges,
        np.ma.masked_invalid(values),
        cmap=_LOAD_COLORS,
        vmin=-2,
        vmax=2,
        rasterized=True,
        zorder=0,
    )
    ax.set_xlim(int(x_edges[0]), int(x_edges[-1]))
    strip = y_edges[-1] / layers
    gap = y_edges[-1] - y_edges[-2]
    ax.set_ylim(y_edges[-1] - gap, 0)
    every = max(1, -(-layers // 16))
    shown = range(0, layers, every)
    ax.set_yticks(
        [layer * strip + (strip - gap) / 2 for layer in shown],
        [f"layer {layer}" for layer in shown],
    )
    rows = values.shape[0] // layers - 1
    note = "one row each" if rows == experts else f"the most uneven of {experts / rows:.3g} a row"
    ax.set_title(f"{experts} experts, {note}", loc="right", fontsize=9.5, color=_GREY, pad=10)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.015, aspect=32, extend="both", extendfrac=0.02)
    bar.set_ticks([float(np.log2(x)) for x in _LOAD_TICKS], labels=list(_LOAD_TICKS.values()))
    bar.set_label("load / fair share", fontsize=9.5, color=_GREY)
    bar.ax.tick_params(colors=_GREY, labelsize=9.5, length=0)
    bar.outline.set_visible(False)
