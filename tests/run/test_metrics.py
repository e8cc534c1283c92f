"""metrics.jsonl, TensorBoard events, the progress line, report.png and the last lines of a run."""

import dataclasses
import errno
import io
import json
import math
import os
import pty
import select
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import ml_dtypes
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jmoe.configs.ufo import ufo_tiny
from jmoe.run.metrics import (
    EXPERT_LOAD_VALUES_PER_STEP,
    MetricsLog,
    ProgressBar,
    least_loaded_expert,
    peak_flops_per_s,
    read_events,
    read_step_records,
    recent_expert_load,
)
from jmoe.run.report import write_report
from jmoe.run.summary import HeldOutLoss, RunSummary, print_final_summary


def metrics(
    step: int = 0, *, layers: int = 2, experts: int = 4, **changes: object
) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    load_LE = rng.dirichlet(np.full(experts, 20.0), size=layers) if layers else None
    return {
        "loss": np.float32(8.3 / (1 + 0.1 * step) + 0.01 * rng.normal()),
        "tokens_per_s": 5000.0 + rng.normal(),
        "dropped_fraction": np.float32(0.01),
        "grad_norm": np.float32(1.25),
        "step_s": 0.4,
        "expert_load": load_LE,
        **changes,
    }


def write_run(folder: Path, first: int, end: int, **shape: int) -> None:
    with MetricsLog(folder, start_step=first) as log:
        for step in range(first, end):
            log.write_step(step, metrics(step, **shape))
            if step % 5 == 4:
                log.write_evaluation(step + 1, loss=3.0 + 1 / (step + 1), bits_per_byte=1.5)


def tensorboard_events(folder: Path) -> list[Event]:
    """Events of all files in name order, as TensorBoard reads them."""
    events = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length_bytes,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length_bytes]))
            at += length_bytes + 16
    return events


