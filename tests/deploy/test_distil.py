"""Distillation: the loss in plain numpy, teachers in a ring, where students begin, a run from
end to end, bad input.
"""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config import CommConfig, DistilConfig, OptimizerConfig, RouterConfig, TrainConfig
from jmoe.deploy import distil as stage
from jmoe.deploy.distil import StudentOptions, evenly_spaced_layers, make_student
from jmoe.inference.teacher import Teacher
from jmoe.layers.loss import HeadWeight, cross_entropy, distillation_losses
from jmoe.models.pretrained import load_pretrained
from jmoe.training.finetune import load_pretrained_state, with_pretrained_model
from jmoe.training.fused.distilling import DistillingTrainer
from jmoe.training.fused.step import FusedTrainer
from tests.damage import flip
from tests.deploy.gpt_moe_models import gpt_moe_config, random_model, softmax, stored_arrays
from tests.deploy.test_prune import TEXT, write_tokenizer
from tests.model_configs import CHECKPOINTS, mesh_of
from tests.train_runs import SHORT, Run, TrainRuns, evaluations, losses, resumes

TOKENS = np.random.default_rng(3).integers(0, 64, (4, 17)).astype(np.int32)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two choices of four experts, three layers."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    model = random_model(gpt_moe_config(router=RouterConfig(kind="gshard"), num_experts_per_tok=2))
    jmoe.save_pretrained(model, path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def student(teacher: Path, out: Path, text: str, **changes: Any) -> None:
    asked = {"experts": 2, "text": text, "max_tokens": 600, "sequence_length": 16} | changes
    make_student(teacher, out, StudentOptions(**asked), lambda _: None)


def run_config(teacher: Path, start: Path, **distil: Any) -> TrainConfig:
    """Four sequences of 16 tokens, in two accumulation steps."""
    config = TrainConfig(
        distil=DistilConfig(str(teacher), **distil),
        optimizer=OptimizerConfig(learning_rate=0.001, warmup_steps=0, schedule="constant"),
        comm=CommConfig(embedding="replicated"),
        batch_size=4,
        sequence_length=16,
        gradient_accumulation_steps=2,
        compute_dtype="float32",
        init_from=str(start),
    )
    return with_pretrained_model(config)


def test_losses_are_those_of_plain_numpy() -> None:
    """And their gradients those of finite differences; a weight of 1 on the text alone is the
    ordinary loss.
    """
    rng = np.random.default_rng(0)
    x, w, hidden, head = (rng.normal(size=shape) for shape in ((6, 5), (5, 11), (6, 7), (7, 11)))
    labels, weights = rng.integers(0, 11, 6), rng.uniform(size=6)

    def by_hand(x: np.ndarray, w: np.ndarray) -> tuple[float, float]:
        nll = -np.log(softmax(x @ w)[np.arange(6), labels])
        p, q = softmax(hidden @ head / 3), softmax(x @ w / 3)
        return float(weights @ nll), float(weights @ (p * np.log(p / q)).sum(axis=1))

    arrays = [jnp.asarray(a, jnp.float32) for a in (x, w, weights, hidden, head)]
    labels_T = jnp.asarray(labels, jnp.int32)

    def ours(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        teacher = arrays[3], HeadWeight(arrays[4])
        return distillation_losses(x, HeadWeight(w), labels_T, arrays[2], teacher, 3.0)

    np.testing.assert_allclose(ours(*arrays[:2]), by_hand(x, w), rtol=1e-5)
    student = arrays[0], HeadWeight(arrays[1])
    assert float(cross_entropy(*student, labels_T, arrays[2])) == pytest.approx(
        by_hand(x, w)[0], rel=1e-5
    )
    gradient = np.asarray(jax.grad(lambda w: ours(arrays[0], w)[1])(arrays[1]))
    for i, j in ((0, 0), (2, 7), (4, 10)):
        step = np.zeros_like(w)
        step[i, j] = 1e-5
        slope = (by_hand(x, w + step)[1] - by_hand(x, w - step)[1]) / 2e-5
        assert gradient[i, j] == pytest.approx(slope, rel=1e-3, abs=1e-5)
    teacher_gradient = jax.grad(
        lambda head: distillation_losses(
            *student, labels_T, arrays[2], (arrays[3], HeadWeight(head)), 3.0
        )[1]
    )(arrays[4])
    assert float(jnp.abs(teacher_gradient).max()) == 0.0


@pytest.mark.parametrize("ring", [False, True])
def test_what_the_teacher_says(teacher: Path, ring: bool) -> None:
    """The logits of the whole model, also where one layer's experts are in memory at a time."""
    kept = {"policy": "ring", "ring_slots": 1} if ring else {"policy": "resident"}
    with contextlib.closing(Teacher(run_config(teacher, teacher, **kept))) as asked:
        found = [
            np.asarray(asked.head.logits(asked(part)))
            for part in (TOKENS[:2, :-1], TOKENS[2:, :-1])
        ]
        stats = asked.residency.stats()
        assert (stats.policy == "ring") == ring and asked.residency.num_slots == (4 if ring else 12)
    expected = np.asarray(load_pretrained(teacher)(TOKENS[:, :-1]))
    np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-4)


def test_a_step(teacher: Path, text: str, tmp_path: Path) -> None:
    """A teacher learns nothing from itself; the student comes nearer to it; the metrics have
    both parts of the loss.
    """
    student(teacher, tmp_path / "student", text)
    config = run_config(teacher, tmp_path / "student", weight=0.75, temperature=2.0)
    tokens_ABS = jnp.asarray(TOKENS.reshape(2, 2, 17))
    with contextlib.closing(Teacher(config)) as asked:
        trainer = DistillingTrainer(config, mesh_of(1, 1, 1), asked, asked.head)
        state, divergences = load_pretrained_state(trainer, config), []
        for step in range(5):
            state, metrics = trainer.step(state, tokens_ABS)
            divergences.append(float(metrics["divergence"]))
            if step == 0:
                first = metrics
        itself = run_config(teacher, teacher)
        same = DistillingTrainer(itself, mesh_of(1, 1, 1), asked, asked.head)
        _, metrics = same.step(load_pretrained_state(same, itself), tokens_ABS)
    assert float(metrics["divergence"]) == pytest.approx(0.0, abs=1e-4)
    assert divergences[-1] < 0.9 * divergences[0]

    small, large = (
        np.asarray(load_pretrained(path)(TOKENS[:, :-1]))
        for path in (tmp_path / "student", teacher)
    )
    p, q = softmax(large / 2.0), softmax(small / 2.0)
    assert divergences[0] == pytest.approx((p * np.log(p / q)).sum(axis=-1).mean(), rel=1e-3)
    plain = dataclasses.replace(config, distil=DistilConfig())
    without = FusedTrainer(plain, mesh_of(1, 1, 1))
    _, metrics = without.step(load_pretrained_state(without, plain), tokens_ABS)
    assert (
        float(first["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
        and "divergence" not in metrics
    )


@pytest.mark.slow
def test_several_devices_take_the_step_of_one(teacher: Path, text: str, tmp_path: Path) -> None:
    student(teacher, tmp_path / "student", text)
    config, divergences = run_config(teacher, tmp_path / "student"), []
    tokens_ABS = jnp.asarray(TOKENS.reshape(2, 2, 17))
    with contextlib.closing(Teacher(config)) as asked:
        for mesh in (mesh_of(1, 1, 1), mesh_of(1, 1, 2)):
            trainer = DistillingTrainer(config, mesh, asked, asked.head)
            state = load_pretrained_state(trainer, config)
            for _ in range(2):
                state, metrics = trainer.step(state, tokens_ABS)
            divergences.append(float(metrics["divergence"]))
    assert divergences[0] == pytest.approx(divergences[1], rel=1e-3)


def test_the_student_begins_as_a_part_of_its_teacher(
    teacher: Path, text: str, tmp_path: Path
) -> None:
    student(teacher, tmp_path / "out", text, experts=3, layers=2, score="reap")
    small, whole = stored_arrays(tmp_path / "out"), stored_arrays(teacher)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["num_hidden_layers"], fields["num_experts"], fields["num_experts_per_tok"]) == (
        2,
        3,
        2,
    )
    name = "model.layers.{}.self_attn.q_proj.weight"
    np.testing.assert_array_equal(small[name.format(1)], whole[name.format(2)])
    assert (
        evenly_spaced_layers(12, 4) == [0, 4, 7, 11]
        and evenly_spaced_layers(5, 5) == [0, 1, 2, 3, 4]
        and evenly_spaced_layers(3, 1) == [0]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 5}, "experts = 5: must be between 1 and the teacher's 4"),
        ({"layers": 4}, "layers = 4: must be between 1 and the teacher's 3 layers"),
        ({"top_k": 3}, "top_k = 3: must be between 1 and experts = 2"),
        ({"max_tokens": 9}, "max_tokens = 9: must be at least 34"),
    ],
)
def test_a_student_that_cannot_be(
    changes: dict[str, Any], message: str, teacher: Path, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        student(teacher, tmp_path / "out", text, **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_student_its_family_does_not_have(text: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "model" / file).write_bytes((CHECKPOINTS / "mixtral" / file).read_bytes())
    with pytest.raises(
        ValueError, match="num_experts_per_tok = 1: is not supported where weights are divided"
    ):
        student(tmp_path / "model", tmp_path / "out", text, top_k=1)
    assert not (tmp_path / "out").exists()


def test_bad_settings(teacher: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"weight": 0.0}, "distil.weight = 0.0: must be greater than 0 and at most 1"),
        ({"temperature": 0.0}, "temperature = 0.0: must be greater than 0"),
        ({"ring_slots": 0}, "ring_slots = 0: must be greater than 0, or None"),
        ({"policy": "luck"}, "policy = 'luck'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            DistilConfig("folder", **changes)  # type: ignore[arg-type]
    other = run_config(CHECKPOINTS / "mixtral", CHECKPOINTS / "mixtral")
    other = dataclasses.replace(other, model=dataclasses.replace(other.model, vocab_size=65))
    with pytest.raises(
        ValueError, match="has a vocabulary of 64 tokens: must have the student's 65"
    ):
        Teacher(other)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="must be an empty folder or none"):
        stage.main(
            [str(teacher), "--out", str(tmp_path / "run"), "--experts", "2", "--text", "nowhere"]
        )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes"]
    command = [str(teacher), "--out", str(tmp_path / "new"), "--experts", "2", "--text", "nowhere"]
    # before the text is looked at
    for wrong in ("--ring-slots", "0"), ("--weight", "2"), ("--num-stepz", "3"):
        with pytest.raises((SystemExit, ValueError)) as error:
            stage.main([*command, *wrong])
        assert "no such file" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_goes_on(
    runs: TrainRuns, run_python: Run, tmp_path: Path
) -> None:
    """A run of train.py is the teacher; the student's run resumes, and becomes a folder that is
    pruned.
    """
    runs.finish(tmp_path / "teacher", "--num-steps", 10, data=runs.text)

    def start(steps: int) -> subprocess.CompletedProcess[str]:
        command = [
            "-m",
            "jmoe.deploy.distil",
            tmp_path / "teacher",
            "--out",
            tmp_path / "run",
            "--experts",
            "4",
        ]
        options = [*SHORT, "--text", runs.text, "--ring-slots", "1", "--num-steps", str(steps)]
        return run_python([*command, *options], env=runs.environment())

    def distil(steps: int) -> str:
        done = start(steps)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "loading the teacher" in distil(5)
    before = losses(tmp_path / "run")
    assert "resuming from step 5" in distil(10)
    assert losses(tmp_path / "run")[: len(before)] == before and len(losses(tmp_path / "run")) == 10
    assert (
        resumes(tmp_path / "run") == [5]
        and evaluations(tmp_path / "run")[-1] < evaluations(tmp_path / "run")[0]
    )
    (weights,) = (tmp_path / "teacher").glob("merged/*/model.safetensors")
    times = weights.stat()
    flip(weights, times.st_size - 5)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    swapped = start(12)
    assert (
        swapped.returncode == 1
        and "distil.teacher: " in swapped.stderr
        and "-> other weights" in swapped.stderr
    )
    done = run_python(
        ["-m", "jmoe.deploy.merge", tmp_path / "run", tmp_path / "hf"], env=runs.environment()
    )
    assert done.returncode == 0 and load_pretrained(tmp_path / "hf").config.num_experts == 4
    prune = [
        "-m",
        "jmoe.deploy.prune",
        tmp_path / "hf",
        "--out",
        tmp_path / "two",
        "--experts",
        "2",
    ]
    done = run_python(
        [*prune, "--text", runs.text, "--max-tokens", "4000", "--sequence-length", "64"]
    )
    assert done.returncode == 0 and re.search(
        r"held-out bits per byte \d\.\d+ -> \d\.\d+", done.stdout
    ), done.stderr
