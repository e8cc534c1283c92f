"""A run merged as a Hugging Face folder; what it says then, and a run that goes on from it, as
users start them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jmoe
from jmoe.deploy.upcycle import main as upcycle
from tests.chat_models import say, write_chat_tokenizer, write_jsonl
from tests.deploy.test_upcycle import write_dense
from tests.train_runs import (
    ENDLESS,
    SHORT,
    Run,
    Start,
    TrainRuns,
    committed,
    evaluations,
    losses,
    records,
    resumes,
)


@pytest.mark.slow
def test_merge_and_fine_tune(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    def run(*arguments: Any) -> str:
        done = run_python(arguments, env=runs.environment())
        assert done.returncode == 0, done.stderr[-3000:]
        return str(done.stdout)

    first, second, folder = tmp_path / "first", tmp_path / "second", tmp_path / "merged"
    few = ("--num-steps", "2", "--optimizer.learning-rate", "0.01")
    warning = "warning: optimizer.warmup_steps = 5: all of the run's num_steps = 2 are warm-up"
    assert warning in runs.finish(first, *few, data=runs.text)
    assert "step 2 of" in run("-m", "jmoe.deploy.merge", first, folder)
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == names
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mixtral"

    say = ["-m", "jmoe.programs.generate", folder, "def read(self):", "--max-new-tokens", "12"]
    resident = run(*say, "--policy", "resident")
    ring = run(*say, "--policy", "ring", "--ring-slots", "1")
    assert resident == ring and resident.startswith("def read(self):")

    described = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.1}
    ends = {"eos_token_id": [5, 0], "bos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(described | ends))
    beside = {
        "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "generation_config.json": json.dumps({"eos_token_id": [5, 0], "temperature": 0.6}),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "TokenizersBackend", "eos_token": "<|endoftext|>"}
        ),
    }
    (folder / "additional_chat_templates").mkdir()
    for name, content in beside.items():
        (folder / name).write_text(content)
    start = ("--init-from", folder, "--model.router.z-loss-coef", "0.25")
    said = run(
        "train.py", "tiny", *SHORT, *few, *start, "--data.path", runs.text, "--output-dir", second
    )
    assert f"starting from {folder}" in said
    assert f"warning: {folder / 'config.json'}: attention_dropout = 0.1: trains without it" in said
    saved = json.loads((second / "config.json").read_text())["model"]
    assert (saved["hidden_size"], saved["router"]["z_loss_coef"]) == (32, 0.25)
    before, after = evaluations(second)
    # it starts where the first run ended
    assert before == pytest.approx(evaluations(first)[-1], abs=1e-5)
    assert after < before

    third = tmp_path / "third"
    start = ("--init-from", first, "--model.router.z-loss-coef", "0.25")
    said = run(
        "train.py", "tiny", *SHORT, *few, *start, "--data.path", runs.text, "--output-dir", third
    )
    assert f"starting from {first}" in said and "step 2 of" in said
    assert evaluations(third) == evaluations(second)  # a run is merged first
    start = (*start, "--num-steps", "3")
    said = run(
        "train.py", "tiny", *SHORT, *few, *start, "--data.path", runs.text, "--output-dir", third
    )
    assert "resuming from step 2" in said

    tuned = tmp_path / "tuned"
    run("-m", "jmoe.deploy.merge", second, tuned)
    assert {name: (tuned / name).read_text() for name in beside} == beside
    described = json.loads((tuned / "config.json").read_text())
    assert {name: described[name] for name in ends} == ends
    tokens = np.arange(20, dtype=np.int32)[None]
    logits = [np.asarray(jmoe.load_pretrained(path)(tokens)) for path in (folder, tuned)]
    assert logits[0].shape == (1, 20, 512) and np.abs(logits[0] - logits[1]).max() > 1e-3


@pytest.mark.slow
def test_a_longer_context(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    """YaRN from the command line to the merged folder; a run resumes only with the same factor."""
    first, second = tmp_path / "first", tmp_path / "second"
    few = ("--num-steps", "2", "--optimizer.learning-rate", "0.01")
    runs.finish(first, *few, data=runs.text)
    stretch = ("--model.rope-scaling", "yarn", "--model.rope-factor")

    def train(factor: str, steps: str) -> Any:
        start = ("train.py", "tiny", *SHORT, "--init-from", first, "--data.path", runs.text)
        given = ("--num-steps", steps, *stretch, factor, "--output-dir", second)
        return run_python((*start, *given), env=runs.environment())

    done = train("4", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    other = train("2", "3")
    assert other.returncode == 1 and "yarn_factor: 4.0 -> 2.0" in other.stderr
    folder = tmp_path / "longer"
    assert run_python(["-m", "jmoe.deploy.merge", second, folder]).returncode == 0
    before, after = (
        json.loads((path / "config.json").read_text())
        for path in (next((first / "merged").glob("step-*")), folder)
    )
    positions = before["max_position_embeddings"]
    assert after["max_position_embeddings"] == 4 * positions
    scaling = after["rope_parameters"]
    assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 4.0)
    assert scaling["original_max_position_embeddings"] == positions
    done = run_python(["-m", "jmoe.programs.generate", folder, "def", "--max-new-tokens", "4"])
    assert done.returncode == 0 and done.stdout.startswith("def")


def test_mistakes(tmp_path: Path, run_python: Run) -> None:
    for arguments, message in (
        (["-m", "jmoe.deploy.merge", tmp_path, tmp_path / "out"], "has no checkpoint in"),
        (["train.py", "tiny", "--init-from", tmp_path], "config.json: is missing"),
        (
            [
                "train.py",
                "tiny",
                "--init-from",
                tmp_path,
                "--model.hidden_size=64",
                "--model.router.jitter-noise",
                "0",
            ],
            (
                "train.py: --model.hidden-size: must not be given with --init-from, whose"
                " config.json says it"
            ),
        ),
        (["-m", "jmoe.programs.generate", tmp_path, "def"], "config.json: is missing"),
    ):
        done = run_python(arguments)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_chats(runs: TrainRuns, tmp_path: Path, run_python: Run, start_python: Start) -> None:
    """From a model's folder and chats to a folder that is served as it was trained; killed and
    resumed to the bit.
    """
    model = write_chat_tokenizer(tmp_path / "tokenizer")
    numbers = [(i * 7 % 40, i * 11 % 40) for i in range(400)]
    chats = write_jsonl(
        tmp_path / "chats.jsonl",
        [say(f"{a} plus {b}?", f"The sum of {a} and {b} is {a + b}.") for a, b in numbers],
    )
    common = ("--sequence-length", "128", "--optimizer.learning-rate", "0.01")
    first, whole, killed = tmp_path / "first", tmp_path / "whole", tmp_path / "killed"
    by_tokenizer = (*common, "--data.tokenizer", model / "tokenizer.json")
    screen = runs.finish(first, *by_tokenizer, "--num-steps", "2", data=chats)
    assert " to learn), " in screen and "samples in " in screen
    assert "rows of sequence_length + 1 = 129 tokens" in screen and "nan" not in screen
    merged = tmp_path / "merged"
    assert run_python(["-m", "jmoe.deploy.merge", first, merged]).returncode == 0
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        assert (merged / name).read_bytes() == (model / name).read_bytes()

    def command(output_dir: Path, *options: Any) -> list[Any]:
        chosen = (*common, "--checkpoint.every-steps", "4", "--output-dir", output_dir, *options)
        start = ("train.py", "tiny", "--init-from", merged, "--data.path", chats)
        return [*start, *SHORT, *map(str, chosen)]

    def train(output_dir: Path, *options: Any) -> Any:
        return run_python(command(output_dir, *options), env=runs.environment(), timeout=300)

    assert train(whole, "--num-steps", 24).returncode == 0
    before, *_, after = evaluations(whole)
    assert before == pytest.approx(evaluations(first)[-1], abs=1e-5)
    assert after < 0.6 * before
    steps = [record for record in records(whole) if "event" not in record]
    assert all(0 < record["trained_tokens"] < 8 * 128 for record in steps)
    # the prompt is not learned, and makes up more than half of a sample
    assert sum(record["trained_tokens"] for record in steps) < 24 * 8 * 128 * 0.6

    child = start_python(command(killed, *ENDLESS), tmp_path / "log", runs.environment())
    child.wait_until(lambda: len(losses(killed)) >= 10)
    child.kill_now()
    done = committed(killed)[-1]
    end = ("--num-steps", max(24, done + 2))
    assert train(killed, *end).returncode == 0
    assert resumes(killed) == [done]
    again = dict(losses(killed))
    assert {step: again[step] for step, _ in losses(whole)} == dict(losses(whole))
    refused = train(killed, *end, "--data.train-on", "all")
    assert refused.returncode == 1
    assert "data.train_on: 'answers' -> 'all'" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--tiers.experts", "nvme", "--lora.expert-dtype", "mxfp4")]
)
def test_adapters_resume_to_the_bit(
    options: tuple[str, ...],
    runs: TrainRuns,
    tmp_path: Path,
    run_python: Run,
    start_python: Start,
) -> None:
    """A LoRA run that is killed and one that is not write the same adapter, byte for byte."""

    def run(*arguments: Any) -> None:
        done = run_python([*map(str, arguments)], env=runs.environment())
        assert done.returncode == 0, done.stderr[-3000:]

    first, model = tmp_path / "first", tmp_path / "model"
    runs.finish(first, "--num-steps", "2", data=runs.text)
    run("-m", "jmoe.deploy.merge", first, model)
    killed, whole = tmp_path / "killed", tmp_path / "whole"

    def command(output_dir: Path, *steps: Any) -> list[Any]:
        lora = ("--lora.rank", 4, "--lora.targets", "attention", "router", "experts", *options)
        saved = ("--checkpoint.every-steps", 4, "--output-dir", output_dir)
        start = ("train.py", "tiny", "--init-from", model, "--data.path", runs.text, *SHORT)
        return [*map(str, (*start, *lora, *saved, *steps))]

    child = start_python(command(killed, *ENDLESS), tmp_path / "log", runs.environment())
    child.wait_until(lambda: len(losses(killed)) >= 10)
    child.kill_now()
    done = committed(killed)[-1]
    for output_dir in (killed, whole):
        run(*command(output_dir, "--num-steps", done + 6))
    assert resumes(killed) == [done]
    again = dict(losses(killed))
    assert {step: again[step] for step, _ in losses(whole)} == dict(losses(whole))
    adapters = []
    for output_dir in (killed, whole):
        out = tmp_path / f"{output_dir.name}-adapter"
        run("-m", "jmoe.deploy.merge", output_dir, out, "--adapter")
        adapters.append((out / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]


@pytest.mark.slow
def test_a_run_of_some_parameters(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    """It resumes with the same patterns alone, and its merged model has the frozen parameters."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    freeze = ("--freeze", "router", "embedding")
    screen = runs.finish(out, "--num-steps", "5", *freeze, data=runs.text)
    assert " parameters are trained, " in screen
    refused = runs.fail(out, "--num-steps", "8", data=runs.text)
    assert "freeze: ['router', 'embedding'] -> []" in refused
    runs.finish(out, "--num-steps", "8", *freeze, data=runs.text)
    runs.finish(whole, "--num-steps", "8", *freeze, data=runs.text)
    assert resumes(out) == [5] and losses(out) == losses(whole)
    merged = [tmp_path / "merged", tmp_path / "again"]
    for output_dir, folder in zip((out, whole), merged, strict=True):
        assert run_python(["-m", "jmoe.deploy.merge", output_dir, folder]).returncode == 0
    own, other = ((folder / "model.safetensors").read_bytes() for folder in merged)
    assert own == other