def strict_json(line: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def assert_png(path: Path) -> np.ndarray:
    """The picture, which must decode, be large and not blank."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = imread(path)
    assert picture.shape[0] > 800 and picture.shape[1] > 1200
    assert picture[::4, ::4, :3].std() > 0.01
    return picture


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    losses = np.concatenate([rng.normal(size=50), [1e-45, 3.4e38, 0.1]]).astype(np.float32)
    load_LE = np.array([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]])
    with MetricsLog(tmp_path / "run", start_step=0) as log:
        for step, loss in enumerate(losses):
            log.write_step(
                step,
                {
                    "loss": loss,
                    "tokens_per_s": 1 / 3,
                    "dropped_fraction": ml_dtypes.bfloat16(0.25),
                    "router_entropy": np.float32([1.5, 0.75]),
                    "overflow": np.bool_(True),
                    "norms": {"head": np.float32(0.5)},
                    "tokens": np.int64(2**40),
                    "expert_load": load_LE,
                },
            )
        log.write_evaluation(len(losses), loss=np.float32(2.5), bits_per_byte=1.25)
    path = tmp_path / "run" / "metrics.jsonl"
    records = read_step_records(path)
    assert [record["step"] for record in records] == list(range(len(losses)))
    assert np.array([r["loss"] for r in records]).astype(np.float32).tobytes() == losses.tobytes()
    assert records[0] == {
        "step": 0,
        "loss": float(losses[0]),
        "tokens_per_s": 1 / 3,
        "dropped_fraction": 0.25,
        "router_entropy": [1.5, 0.75],
        "overflow": True,
        "norms": {"head": 0.5},
        "tokens": 2**40,
        "expert_load": [[0.5, 0.25, 0.25], [0.33333, 0.33333, 0.33333]],
    }
    assert read_events(path) == [
        {"event": "evaluation", "step": len(losses), "loss": 2.5, "bits_per_byte": 1.25}
    ]
    for line in path.read_text().splitlines():
        strict_json(line)


def test_a_missing_metric_is_named(tmp_path: Path) -> None:
    with (
        MetricsLog(tmp_path, start_step=0) as log,
        pytest.raises(ValueError, match=r"step 3: tokens_per_s, dropped_fraction missing"),
    ):
        log.write_step(3, {"loss": 1.0})


def test_a_step_can_be_read_while_the_log_is_open(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, start_step=0) as log:
        log.write_step(0, metrics(0))
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
        assert read_step_records(log.path)[0]["step"] == 0


def test_resumed_steps_replace_older_ones(tmp_path: Path) -> None:
    write_run(tmp_path, 0, 13)
    with MetricsLog(tmp_path, start_step=10) as log:
        log.write_step(10, metrics(10, loss=np.float32(1.5)))
        log.write_step(11, metrics(11, loss=np.float32(1.25)))
    records = read_step_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(12))
    assert [record["loss"] for record in records[10:]] == [1.5, 1.25]
    events = read_events(tmp_path / "metrics.jsonl")
    assert [(e["event"], e["step"]) for e in events] == [
        ("evaluation", 5),
        ("evaluation", 10),
        ("resume", 10),
    ]
    raw = [strict_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert raw.count({"event": "resume", "step": 10}) == 1
    # each once
    assert [record["step"] for record in raw if "event" not in record] == list(range(12))


def test_a_run_from_the_start_voids_what_the_file_held(tmp_path: Path) -> None:
    write_run(tmp_path, 0, 7)
    write_run(tmp_path, 0, 3)
    assert [record["step"] for record in read_step_records(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert read_events(tmp_path / "metrics.jsonl") == [{"event": "resume", "step": 0}]


def test_resume_without_an_older_file_is_recorded(tmp_path: Path) -> None:
    write_run(tmp_path, 4, 5)
    assert read_events(tmp_path / "metrics.jsonl")[0] == {"event": "resume", "step": 4}


@pytest.mark.parametrize(
    "tail", ['{"step": 3, "lo', "\0\0\0\0", '{"step": 3, "loss": [' + "1.5, " * 60_000]
)
def test_a_torn_last_line_is_skipped_and_cut(tmp_path: Path, tail: str) -> None:
    write_run(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + tail.encode())
    assert [record["step"] for record in read_step_records(path)] == [0, 1, 2]
    write_run(tmp_path, 3, 4)
    assert path.read_bytes().startswith(whole + b'{"event": "resume", "step": 3}\n')
    assert [record["step"] for record in read_step_records(path)] == [0, 1, 2, 3]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    write_run(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    write_run(tmp_path, 3, 4)
    assert [record["step"] for record in read_step_records(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", ["not JSON", "[1]", "3", '{"loss": 1.0}', '{"step": "a"}'])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, bad: str) -> None:
    write_run(tmp_path, 0, 2)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], bad, lines[1]]) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: must be .*; delete the line"):
        read_step_records(path)


WRITER = """
import itertools, sys
from pathlib import Path
import numpy as np
from jmoe.run.metrics import MetricsLog
load_LE = np.full((8, 32), 1 / 32)
with MetricsLog(Path(sys.argv[1]), start_step=int(sys.argv[2])) as log:
    for step in itertools.count(int(sys.argv[2])):
        log.write_step(step, {"loss": 1 / (1 + step), "tokens_per_s": 1.0, "dropped_fraction": 0.0,
                              "expert_load": load_LE})
"""


def test_kill_and_resume(
    tmp_path: Path, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """SIGKILL in the middle of writing, twice: every record that was written survives and the
    file stays readable.
    """
    path, start = tmp_path / "run" / "metrics.jsonl", 0
    for attempt in range(2):
        log = tmp_path / f"log{attempt}"
        process = start_python(["-c", WRITER, tmp_path / "run", str(start)], log)
        deadline_s = time.monotonic() + 240
        while not (path.exists() and path.stat().st_size > 200_000 * (attempt + 1)):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.02)
        process.kill()
        process.wait()
        start = read_step_records(path)[-1]["step"] - 7
        assert start > 20
    records = read_step_records(path)
    assert [record["step"] for record in records] == list(range(len(records)))
    assert all(record["loss"] == 1 / (1 + record["step"]) for record in records)
    assert (
        tensorboard_events(tmp_path / "run" / "tensorboard" / "evaluation")[-1].session_log.status
        == 1
    )


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    bad_LE = np.array([[0.5, np.nan], [0.5, 0.5]])
    with MetricsLog(tmp_path, start_step=0) as log:
        log.write_step(
            0,
            metrics(
                loss=np.float32("nan"), grad_norm=math.inf, balance_loss=-np.inf, expert_load=bad_LE
            ),
        )
        log.write_evaluation(1, loss=math.nan, bits_per_byte=math.inf)
    first, second = ((tmp_path / "metrics.jsonl").read_text()).splitlines()
    record = strict_json(first)
    assert (
        record["loss"] is None
        and record["grad_norm"] is None
        and record["expert_load"][0] == [0.5, None]
    )
    assert record["non_finite"] == {
        "loss": "nan",
        "grad_norm": "inf",
        "balance_loss": "-inf",
        "expert_load[0][1]": "nan",
    }
    assert strict_json(second)["non_finite"] == {"loss": "nan", "bits_per_byte": "inf"}
    (read,) = read_step_records(tmp_path / "metrics.jsonl")
    assert (
        math.isnan(read["loss"])
        and read["grad_norm"] == math.inf
        and read["balance_loss"] == -math.inf
    )
    assert "non_finite" not in read
    assert_png(write_report(tmp_path))


def test_load_of_a_large_model_is_recorded_on_some_steps(tmp_path: Path) -> None:
    layers, experts = 8, EXPERT_LOAD_VALUES_PER_STEP // 2  # four times what a step may hold
    write_run(tmp_path, 0, 10, layers=layers, experts=experts)
    write_run(tmp_path, 6, 10, layers=layers, experts=experts)
    records = read_step_records(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if "expert_load" in r] == [0, 4, 6]
    assert np.asarray(records[0]["expert_load"]).shape == (layers, experts)
    assert_png(write_report(tmp_path))


def test_full_disk_raises_with_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device.*metrics\.jsonl"):
        MetricsLog(tmp_path, start_step=0)


def test_tensorboard_events(tmp_path: Path) -> None:
    write_run(tmp_path, 0, 6)
    write_run(tmp_path, 5, 8)
    train = tensorboard_events(tmp_path / "tensorboard" / "train")
    assert train[0].file_version == "brain.Event:2"
    starts = [
        (event.step, event.session_log.status) for event in train if event.HasField("session_log")
    ]
    assert starts == [(0, SessionLog.START)]
    scalars = [
        (event.step, {v.tag: v.simple_value for v in event.summary.value})
        for event in train
        if event.summary.value
    ]
    assert [step for step, _ in scalars] == [0, 1, 2, 3, 4, 5, 6, 7]
    step, values = scalars[-1]
    load_LE = metrics(step)["expert_load"]
    assert values["loss"] == metrics(step)["loss"]
    assert values["experts/least_loaded"] == pytest.approx(4 * load_LE.min(), rel=1e-6)
    assert values["experts/most_loaded"] == pytest.approx(4 * load_LE.max(), rel=1e-6)
    assert values["experts/least_loaded_layer_1"] == pytest.approx(4 * load_LE[1].min(), rel=1e-6)
    evaluation = tensorboard_events(tmp_path / "tensorboard" / "evaluation")
    # The evaluation after 5 steps belongs to what was resumed from: only later ones are cut.
    assert [e.step for e in evaluation if e.summary.value] == [5]
    mine = tmp_path / "tensorboard" / "train" / "events.out.tfevents.of.mine"
    mine.write_text("mine")
    for start in (6, 6, 7):
        write_run(tmp_path, start, 8)
    assert mine.read_text() == "mine"
    mine.unlink()
    assert [
        len(list((tmp_path / "tensorboard" / name).iterdir())) for name in ("train", "evaluation")
    ] == [1, 1]
    train = tensorboard_events(tmp_path / "tensorboard" / "train")
    assert [event.step for event in train if event.summary.value] == list(range(8))


def test_a_torn_event_file_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path, 0, 6)
    (path,) = (tmp_path / "tensorboard" / "train").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    write_run(tmp_path, 5, 7)
    train = tensorboard_events(tmp_path / "tensorboard" / "train")
    assert [event.step for event in train if event.summary.value] == list(range(7))


def test_sync_makes_both_files_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    with MetricsLog(tmp_path, start_step=0) as log:
        log.write_step(0, metrics(0))
        monkeypatch.setattr(os, "fsync", fsync)
        log.sync()
        assert synced[0] == "metrics.jsonl" and synced[1].startswith("events.out.tfevents.")


def test_least_loaded() -> None:
    assert least_loaded_expert([[0.25, 0.75], [0.5, 0.5]]) == (0.5, 0, 0)
    assert least_loaded_expert(np.array([[10, 10, 10, 10], [20, 15, 5, 0]])) == (0.0, 1, 3)


def test_recent_expert_load(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, start_step=0) as log:
        for step, share in enumerate([0.0, 0.5, 0.25]):
            log.write_step(step, metrics(expert_load=[[share, 1 - share]]))
    path = tmp_path / "metrics.jsonl"
    np.testing.assert_allclose(recent_expert_load(path, steps=2), [[0.375, 0.625]])
    write_run(tmp_path / "dense", 0, 2, layers=0)
    assert recent_expert_load(tmp_path / "dense" / "metrics.jsonl") is None


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA L400", None),
        ("cpu", None),
    ],
)
def test_peak_flops(device_kind: str, peak: float | None) -> None:
    assert peak_flops_per_s(device_kind) == peak


def progress(
    stream: Any, *, num_steps: int = 100, device_kind: str = "cpu", every_s: float = 0.0
) -> ProgressBar:
    return ProgressBar(
        num_steps=num_steps,
        tokens_per_step=2048,
        flops_per_token=1e9,
        num_devices=2,
        device_kind=device_kind,
        every_s=every_s,
        stream=stream,
    )


def test_plain_lines() -> None:
    stream = io.StringIO()
    with progress(stream, num_steps=1000) as line:
        line.show_step(0, loss=8.31789, step_s=12.34, dropped_fraction=0.0)
        for step in range(1, 6):
            line.show_step(
                step,
                loss=8.0,
                step_s=100.0 if step == 3 else 0.5,
                dropped_fraction=np.float32(0.0123),
            )
        line.print_message("saved step 6")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 0 (0 %) | loss 8.3179 | compiled and run in 12.3 s | dropped 0.00 %"
    # Neither the step that compiled nor a single slow one counts; 994 steps of 0.5 s are left.
    assert lines[5] == "step 5 (0 %) | loss 8.0000 | 4,096 tokens/s | dropped 1.23 % | ETA 8:17"
    assert lines[6:] == ["saved step 6"]
    assert "MFU" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_plain_lines_come_at_a_sensible_rate() -> None:
    stream = io.StringIO()
    with progress(stream, num_steps=50, every_s=1e9) as line:
        for step in range(20, 50):  # resumed
            line.show_step(step, loss=1.0, step_s=0.1, dropped_fraction=0.0)
    first, last = stream.getvalue().splitlines()
    assert first.startswith("step 20 (42 %) | loss 1.0000 | compiled")
    assert last == "step 49 (100 %) | loss 1.0000 | 20,480 tokens/s | dropped 0.00 % | ETA 0:00"


def test_mfu_where_the_peak_is_known() -> None:
    stream = io.StringIO()
    line = progress(stream, num_steps=40_000, device_kind="NVIDIA H200")
    line.show_step(0, loss=1.0, step_s=60.0, dropped_fraction=0.0)
    line.show_step(1, loss=math.nan, step_s=2048 * 1e9 / (0.4 * 2 * 989e12), dropped_fraction=0.0)
    assert (
        " | loss nan | 791,200 tokens/s | MFU 40.0 % | dropped 0.00 % | ETA 1:44"
        in stream.getvalue()
    )
    line.close()
    line.close()


def test_rates_follow_a_change_of_devices_and_tasks() -> None:
    """Half of the devices with a quarter of the tokens: the step that compiles for them counts
    for no rate.
    """
    stream = io.StringIO()
    line = progress(stream, num_steps=1000, device_kind="NVIDIA H200")
    line.set_devices_and_tokens(2, 2048)
    for step in range(2):
        line.show_step(step, loss=1.0, step_s=0.5, dropped_fraction=0.0)
    line.set_devices_and_tokens(1, 512)
    line.show_step(2, loss=1.0, step_s=30.0, dropped_fraction=0.0)
    line.set_devices_and_tokens(1, 512)
    line.show_step(3, loss=1.0, step_s=512 * 1e9 / (0.3 * 989e12), dropped_fraction=0.0)
    lines = stream.getvalue().splitlines()
    assert " | 4,096 tokens/s | " in lines[1]
    assert lines[2] == "step 2 (0 %) | loss 1.0000 | compiled and run in 30.0 s | dropped 0.00 %"
    assert " | 296,700 tokens/s | MFU 30.0 % | " in lines[3]
    line.close()


def test_tokens_are_those_of_the_tasks_that_take_part() -> None:
    fonts = dataclasses.replace(ufo_tiny.tasks["fonts"], num_steps=10)
    config = dataclasses.replace(
        ufo_tiny, layout="elastic", tasks=ufo_tiny.tasks | {"fonts": fonts}
    )
    assert [config.tokens_before_step(step) for step in (0, 10, 12)] == [
        0,
        10 * 128 * 16,
        (12 * 112 + 10 * 16) * 16,
    ]
    assert ufo_tiny.tokens_before_step(12) == 12 * 128 * 16


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """(a stream that is a terminal, what it shows so far)."""
    try:
        master, slave = pty.openpty()
    except OSError as error:
        pytest.skip(f"this system gives no terminal: {error}")
    with open(master, "rb", buffering=0), open(slave, "w") as stream:

        def shown() -> str:
            stream.flush()
            text = b""
            while select.select([master], [], [], 0.5)[0]:  # the kernel hands it on in parts
                text += os.read(master, 1 << 16)
            return text.decode()

        yield stream, shown


@pytest.mark.parametrize("width", [50, 120])
def test_one_live_line_on_a_terminal(
    width: int, terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    stream, shown = terminal
    with progress(stream, num_steps=3) as line:
        line.show_step(0, loss=4.25, step_s=9.0, dropped_fraction=0.5)
        text = shown()
        # rich hides the cursor, and a SIGKILL would leave it so.
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
        line.print_message("a [bold] message")
        line.show_step(1, loss=4.125, step_s=0.5, dropped_fraction=0.5)
        line.show_step(2, loss=4.0, step_s=0.5, dropped_fraction=0.5)
    text += shown()
    assert "loss 4.2500" in text and "loss 4.0000" in text and "step 2 (100 %)" in text
    assert "a [bold] message\r\n" in text
    assert "\x1b[2K" in text  # the line is erased and written again
    assert ("━" in text) == (width == 120)


def test_a_dumb_terminal_gets_plain_lines(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream, shown = terminal
    with progress(stream) as line:
        line.show_step(0, loss=4.25, step_s=9.0, dropped_fraction=0.5)
    assert shown() == "step 0 (1 %) | loss 4.2500 | compiled and run in 9.0 s | dropped 50.00 %\r\n"


def test_report_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 0, 40)
    write_run(tmp_path, 30, 60)
    with MetricsLog(tmp_path, start_step=60) as log:
        log.write_event("packing", 60, experts_per_device=4)
        shares = {"waited_share": 0.125, "predicted_waited_share": 0.1}
        log.write_event("tiers", 60, predicted_step_s=2.0, measured_step_s=2.25, **shares)
    texts, write = list[str](), Figure.text
    monkeypatch.setattr(
        Figure, "text", lambda self, *a, **o: (texts.append(a[2]), write(self, *a, **o))
    )
    path = write_report(tmp_path)
    assert texts[-1] == (
        "experts on tiers: a step 2.25 s, predicted 2 s"
        "   ·   devices waited 12.5 % of it, predicted 10.0 %"
    )
    assert path == tmp_path / "report.png"
    assert_png(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "report.png",
        "tensorboard",
    ]


@pytest.mark.parametrize(
    ("steps", "layers", "experts"), [(1, 2, 4), (2, 2, 4), (1, 0, 0), (2, 1, 1), (1, 30, 16)]
)
def test_report_of_a_short_run(tmp_path: Path, steps: int, layers: int, experts: int) -> None:
    write_run(tmp_path, 0, steps, layers=layers, experts=experts)
    assert_png(write_report(tmp_path))


def test_report_of_a_long_run_with_gaps(tmp_path: Path) -> None:
    """More steps than a curve has points; the last third of the losses is not finite."""
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(6000):
            loss = 5 / (1 + step / 100) if step < 4000 else None
            record = {"step": step, "loss": loss, "tokens_per_s": 100.0, "dropped_fraction": 0.0}
            file.write(json.dumps(record) + "\n")
    assert_png(write_report(tmp_path))


def test_a_compilation_is_no_dip_in_the_rate(tmp_path: Path) -> None:
    """What a step took while it was compiled is not drawn: fast or slow, the picture is the
    same.
    """
    pictures = []
    for name, rate in (("a", 3.0), ("b", 40.0)):
        folder = tmp_path / name / "run"
        with MetricsLog(folder, start_step=0) as log:
            for step in range(40):
                first = {"tokens_per_s": rate, "compiled": True} if step == 0 else {}
                log.write_step(step, metrics(step, **first))
        pictures.append(write_report(folder).read_bytes())
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize("rises", [False, True])
def test_no_word_lies_over_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rises: bool
) -> None:
    """Evaluated at quarters, as `train.py` does."""
    with MetricsLog(tmp_path, start_step=0) as log:
        for step in range(361):
            loss = 3 + 5 * math.exp(-(360 - step if rises else step) / 60)
            if step % 90 == 0:
                log.write_evaluation(step, loss=loss + 0.02, bits_per_byte=1.5)
            if step < 360:
                log.write_step(step, metrics(step, loss=loss))
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **o: (figures.append(self), save(self, *a, **o))
    )
    write_report(tmp_path)
    ax = next(ax for ax in figures[0].axes if ax.get_title(loc="left") == "Loss")
    boxes = [text.get_window_extent() for text in ax.texts]
    boxes += [text.get_window_extent() for text in ax.get_legend().get_texts()]
    assert any(
        "bits per byte" in text.get_text() for text in [*ax.texts, *ax.get_legend().get_texts()]
    )
    for line in ax.get_lines():
        points = line.get_transform().transform(line.get_xydata())
        ends = np.linspace(points[:-1], points[1:], 20).reshape(-1, 2)  # between the points, too
        assert not any(box.contains(*point) for box in boxes for point in ends), line.get_label()


def test_report_before_the_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "costs $1 _and_ $2"  # not mathematics
    with MetricsLog(folder, start_step=0) as log:
        log.write_evaluation(0, loss=8.3, bits_per_byte=3.6)
    assert_png(write_report(folder))


def test_report_needs_metrics(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_run(tmp_path, 0, 2)
    old = write_report(tmp_path).read_bytes()
    files = set(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_report(tmp_path)
    assert (tmp_path / "report.png").read_bytes() == old and set(tmp_path.iterdir()) == files


def test_a_strip_shows_load_by_colour(tmp_path: Path) -> None:
    """An overloaded expert is red, a starved one blue, in the heat map (the picture's lower left
    quarter).
    """
    with MetricsLog(tmp_path, start_step=0) as log:
        for step in range(4):
            log.write_step(step, metrics(expert_load=[[0.02, 0.7, 0.14, 0.14]]))
    picture = assert_png(write_report(tmp_path))
    height, width, _ = picture.shape
    column = picture[height * 6 // 10 : height * 9 // 10, width // 4, :3]
    red, blue = column[:, 0] - column[:, 2], column[:, 2] - column[:, 0]
    assert red.max() > 0.3 and blue.max() > 0.3
    assert np.argmax(blue) < np.argmax(red)  # expert 0 on top


def summary_text(stream: Any, folder: Path, **changes: Any) -> None:
    summary = RunSummary(
        before=HeldOutLoss(8.31, 3.6),
        after=HeldOutLoss(2.9012, 1.31),
        unigram_bits_per_byte=2.62,
        xz_bits_per_byte=1.25,
        expert_load=np.array([[0.25, 0.75], [0.5, 0.5]]),
        sample="def read(self):\n\treturn [bold]\x1b[31m é",
    )
    print_final_summary(dataclasses.replace(summary, **changes), folder, stream)


def test_final_summary(tmp_path: Path) -> None:
    folder = tmp_path / ("a-long-name-" * 12)
    stream = io.StringIO()
    summary_text(stream, folder)
    text = stream.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines() if str(folder) not in line)
    words = [line.split() for line in text.splitlines()]
    assert ["before", "training", "8.3100", "3.6000"] in words
    assert ["after", "training", "2.9012", "1.3100"] in words
    assert [
        "unigram",
        "model,",
        "same",
        "tokens",
        "2.6200",
        "the",
        "model",
        "is",
        "50.0",
        "%",
        "below",
    ] in words
    assert [
        "xz",
        "-9,",
        "same",
        "bytes",
        "1.2500",
        "the",
        "model",
        "is",
        "4.8",
        "%",
        "above",
    ] in words
    assert "least loaded expert: 0.50 of its fair share (layer 0, expert 0)" in text
    assert ["def", "read(self):"] in words
    # neither markup nor the terminal is steered by the sample
    assert "      return [bold]\\x1b[31m é" in text
    assert "\x1b" not in text
    for name in ("checkpoints", "metrics.jsonl", "tensorboard", "report.png"):
        assert f"{folder / name}\n" in text  # whole, on one line


def test_final_summary_of_a_dense_resumed_run_in_ascii(tmp_path: Path) -> None:
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, encoding="ascii")
    summary_text(stream, tmp_path, before=None, expert_load=None, sample="é")
    stream.flush()
    text = data.getvalue().decode("ascii")
    assert "before training" not in text and "expert" not in text and "\\xe9" in text
