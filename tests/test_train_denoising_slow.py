"""train.py with an encoder and a decoder: real processes, killed while they save, resumed to the
bit, and on other devices.
"""

from pathlib import Path

import pytest

from tests.test_train_encoder_slow import assert_same_until_a_token_changes_experts
from tests.train_runs import (
    ENDLESS,
    Run,
    Start,
    TrainRuns,
    committed,
    evaluations,
    kill_while_saving,
    losses,
    records,
    resumes,
)

pytestmark = pytest.mark.slow

STEPS = 120
# of 64 tokens 10 are in 3 spans: 4 sentinels beside the 512 ids of the text
BOTH = (
    *("--model.num-encoder-layers", 2, "--evaluation.sample-tokens", 0),
    *("--model.vocab-size", 516, "--optimizer.learning-rate", 4e-3),
)
END = ("--num-steps", STEPS)


@pytest.fixture(scope="module")
def whole(runs: TrainRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run on one device."""
    folder = tmp_path_factory.mktemp("denoising") / "whole"
    runs.finish(folder, *BOTH, *END)
    return folder


def test_both_learn(whole: Path) -> None:
    before, *_, after = evaluations(whole)
    assert after < before - 0.5
    held_out = [record for record in records(whole) if record.get("event") == "evaluation"]
    assert all(record["bits_per_byte"] is None for record in held_out)  # of spans alone
    loads = [record["expert_load"] for record in records(whole) if "event" not in record]
    assert {len(load) for load in loads} == {4}  # two layers on each side


def test_a_killed_run_goes_on_to_the_bit(
    runs: TrainRuns, tmp_path: Path, start_python: Start, whole: Path
) -> None:
    run = tmp_path / "run"
    (process,) = runs.start(start_python, run, 1, *BOTH, *ENDLESS)
    process.wait_until(lambda: committed(run))
    kill_while_saving(process, run)
    begin = committed(run)[-1]
    assert begin < STEPS
    runs.finish(run, *BOTH, *END)
    assert resumes(run) == [begin]
    assert losses(run) == losses(whole)
    assert evaluations(run)[-1] == evaluations(whole)[-1]


def test_two_processes_go_on_as_two_devices_of_one(
    runs: TrainRuns, tmp_path: Path, start_python: Start, whole: Path
) -> None:
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    experts = ("--mesh.expert-intra", 2)
    runs.finish(undisturbed, *BOTH, *END, *experts, devices=2)
    # after the change of experts two runs at this learning rate part by 1 %
    assert_same_until_a_token_changes_experts(whole, undisturbed, afterwards=3e-2)
    pair = runs.start(start_python, run, 2, *BOTH, *ENDLESS, *experts)
    pair[0].wait_until(lambda: committed(run))
    kill_while_saving(pair[0], run, pair[1:])
    begin = committed(run)[-1]
    assert begin < STEPS
    runs.finish(run, *BOTH, *END, *experts, devices=2)
    assert resumes(run) == [begin]
    assert losses(run) == losses(undisturbed)
    assert evaluations(run)[-1] == evaluations(undisturbed)[-1]


def test_the_state_is_no_model_of_the_engine(
    runs: TrainRuns, tmp_path: Path, run_python: Run, whole: Path
) -> None:
    """Neither a merge, nor the server, nor another run takes it, and each says why."""
    why = "no Hugging Face family has all its options"
    merged = run_python(("-m", "jmoe.deploy.merge", whole, tmp_path / "hf"))
    assert merged.returncode == 1 and "Traceback" not in merged.stderr
    served = run_python(("serve.py", whole))
    assert served.returncode != 0 and "Traceback" not in served.stderr
    options = ("--init-from", whole, "--data.path", runs.shards, "--output-dir", tmp_path / "run")
    continued = run_python(("train.py", "tiny", *options))
    assert continued.returncode == 1 and "Traceback" not in continued.stderr
    for words in (merged.stderr, served.stderr, continued.stderr):
        assert why in words and "num_encoder_layers: 2 -> 0" in words
    assert not (tmp_path / "hf").exists()


def test_samples_are_refused(runs: TrainRuns, tmp_path: Path) -> None:
    done = runs.run(tmp_path / "run", "--model.num-encoder-layers", 2)
    assert done.returncode == 2, done.stdout
    words = " ".join(done.stderr.replace("│", " ").split())  # as the frame of tyro wraps them
    assert "evaluation.sample_tokens = 4: is not supported with model.num_encoder_layers" in words
