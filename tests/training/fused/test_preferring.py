"""DPO: losses, rewards, gradients and updates against PyTorch; several devices; accumulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jmoe.config import (
    CommConfig,
    DistilConfig,
    DpoConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    TiersConfig,
    TrainConfig,
)
from jmoe.configs import PRESETS
from jmoe.data.sample_rows import PreferenceRows, empty_rows, stack_rows
from jmoe.mesh import make_mesh
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.peft_files import read_adapter_folder
from jmoe.models.pretrained import read_config
from jmoe.training.finetune import load_pretrained_state, with_pretrained_model
from jmoe.training.fused.adapting import ADAPTERS
from jmoe.training.fused.preferring import PreferenceTrainer, make_preference_trainer
from jmoe.training.state import TrainState
from tests.arrays import differing
from tests.model_configs import CHECKPOINTS, mesh_of

DPO = CHECKPOINTS.parent / "dpo"  # made by tests/fixtures/make_dpo.py
# tokens of prompt, chosen and rejected answer of each pair there
LENGTHS = ((3, 4, 2), (2, 1, 5), (5, 3, 3), (1, 2, 6))
# which pairs share a row
ROWS = ((0,), (1, 3), (2,), ())
S = 23


def expected_of(name: str) -> dict[str, Any]:
    with np.load(DPO / name / "expected.npz") as arrays:
        return dict(arrays)


def config_of(name: str, **options: Any) -> TrainConfig:
    """As make_dpo.py's runs: no balance loss, no decay, no clipping."""
    plain = {"warmup_steps": 0, "eps": 1e-4, "weight_decay": 0.0, "clip_norm": 0.0}
    options = {
        "batch_size": len(ROWS),
        "sequence_length": S,
        "compute_dtype": "float32",
        "optimizer": OptimizerConfig(2e-3, "constant", **plain),
    } | options
    data = dataclasses.replace(PRESETS["tiny"][1].data, path=("pairs.jsonl",))
    config = with_pretrained_model(
        dataclasses.replace(
            PRESETS["tiny"][1],
            init_from=str(CHECKPOINTS / name),
            data=data,
            dpo=DpoConfig(beta=0.5, label_smoothing=0.1),
            num_steps=4,
            **options,
        )
    )
    router = dataclasses.replace(
        config.model.router, aux_loss_coef=0.0, z_loss_coef=0.0, bias_update_speed=0.0
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, router=router))


def pairs_in_rows(expected: dict[str, Any]) -> PreferenceRows:
    """The pairs of the fixture as rows, with the reference's log-probabilities."""
    samples = [(prompt, prompt + own) for prompt, *both in LENGTHS for own in both]
    ends = np.cumsum([length for _, length in samples])
    tokens = np.split(expected["tokens"], ends[:-1])
    reference, rows = expected["reference"].reshape(-1), []
    for pairs in ROWS:
        row, begin = empty_rows((), S, 0), 0
        reference_S = np.zeros(S, np.float32)
        for number, i in enumerate([2 * pair + which for pair in pairs for which in range(2)], 1):
            prompt, length = samples[i]
            end = begin + length
            row.tokens[begin:end] = tokens[i]
            row.documents[begin : end - 1] = number
            row.weights[begin + prompt - 1 : end - 1] = 1
            reference_S[begin + prompt - 1] = reference[i]
            begin = end
        rows.append(PreferenceRows(*row, reference_S))
    return stack_rows(rows)


def start(trainer: PreferenceTrainer, name: str) -> TrainState:
    """The state of the fixture's first step."""
    config = trainer.config
    if config.lora.rank is None:
        return load_pretrained_state(trainer, config)
    state, fields = trainer.init(), read_config(CHECKPOINTS / name)
    first = CHECKPOINTS.parent / "lora" / name / "first"
    own = read_adapter_folder(first, model_config(fields), family_of(fields))
    place = jax.tree.map(lambda s: s.sharding, trainer.saved_shape.params)
    return dataclasses.replace(state, params=jax.device_put({ADAPTERS: own.adapters}, place))