@pytest.mark.slow
def test_mistakes_in_chats(runs: TrainRuns, tmp_path: Path) -> None:
    chats = write_jsonl(tmp_path / "chats.jsonl", [say("q", "a")] * 30 + [say("q", "")])
    said = runs.fail(tmp_path / "run", data=chats)
    assert "data.tokenizer = None: must be the tokenizer.json of the model" in said
    model = write_chat_tokenizer(tmp_path / "tokenizer", None)
    tokenizer = ("--data.tokenizer", model / "tokenizer.json")
    said = runs.fail(tmp_path / "run", *tokenizer, data=chats)
    assert f"{chats}:31: messages[1]: the answer is empty" in said
    write_jsonl(chats, [say("q", "a")] * 30)
    said = runs.fail(tmp_path / "run", *tokenizer, data=chats)
    assert f"{chats}:1: messages: the tokenizer's folder has no chat template" in said


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lora.rank", "8")])
def test_preferences(
    options: tuple[str, ...],
    runs: TrainRuns,
    tmp_path: Path,
    run_python: Run,
    start_python: Start,
) -> None:
    """A run learns to prefer; killed, it resumes to the bit, with the file of the reference's
    log-probabilities or without.
    """
    model = write_chat_tokenizer(tmp_path / "tokenizer")
    preferences = [
        {"prompt": f"{i} or {j}?", "chosen": f"Yes, {i}.", "rejected": f"No, {j}."}
        for i in range(20)
        for j in range(20)
        if i != j
    ]
    pairs = write_jsonl(tmp_path / "pairs.jsonl", preferences)
    first, merged = tmp_path / "first", tmp_path / "merged"
    chats = write_jsonl(
        tmp_path / "chats.jsonl", [say(own["prompt"], own["chosen"]) for own in preferences]
    )
    tokenizer = ("--data.tokenizer", model / "tokenizer.json")
    runs.finish(first, *tokenizer, "--num-steps", "8", data=chats)
    assert run_python(["-m", "jmoe.deploy.merge", first, merged]).returncode == 0
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def command(output_dir: Path, *more: Any) -> list[Any]:
        dpo = ("--dpo.beta", 0.2, "--sequence-length", 128, "--optimizer.learning-rate", 0.005)
        saved = ("--checkpoint.every-steps", 4, "--output-dir", output_dir)
        start = ("train.py", "tiny", "--init-from", merged, "--data.path", pairs, *SHORT)
        return [*map(str, (*start, *dpo, *saved, *options, *more))]

    child = start_python(command(killed, *ENDLESS), tmp_path / "log", runs.environment())
    child.wait_until(lambda: len(losses(killed)) >= 10)
    child.kill_now()
    done = committed(killed)[-1]
    (reference,) = (killed / "data").glob("reference-*.bin")
    content = reference.read_bytes()
    reference.unlink()
    for output_dir in (killed, whole):
        again = run_python(
            command(output_dir, "--num-steps", done + 12), env=runs.environment(), timeout=300
        )
        assert again.returncode == 0, again.stderr[-3000:]
    assert reference.read_bytes() == content and resumes(killed) == [done]
    own = dict(losses(killed))
    assert {step: own[step] for step, _ in losses(whole)} == dict(losses(whole))
    steps = [record for record in records(whole) if "event" not in record]
    assert steps[0]["loss"] == pytest.approx(0.693, abs=2e-3)
    assert steps[-1]["reward_accuracy"] > 0.8 and steps[-1]["reward_margin"] > 0.1
    assert evaluations(whole)[-1] < 0.9 * evaluations(whole)[0]
    write_jsonl(pairs, preferences[:30] + [preferences[0] | {"rejected": ""}])
    refused = run_python(command(tmp_path / "bad"), env=runs.environment())
    assert f"{pairs}:31: rejected: is empty" in refused.stderr


