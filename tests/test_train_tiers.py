"""train.py with experts on other tiers: the ordinary run's losses, also after a SIGKILL in the
middle of a save.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from jmoe.cluster.overview import read_overview
from jmoe.command_line import parse_train
from jmoe.configs import PRESETS
from jmoe.memory.record_checkpoint import ITEM
from jmoe.memory.saved_records import read_record_lists
from jmoe.run.metrics import read_events
from jmoe.run.planner import training_plan
from tests.train_runs import (
    ENDLESS,
    Run,
    Start,
    TrainRuns,
    committed,
    evaluations,
    kill_while_saving,
    losses,
    resumes,
    run_split,
)

STEPS = 24
LENGTH = ("--num-steps", STEPS)
NVME = (
    "--tiers.experts",
    "nvme",
    "--tiers.optimizer",
    "nvme",
    "--tiers.host-cache-bytes",
    "500000",
)
HOST = ("--tiers.experts", "host", "--tiers.optimizer", "host")


@pytest.fixture(scope="module")
def on_host(runs: TrainRuns) -> Path:
    """A run with all experts in host memory that nothing disturbed."""
    output_dir = runs.folder / "host"
    runs.finish(output_dir, *HOST, *LENGTH)
    return output_dir


@pytest.mark.slow
def test_tiers_change_no_loss_but_by_rounding(runs: TrainRuns, on_host: Path) -> None:
    ordinary = losses(runs.reference[0])[:STEPS]
    assert losses(on_host) == [
        (step, pytest.approx(loss, rel=1e-5, abs=0)) for step, loss in ordinary
    ]


@pytest.mark.slow
def test_the_end_of_a_run_has_predictions_with_an_estimated_and_the_measured_share(
    runs: TrainRuns, tmp_path: Path
) -> None:
    """The plan of a run to which that share is given says the same."""
    few = (
        *NVME,
        "--model.num-experts",
        64,
        "--model.num-experts-per-tok",
        1,
        "--batch-size",
        1,
        "--num-steps",
        2,
    )
    few = (*few, "--machine.nvme-read-bytes-per-s", "1e6")
    screen = runs.finish(tmp_path, *few)
    (event,) = [
        event for event in read_events(tmp_path / "metrics.jsonl") if event["event"] == "tiers"
    ]
    estimated_s, measured_s = event["predicted_step_s"], event["predicted_step_s_measured_share"]
    assert (
        0 < event["chosen_share"] <= event["most_chosen_share"] <= 1
        and estimated_s != measured_s > 0
    )
    shown = (
        f"step: predicted {estimated_s:.3g} s ({measured_s:.3g} s with the measured share of chosen"
        " experts), "
    )
    assert f"{shown}measured {event['measured_step_s']:.3g} s; " in screen
    again = runs.command(tmp_path, *few, "--tiers.chosen-share", event["chosen_share"])
    planned = training_plan(parse_train(list(map(str, again[1:])), PRESETS))
    assert planned.step_s() == pytest.approx(measured_s)


@pytest.mark.slow
def test_a_run_updated_on_the_host_that_is_killed_goes_on_to_the_bit(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """As the same run in host memory that nothing disturbed, with weights in bfloat16; and the
    end says how few bytes went to the device and back.
    """
    options = ("--tiers.update", "host", "--compute-dtype", "bfloat16")
    screen = runs.finish(tmp_path / "whole", *HOST, *options, *LENGTH)
    assert re.search(r"; host to devices \d+\.\d\d GB, back \d+\.\d\d GB\n", screen)
    (event,) = [
        e for e in read_events(tmp_path / "whole" / "metrics.jsonl") if e["event"] == "tiers"
    ]
    assert 0 < event["to_device_bytes"] < 2 * event["from_device_bytes"]
    run = tmp_path / "run"
    command = runs.command(run, *NVME, *options, *ENDLESS)
    process = start_python(command, run.with_suffix(".log"), runs.environment())
    process.wait_until(lambda: committed(run))
    kill_while_saving(process, run)
    assert committed(run)[-1] < STEPS
    runs.finish(run, *NVME, *options, *LENGTH)
    assert len(resumes(run)) == 1
    assert {step: loss for step, loss in losses(run) if step < STEPS} == dict(
        losses(tmp_path / "whole")
    )
    assert evaluations(run)[-1] == evaluations(tmp_path / "whole")[-1]


@pytest.mark.slow  # tests/memory/test_record_checkpoint.py kills a quick one
@pytest.mark.parametrize(
    "policy",
    [
        (),
        pytest.param(("--tiers.cache-policy", "moesys", "--tiers.cache-threshold", 0), id="moesys"),
    ],
)
def test_a_run_on_nvme_that_is_killed_goes_on_to_the_bit(
    runs: TrainRuns,
    on_host: Path,
    tmp_path: Path,
    start_python: Start,
    policy: tuple[str | float, ...],
) -> None:
    def killed_run(run: Path) -> list[int]:
        """The steps that it has saved."""
        process = start_python(
            runs.command(run, *NVME, *policy, *ENDLESS), run.with_suffix(".log"), runs.environment()
        )
        process.wait_until(lambda: committed(run))
        kill_while_saving(process, run)
        return committed(run)

    for number in range(10):  # one that comes too far while this process stands still is of no use
        run = tmp_path / str(number)
        if (saved := killed_run(run))[-1] < STEPS:
            break
    killed = read_overview(run)
    assert (killed.state, killed.checkpoint) == ("dead", saved[-1])
    assert (
        killed.tiers is not None
        and killed.tiers["nvme_read_bytes"] > 0
        and 0 <= killed.tiers["hit_rate"] <= 1
    )
    screen = runs.finish(run, *NVME, *policy, *LENGTH)
    assert resumes(run) == saved[-1:]
    assert f"resuming from step {saved[-1]}" in screen
    expected = dict(losses(on_host))
    assert {step: loss for step, loss in losses(run) if step < STEPS} == expected
    assert evaluations(run)[-1] == evaluations(on_host)[-1]


@pytest.mark.slow
def test_a_checkpoint_of_host_memory_is_an_ordinary_one(
    runs: TrainRuns, on_host: Path, tmp_path: Path
) -> None:
    runs.finish(tmp_path, *HOST, "--num-steps", 10)
    runs.finish(tmp_path, *LENGTH)
    ours, expected = dict(losses(tmp_path)), dict(losses(on_host))
    assert all(abs(ours[step] - expected[step]) <= 1e-5 * expected[step] for step in expected)


@pytest.mark.slow
def test_a_run_on_nvme_is_served_merged_and_moved(
    runs: TrainRuns, on_host: Path, tmp_path: Path, run_python: Run
) -> None:
    """The weights are those of the run in host memory, and so is what the run does when it goes
    on on the device.
    """
    run = tmp_path / "run"
    runs.finish(run, *NVME, *LENGTH)
    served = run_python(["serve.py", run, "--dry-run"], runs.environment(), timeout=200)
    assert served.returncode == 0, served.stderr
    merged = run_python(
        ["-m", "jmoe.deploy.merge", on_host, tmp_path / "model"], runs.environment(), timeout=200
    )
    assert merged.returncode == 0, merged.stderr
    folders = [tmp_path / "model", *(run / "merged").glob(f"step-{STEPS}-*")]
    ours, theirs = (folder / "model.safetensors" for folder in folders)
    assert ours.read_bytes() == theirs.read_bytes()

    shutil.copytree(on_host, tmp_path / "host")
    runs.finish(tmp_path / "host", *NVME, "--num-steps", STEPS + 4)  # memory to disk
    runs.finish(run, "--num-steps", STEPS + 4)  # disk to device
    assert [resumes(folder) for folder in (tmp_path / "host", run)] == [[STEPS], [STEPS]]
    ours, theirs = dict(losses(tmp_path / "host")), dict(losses(run))
    assert len(ours) == STEPS + 4
    assert ours == pytest.approx(theirs, rel=1e-5, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "devices", "update"),
    [
        ("expert-inter", 1, "device"),
        ("data", 1, "device"),
        ("expert-inter", 1, "host"),
        ("expert-inter", 4, "host"),
    ],
)
def test_two_processes_are_killed_and_go_on_and_then_one(
    runs: TrainRuns,
    on_host: Path,
    tmp_path: Path,
    start_python: Start,
    axis: str,
    devices: int,
    update: str,
) -> None:
    """Each with half of the experts or all: to the bit as without the kill; one process then
    goes on with all.
    """
    spread = (f"--mesh.{axis}", 2, "--checkpoint.every-steps", 4, "--tiers.update", update)
    if devices > 1:
        spread = (*spread, "--mesh.expert-intra", devices)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_split(runs, start_python, whole, 2, devices, *HOST, *spread, "--num-steps", STEPS)
    assert dict(losses(whole)) == pytest.approx(dict(losses(on_host)), rel=1e-5, abs=0)

    group = runs.start(start_python, killed, 2, *NVME, *spread, *ENDLESS, devices=devices)
    group[0].wait_until(lambda: committed(killed))
    kill_while_saving(group[0], killed, group[1:])
    saved = committed(killed)
    assert saved and saved[-1] < STEPS
    run_split(runs, start_python, killed, 2, devices, *NVME, *spread, "--num-steps", STEPS)
    assert resumes(killed) == saved[-1:]
    assert {step: loss for step, loss in losses(killed) if step < STEPS} == dict(losses(whole))
    assert evaluations(killed)[-1] == evaluations(whole)[-1]

    lists = read_record_lists(killed / "checkpoints" / str(STEPS) / ITEM)
    saved_by = [
        {name.split(".")[0] for name in listed["versions"]["moments"]} for listed in lists.values()
    ]
    assert len(saved_by) == 2 and not saved_by[0] & saved_by[1]  # each record once
    run = json.loads((killed / "run.json").read_text())["run"]
    folders = [killed / "records" / run / f"process-{rank}" for rank in range(2)]
    num_records = [
        sum(path.name[0].isdigit() for path in (folder / "moments").iterdir()) for folder in folders
    ]
    assert min(num_records) > 0
    often = ("--checkpoint.every-steps", 2, "--checkpoint.keep", 2)
    run_split(runs, start_python, killed, 1, 1, *NVME, *often, "--num-steps", STEPS + 6)
    assert resumes(killed)[-1] == STEPS
    assert not folders[1].exists()  # no kept step needs what process 1 had
    shutil.copytree(on_host, tmp_path / "one")
    run_split(runs, start_python, tmp_path / "one", 1, 1, *HOST, "--num-steps", STEPS + 6)
    ours, expected = dict(losses(killed)), dict(losses(tmp_path / "one"))
    assert ours == pytest.approx(expected, rel=1e-5, abs=0)


@pytest.mark.slow
def test_a_run_updated_on_the_host_moves_between_tiers_and_meshes(
    runs: TrainRuns, on_host: Path, tmp_path: Path
) -> None:
    """One device, four, two and one again, on another tier each time, with gradients that wait."""
    legs = [
        (1, (*HOST, "--tiers.update", "host")),
        (4, (*NVME, "--tiers.update", "host")),
        (2, (*HOST, "--tiers.update", "host")),
        (2, ()),
        (4, (*NVME, "--tiers.gradients", "nvme", "--tiers.update", "host")),
        (1, (*NVME, "--tiers.update", "host")),
    ]
    for number, (devices, options) in enumerate(legs):
        steps = STEPS * (number + 1) // len(legs)
        axis = ("--mesh.expert-intra", devices)
        runs.finish(tmp_path, *options, *axis, "--num-steps", steps, devices=devices)
    assert resumes(tmp_path) == [STEPS * number // len(legs) for number in range(1, len(legs))]
    assert dict(losses(tmp_path)) == pytest.approx(dict(losses(on_host)), rel=1e-5, abs=0)


@pytest.mark.slow
def test_two_processes_make_room_for_as_many_experts(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """Both have more slots as soon as one of them has no room for the experts that its layer's
    tokens chose.
    """
    few_tokens = ("--model.num-experts", 256, "--model.num-experts-per-tok", 1, "--batch-size", 4)
    spread = (*HOST, "--mesh.expert-inter", 2, *few_tokens, *LENGTH)
    for name, share in (("all", 1.0), ("few", 0.01)):
        run_split(
            runs, start_python, tmp_path / name, 2, 1, *spread, "--tiers.device-experts", share
        )
    assert dict(losses(tmp_path / "few")) == pytest.approx(
        dict(losses(tmp_path / "all")), rel=1e-6, abs=0
    )
    few = read_overview(tmp_path / "few").tiers
    assert few is not None and few["chosen_share"] < few["most_chosen_share"] <= few["room"] < 1
    for name in ("all", "few"):
        logs = [(tmp_path / name / f"rank-2-{rank}").read_text() for rank in range(2)]
        assert ["tiers.device_experts is too small" in log for log in logs] == 2 * [name == "few"]


FAILING_DISK = """
import errno, os, sys