def train(
    name: str, mesh: Mesh, steps: int, **options: Any
) -> tuple[TrainState, list[dict[str, Any]]]:
    trainer = make_preference_trainer(config_of(name, **options), mesh)
    accumulation = trainer.config.gradient_accumulation_steps
    rows = jax.tree.map(
        lambda a: jnp.asarray(a.reshape(accumulation, -1, a.shape[-1])),
        pairs_in_rows(expected_of(name)),
    )
    state, record = start(trainer, name), []
    for _ in range(steps):
        state, metrics = trainer.step(state, rows)
        assert metrics["ok"]
        record.append(jax.device_get(metrics))
    return state, record


def lora_of(name: str) -> LoraConfig:
    fields = read_config(CHECKPOINTS / name)
    first = CHECKPOINTS.parent / "lora" / name / "first"
    return read_adapter_folder(first, model_config(fields), family_of(fields)).lora


def check_record(name: str, run: str, record: list[dict[str, Any]]) -> None:
    expected = expected_of(name)
    for i, metrics in enumerate(record):
        rewards = expected[f"{run}_rewards"][i]
        values = {
            "loss": expected[f"{run}_losses"][i],
            "grad_norm": expected[f"{run}_grad_norms"][i],
            "reward_chosen": rewards[:, 0].mean(),
            "reward_rejected": rewards[:, 1].mean(),
            "reward_margin": (rewards[:, 0] - rewards[:, 1]).mean(),
        }
        if run == "lora" or i:  # without a difference, rounding decides
            values["reward_accuracy"] = (rewards[:, 0] > rewards[:, 1]).mean()
        for key, value in values.items():
            assert metrics[key] == pytest.approx(value, abs=2e-4, rel=2e-4), (i, key)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_adapters_train_as_in_torch(name: str) -> None:
    state, record = train(name, mesh_of(1, 1, 1), 4, lora=lora_of(name))
    check_record(name, "lora", record)
    fields = read_config(CHECKPOINTS / name)
    last = read_adapter_folder(DPO / name / "last", model_config(fields), family_of(fields))
    pairs = zip(*map(jax.tree.leaves, (state.params[ADAPTERS], last.adapters)), strict=True)
    for own, other in pairs:
        np.testing.assert_allclose(own, other, atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_all_parameters_train_as_in_torch(name: str) -> None:
    """The loss begins at that of two equal answers, smoothed."""
    _, record = train(name, mesh_of(1, 1, 1), 3)
    check_record(name, "full", record)
    assert record[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ["replicated", "rows"])
def test_several_devices_and_accumulation_steps(embedding: Any) -> None:
    """Pairs are counted over all devices and accumulation steps, whose rows hold different numbers
    of them; the log-probabilities of a split vocabulary are those of the whole one.
    """
    comm = CommConfig(embedding=embedding)
    _, record = train("mixtral", make_mesh((1, 1, 2), jax.devices()[:2]), 1, comm=comm)
    check_record("mixtral", "full", record)
    if embedding == "replicated":
        _, record = train("mixtral", mesh_of(1, 1, 1), 1, gradient_accumulation_steps=2)
        check_record("mixtral", "full", record)


def test_reference_and_held_out_loss() -> None:
    """The reference's log-probabilities, with which the starting model's rewards are 0."""
    trainer = make_preference_trainer(config_of("mixtral"), mesh_of(1, 1, 1))
    state, expected = start(trainer, "mixtral"), expected_of("mixtral")
    rows = jax.tree.map(jnp.asarray, pairs_in_rows(expected))
    log_probs = np.asarray(trainer.answer_log_probs(state, rows))
    for row, pairs in zip(log_probs, ROWS, strict=True):
        wanted = expected["reference"][list(pairs)].reshape(-1)
        np.testing.assert_allclose(row[: len(wanted)], wanted, atol=1e-4)
        assert not row[len(wanted) :].any()
    (loss,) = trainer.evaluate_batches(state, [rows])
    assert float(loss) == pytest.approx(len(LENGTHS) * np.log(2), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_from": ""}, "dpo.beta = 0.5: must be given together with init_from"),
        ({"compute_dtype": "float16"}, "compute_dtype = 'float16': is not supported with dpo.beta"),
        ({"plan": True}, "plan = True: is not supported with dpo.beta"),
        ({"estimate": "h100"}, "estimate = 'h100': is not supported with dpo.beta"),
        (
            {"tiers": TiersConfig(experts="host", optimizer="host")},
            "tiers.experts = 'host': is not supported with dpo.beta",
        ),
        ({"comm": CommConfig(packing=2)}, "comm.packing = 2: is not supported with dpo.beta"),
        ({"mesh": MeshConfig(context=2)}, "mesh.context = 2: must be 0 or 1 with dpo.beta"),
        (
            {"distil": DistilConfig(teacher="teacher")},
            "distil.teacher = 'teacher': is not supported with dpo.beta",
        ),
        ({"dpo": DpoConfig()}, "data.preferences = True: must be False without dpo.beta"),
    ],
)
def test_runs_that_cannot_train_on_preferences(options: dict[str, Any], message: str) -> None:
    config = config_of("mixtral")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **options)


