"""Runs that train some parameters and freeze the others."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jmoe.config import LoraConfig, OptimizerConfig, RouterConfig, TiersConfig, TrainConfig
from jmoe.configs import PRESETS
from jmoe.mesh import make_mesh
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.state import TrainState
from jmoe.training.trained_parts import (
    is_trained,
    pattern_matches,
    replace_subtree,
    subtree_like,
    trained_subtree,
)
from tests.model_configs import mesh_of

W_UP = ("moe_layers", "moe", "experts", "w_up")
PARTS = {"train": ("experts", "attention.w_*", "embedding"), "freeze": ("w_out",)}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("experts", True),
        ("experts.*", True),
        ("experts.w_up", True),
        ("moe_layers", True),
        ("moe_layers.moe.experts.w_up", True),
        ("w_*", True),
        ("expert", False),
        ("experts.w_up.*", False),
        ("router", False),
        ("layers", False),
    ],
)
def test_a_pattern_names_a_part(pattern: str, expected: bool) -> None:
    assert pattern_matches(pattern, W_UP) == expected


def test_what_is_trained() -> None:
    config = config_of(**PARTS)
    assert is_trained(config, W_UP) and is_trained(config, ("embedding",))
    assert not is_trained(config, ("moe_layers", "attention", "w_out"))
    assert not is_trained(config, ("moe_layers", "moe", "router", "kernel"))
    tree = {"embedding": 1, "moe_layers": {"moe": {"router": {"kernel": 2}}}}
    part = trained_subtree(config, tree)
    assert part == {"embedding": 1} == subtree_like(tree, part)
    assert replace_subtree(tree, {"embedding": 3}) == tree | {"embedding": 3}


def config_of(**options: object) -> TrainConfig:
    _, tiny = PRESETS["tiny"]
    model = dataclasses.replace(
        tiny.model,
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_experts=4,
    )
    options = {"compute_dtype": "float32", "batch_size": 4, "sequence_length": 8} | options
    return dataclasses.replace(tiny, model=model, num_steps=4, **options)  # type: ignore[arg-type]


def run(
    config: TrainConfig, mesh: Mesh, steps: int = 1
) -> tuple[TrainState, list[dict[str, float]]]:
    trainer = FusedTrainer(config, mesh)
    batch = np.random.default_rng(0).integers(0, 64, (1, 4, 9), np.int32)
    state, seen = trainer.init(), []
    for _ in range(steps):
        state, metrics = trainer.step(state, jnp.asarray(batch))
        seen.append(jax.device_get(metrics))
    saved = trainer.prepare_state_for_save(state)
    again = trainer.restore_state(jax.tree.map(jnp.copy, saved))
    for own, other in zip(*map(jax.tree.leaves, (again.m, state.m)), strict=True):
        np.testing.assert_array_equal(own, other)
    return jax.device_get(state), seen


@pytest.mark.slow
def test_frozen_parameters_stay_and_the_norm_is_that_of_the_others() -> None:
    """Beside a run of all parameters: the same first step, without and with clipping."""
    adamw = OptimizerConfig(1e-2, "constant", warmup_steps=0, clip_norm=0.0)
    config = config_of(optimizer=adamw)
    before = jax.device_get(FusedTrainer(config, mesh_of(1, 1, 1)).init())
    whole, (of_whole,) = run(config, mesh_of(1, 1, 1))
    freezing = dataclasses.replace(config, freeze=("embedding", "router"))
    state, (metrics,) = run(freezing, mesh_of(1, 1, 1))
    assert "embedding" not in state.m and "router" not in state.m["moe_layers"]["moe"]
    assert state.params.keys() == whole.params.keys()
    trained = subtree_like(whole.params, state.m)
    for own, other in zip(
        *map(jax.tree.leaves, (subtree_like(state.params, state.m), trained)), strict=True
    ):
        np.testing.assert_allclose(own, other, atol=1e-6)
    for name in ("embedding", "router"):
        own, other = (
            jax.tree.leaves(
                tree["embedding"] if name == "embedding" else tree["moe_layers"]["moe"][name]
            )
            for tree in (state.params, before.params)
        )
        np.testing.assert_array_equal(own, other)
    # the gradient of a first step without decay: m = (1 - beta1) g
    squares = [np.square(m / (1 - adamw.beta1)).sum() for m in jax.tree.leaves(state.m)]
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-4)
    assert metrics["grad_norm"] < of_whole["grad_norm"]
    clipping = dataclasses.replace(freezing, optimizer=dataclasses.replace(adamw, clip_norm=1e-3))
    _, (clipped,) = run(clipping, mesh_of(1, 1, 1))
    assert clipped["clip"] == pytest.approx(1e-3 / metrics["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("parts", "moves"),
    [
        ({}, True),
        pytest.param({"freeze": ("router",)}, False, marks=pytest.mark.slow),
        pytest.param({"train": ("experts",)}, False, marks=pytest.mark.slow),
    ],
)
def test_the_bias_of_a_frozen_router_stays(parts: dict[str, object], moves: bool) -> None:
    config = config_of(**parts)
    router = RouterConfig("sigmoid", bias_update_speed=0.5)
    model = dataclasses.replace(config.model, router=router)
    state, _ = run(dataclasses.replace(config, model=model), mesh_of(1, 1, 1))
    (bias,) = jax.tree.leaves(state.router_bias)
    assert bias.any() == moves


@pytest.mark.slow  # on one device it is quick, above
def test_several_devices_train_the_same_parts() -> None:
    config = config_of(**PARTS)
    one, of_one = run(config, mesh_of(1, 1, 1), 2)
    many, of_many = run(config, make_mesh((2, 1, 2), jax.devices()[:4]), 2)
    assert of_one[1]["grad_norm"] == pytest.approx(of_many[1]["grad_norm"], rel=1e-4)
    for own, other in zip(*map(jax.tree.leaves, (one.params, many.params)), strict=True):
        np.testing.assert_allclose(own, other.reshape(own.shape), atol=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": ("expert",)}, "train = 'expert': must fit a parameter: .*experts.w_up"),
        ({"freeze": ("*",)}, "freeze = .*: must leave a parameter to train"),
    ],
)
def test_patterns_that_fit_nothing(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedTrainer(config_of(**options), mesh_of(1, 1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ("",)}, "must hold no empty pattern"),
        ({"train": ("x",), "plan": True}, "train = .*: must be empty with plan"),
        ({"freeze": ("x",), "tiers": TiersConfig("host", "host")}, "freeze = .*other tiers"),
        (
            {"freeze": ("x",), "init_from": "model", "lora": LoraConfig(2)},
            "freeze = .*: must be empty with lora.rank",
        ),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**options)
