"""The lines printed at the end of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jmoe.run.metrics import METRICS_FILE, REPORT_FILE, TENSORBOARD_DIR, least_loaded


def _printable(text: str, encoding: str) -> str:
    """Return `text` without what would steer a terminal or what `encoding` lacks; both are
    written as escapes.
    """
    visible = "".join(
        c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text.expandtabs(4)
    )
    return visible.encode(encoding, "backslashreplace").decode(encoding)


class HeldOut(NamedTuple):
    """Cost of the held-out text: nats per token, and bits per byte, nan where the text is
    unknown.
    """

    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class Summary:
    """Results of a run."""

    before: HeldOut | None  # None: not measured
    after: HeldOut
    unigram_bits_per_byte: float  # nan: not shown
    xz_bits_per_byte: float  # nan: not shown
    # [num_moe_layers, num_experts], fractions or counts; None without experts
    expert_load: np.ndarray | None = None
    sample: str = ""  # a text that the model wrote


def _comparison(run: Summary) -> Table:
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold"
    )
    table.add_column("held-out text")
    table.add_column("loss", justify="right")
    table.add_column("bits per byte", justify="right")
    table.add_column("")
    if run.before is not None:
        table.add_row(
            "before training", f"{run.before.loss:.4f}", f"{run.before.bits_per_byte:.4f}", ""
        )
    table.add_row(
        "after training",
        f"{run.after.loss:.4f}",
        f"{run.after.bits_per_byte:.4f}",
        "",
        style="bold",
    )
    others = {
        "unigram model, same tokens": run.unigram_bits_per_byte,
        "xz -9, same bytes": run.xz_bits_per_byte,
    }
    for name, bits in others.items():
        if math.isfinite(bits):
            percent = 100 * (run.after.bits_per_byte / bits - 1)
            side = "below" if percent < 0 else "above"
            table.add_row(name, "", f"{bits:.4f}", f"the model is {abs(percent):.1f} % {side}")
    return table


def print_final_summary(run: Summary, output_dir: Path, stream: TextIO | None = None) -> None:
    """Print the lines that end a run. stream: by default stdout; colours only on a terminal,
    paths never wrapped.
    """
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 80
    console.print()
    console.print(_comparison(run))
    if run.expert_load is not None:
        share, layer, expert = least_loaded(run.expert_load)
        console.print(
            f"\nleast loaded expert: {share:.2f} of its fair share (layer {layer}, expert {expert})"
        )
    if run.sample:
        console.print("\nsample")
        console.print(
            Padding(Text(_printable(run.sample, console.encoding)), (0, 0, 0, 2), expand=False)
        )
    files = {
        "checkpoints": "checkpoints",
        "metrics": METRICS_FILE,
        "TensorBoard": TENSORBOARD_DIR,
        "report": REPORT_FILE,
    }
    console.print()
    for name, file in files.items():
        path = _printable(str(output_dir / file), console.encoding)
        console.print(Text.assemble((f"{name:<13}", "cyan"), path), soft_wrap=True)