def test_images_have_no_preferences() -> None:
    with pytest.raises(ValueError, match=r"dpo.beta = 0.1: must not be given for images"):
        dataclasses.replace(PRESETS["ufo-tiny"][1], init_from="model", dpo=DpoConfig(beta=0.1))


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"dpo.label_smoothing = 0.5: must be in \[0, 0.5\)"):
        DpoConfig(beta=0.1, label_smoothing=0.5)
    with pytest.raises(ValueError, match=r"beta = 0.0: must be greater than 0"):
        DpoConfig(beta=0.0)
    assert config_of("mixtral").data.max_prompt_tokens == (S + 1) // 2 - 1


@pytest.mark.slow
def test_adapters_over_compressed_experts() -> None:
    """The reference is the model with the same rounded experts: rewards begin at 0."""
    lora = dataclasses.replace(lora_of("mixtral"), expert_dtype="fp8")
    trainer = make_preference_trainer(config_of("mixtral", lora=lora), mesh_of(1, 1, 1))
    state = trainer.init()
    rows = pairs_in_rows(expected_of("mixtral"))
    log_probs = np.asarray(trainer.answer_log_probs(state, jax.tree.map(jnp.asarray, rows)))
    for row, own, pairs in zip(rows.reference, log_probs, ROWS, strict=True):
        row[np.flatnonzero(row)] = own[: 2 * len(pairs)]
    batch = jax.tree.map(lambda a: jnp.asarray(a)[None], rows)
    margins = []
    for _ in range(2):
        state, metrics = trainer.step(state, batch)
        margins.append(float(metrics["reward_margin"]))
    assert abs(margins[0]) < 1e-4 < 1e-3 < margins[1]


@pytest.mark.slow
def test_muon() -> None:
    """The loss falls from AdamW's first one, to other experts than AdamW's."""
    adamw = dataclasses.replace(config_of("mixtral").optimizer, learning_rate=1e-3)
    muon = dataclasses.replace(adamw, kind="muon")
    expected, plain = train("mixtral", mesh_of(1, 1, 2), 2, optimizer=adamw)
    state, metrics = train("mixtral", mesh_of(1, 1, 2), 2, optimizer=muon)
    assert metrics[0]["loss"] == plain[0]["loss"]
    assert metrics[1]["loss"] < metrics[0]["loss"]
    experts, of_adamw = (s.params["moe_layers"]["moe"]["experts"] for s in (state, expected))
    for name, w in experts.items():
        assert differing({name: w}, {name: of_adamw[name]}) != []