@pytest.mark.slow
def test_experts_of_a_dense_model(runs: TrainRuns, tmp_path: Path, run_python: Run) -> None:
    """A run makes them, as jmoe.deploy.upcycle does, and a later start goes on with them; another
    number of experts and a model that has some are refused.
    """
    dense, made, tuned = tmp_path / "dense", tmp_path / "made", tmp_path / "tuned"
    write_dense(dense, vocab_size=512)

    def train(model: Path, out: Path, *options: str) -> Any:
        start = ("train.py", "tiny", *SHORT, "--init-from", model, "--data.path", runs.shards)
        command = (*start, "--optimizer.learning-rate", "0.01", "--output-dir", out, *options)
        return run_python(command, env=runs.environment())

    done = train(dense, tuned, "--num-steps", "2", "--model.num-experts", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    saved = json.loads((tuned / "config.json").read_text())
    assert saved["model"]["num_experts"] == 4 and saved["init_from"] == str(tuned / "upcycled")
    upcycle([str(dense), str(made), "--num-experts", "4"])
    beside = train(made, tmp_path / "beside", "--num-steps", "2")
    assert beside.returncode == 0, beside.stderr[-3000:]
    assert losses(tuned) == losses(tmp_path / "beside")
    again = train(dense, tuned, "--num-steps", "3", "--model.num-experts", "4")
    assert "resuming from step 2" in again.stdout, again.stderr[-3000:]
    other = train(dense, tuned, "--num-steps", "4", "--model.num-experts", "8")
    assert other.returncode == 1 and "num_experts: 4 -> 8" in other.stderr
    sparse = train(made, tmp_path / "none", "--model.num-experts", "8")
    assert "model_type = 'qwen3_moe': must be a dense model" in sparse.stderr
    assert not (tmp_path / "none").exists()
