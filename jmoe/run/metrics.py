"""Metrics of a training run: `metrics.jsonl`, TensorBoard events and the progress bar.

`train.py` creates a `MetricsLog` and a `ProgressBar`, on process 0 only. Steps are numbered from 0.
Each line of `metrics.jsonl` is a JSON object: the record of a step, or an event (`resume`,
`evaluation`, …). Floats keep full precision, so equal records mean bit-identical losses. A
non-finite float is written as null, with its value under `non_finite`, and `read_step_records`
restores it:

    {"step": 7, "loss": null, "non_finite": {"loss": "nan"}}

Axis legend:

L  MoE layers
E  experts of a layer
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Final, TextIO, TypeVar

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from jax import monitoring
from jax.sharding import Mesh
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar as RichProgressBar
from rich.table import Table
from rich.text import Text
from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jmoe.config import TrainConfig, VisionTrainConfig
from jmoe.data.shards import replace_content_durably
from jmoe.status import duration_text
from jmoe.types import Json, JsonObject

METRICS_FILE: Final = "metrics.jsonl"
TENSORBOARD_DIR: Final = "tensorboard"
REPORT_FILE: Final = "report.png"
REQUIRED: Final = ("loss", "tokens_per_s", "dropped_fraction")
# on average: 48 layers x 128 experts at every step would be 5 GB in 100,000 steps
EXPERT_LOAD_VALUES_PER_STEP: Final = 256
TENSORBOARD_FLUSH_S: Final = 5.0  # a flush is an fsync, slow on a shared file system
RATE_STEPS: Final = 32  # tokens/s and ETA are the median of this many last steps
COMPILE_EVENT: Final = "/jax/core/compile/backend_compile_duration"
REFRESH_S: Final = 0.1  # of the live line

T = TypeVar("T")
_EVENT_FILE: Final = re.compile(r"events\.out\.tfevents\.\d{10}\..+\.\d{9}")

# Dense bfloat16 peaks in FLOP/s with float32 accumulation, from NVIDIA's data sheets (which print
# the sparse figure).
_PEAK_FLOPS: Final = (
    (r"\bGB[23]00\b", 2500e12),
    (r"\bB[23]00\b", 2250e12),
    (r"\bH[12]00 NVL\b", 835e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\b(H100|H200|H800|GH200)\b", 989e12),
    (r"\bH20\b", 148e12),
    (r"\b(A100|A800)\b", 312e12),
    (r"\bA30\b", 165e12),
    (r"\bA40\b", 150e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"\bRTX 6000 Ada\b", 364e12),
    (r"\bRTX A6000\b", 155e12),
    (r"\bRTX 5090\b", 210e12),
    (r"\bRTX 4090\b", 165e12),
    (r"\bRTX 3090\b", 71e12),
)


def peak_flops_per_s(device_kind: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, by JAX's `device_kind`; None for
    unknown devices (CPU, MIG slices, others).
    """
    if re.search(r"\bMIG\b", device_kind):
        return None
    return next(
        (peak for name, peak in _PEAK_FLOPS if re.search(name, device_kind, re.IGNORECASE)), None
    )


