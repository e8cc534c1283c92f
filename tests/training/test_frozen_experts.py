"""LoRA over experts that stay compressed: against the same run over their decompressed values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config import LoraConfig, ModelConfig, OptimizerConfig, TrainConfig
from jmoe.configs import PRESETS
from jmoe.mesh import make_mesh
from jmoe.models.decoder import Decoder
from jmoe.models.pretrained import LanguageModel
from jmoe.training.finetune import with_pretrained_model
from jmoe.training.frozen_experts import MATRICES
from jmoe.training.fused.adapting import STORED, AdapterTrainer
from jmoe.training.state import TrainState
from kernels_pallas.compressed import compress, decompress
from kernels_pallas.formats import FORMATS
from tests.model_configs import CHECKPOINTS, mesh_of

BASE = CHECKPOINTS / "gpt_oss_mxfp4"  # its stored values are mxfp4's
SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
)
LORA = LoraConfig(4, 8.0, targets=("attention", "experts", "router"))
STEPS = 3


def config_of(base: Path, lora: LoraConfig, **options: object) -> TrainConfig:
    options = {"batch_size": 4, "sequence_length": 16, "compute_dtype": "float32"} | options
    return with_pretrained_model(
        dataclasses.replace(
            PRESETS["tiny"][1],
            init_from=str(base),
            lora=lora,
            optimizer=OptimizerConfig(1e-2, "constant", warmup_steps=0, eps=1e-4),
            num_steps=STEPS,
            **options,
        )  # type: ignore[arg-type]
    )


def train(trainer: AdapterTrainer, steps: int = STEPS) -> tuple[TrainState, list[float]]:
    state, losses = trainer.init(), []
    for step in range(steps):
        config, steps_of_batch = trainer.config, trainer.config.gradient_accumulation_steps
        rows = config.batch_size // steps_of_batch
        shape = steps_of_batch, rows, config.sequence_length + 1
        tokens = np.random.default_rng(step).integers(0, 64, shape, np.int32)
        state, metrics = trainer.step(state, jnp.asarray(tokens))
        assert metrics["ok"]
        losses.append(float(metrics["loss"]))
    return state, losses


def small_base(folder: Path) -> Path:
    """Write a model of random float32 weights, two equal layers of four experts."""
    jmoe.save_pretrained(LanguageModel(Decoder(SMALL, rngs=nnx.Rngs(0))), folder, eos_token_id=0)
    return folder


def decompressed(base: Path, folder: Path, kind: str) -> Path:
    """Write a model with the values that its experts have once compressed, in float32."""
    model = jmoe.load_pretrained(base, dtype="float32")
    experts = model.decoder.moe_layers.moe.experts
    for name in MATRICES:
        wide = getattr(experts, name)[...]
        rounded = [
            decompress(*map(jnp.asarray, compress(np.asarray(w), FORMATS[kind])), jnp.float32)
            for w in wide.reshape(-1, *wide.shape[2:])
        ]
        getattr(experts, name)[...] = jnp.stack(rounded).reshape(wide.shape)
    jmoe.save_pretrained(model, folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("mxfp4", 4),
        *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in ("int4", "int8", "fp8")),
        # more ranks than `MOST_MASKED_RANKS`: grouped products
        pytest.param("mxfp4", 80, marks=pytest.mark.slow),
        pytest.param("stored mxfp4", 4, marks=pytest.mark.slow),
    ],
)
def test_compressed_experts_train_as_their_values(kind: str, rank: int, tmp_path: Path) -> None:
    """The low-rank product beside the base product is the product of their sum."""
    lora = dataclasses.replace(LORA, rank=rank)
    base, kind = (
        (BASE, "mxfp4") if kind == "stored mxfp4" else (small_base(tmp_path / "base"), kind)
    )
    values = decompressed(base, tmp_path / "values", kind)
    wide, expected = train(AdapterTrainer(config_of(values, lora), mesh_of(1, 1, 1)))
    compressed = dataclasses.replace(lora, expert_dtype=kind)
    trainer = AdapterTrainer(config_of(base, compressed), mesh_of(1, 1, 1))
    state, losses = train(trainer)
    np.testing.assert_allclose(losses, expected, atol=1e-5, rtol=0)
    for own, other in zip(*map(jax.tree.leaves, (state.params, wide.params)), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5, rtol=0)
    held = state.frozen[STORED]["moe_layers"]["experts"]
    assert held["w_up"].dtype == FORMATS[kind].values
    dense = wide.frozen["moe_layers"]["moe"]["experts"]["w_up"]
    assert dense.nbytes > 3.5 * sum(held[name].nbytes for name in ("w_up", "w_up_scales"))
    assert f"of experts in {kind}" in trainer.notes[-1]


@pytest.mark.slow
def test_several_devices_train_as_one() -> None:
    lora = dataclasses.replace(LORA, expert_dtype="mxfp4")
    results = []
    for mesh in (mesh_of(1, 1, 1), make_mesh((2, 1, 2), jax.devices()[:4])):
        config = config_of(BASE, lora, batch_size=8)
        # so large an epsilon makes an update proportional to its gradient, however small that is
        config = dataclasses.replace(
            config, optimizer=dataclasses.replace(config.optimizer, eps=1.0)
        )
        state, losses = train(AdapterTrainer(config, mesh), 2)
        results.append((jax.device_get(state.params), losses))
    (one, losses), (many, losses_of_many) = results
    np.testing.assert_allclose(losses, losses_of_many, atol=1e-5)
    for own, other in zip(*map(jax.tree.leaves, (one, many)), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_alone_and_goes_on() -> None:
    trainer = AdapterTrainer(
        config_of(BASE, dataclasses.replace(LORA, expert_dtype="mxfp4")), mesh_of(1, 1, 1)
    )
    state, _ = train(trainer, 1)
    saved = trainer.prepare_state_for_save(state)
    assert saved.frozen is None
    again = trainer.restore_state(jax.tree.map(jnp.copy, saved))
    for own, other in zip(*map(jax.tree.leaves, (again, state)), strict=True):
        np.testing.assert_array_equal(own, other)


def test_sizes_that_a_format_cannot_hold() -> None:
    lora = LoraConfig(4, expert_dtype="mxfp4")
    with pytest.raises(ValueError, match=r"expert_dtype = 'mxfp4': needs inputs of w_down to be"):
        AdapterTrainer(config_of(CHECKPOINTS / "mixtral", lora), mesh_of(1, 1, 1))
