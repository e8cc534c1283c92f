"""A training state from a Hugging Face folder, on one device and on many."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config import LoraConfig, TiersConfig, TrainConfig, YarnConfig
from jmoe.configs import PRESETS
from jmoe.mesh import make_mesh
from jmoe.models.huggingface import hf_config
from jmoe.models.weights import flatten_by_path
from jmoe.training.finetune import (
    companion_files,
    ignored_training_options,
    load_pretrained_state,
    with_pretrained_model,
)
from jmoe.training.trainer import make_trainer
from tests.model_configs import CHECKPOINTS, mesh_of


def config_of(name: str, **options: object) -> TrainConfig:
    _, tiny = PRESETS["tiny"]
    options = {"batch_size": 2, "sequence_length": 11, "compute_dtype": "float32"} | options
    return with_pretrained_model(
        dataclasses.replace(tiny, init_from=str(CHECKPOINTS / name), **options)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow), "gpt_oss_mxfp4"]
)
def test_first_steps(name: str) -> None:
    """The first loss is that of transformers; the state is the step's own, to write over as it
    likes.
    """
    config = config_of(name)
    program = make_trainer(config, mesh_of(1, 1, 1))
    state = load_pretrained_state(program, config)
    with np.load(CHECKPOINTS / name / "reference.npz") as reference:
        tokens = jnp.asarray(reference["input_ids"].astype(np.int32))[None]
        expected = reference["adamw_losses"]
    losses = []
    for _ in range(3):
        state, metrics = program.step(state, tokens)
        assert metrics["ok"] and not metrics["overflow"]
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(float(expected[0]), abs=1e-4)
    assert losses[2] < losses[0]
    assert int(state.step) == 3
    again = load_pretrained_state(program, config)
    stored = flatten_by_path(again.params) | flatten_by_path(again.router_bias)
    whole = jmoe.load_pretrained(CHECKPOINTS / name, dtype="float32").decoder
    np.testing.assert_array_equal(stored["embedding",], whole.embedding[...])
    np.testing.assert_array_equal(
        stored["moe_layers", "moe", "experts", "w_up"], whole.moe_layers.moe.experts.w_up
    )


def test_state_on_a_mesh_is_the_state_on_one_device() -> None:
    config = config_of("mixtral", batch_size=8)
    one, many = (make_trainer(config, mesh) for mesh in (mesh_of(1, 1, 1), make_mesh((2, 2, 2))))
    a, b = load_pretrained_state(one, config), load_pretrained_state(many, config)
    for x, y, place in zip(*map(jax.tree.leaves, (a, b, many.state_shape)), strict=True):
        assert y.sharding.is_equivalent_to(place.sharding, y.ndim) and y.dtype == place.dtype
        np.testing.assert_array_equal(x, y)


def test_what_is_trained_without_is_said(tmp_path: Path) -> None:
    """Noise and dropout change no answers, so that the model is served; training has other
    means.
    """
    fields = json.loads((CHECKPOINTS / "mixtral" / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(fields | {"router_jitter_noise": 0.01, "attention_dropout": 0.1})
    )
    file = tmp_path / "config.json"
    assert ignored_training_options(str(tmp_path)) == [
        f"{file}: attention_dropout = 0.1: trains without it",
        f"{file}: router_jitter_noise = 0.01: trains without it",
    ]
    assert ignored_training_options(str(CHECKPOINTS / "mixtral")) == []


def test_model_and_tokenizer_of_the_folder(tmp_path: Path) -> None:
    _, tiny = PRESETS["tiny"]
    assert with_pretrained_model(tiny) is tiny
    config = config_of("olmoe", model=dataclasses.replace(tiny.model, capacity_factor=1.5))
    assert config.model.qk_norm == "full" and config.model.hidden_size == 32
    assert config.model.capacity_factor == 1.5 and config.data.tokenizer is None
    (tmp_path / "config.json").write_bytes((CHECKPOINTS / "olmoe" / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    config = with_pretrained_model(dataclasses.replace(tiny, init_from=str(tmp_path)))
    assert config.data.tokenizer == str(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"config.json: is missing"):
        with_pretrained_model(dataclasses.replace(tiny, init_from=str(tmp_path / "nowhere")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_longer_context_is_what_its_export_says(name: str, tmp_path: Path) -> None:
    """The first loss is that of the model that its `config.json` with YaRN describes."""
    config = config_of(name, yarn_factor=4.0)
    short = config_of(name)
    positions = short.model.max_position_embeddings
    assert config.model.rope_scaling == YarnConfig(4.0, positions)
    assert config.model.max_position_embeddings == 4 * positions
    for file in (CHECKPOINTS / name).glob("*.safetensors*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    exported = hf_config(config.model)
    (tmp_path / "config.json").write_text(json.dumps(exported))
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 64, (2, 12)), jnp.int32)
    model = jmoe.load_pretrained(tmp_path, dtype="float32")
    logits = jax.nn.log_softmax(jnp.asarray(model(tokens[:, :-1])))
    expected = -jnp.take_along_axis(logits, tokens[:, 1:, None], 2).mean()
    losses = []
    for run in (config, short):
        program = make_trainer(run, mesh_of(1, 1, 1))
        _, metrics = program.step(load_pretrained_state(program, run), tokens[None])
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(float(expected), abs=2e-5)
    assert abs(losses[0] - losses[1]) > 1e-4


def test_contexts_that_cannot_be_stretched() -> None:
    said = "yarn_factor = 2.0: must be 1 "
    with pytest.raises(ValueError, match=f"{said}for a model whose positions are stretched"):
        config_of("deepseek_v3_yarn", yarn_factor=2.0)
    with pytest.raises(ValueError, match=f"{said}with lora.rank"):
        config_of("qwen3_moe", yarn_factor=2.0, lora=LoraConfig(rank=2))


def test_a_run_keeps_what_belongs_to_the_tokenizer_of_its_model(tmp_path: Path) -> None:
    """What a merge then gives to who chats with it."""
    for name in (
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/README.md",
        "README.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    kept = companion_files(str(tmp_path), b"tokenizer.json")
    assert kept == {
        "additional_chat_templates/tool_use.jinja": b"additional_chat_templates/tool_use.jinja",
        "chat_template.jinja": b"chat_template.jinja",
        "generation_config.json": b"generation_config.json",
        "initial_config.json": b"config.json",
    }
    assert companion_files(str(tmp_path), b"another") == companion_files(str(tmp_path), None) == {}


def test_a_share_of_chosen_experts_is_checked_with_the_model_of_the_folder() -> None:
    with pytest.raises(
        ValueError, match=r"tiers.chosen_share = 0.01: must be at least \d+ / \d+, what one token"
    ):
        config_of("olmoe", tiers=TiersConfig(chosen_share=0.01))
    assert config_of("olmoe", tiers=TiersConfig(chosen_share=1.0)).tiers.chosen_share == 1