def least_loaded_expert(expert_load: object) -> tuple[float, int, int]:
    """Return (load / fair share, MoE layer, expert) of the expert with the smallest share of its
    layer; layer and expert count from 0.

    expert_load: [L, E], fractions or counts.
    """
    load_LE = np.asarray(expert_load, np.float64)
    share_LE = (
        load_LE
        * load_LE.shape[1]
        / np.maximum(load_LE.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    )
    layer, expert = np.unravel_index(int(np.argmin(share_LE)), share_LE.shape)
    return float(share_LE[layer, expert]), int(layer), int(expert)


def _to_json(value: object, name: str, non_finite: dict[str, str]) -> Json:
    """Return `value` as JSON types. Non-finite floats become None, and their text goes to
    `non_finite` under `name`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(v, f"{name}.{key}", non_finite) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(v, f"{name}[{i}]", non_finite) for i, v in enumerate(value)]
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        non_finite[name] = str(value)
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "biuSU":  # bfloat16 is not a native numpy dtype
        array = array.astype(np.float64)
    return _to_json(array.tolist(), name, non_finite)


def _record_to_line(record: Mapping[str, object]) -> bytes:
    non_finite: dict[str, str] = {}
    plain = {key: _to_json(value, key, non_finite) for key, value in record.items()}
    if non_finite:
        plain["non_finite"] = non_finite
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _parse_step_line(line: bytes) -> JsonObject | None:
    """Return the record in a line of metrics.jsonl, or None if the line has none with a step."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    for name, value in record.pop("non_finite", {}).items():
        if name in record:
            record[name] = float(value)
    return record


def _drop_repeated_steps(path: Path, start_step: int) -> None:
    """Delete from the file the records that a run resuming at `start_step` writes again, and a last
    line cut off by a kill.
    """
    if not path.is_file():
        return
    kept, void = bytearray(), False
    with path.open("rb") as file:
        for line in file:
            record, ended = _parse_step_line(line), line.endswith(b"\n")
            step = -1 if record is None else record["step"]
            event = record is not None and "event" in record
            again = step >= start_step and not (event and step == start_step > 0)
            torn = record is None and not ended
            if not again and not torn:
                kept += line if ended else line + b"\n"
            void |= again or not ended
    if void:
        replace_content_durably(path.resolve(), bytes(kept))  # keeps a symbolic link


class CompilationCounter:
    """Counts the programs that JAX has compiled in this process, or loaded from its compilation
    cache, in `count`.
    """

    def __init__(self) -> None:
        self.count = 0
        monitoring.register_event_duration_secs_listener(self._count_compilation)

    def _count_compilation(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == COMPILE_EVENT


def make_step_record(
    values: JsonObject, step_s: float, config: TrainConfig, *, compiled: bool
) -> JsonObject:
    """Return the record of one step for metrics.jsonl.

    values: the step's metrics on the host. step_s: seconds of the step. compiled: whether `step_s`
    includes a compilation.
    """
    names, size = ("loss", "grad_norm", "learning_rate"), config.batch_size
    if isinstance(config, VisionTrainConfig):  # the record lists only tasks that still run
        size = sum(config.tasks[name].batch_size for name in values["task_loss"])
    # padding of samples' rows is no token
    num_tokens = int(values.get("tokens", size * config.sequence_length))
    line = {name: values[name] for name in names} | {
        "tokens_per_s": num_tokens / step_s,
        "dropped_fraction": 0.0,
        "step_s": step_s,
    }
    line |= {
        name: values[name]
        for name in (
            *("task_loss", "task_accuracy", "divergence", "trained_tokens"),
            *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
        )
        if name in values
    }
    if "loss_scale" in values:
        line |= {name: values[name] for name in ("loss_scale", "skipped_steps")}
    if compiled:
        line["compiled"] = True
    if "counts" in values:
        assignments = values["counts"].sum()
        line |= {
            "dropped_fraction": float(values["dropped"].sum() / assignments),
            "balance_loss": values["balance_loss"],
            "z_loss": values["z_loss"],
            "router_entropy": values["entropy"].mean(),
            "expert_load": values["counts"] / values["counts"].sum(axis=1, keepdims=True),
        }
    return line


class _EventFile:
    """The single TensorBoard event file in `folder`. Events of earlier files before `end_step` are
    copied into it, and those files are deleted.

    tensorboardX's SummaryWriter passes events to a thread through a queue of ten; if that thread
    dies because the disk is full, training blocks on the queue. This class writes in the calling
    thread and raises `OSError` there. flush_s: seconds between flushes.
    """

    def __init__(self, folder: Path, end_step: int, flush_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        older = sorted(path for path in folder.iterdir() if _EVENT_FILE.fullmatch(path.name))
        second, nanosecond = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{nanosecond:09d}"
        self._writer = RecordWriter(str(folder / name))
        self._flush_s, self._flushed_s = flush_s, time.monotonic()
        self._write_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if older:  # a running TensorBoard drops events that it read from the old files
            start = SessionLog(status=SessionLog.START)
            self._write_event(Event(wall_time=time.time(), step=0, session_log=start))
        for event in _read_scalar_events(older, end_step):
            self._write_event(event)
        self._writer.flush()
        for path in older:
            path.unlink()

    def flush(self) -> None:
        """Flush the file to disk (fsync)."""
        self._writer.flush()
        self._flushed_s = time.monotonic()

    def _write_event(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        if time.monotonic() - self._flushed_s >= self._flush_s:
            self.flush()

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._write_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        try:
            self._writer.flush()
        finally:
            self._writer.close()


def _read_scalar_events(paths: list[Path], end_step: int) -> Iterator[Event]:
    """Return an iterator over the last event of every step before `end_step`, in ascending order.
    Events after an incomplete one are lost.
    """
    steps: dict[int, Event] = {}
    for path in paths:
        with path.open("rb") as file:
            while len(head := file.read(12)) == 12:
                length_bytes = int.from_bytes(head[:8], "little")
                data = file.read(length_bytes + 4)
                if len(data) < length_bytes + 4:
                    break
                try:
                    event = Event.FromString(data[:-4])
                except DecodeError:
                    break
                if event.HasField("session_log"):  # older versions began a file at every start
                    steps = {step: known for step, known in steps.items() if step < event.step}
                elif event.summary.value and event.step < end_step:
                    steps[event.step] = event
    return iter(steps[step] for step in sorted(steps))


class MetricsLog:
    """Appends to OUTPUT_DIR/metrics.jsonl and to TensorBoard events in
    OUTPUT_DIR/tensorboard/{train,evaluation}.

    start_step: first step that this process will write; records of that and later steps are
    deleted. If `start_step` is greater than 0 or metrics.jsonl exists, an event `resume` is written
    first. A kill can cut off only the last line, which readers skip. Raises `OSError` with the
    file's name, for example if the disk is full.
    """

    def __init__(self, output_dir: Path, *, start_step: int) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        self.path: Final = output_dir / METRICS_FILE
        resumes = self.path.exists() or start_step > 0
        _drop_repeated_steps(self.path, start_step)
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(self.path.open("ab", buffering=0))
            folder = output_dir / TENSORBOARD_DIR
            self._train = _EventFile(folder / "train", start_step, TENSORBOARD_FLUSH_S)
            stack.callback(self._train.close)
            # An evaluation at start_step belongs to the state that is resumed from, so it stays.
            self._evaluation = _EventFile(folder / "evaluation", start_step + (start_step > 0), 0.0)
            stack.callback(self._evaluation.close)
            self._load_step = start_step
            if resumes:
                self.write_event("resume", start_step)
            self._close = stack.pop_all()

    def write_step(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Write the record of one step to metrics.jsonl, and its scalars to TensorBoard.

        metrics: values by name, including all of `REQUIRED`. `expert_load` [L, E], fractions of
        assignments, is written with 5 significant digits, and only at some steps of large models.
        Raises `ValueError` if a required metric is missing.
        """
        missing = [name for name in REQUIRED if name not in metrics]
        if missing:
            raise ValueError(
                f"metrics of step {step}: {', '.join(missing)} missing, needs {', '.join(REQUIRED)}"
            )
        record: dict[str, object] = {"step": step, **metrics}
        scalars = {
            name: float(value)
            for name, value in metrics.items()
            if np.ndim(value) == 0 and not isinstance(value, str | bool | Mapping | None)
        }
        if metrics.get("compiled"):
            del scalars["tokens_per_s"]
        load = record.pop("expert_load", None)
        load_LE = np.asarray([] if load is None else load, np.float64)
        if load_LE.size:
            scalars |= _expert_load_scalars(load_LE)
        if step >= self._load_step:
            record["expert_load"] = [[float(f"{x:.5g}") for x in row] for row in load_LE]
            self._load_step = step + max(1, math.ceil(load_LE.size / EXPERT_LOAD_VALUES_PER_STEP))
        self._append_record(record)
        self._train.write_scalars(step, scalars)

    def write_evaluation(self, step: int, *, loss: float, bits_per_byte: float) -> None:
        """Write the held-out loss after `step` steps, in nats per token, and the bits per byte of
        text.
        """
        self.write_event("evaluation", step, loss=loss, bits_per_byte=bits_per_byte)
        self._evaluation.write_scalars(
            step, {"loss": float(loss), "bits_per_byte": float(bits_per_byte)}
        )

    def write_event(self, event: str, step: int, **values: object) -> None:
        """Append `{"event": event, "step": step, ...values}` to metrics.jsonl."""
        self._append_record({"event": event, "step": step, **values})

    def sync(self) -> None:
        """Flush all written records to disk (fsync), so that they are as durable as the checkpoint
        of these steps.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._train.flush()

    def close(self) -> None:
        self._close.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append_record(self, record: Mapping[str, object]) -> None:
        line = _record_to_line(record)
        try:
            while line:  # a disk that fills up takes part of a line before it refuses
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def _expert_load_scalars(load_LE: np.ndarray) -> dict[str, float]:
    """Return TensorBoard scalars of the expert load by name: least and most loaded expert, and the
    least loaded of each layer, as multiples of the fair share.
    """
    share_LE = load_LE * load_LE.shape[1]
    scalars = {
        "experts/least_loaded": float(share_LE.min()),
        "experts/most_loaded": float(share_LE.max()),
    }
    return scalars | {
        f"experts/least_loaded_layer_{i}": float(row.min()) for i, row in enumerate(share_LE)
    }


def _read_records(path: Path) -> Iterator[JsonObject]:
    """Yield the records of metrics.jsonl in order, without an incomplete last line. Raises
    `ValueError` for a bad line before the last.
    """
    bad = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if bad:
                raise ValueError(
                    f"{path}, line {bad}: must be a JSON object with a step: the file is damaged;"
                    " delete the line"
                )
            record = _parse_step_line(line)
            if record is None:
                bad = number
            else:
                yield record


def read_steps_and_events(
    path: Path, convert: Callable[[JsonObject], T]
) -> tuple[dict[int, T], list[JsonObject]]:
    """Return (converted records by step, in ascending order; events in the order of the file).

    A run that resumed at step s writes s and later steps again. Their earlier records are dropped,
    and evaluations after more than s steps too, so that the result is one history. convert: a
    function applied to each step's record, to keep only the needed values of a long run in memory.
    """
    steps: dict[int, T] = {}
    events: list[JsonObject] = []
    for record in _read_records(path):
        step = record["step"]
        if "event" not in record:
            steps[step] = convert(record)
            continue
        if record["event"] == "resume":
            steps = {s: value for s, value in steps.items() if s < step}
            events = [e for e in events if e["event"] != "evaluation" or int(e["step"]) <= step]
        events.append(record)
    return dict(sorted(steps.items())), events


def read_step_records(path: Path) -> list[JsonObject]:
    """Return the last record of every step, in ascending order of steps."""
    return list(read_steps_and_events(path, lambda record: record)[0].values())


def read_events(path: Path) -> list[JsonObject]:
    """Return the events (resume, evaluation, and other events of `write_event`) in the order of the
    file, without superseded evaluations.
    """
    return read_steps_and_events(path, lambda record: None)[1]


def recent_expert_load(path: Path, steps: int = 50) -> np.ndarray | None:
    """Return the mean expert load [L, E] over the last `steps` steps that recorded one, or None if
    no step did.
    """
    loads, _ = read_steps_and_events(
        path, lambda record: np.asarray(record.get("expert_load") or [], np.float32)
    )
    last = [load_LE.astype(np.float64) for load_LE in list(loads.values())[-steps:] if load_LE.size]
    return np.mean(last, axis=0) if last else None


def make_progress_bar(config: TrainConfig, mesh: Mesh) -> ProgressBar:
    """Return the `ProgressBar` of a run. mesh: gives number and kind of devices, for the MFU."""
    return ProgressBar(
        num_steps=config.num_steps,
        tokens_per_step=config.tokens_before_step(1),
        flops_per_token=config.flops_per_token,
        num_devices=mesh.size,
        device_kind=mesh.devices.flat[0].device_kind,
    )


class ProgressBar:
    """Shows step, loss, tokens/s, MFU, dropped tokens and remaining time: one live line on a
    terminal, plain lines elsewhere.

    Plain lines are printed at this process's first step, every `every_s` seconds, and at the last
    step. Rates are medians over the last `RATE_STEPS` steps, of all devices together. The first
    step after the start, or after a change of devices or tasks, is left out because it compiles.
    MFU is shown only if `peak_flops_per_s` knows the device.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        num_devices: int,
        device_kind: str,
        every_s: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._num_steps, self._tokens_per_step, self._every_s = num_steps, tokens_per_step, every_s
        self._num_devices, self._flops_per_token, self._peak = (
            num_devices,
            flops_per_token,
            peak_flops_per_s(device_kind),
        )
        self._step_s: deque[float] = deque(maxlen=RATE_STEPS)
        self._compiles = True  # whether the next step compiles
        self._steps_seen = 0
        self._shown_s = -math.inf
        self._live: Live | None = None
        self._console = Console(file=self._stream, highlight=False)
        if self._stream.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._console.show_cursor(True)  # rich hides it, and a SIGKILL would leave it hidden

    def set_devices_and_tokens(self, num_devices: int, tokens_per_step: int) -> None:
        """Set the number of devices and tokens of the next step. A change restarts the rates."""
        if (num_devices, tokens_per_step) != (self._num_devices, self._tokens_per_step):
            self._num_devices = num_devices
            self._tokens_per_step = tokens_per_step
            self._compiles = True
            self._step_s.clear()

    def show_step(self, step: int, *, loss: float, step_s: float, dropped_fraction: float) -> None:
        """Show a finished step. step_s: seconds of the step, without evaluation and saving."""
        self._steps_seen += 1
        if not self._compiles:
            self._step_s.append(step_s)
        self._compiles = False
        last = step + 1 >= self._num_steps
        now_s = time.monotonic()
        wait_s = REFRESH_S if self._live else self._every_s
        if self._steps_seen > 1 and not last and now_s - self._shown_s < wait_s:
            return
        self._shown_s = now_s
        parts = self._step_texts(step, float(loss), step_s, float(dropped_fraction))
        if self._live is None:
            print(" | ".join(parts), file=self._stream, flush=True)
            return
        self._live.update(self._bar_table(step, parts), refresh=True)

    def print_message(self, text: str) -> None:
        """Print a line of text, above the live line on a terminal."""
        if self._live is None:
            print(text, file=self._stream, flush=True)
        else:
            self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Stop the display, leaving the last line on the terminal. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _step_texts(
        self, step: int, loss: float, step_s: float, dropped_fraction: float
    ) -> list[str]:
        parts = [
            f"step {step} ({math.floor(100 * (step + 1) / self._num_steps)} %)",
            f"loss {loss:.4f}",
        ]
        if self._step_s:
            typical_s = max(median(self._step_s), 1e-9)
            tokens_per_s = self._tokens_per_step / typical_s
            parts.append(f"{tokens_per_s:,.0f} tokens/s")
            if self._peak is not None:
                mfu = tokens_per_s * self._flops_per_token / (self._num_devices * self._peak)
                parts.append(f"MFU {100 * mfu:.1f} %")
        else:
            parts.append(f"compiled and run in {step_s:.1f} s")
        parts.append(f"dropped {100 * dropped_fraction:.2f} %")
        if self._step_s:
            parts.append(f"ETA {duration_text((self._num_steps - step - 1) * typical_s)}")
        return parts

    def _bar_table(self, step: int, parts: list[str]) -> Table:
        """Return a table of one row: step, bar, remaining values. The bar takes the width that the
        text leaves.
        """
        rest = Text("  ".join(parts[1:]), no_wrap=True, overflow="ellipsis")
        rest.stylize("bold", 0, len(parts[1]))
        grid = Table.grid(padding=(0, 2), expand=True)
        row: list[Text | RichProgressBar] = [Text(parts[0], style="cyan", no_wrap=True), rest]
        grid.add_column(no_wrap=True, min_width=len(parts[0]))
        if self._console.width >= len(parts[0]) + rest.cell_len + 16:
            grid.add_column(ratio=1)
            row.insert(1, RichProgressBar(total=self._num_steps, completed=step + 1))
        grid.add_column(no_wrap=True)
        grid.add_row(*row)
        return grid
