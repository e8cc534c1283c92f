"""Steps of Muon, and of AdamW with moments in 8 bits: beside optax's optimizers, and on several
devices beside one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmoe.config import CheckpointConfig, OptimizerConfig, TrainConfig
from jmoe.mesh import path_names
from jmoe.optim.block_codes import decode
from jmoe.optim.moments import is_layer_matrix
from jmoe.optim.muon import UPDATE_RMS
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.fused.step import FusedTrainer
from tests.model_configs import mesh_of, spread_over
from tests.training.test_trained_parts import config_of, run

PLAIN = OptimizerConfig(1e-2, "constant", warmup_steps=0, clip_norm=0.0)
MUON = dataclasses.replace(PLAIN, kind="muon")
CODED = dataclasses.replace(PLAIN, moments="8bit")


def wide(optimizer: OptimizerConfig, **options: object) -> TrainConfig:
    """A model whose rows hold blocks of 32 codes, and more."""
    config = config_of(optimizer=optimizer, **options)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))


def test_a_step_of_muon_is_that_of_optax() -> None:
    """Each expert's matrix by itself; embeddings and the rest as in a run of AdamW. Without
    clipping the first moment of that run tells the gradient.
    """
    trainer = FusedTrainer(wide(PLAIN), mesh_of(1, 1, 1))
    before = jax.device_get(trainer.init().params)
    adamw, _ = run(wide(PLAIN), mesh_of(1, 1, 1))
    muon, (metrics,) = run(wide(MUON), mesh_of(1, 1, 1))
    grads = jax.tree.map(lambda m: m / np.float32(1 - PLAIN.beta1), adamw.m)

    def dims(tree: object) -> object:
        return jax.tree_util.tree_map_with_path(
            lambda path, w: (
                optax.contrib.MuonDimensionNumbers(w.ndim - 2, w.ndim - 1)
                if is_layer_matrix(path, w.shape)
                else None
            ),
            tree,
        )

    theirs = optax.contrib.muon(
        PLAIN.learning_rate,
        beta=MUON.momentum,
        weight_decay=PLAIN.weight_decay,
        consistent_rms=UPDATE_RMS,
        muon_weight_dimension_numbers=dims,
    )
    with jax.numpy_dtype_promotion("standard"):  # optax itself mixes dtypes
        steps, _ = jax.jit(theirs.update)(grads, theirs.init(before), before)
    for (path, own), other, step, old in zip(
        jax.tree_util.tree_leaves_with_path(muon.params),
        *map(jax.tree.leaves, (adamw.params, steps, before)),
        strict=True,
    ):
        # the rest is AdamW's, which optax's Muon gives Nesterov's correction
        expected = old + step if is_layer_matrix(path, own.shape) else other
        np.testing.assert_allclose(
            own, expected, rtol=1e-4, atol=1e-5, err_msg=".".join(path_names(path))
        )
    assert metrics["ok"] and "experts" not in muon.v["moe_layers"]["moe"]


@pytest.mark.parametrize(
    "optimizer", [MUON, pytest.param(CODED, marks=pytest.mark.slow)], ids=["muon", "8bit"]
)
@pytest.mark.parametrize(
    ("shape", "comm"),
    [
        ((1, 2, 2), {}),
        pytest.param((2, 1, 2), {"shard_experts": "weights"}, marks=pytest.mark.slow),
        pytest.param((1, 1, 4), {"shard_dense": False}, marks=pytest.mark.slow),
        pytest.param((1, 1, 4), {"fuse_dense": False}, marks=pytest.mark.slow),
    ],
)
def test_several_devices_are_one(
    optimizer: OptimizerConfig, shape: tuple[int, int, int], comm: dict[str, object]
) -> None:
    config = wide(optimizer)
    split = spread_over(config, *shape, **comm)
    one, of_one = run(config, mesh_of(1, 1, 1), 2)
    many, of_many = run(split, mesh_of(*shape), 2)
    assert of_one[1]["grad_norm"] == pytest.approx(of_many[1]["grad_norm"], rel=1e-4)
    for own, other in zip(*map(jax.tree.leaves, (one.params, many.params)), strict=True):
        # a code on the edge between two values may round the other way
        far = np.abs(own - other.reshape(own.shape)) > 1e-4
        assert far.mean() < (0.01 if optimizer == CODED else 1e-9)


def test_codes_hold_the_moments_of_adamw() -> None:
    """Within the table's resolution of float32 moments after a step, and near after several."""
    coded, _ = run(wide(CODED), mesh_of(1, 1, 1))
    plain, _ = run(wide(PLAIN), mesh_of(1, 1, 1))
    w_up = ("moe_layers", "moe", "experts", "w_up")
    assert "embedding" not in coded.scales["m"]
    for name in ("m", "v"):
        trees = getattr(coded, name), coded.scales[name], getattr(plain, name)
        codes, scales, expected = (_at(tree, w_up) for tree in trees)
        assert codes.dtype == np.uint8
        values = np.asarray(decode(codes, scales, signed=name == "m"))
        blocks = np.abs(expected).reshape(*scales.shape, -1).max(-1, keepdims=True)
        error = np.abs(values - expected).reshape(*scales.shape, -1) / np.maximum(blocks, 1e-30)
        assert error.max() < 0.008 and values.any()
    # the first step takes float32 moments, and rounds them for the next
    for own, other in zip(*map(jax.tree.leaves, (coded.params, plain.params)), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", [MUON, pytest.param(CODED, marks=pytest.mark.slow)], ids=["muon", "8bit"]
)
def test_a_checkpoint_goes_on_to_the_bit(optimizer: OptimizerConfig, tmp_path: Path) -> None:
    """Saved after a step on one device, and restored on one and on four."""
    trainer = FusedTrainer(wide(optimizer), mesh_of(1, 1, 1))
    tokens = np.random.default_rng(0).integers(0, 64, (1, 4, 9), np.int32)
    batch = jnp.asarray(tokens)
    state, _ = trainer.step(trainer.init(), batch)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, trainer.prepare_state_for_save(state), {}, "{}")
        checkpoints.wait_for_save()
        saved, *_ = checkpoints.restore(1, trainer.saved_shape)
        moved = FusedTrainer(spread_over(wide(optimizer), 1, 2, 2), mesh_of(1, 2, 2))
        elsewhere, *_ = checkpoints.restore(1, moved.saved_shape)
    expected, _ = trainer.step(state, batch)
    resumed, _ = trainer.step(trainer.restore_state(saved), batch)
    for own, other in zip(*map(jax.tree.leaves, (resumed, expected)), strict=True):
        np.testing.assert_array_equal(own, other)
    far, _ = moved.step(moved.restore_state(elsewhere), batch)
    for own, other in zip(*map(jax.tree.leaves, (far.params, expected.params)), strict=True):
        differs = np.abs(np.asarray(own).reshape(other.shape) - other) > 1e-4
        assert differs.mean() < (0.01 if optimizer == CODED else 1e-9)


def _at(tree: object, path: tuple[str, ...]) -> np.ndarray:
    for name in path:
        tree = tree[name]  # type: ignore[index]
    return np.asarray(tree)
