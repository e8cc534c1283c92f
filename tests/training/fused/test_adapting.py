"""LoRA training: against PEFT, on several devices, and from its own checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jmoe.config import CommConfig, LoraConfig, MeshConfig, OptimizerConfig, TrainConfig
from jmoe.configs import PRESETS
from jmoe.mesh import make_mesh, mesh_shape
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.peft_files import AdapterFolder, read_adapter_folder
from jmoe.models.pretrained import read_config
from jmoe.training.finetune import with_pretrained_model
from jmoe.training.fused.adapting import ADAPTERS, AdapterTrainer
from jmoe.training.session import place_batch
from jmoe.training.state import TrainState
from tests.model_configs import CHECKPOINTS, mesh_of

LORA = CHECKPOINTS.parent / "lora"  # made by tests/fixtures/make_lora.py
STEPS = 20


def adapter_of(name: str, when: str) -> AdapterFolder:
    fields = read_config(CHECKPOINTS / name)
    return read_adapter_folder(LORA / name / when, model_config(fields), family_of(fields))


def config_of(name: str, lora: LoraConfig, **options: object) -> TrainConfig:
    """As PEFT's run in make_lora.py: no balance loss, no decay, no clipping."""
    plain = {"warmup_steps": 0, "eps": 1e-4, "weight_decay": 0.0, "clip_norm": 0.0}
    adamw = OptimizerConfig(2e-3, "constant", **plain)
    options = {"batch_size": 2, "sequence_length": 12, "compute_dtype": "float32"} | options
    config = with_pretrained_model(
        dataclasses.replace(
            PRESETS["tiny"][1],
            init_from=str(CHECKPOINTS / name),
            lora=lora,
            optimizer=adamw,
            num_steps=STEPS,
            **options,
        )  # type: ignore[arg-type]
    )
    router = dataclasses.replace(config.model.router, aux_loss_coef=0.0)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, router=router))


def start(trainer: AdapterTrainer, own: AdapterFolder) -> TrainState:
    state = trainer.init()
    place = jax.tree.map(lambda s: s.sharding, trainer.saved_shape.params)
    return dataclasses.replace(state, params=jax.device_put({ADAPTERS: own.adapters}, place))