sys.path.insert(0, os.getcwd())
import train

folder, failing = sys.argv[1], False


def failing_in_the_folder(real):
    def call(descriptor, *arguments):
        if failing and f"{os.readlink(f'/proc/self/fd/{descriptor}')}/".startswith(folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *arguments)

    return call


for name in ("fsync", "fdatasync", "pwritev", "posix_fallocate"):
    setattr(os, name, failing_in_the_folder(getattr(os, name)))
train_step = train.train_step


def from_step_7_on(trainer, state, tokens):
    global failing
    failing = int(state.step) >= 7
    return train_step(trainer, state, tokens)


train.train_step = from_step_7_on
try:
    train.main(sys.argv[2:])
except (ValueError, OSError, FloatingPointError) as error:
    sys.exit(f"train.py: {error}")
"""


def test_a_disk_that_fails_is_named(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    """What fails first is what the run says last, not what fails when its folders are closed
    after it.
    """
    _, *arguments = runs.command(tmp_path, *NVME, "--num-steps", STEPS)
    done = run_python(
        ["-c", FAILING_DISK, f"{tmp_path}/records/", *arguments], runs.environment(), timeout=200
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert re.search(rf"^train.py: \[Errno 5\] .*{tmp_path}/records/", lines[-1])
    assert "needs" in lines[-1]  # the write of a record, not the flush of a folder
    assert all(str(tmp_path) in line for line in lines if "[Errno" in line)
