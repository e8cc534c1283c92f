"""train.py in folders that are not its alone: another run is in the output folder, other things
lie in the tiers'.
"""

import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests.train_runs import ENDLESS, Run, Start, TrainRuns, committed, losses, records, resumes

IMPATIENT = ("--distributed.start-timeout-s", "2")


def test_a_second_start_is_refused_and_a_requeued_one_waits(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    output_dir = tmp_path / "run"
    first = start_python(runs.command(output_dir, *ENDLESS), tmp_path / "first", runs.environment())
    first.wait_until(lambda: committed(output_dir))
    (output_dir / "run.lock").unlink()  # by somebody who thought it was left over
    first.wait_until((output_dir / "run.lock").exists)
    errors = runs.fail(output_dir, "--num-steps", 7, "--optimizer.learning-rate", 0.5, *IMPATIENT)
    holder = (
        f"output_dir = '{output_dir}': is in use by process {first.pid} on {socket.gethostname()}"
        " since "
    )
    assert f"train.py: {holder}" in errors

    command = runs.command(output_dir, "--num-steps", 1_000_000, "--evaluation.sample-tokens", 0)
    requeued = start_python(command, tmp_path / "requeued", runs.environment())
    requeued.wait_until(lambda: "waiting for it to end" in requeued.screen)
    first.send_signal(signal.SIGTERM)
    assert "stopped by a signal" in first.end(120)
    stop = committed(output_dir)[-1]
    requeued.wait_until(lambda: len(losses(output_dir)) > stop + 6)
    requeued.send_signal(signal.SIGTERM)
    assert f"resuming from step {stop} " in requeued.end(120)
    assert resumes(output_dir) == [stop]
    assert [step for step, _ in losses(output_dir)] == list(range(committed(output_dir)[-1]))
    rates = {
        record["learning_rate"] for record in records(output_dir)[10:] if "event" not in record
    }
    assert len(rates) == 1


@pytest.mark.slow
def test_a_rank_left_behind_keeps_the_folder_until_it_ends(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    output_dir = tmp_path / "run"
    pair = runs.start(start_python, output_dir, 2, *ENDLESS)
    pair[0].wait_until(lambda: committed(output_dir))
    os.kill(pair[1].pid, signal.SIGSTOP)
    pair[0].kill_now()
    assert "is in use by process" in runs.fail(output_dir, "--num-steps", 7, *IMPATIENT)
    pair[1].kill_now()
    saved = committed(output_dir)[-1]
    assert f"resuming from step {saved} " in runs.finish(output_dir, "--num-steps", saved + 2)


def files(folder: Path) -> dict[str, bytes]:
    """The content of every file of an output folder but its lock, which names the process that
    had it last.
    """
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {name: content for name, content in found.items() if name != "run.lock"}


@pytest.mark.slow
def test_what_may_change_changes_from_the_checkpoint_on(runs: TrainRuns, tmp_path: Path) -> None:
    """Said on the screen and in metrics.jsonl; fewer steps than are done and other text are
    refused at once.
    """
    run = tmp_path / "run"
    quiet = ("--evaluation.no-at-start", "--evaluation.sample-tokens", 0)
    assert "held-out loss after 0 steps" not in runs.finish(run, *quiet, "--num-steps", 6)
    faster = ("--optimizer.learning-rate", 0.25, "--optimizer.warmup-steps", 0)
    screen = runs.finish(run, *quiet, "--num-steps", 8, *faster)
    assert re.search(r"changed: optimizer.learning_rate: \S+ -> 0.25 .from here on.", screen)
    rates = [record["learning_rate"] for record in records(run) if "event" not in record]
    assert max(rates[:6]) < 0.01 and rates[6:] == [0.25] * 2
    settings = [record["setting"] for record in records(run) if record.get("event") == "changed"]
    assert {setting.partition(":")[0] for setting in settings} >= {
        "optimizer.learning_rate",
        "num_steps",
    }
    errors = runs.fail(run, *quiet, "--num-steps", 7)
    assert (
        "num_steps = 7: must be at least 8, the steps that the run has done; another output_dir"
        in errors
    )

    other = tmp_path / "other"
    other.mkdir()
    for number in range(3):
        (other / f"{number}.txt").write_text(f"other words, {number} of them\n" * 2000)
    text = tmp_path / "of-text"
    runs.finish(text, *quiet, "--num-steps", 1, data=runs.text)
    done = runs.run(text, *quiet, "--num-steps", 2, data=other)
    assert "the data has changed since the checkpoint was saved: data.path: " in done.stderr
    assert "training the tokenizer" not in done.stdout and "tokenising" not in done.stdout


@pytest.mark.slow
def test_a_refused_command_changes_nothing_and_the_checkpoint_has_its_tokenizer(
    runs: TrainRuns, tmp_path: Path, run_python: Run
) -> None:
    output_dir, text, other = tmp_path / "run", tmp_path / "text", tmp_path / "other"
    shutil.copytree(runs.text, text)
    other.mkdir()
    for number in range(3):
        (other / f"{number}.txt").write_text(f"other words, {number} of them\n" * 2000)
    small = ("--data.held-out-bytes", 20000)
    runs.finish(output_dir, *small, "--num-steps", 6, data=text)
    before = files(output_dir)

    with (text / "random.py").open("a") as file:
        file.write("# one more line\n")
    for data, why in (
        (other, f"data.path: ['{text}'] -> ['{other}']"),
        (text, f"data.path = ['{text}']"),
    ):
        errors = runs.fail(output_dir, *small, "--num-steps", 8, data=data)
        assert f"the data has changed since the checkpoint was saved: {why}" in errors
        assert not re.search("[0-9a-f]{32}", errors)
        assert files(output_dir) == before
    assert "seed: 0 -> 1" in runs.fail(output_dir, *small, "--seed", 1, data=other)
    assert files(output_dir) == before

    moved = tmp_path / "moved"
    shutil.copytree(runs.text, moved)
    assert "(the text itself is the same)" in runs.finish(
        output_dir, *small, "--num-steps", 8, data=moved
    )
    kept = {
        name: content
        for name, content in files(output_dir / "data").items()
        if name != "manifest.json"
    }
    assert kept == {name: before[f"data/{name}"] for name in kept}
    assert not list(output_dir.glob(".data*"))

    shard = output_dir / "data" / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[5000:5600] = bytes(byte ^ 1 for byte in content[5000:5600])
    shard.write_bytes(content)
    screen = runs.finish(output_dir, *small, "--num-steps", 10, data=moved)
    assert "the prepared text is damaged, it is prepared again" in screen
    assert shard.read_bytes() == before["data/train-00000.bin"]

    (output_dir / "data" / "tokenizer.json").write_bytes(
        before["data/tokenizer.json"].replace(b"import", b"impor_")
    )
    compiler, asked = tmp_path / "c++", tmp_path / "asked"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || : > {asked}\nexit 1\n')
    compiler.chmod(0o755)
    environment = runs.environment() | {
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = run_python(["-m", "jmoe.deploy.merge", output_dir, tmp_path / "merged"], environment)
    assert done.returncode == 0, done.stderr
    assert not asked.exists()  # native operations are for steps, which a merge does not take
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == before["data/tokenizer.json"]


@pytest.mark.slow
def test_runs_with_one_path_for_their_tiers_and_what_else_is_there(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Folders of a user and another run, alive, stay as they are; each run resumes from records
    of its own.
    """
    tiers, alive = tmp_path / "tiers", tmp_path / "alive"
    for name in ("process-1", "process-5", "freed-space", "pins"):
        (tiers / name).mkdir(parents=True)
        (tiers / name / "notes").write_text(name)
    nvme = (
        "--tiers.experts",
        "nvme",
        "--tiers.optimizer",
        "nvme",
        "--tiers.gradients",
        "nvme",
        "--tiers.path",
        tiers,
    )
    first = start_python(runs.command(alive, *nvme, *ENDLESS), tmp_path / "log", runs.environment())
    first.wait_until(lambda: len(committed(alive)) > 1)
    runs.finish(tmp_path / "run", *nvme, "--num-steps", 6)
    names = [
        json.loads((folder / "run.json").read_text())["run"] for folder in (alive, tmp_path / "run")
    ]
    shutil.rmtree(tiers / names[1] / "process-0" / "moments" / "pins")
    (tiers / names[1] / "process-0" / "weights" / "pins" / "a stray file").touch()
    bfloat16 = ("--tiers.gradient-dtype", "bfloat16", "--num-steps", 8)
    screen = runs.finish(tmp_path / "run", *nvme, *bfloat16)
    assert "tiers.gradient_dtype: 'float32' -> 'bfloat16'" in screen
    assert "resuming from step 6 " in screen
    first.send_signal(signal.SIGTERM)
    assert "stopped by a signal" in first.end(120)
    assert len(losses(alive)) == committed(alive)[-1]
    assert sorted(path.name for path in tiers.iterdir()) == sorted(
        [*names, "process-1", "process-5", "freed-space", "pins"]
    )
    for name in ("process-1", "process-5", "freed-space", "pins"):
        assert (tiers / name / "notes").read_text() == name