def run(
    name: str, mesh: Mesh, steps: int, context: int = 0, **options: object
) -> tuple[AdapterTrainer, TrainState, list[float]]:
    own = adapter_of(name, "first")
    spread = MeshConfig(*mesh_shape(mesh), context)
    trainer = AdapterTrainer(config_of(name, own.lora, mesh=spread, **options), mesh)
    state, losses = start(trainer, own), []
    with np.load(LORA / name / "expected.npz") as expected:
        tokens = expected["tokens"].astype(np.int32)
    for step in range(steps):
        batch = place_batch(trainer.config, mesh, tokens[step % len(tokens)])
        state, metrics = trainer.step(state, batch)
        assert metrics["ok"]
        losses.append(float(metrics["loss"]))
    return trainer, state, losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_losses_and_adapters_are_those_of_peft(name: str) -> None:
    _, state, losses = run(name, mesh_of(1, 1, 1), STEPS)
    with np.load(LORA / name / "expected.npz") as expected:
        np.testing.assert_allclose(losses, expected["losses"], atol=1e-4, rtol=0)
    last = adapter_of(name, "last").adapters
    for own, other in zip(*map(jax.tree.leaves, (state.params[ADAPTERS], last)), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_sequences_on_two_devices_are_those_of_peft(name: str) -> None:
    """Windows, sinks and latents of sequences of which each device has a half. Later, a router's
    tie may fall to another expert.
    """
    steps = 10
    _, _, losses = run(name, mesh_of(2, 1, 1), steps, context=2)
    with np.load(LORA / name / "expected.npz") as expected:
        np.testing.assert_allclose(losses, expected["losses"][:steps], atol=1e-4, rtol=0)


def test_only_adapters_have_state_and_change() -> None:
    """Moments, checkpoints and updates are of adapters alone; the model lies there once."""
    trainer, state, losses = run("mixtral", mesh_of(1, 1, 1), 2)
    with np.load(LORA / "mixtral" / "expected.npz") as expected:
        np.testing.assert_allclose(losses, expected["losses"][:2], atol=1e-4, rtol=0)
    elements = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    adapters = elements(adapter_of("mixtral", "first").adapters)
    assert elements(state.m) == elements(state.v) == elements(state.params) == adapters
    base = trainer.init().frozen
    assert elements(base) > 5 * adapters
    for own, other in zip(*map(jax.tree.leaves, (state.frozen, base)), strict=True):
        np.testing.assert_array_equal(own, other)
    saved = trainer.prepare_state_for_save(state)
    assert elements(saved) < 3 * adapters + 10 and saved.frozen is None
    again = trainer.restore_state(jax.tree.map(jnp.copy, saved))
    for own, other in zip(*map(jax.tree.leaves, (again, state)), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("exchange", ["auto", pytest.param("ragged", marks=pytest.mark.slow)])
def test_several_devices_train_as_one(exchange: Any) -> None:
    """With dense parameters split over devices, experts over some, and two replicas of them."""
    tokens: dict[str, Any] = {"batch_size": 8, "comm": CommConfig(exchange=exchange)}
    config = config_of("mixtral", adapter_of("mixtral", "first").lora, **tokens)
    batch = np.random.default_rng(0).integers(0, config.model.vocab_size, (1, 8, 13), np.int32)
    results = []
    for mesh in (mesh_of(1, 1, 1), make_mesh((2, 1, 2), jax.devices()[:4])):
        trainer = AdapterTrainer(config, mesh)
        state = start(trainer, adapter_of("mixtral", "first"))
        for _ in range(2):
            state, metrics = trainer.step(state, jnp.asarray(batch))
        results.append((jax.device_get(state.params), float(metrics["loss"])))
    (one, loss), (many, loss_of_many) = results
    assert loss == pytest.approx(loss_of_many, abs=1e-5)
    for own, other in zip(*map(jax.tree.leaves, (one, many)), strict=True):
        np.testing.assert_allclose(own, other, atol=2e-5)


def test_dropout_is_of_training_alone_and_repeats() -> None:
    """A step is that of its number and seed; without training, and at probability 0, nothing is
    dropped.
    """
    own, mesh = adapter_of("mixtral", "first"), mesh_of(1, 1, 1)
    lora = dataclasses.replace(own.lora, targets=("attention",))
    stack = {"attention": own.adapters["moe_layers"]["attention"]}
    attention = dataclasses.replace(own, adapters={"moe_layers": stack})
    with np.load(LORA / "mixtral" / "expected.npz") as expected:
        tokens = jnp.asarray(expected["tokens"][0].astype(np.int32))
    losses, held_out = {}, {}
    for dropout in (0.0, 0.5):
        config = config_of("mixtral", dataclasses.replace(lora, dropout=dropout))
        trainer = AdapterTrainer(config, mesh)
        weights = jnp.ones(tokens[:, 1:].shape, jnp.float32)
        held_out[dropout] = float(
            trainer.evaluate_batches(start(trainer, attention), [(tokens, weights)])[0]
        )
        for seed_run in range(2):
            state, metrics = trainer.step(start(trainer, attention), tokens[None])
            losses[dropout, seed_run] = float(metrics["loss"])
        moved = jax.tree.leaves(jax.tree.map(lambda m: float(jnp.abs(m).max()), state.m))
        assert all(size > 0 for size in moved)
    assert held_out[0.0] == held_out[0.5]
    assert losses[0.5, 0] == losses[0.5, 1]
    assert losses[0.0, 0] == pytest.approx(held_out[0.0] / tokens[:, 1:].size, abs=1e-5)
    assert abs(losses[0.5, 0] - losses[0.0, 0]) > 1e-4


def test_bfloat16_freezes_matrices_in_bfloat16() -> None:
    lora = LoraConfig(rank=2, targets=("experts", "attention"))
    trainer = AdapterTrainer(
        config_of("mixtral", lora, compute_dtype="bfloat16", native="off"), mesh_of(1, 1, 1)
    )
    frozen = trainer.state_shape.frozen
    assert (
        frozen["embedding"].dtype == frozen["moe_layers"]["attention"]["w_qkv"].dtype == "bfloat16"
    )
    assert frozen["norm"]["scale"].dtype == frozen["moe_layers"]["moe"]["router"]["kernel"].dtype
    assert all(x.dtype == "float32" for x in jax.tree.leaves(trainer.state_shape.m))
    assert "LoRA of rank 2 on experts, attention" in trainer.notes[-1]


def test_a_part_that_the_model_has_not() -> None:
    with pytest.raises(ValueError, match=r"lora.targets = \('mlp',\): must name a part that the"):
        AdapterTrainer(config_of("mixtral", LoraConfig(2, targets=("mlp",))), mesh_of(1, 1, 1))
