"""`train.py ufo-tiny` as a program: it trains, resumes, ends with its table and picture; its
plan; what is refused.
"""

import shutil
from pathlib import Path

import pytest

from jmoe.command_line import parse_train
from jmoe.configs import PRESETS
from jmoe.deploy.merge import merge_run_to_hugging_face
from jmoe.run.metrics import read_events, read_step_records
from tests.train_runs import Run, TrainRuns

# Glyphs and fonts come with matplotlib; with a few small layers a step takes milliseconds.
SMALL = (
    *(
        "--model.hidden-size",
        "16",
        "--model.intermediate-size",
        "16",
        "--model.moe-intermediate-size",
        "16",
    ),
    *(
        "--model.num-attention-heads",
        "2",
        "--model.num-key-value-heads",
        "2",
        "--model.image-size",
        "8",
    ),
    *("--tasks.digits.source", "glyphs", "--tasks.photographs.source", "fonts"),
    *("--tasks.glyphs.batch-size", "8", "--tasks.digits.batch-size", "4"),
    *("--tasks.fonts.batch-size", "2", "--tasks.photographs.batch-size", "2"),
    *(
        "--optimizer.schedule",
        "constant",
        "--optimizer.warmup-steps",
        "5",
        "--checkpoint.every-steps",
        "2",
    ),
)

ALL_END = (
    *("--tasks.glyphs.num-steps", "5", "--tasks.digits.num-steps", "6"),
    *("--tasks.fonts.num-steps", "7", "--tasks.photographs.num-steps", "8"),
)


NO_PATHS = [f"--tasks.{task}.path" for task in ("glyphs", "digits", "fonts", "photographs")]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_step_records(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_resumes_and_ends_with_a_table_and_a_picture(
    run_python: Run, runs: TrainRuns, tmp_path: Path
) -> None:
    command, environment = ("train.py", "ufo-tiny", *SMALL), runs.environment()
    whole = run_python(
        (*command, "--num-steps", "4", "--output-dir", tmp_path / "whole"), environment
    )
    assert whole.returncode == 0, whole.stdout + whole.stderr
    table = [
        line.split()
        for line in whole.stdout.splitlines()
        if line.startswith(("glyphs", "digits", "fonts", "phot"))
    ]
    assert [(row[0], row[1]) for row in table] == [
        ("glyphs", "36"),
        ("digits", "36"),
        ("fonts", "14"),
        ("photographs", "14"),
    ]
    assert (tmp_path / "whole" / "report.png").read_bytes().startswith(b"\x89PNG")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "4")
    again = run_python(
        (*command, "--num-steps", "4", "--output-dir", tmp_path / "again"), environment
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from step 2" in again.stdout
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    final = [read_events(tmp_path / name / "metrics.jsonl")[-1] for name in ("again", "whole")]
    assert final[0] == final[1]
    (idle,) = [
        event
        for event in read_events(tmp_path / "whole" / "metrics.jsonl")
        if event["event"] == "idle"
    ]
    assert idle["step"] == 4 and idle["planned"] == [0.0]
    assert len(idle["idle"]) == 1 and 0 <= idle["idle"][0] < 1
    with pytest.raises(ValueError, match="learned image tasks: must be a run of a language model"):
        merge_run_to_hugging_face(tmp_path / "whole", tmp_path / "merged")


def test_the_plan_draws_who_runs_where(run_python: Run) -> None:
    done = run_python(("train.py", "ufo-tiny", "--plan", "--mesh.data", "2"), {}, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert " MB  glyphs 0:64" in lines[0]
    assert " MB  digits 0:32 + fonts 0:16 + photographs 0:16" in lines[1]
    assert lines[2].startswith("every device has room for 3 of 4 experts in each of 2 layers: ")
    few = (
        "train.py",
        "ufo-tiny",
        "--plan",
        "--mesh.data",
        "2",
        "--machine.device-bytes",
        "3000000",
    )
    done = run_python(few, {}, timeout=120)
    assert done.returncode == 1 and not done.stdout
    assert (
        "machine.device_bytes = 3000000: must be more for 4 tasks on 2 devices, at least 4"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--tasks.digits.path", "1"),
            "tasks.digits.path = (1,): must name an expert for 2 model.task_layers",
        ),
        (("--tasks.digits.path", "1", "9"), "tasks.digits.path = (1, 9): must lie between 0 and"),
        (
            ("--compute-dtype", "float16"),
            "compute_dtype = 'float16': must be float32 or bfloat16 for images",
        ),
        (("--comm.schedule", "chunks"), "comm.schedule = 'chunks': must be none for images"),
        (("--comm.bucket-bytes", "1000"), "comm.bucket_bytes = 1000: must be 0 for images"),
        (
            ("--layout", "elastic", "--mesh.expert-intra", "2"),
            "must be (1, 1) with layout = 'elastic'",
        ),
        (("--tasks.fonts.num-steps", "-1"), "num_steps = -1: must not be negative"),
        (
            ("--tasks.fonts.num-steps", "9"),
            "tasks.fonts.num_steps = 9: must be 0 with layout = 'even'",
        ),
        (
            ("--tasks.fonts.num-steps", "9999"),
            "tasks.fonts.num_steps = 9999: must not exceed num_steps = 3000",
        ),
        (
            ("--layout", "elastic", *ALL_END),
            "num_steps = (5, 6, 7, 8): one must be 0 or num_steps = 3000",
        ),
        (
            ("--elastic.replan-every-steps", "9"),
            "elastic.replan_every_steps = 9: must be 0 with layout = 'even'",
        ),
        (
            ("--tiers.experts", "auto"),
            "tiers.experts = 'auto': must be device, host or nvme for images",
        ),
        (
            ("--tiers.experts", "host", "--tiers.device-experts", "0.5"),
            "tiers.device_experts = 0.5: must be 1 for images, whose tasks say what a device holds",
        ),
        (
            ("--tiers.experts", "host", "--tiers.chosen-share", "0.01"),
            "tiers.chosen_share = 0.01: must be 0 for images, whose tasks name their experts",
        ),
        (
            ("--layout", "elastic", "--elastic.replan-every-steps", "9", "--tiers.experts", "host"),
            "elastic.replan_every_steps = 9: must be 0 with experts on other tiers than the device",
        ),
        (
            ("--tiers.experts", "nvme", "--tiers.optimizer", "host"),
            "tiers.optimizer = 'host': must be nvme with tiers.experts = 'nvme'",
        ),
        (
            (
                "--tiers.optimizer",
                "host",
                "--model.task-layers",
                "--model.num-experts",
                "0",
                *NO_PATHS,
            ),
            "tiers = ('device', 'host'): must be device for a model without experts",
        ),
        (("--elastic.max-imbalance", "0.9"), "elastic.max_imbalance = 0.9: must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:

    with pytest.raises((SystemExit, ValueError)) as refused:
        parse_train(["ufo-tiny", *options], PRESETS)
    said = " ".join((str(refused.value) + capsys.readouterr().err).replace("│", " ").split())
    assert message in said
