"""train.py end to end with real processes: killed, stopped, moved to other devices, fed with bad
input.

All runs share one tiny model, its token shards and a compile cache, and are held against one
uninterrupted run.
"""

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Child
from tests.train_runs import (
    ENDLESS,
    REFERENCE_STEPS,
    Run,
    Start,
    TrainRuns,
    committed,
    kill_while_saving,
    losses,
    records,
    resumes,
    unfinished,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def reference(runs: TrainRuns) -> dict[int, float]:
    """The loss of every step of a run on one device that nothing disturbed."""
    return dict(losses(runs.reference[0]))


# A whole run


def test_completed_run(runs: TrainRuns) -> None:
    output_dir, screen = runs.reference
    for words in (
        "tokens to train on",
        "step 0 ",
        f"step {REFERENCE_STEPS - 1} (100 %)",
        "tokens/s",
        "evaluating on ",
        "held-out loss after 20 steps: ",
        "compiling the training step ...",
        "before training",
    ):
        assert words in screen
    summary = screen.partition("before training")[2].partition("\ncheckpoints ")[0]
    assert len(summary.splitlines()) > 4 and max(map(len, summary.splitlines())) <= 80
    for words in ("after training", "bits per byte", "least loaded expert", "sample"):
        assert words in screen
    for name in ("checkpoints", "metrics.jsonl", "tensorboard", "report.png"):
        assert str(output_dir / name) in screen.replace("\n", ""), name
    assert (output_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    events = b"".join(
        path.read_bytes() for path in (output_dir / "tensorboard" / "train").iterdir()
    )
    compiled = [record["step"] for record in records(output_dir) if record.get("compiled")]
    assert compiled[0] == 0 and len(compiled) < 10  # the time of these says nothing of the rate
    assert events.count(b"tokens_per_s") == REFERENCE_STEPS - len(compiled)

    steps = [record for record in records(output_dir) if "event" not in record]
    assert [record["step"] for record in steps] == list(range(REFERENCE_STEPS))
    for record in steps:
        assert math.isfinite(record["loss"])
        assert record["tokens_per_s"] > 0
        assert record["dropped_fraction"] == 0  # dropless
    evaluations = [record for record in records(output_dir) if "event" in record]
    assert [(e["event"], e["step"]) for e in evaluations] == [
        ("evaluation", step) for step in (0, 20, 40, 60, 80)
    ]
    before, *_, after = evaluations
    assert after["bits_per_byte"] < 0.9 * before["bits_per_byte"]
    assert committed(output_dir) == list(range(5, REFERENCE_STEPS + 1, 5))
    saved = json.loads((output_dir / "config.json").read_text())
    assert saved["model"]["hidden_size"] == 32
    assert saved["data_fingerprint"]
    (trace,) = (output_dir / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    for phase in ("attention", "router", "dispatch", "experts", "combine", "loss", "optimizer"):
        assert f"/{phase}/".encode() in content or f"({phase})/".encode() in content, phase


@pytest.mark.slow
def test_a_run_without_a_compiler_says_that_it_is_slower(
    runs: TrainRuns, tmp_path: Path, run_python: Run
) -> None:
    command = runs.command(tmp_path / "run", "--num-steps", 1, "--compute-dtype", "bfloat16")
    done = run_python(
        command, runs.environment() | {"CXX": "no-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert (
        "no native operations, steps are slower: $CXX = 'no-compiler' is not there" in done.stderr
    )


@pytest.mark.slow
def test_jsonl_and_dense_model(runs: TrainRuns, tmp_path: Path) -> None:
    lines = tmp_path / "modules.jsonl"
    with lines.open("w") as file:
        for path in sorted(runs.text.iterdir()):
            file.write(json.dumps({"name": path.name, "body": path.read_text()}) + "\n")
    dense = (
        "--model.num-experts",
        0,
        "--model.intermediate-size",
        64,
        "--optimizer.schedule",
        "cosine",
    )
    runs.finish(tmp_path / "run", "--num-steps", 30, "--data.field", "body", *dense, data=lines)
    values = [loss for _, loss in losses(tmp_path / "run")]
    assert len(values) == 30
    assert sum(values[-3:]) / 3 < values[0] - 0.2
    assert all(
        record["dropped_fraction"] == 0
        for record in records(tmp_path / "run")
        if "event" not in record
    )


# Killed and stopped


def test_killed_run_resumes_bit_identically(
    runs: TrainRuns, reference: dict[int, float], tmp_path: Path, start_python: Start
) -> None:
    command, environment = runs.command(tmp_path, *ENDLESS), runs.environment()
    first = start_python(command, tmp_path / "log-1", environment)
    # by step 12 the first checkpoint is complete: the save of step 10 waited for it
    moment = random.randint(12, 40)
    first.wait_until(lambda: len(losses(tmp_path)) >= moment)
    time.sleep(random.uniform(0, 0.03))
    first.kill_now()
    commits = committed(tmp_path)[-1:]

    second = start_python(command, tmp_path / "log-2", environment)
    kill_while_saving(second, tmp_path)
    commits += committed(tmp_path)[-1:]

    end = max(REFERENCE_STEPS, commits[-1] + 5)
    third = start_python(
        runs.command(tmp_path, "--num-steps", end), tmp_path / "log-3", environment
    )
    assert "after training" in third.end(300)
    # resumed from the last commit, and said so
    assert resumes(tmp_path) == commits
    for step, process in zip(commits, (second, third), strict=True):
        assert f"resuming from step {step} " in process.screen
    # what a step computed, the first time or again, is what the undisturbed run computed: all bits
    # of it
    computed = set(losses(tmp_path))
    assert sorted(step for step, _ in computed) == list(range(end))
    assert [(step, loss) for step, loss in computed if loss != reference.get(step, loss)] == []
    assert committed(tmp_path) == [end - 5, end]
    assert unfinished(tmp_path) == set()


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM, signal.SIGINT),
        pytest.param((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_signals_save_and_resume(
    signals: tuple[signal.Signals, ...],
    runs: TrainRuns,
    reference: dict[int, float],
    tmp_path: Path,
    start_python: Start,
) -> None:
    """A signal, then the same command again and the next: each ends with the step saved and a
    report, and nothing is lost.
    """
    stops: list[int] = []
    for number in signals:
        before = len(losses(tmp_path))
        process = start_python(
            runs.command(tmp_path, *ENDLESS), tmp_path / f"log-{number}", runs.environment()
        )
        process.wait_until(lambda before=before: len(losses(tmp_path)) >= before + 7)
        process.send_signal(number)
        screen = process.end(240)
        stops.append(committed(tmp_path)[-1])
        assert f"stopped by a signal after step {stops[-1]};" in screen
        assert f"jmoe: {number.name}: the run finishes this step, saves and stops" in screen
        assert "Traceback" not in screen
        (tmp_path / "report.png").unlink()  # there is one every time
        assert losses(tmp_path)[-1][0] == stops[-1] - 1
    assert f"resuming from step {stops[-2]} " in screen
    assert resumes(tmp_path) == stops[:-1]
    assert [step for step, _ in losses(tmp_path)] == list(range(stops[-1]))  # each once
    assert [
        (step, loss) for step, loss in losses(tmp_path)[:REFERENCE_STEPS] if loss != reference[step]
    ] == []


@pytest.mark.slow  # signals at any step are quick, above
def test_ctrl_c_at_once(runs: TrainRuns, tmp_path: Path, start_python: Start) -> None:
    """Before the first step one ends the run where it stands, a second one anywhere, inside the
    compiler too.
    """
    slow = {"JAX_COMPILATION_CACHE_DIR": None, "JAX_DISABLE_MOST_OPTIMIZATIONS": None}

    def interrupted(name: str, line: str) -> Child:
        """A run that got a Ctrl-C after it had said this line."""
        environment = (
            runs.environment() | slow | {"XDG_CACHE_HOME": str(tmp_path / f"cache-{name}")}
        )
        process = start_python(
            runs.command(tmp_path / name, *ENDLESS), tmp_path / f"log-{name}", environment
        )
        process.wait_until(lambda: line in process.screen)
        process.send_signal(signal.SIGINT)
        return process

    for number in range(10):  # this process may stand still at the wrong moment: then once more
        early = interrupted(f"early-{number}", "evaluating on")
        if early.wait(240) == -signal.SIGINT:
            break
    assert "Traceback" not in early.end(240, -signal.SIGINT)
    for number in range(10):
        late = interrupted(f"late-{number}", "compiling the training step")
        late.wait_until(lambda late=late: "jmoe: SIGINT: the run finishes this step" in late.screen)
        still_compiles = losses(tmp_path / f"late-{number}") == []
        late.send_signal(signal.SIGINT)
        if late.wait(240) == 128 + signal.SIGINT and still_compiles:
            break
    screen = late.end(240, 128 + signal.SIGINT)
    assert still_compiles
    assert "a second Ctrl-C: ended at once" in screen and "Traceback" not in screen
    # what has been compiled is kept
    assert list((tmp_path / f"cache-late-{number}" / "jmoe" / "compiled").iterdir())


def test_completed_run_again(runs: TrainRuns, tmp_path: Path) -> None:
    """The command of a run that is complete trains no further and prints what the run came to."""
    runs.from_checkpoint(REFERENCE_STEPS, tmp_path)
    shutil.copy(runs.reference[0] / "metrics.jsonl", tmp_path)
    before = losses(tmp_path)
    screens = runs.reference[1], runs.finish(tmp_path, "--num-steps", REFERENCE_STEPS)
    first, again = (
        screen.partition("held-out text")[2].partition("sample")[0] for screen in screens
    )
    assert first == again
    assert losses(tmp_path) == before
    assert committed(tmp_path) == [REFERENCE_STEPS]


# Other devices, more processes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2, 2), (4, 1, 1), (1, 4, 1), (2, 1, 2)])
def test_another_mesh_and_back(
    runs: TrainRuns, reference: dict[int, float], tmp_path: Path, mesh: tuple[int, int, int]
) -> None:
    """A checkpoint of one device on four, and one of four on one."""
    runs.from_checkpoint(40, tmp_path)
    data, inter, intra = mesh
    shape = ("--mesh.data", data, "--mesh.expert-inter", inter, "--mesh.expert-intra", intra)
    for devices, end, options in ((4, 47, shape), (1, 54, ())):
        assert f"{devices} cpu device(s)" in runs.finish(
            tmp_path, "--num-steps", end, *options, devices=devices
        )
    assert resumes(tmp_path) == [40, 47]
    assert dict(losses(tmp_path)) == pytest.approx(
        {s: reference[s] for s in range(40, 54)}, rel=1e-5, abs=0
    )


@pytest.mark.slow
def test_two_processes_stop_together_and_go_on_as_one(
    runs: TrainRuns, reference: dict[int, float], tmp_path: Path, start_python: Start
) -> None:
    """Only rank 1 gets the signal; both end with the code that was asked for. Then one process
    goes on.
    """
    runs.from_checkpoint(20, tmp_path)
    pair = runs.start(start_python, tmp_path, 2, *ENDLESS, "--distributed.stopped-exit-code", 75)
    pair[0].wait_until(lambda: len(losses(tmp_path)) >= 4)
    pair[1].send_signal(signal.SIGTERM)
    screens = [process.end(240, code) for process, code in zip(pair, (75, 75), strict=True)]
    stop = committed(tmp_path)[-1]
    assert losses(tmp_path)[-1][0] == stop - 1
    assert f"stopped by a signal after step {stop};" in screens[0]

    runs.finish(tmp_path, "--num-steps", stop + 5)
    assert resumes(tmp_path) == [20, stop]
    got = dict(losses(tmp_path))
    assert sorted(got) == list(range(20, stop + 5))
    known = [step for step in got if step in reference]
    assert [got[s] for s in known] == pytest.approx([reference[s] for s in known], rel=1e-5, abs=0)


@pytest.mark.slow
def test_a_killed_rank_ends_the_other(runs: TrainRuns, tmp_path: Path, start_python: Start) -> None:
    """Killed in a step: while a checkpoint is saved JAX ends the other with a stack around the
    same line.
    """
    limits = ("--distributed.heartbeat-timeout-s", 8, "--distributed.step-timeout-s", 120)
    limits = (*limits, "--checkpoint.every-steps", 100_000)
    survivor, victim = runs.start(start_python, tmp_path, 2, *ENDLESS, *limits)
    survivor.wait_until(lambda: len(losses(tmp_path)) > 5)
    victim.kill()
    assert survivor.wait(240) != 0
    assert "rank 1: no sign of life" in survivor.screen, survivor.screen
    for drowning in ("Traceback", "stack trace", "most recent call"):
        assert drowning not in survivor.screen


@pytest.mark.slow
def test_a_missing_rank_is_named(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    command = runs.ranks(tmp_path / "run", 3, "--num-steps", 5, "--distributed.start-timeout-s", 2)[
        0
    ]
    done = run_python(command, runs.environment(), timeout=240)
    assert done.returncode == 70
    assert (
        done.stderr
        == "train.py: ranks 1, 2 did not start within distributed.start_timeout_s = 2 s\n"
    )
    assert not (tmp_path / "run").exists()


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh.data", "3"], "= (3, 1, 1): must multiply to the 1 devices"),
        (["--data.path", "no/such/text"], "data.path = 'no/such/text': no such file or folder"),
    ],
    ids=["devices", "data"],
)
def test_a_mistake_is_named_and_leaves_no_folder(
    runs: TrainRuns, tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in runs.fail(tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()


def test_a_platform_that_jax_does_not_find_is_named(runs: TrainRuns, tmp_path: Path) -> None:
    named = {"JAX_PLATFORMS": "nonsense"}
    done = runs._run_python(runs.command(tmp_path / "run"), runs.environment() | named)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "train.py: JAX_PLATFORMS = 'nonsense': must name devices that JAX finds" in done.stderr


@pytest.mark.slow
def test_preparing_data_may_take_longer_than_the_limit_without_progress(
    runs: TrainRuns, tmp_path: Path
) -> None:
    """The standard library takes several seconds, a piece of it far less than the 4 s that are
    allowed.
    """
    text = tmp_path / "text"
    text.mkdir()
    sources = [
        path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]
    for copy in range(4):
        (text / f"{copy}.txt").write_bytes(b"".join(sources))
    limit = ("--distributed.start-timeout-s", 4, "--num-steps", 1, "--data.held-out-bytes", 3000)
    assert "; 4 file(s) read\n" in runs.finish(tmp_path / "run", *limit, data=text)


@pytest.mark.slow
def test_text_that_cannot_be_read(runs: TrainRuns, tmp_path: Path) -> None:
    """All of it is named at once and nothing is prepared; `--data.encoding` then reads it."""
    text, folder = shutil.copytree(runs.text, tmp_path / "text"), tmp_path / "run"
    for name in ("one.txt", "two.md"):
        (text / name).write_bytes("naïve café\n".encode("latin-1") * 9)
    (text / "logo.png").write_bytes(b"x")
    errors = runs.fail(folder, "--num-steps", 2, data=text)
    assert "data.path: 2 problem(s) in 10 file(s) of text; nothing was written:" in errors
    for name in ("one.txt", "two.md"):
        assert f"{text / name}: not UTF-8 at byte 2: invalid continuation byte" in errors
    assert (
        "--data.encoding utf-8 latin-1 reads each file in the first of these encodings that fits it"
        in errors
    )
    assert not (folder / "data").exists()

    screen = runs.finish(folder, "--num-steps", 2, "--data.encoding", "utf-8", "latin-1", data=text)
    assert "; 10 file(s) read, 1 skipped that are no text (1 *.png)\n" in screen
    assert (
        "too few to compare with xz and a unigram model\n(100,000; see data.held_out_bytes"
        in screen
    )
    assert "xz -9" not in screen and "nan" not in screen


WITHOUT_JAX = """
import runpy, sys
sys.modules["jax"] = None  # importing it fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["train.py", "--help"], 0, "train.py PRESET --help shows every option"),
        (["train.py", "tiny", "--help"], 0, "--optimizer.warmup-steps INT"),
        (["train.py", "tiny", "--batch-size", "0"], 2, "batch_size = 0: must be greater than 0"),
        (["serve.py", "--help"], 0, "--max-seq-len"),
    ],
)
def test_help_and_mistakes_do_not_wait_for_jax(
    run_python: Run, arguments: list[str], status: int, message: str
) -> None:
    done = run_python(["-c", WITHOUT_JAX, *arguments], {"JMOE_RUNTIME": "1"}, timeout=240)
    assert done.returncode == status, done.stderr
    assert message in done.stdout + done.stderr


def test_a_reader_of_the_help_may_leave_early() -> None:
    """`train.py tiny --help | head -1`."""
    command = [sys.executable, "train.py", "tiny", "--help"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_another_configuration_leaves_the_checkpoint_alone(runs: TrainRuns, tmp_path: Path) -> None:
    runs.from_checkpoint(20, tmp_path)
    before = _files(tmp_path)
    errors = runs.fail(tmp_path, "--num-steps", 25, "--model.hidden-size", 64, "--seed", 1)
    assert (
        "another configuration (saved -> now): model.hidden_size: 32 -> 64; seed: 0 -> 1" in errors
    )
    assert {
        name: data for name, data in _files(tmp_path).items() if name.startswith("checkpoints")
    } == before


@pytest.mark.slow
def test_damaged_checkpoints(runs: TrainRuns, reference: dict[int, float], tmp_path: Path) -> None:
    """A truncated file stops the run and names the intact step; a step half-deleted is passed
    over with a warning.
    """
    runs.from_checkpoint(20, tmp_path)
    runs.from_checkpoint(25, tmp_path)
    intact = _files(tmp_path / "checkpoints" / "20")
    newest = tmp_path / "checkpoints" / "25"
    largest = max(
        (path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    os.truncate(largest, largest.stat().st_size // 2)
    errors = runs.fail(tmp_path, "--num-steps", 27)
    assert f"checkpoint {newest} is damaged: {largest.relative_to(newest)} has " in errors
    assert "step 20 is intact" in errors

    largest.unlink()
    assert _files(tmp_path / "checkpoints" / "20") == intact
    done = runs.run(tmp_path, "--num-steps", 27)
    assert done.returncode == 0, done.stderr
    warning = (
        f"warning: checkpoint {newest} is incomplete: {largest.relative_to(newest)} is missing;"
        " skipped"
    )
    assert warning in done.stderr
    assert "resuming from step 20 " in done.stdout
    assert losses(tmp_path) == [(step, reference[step]) for step in range(20, 27)]


@contextlib.contextmanager
def _tmpfs(folder: Path, size_bytes: int) -> Iterator[None]:
    """A file system of `size_bytes` at `folder`; skips the test where this process may not mount
    one.
    """
    folder.mkdir(parents=True)
    command = ("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True, timeout=240)


@pytest.mark.slow  # tests/run/test_checkpoint.py fills a disk within a process
def test_full_disk(runs: TrainRuns, tmp_path: Path) -> None:
    """The checkpoints' file system fills up: a clear error, the older checkpoint restorable, and
    no steps lost.
    """
    reference = dict(losses(runs.reference[0]))
    one = sum(
        f.stat().st_size
        for f in (runs.reference[0] / "checkpoints" / "20").rglob("*")
        if f.is_file()
    )
    with _tmpfs(tmp_path / "checkpoints", int(1.6 * one)):
        errors = runs.fail(tmp_path, "--num-steps", 30)
        (message,) = (line for line in errors.splitlines() if line.startswith("train.py: "))
        assert message.startswith(
            f"train.py: checkpoint of step 10 in {tmp_path / 'checkpoints'} was not written: "
        )
        assert "No space left on device" in message
        assert "; step 5 is complete" in message
        assert committed(tmp_path) == [5]
        size = f"remount,size={10 * one}"
        subprocess.run(
            ("mount", "-o", size, str(tmp_path / "checkpoints")), check=True, timeout=240
        )
        assert "resuming from step 5 " in runs.finish(tmp_path, "--num-steps", 30)
        assert [(step, loss) for step, loss in losses(tmp_path) if loss != reference[step]] == []
        assert {step for step, _ in losses(tmp_path)} == set(range(30))
        assert committed(tmp_path) == [25, 30]


@pytest.mark.slow
def test_loss_that_is_not_finite(runs: TrainRuns, tmp_path: Path) -> None:
    """A weight decay that wrecks the weights: the step, the layers and a checkpoint from before are
    named.

    That checkpoint is there though but one is to be kept: the newest one holds what has failed.
    """
    runs.from_checkpoint(20, tmp_path)
    often = ("--checkpoint.every-steps", 1, "--checkpoint.keep", 1)
    options = ("--num-steps", 40, "--optimizer.weight-decay", 1e10, *often)
    done = runs.run(tmp_path, *options)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "warning: optimizer.weight_decay = 1e+10: " in done.stdout
    (message,) = (
        line for line in done.stderr.splitlines() if "gradient norm not finite in " in line
    )
    failed = losses(tmp_path)[-1][0] + 1
    assert 20 < failed < 40
    assert message.startswith(f"train.py: step {failed}: loss = ")
    assert "moe_layers 0, 1" in message
    saved = tmp_path / "checkpoints"
    words = (
        f"the last good checkpoint is {saved / str(failed - 1)}; delete {saved / str(failed)} to go"
        " on from it"
    )
    assert message.endswith(words)
    assert committed(tmp_path) == [failed - 1, failed]
    shutil.rmtree(saved / str(failed))
    screen = runs.finish(tmp_path, "--num-steps", failed + 2)
    assert f"resuming from step {failed - 1} " in screen
