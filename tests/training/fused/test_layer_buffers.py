"""Experts that the data axis splits (`comm.shard_experts`) and copies of the state
(`mesh.replicate`): no number changes, a device holds its share, and a checkpoint of one layout
restores under every other.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import CheckpointConfig, LoraConfig, ModelConfig, TiersConfig, TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH, is_expert
from jmoe.mesh import BATCH as ROWS
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.resume import restore_checkpoint
from jmoe.training.state import TrainState
from tests import model_configs
from tests.arrays import assert_trees_close, differing, on_host
from tests.model_configs import OPTIMIZER, mesh_of, spread_over

SEQUENCE, BATCH = 16, 8
ONE = (1, 1, 1)
MODEL = dataclasses.replace(
    model_configs.MODEL, num_hidden_layers=3, num_experts_per_tok=2, capacity_factor=None
)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=dataclasses.replace(OPTIMIZER, learning_rate=0.001),
    batch_size=BATCH,
    sequence_length=SEQUENCE,
    num_steps=50,
    compute_dtype="float32",
)
# mesh, and what differs from CommConfig; `replicate` of the mesh
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "whole experts": ((2, 1, 2), {}),
    "optimizer": ((2, 2, 1), {"shard_experts": "optimizer"}),
    "weights": ((4, 1, 1), {"shard_experts": "weights", "schedule": "pipelined"}),
    "weights, dense parameters whole": (
        (2, 1, 2),
        {"shard_experts": "weights", "shard_dense": False, "bucket_bytes": 20_000},
    ),
    "weights, three levels": ((2, 2, 2), {"shard_experts": "weights", "exchange": "dedup"}),
    "copies": ((4, 1, 2), {"replicate": 4}),
    "copies, experts split": ((4, 1, 2), {"replicate": 2, "shard_experts": "weights"}),
    "copies over nodes": (
        (4, 2, 1),
        {"replicate": 2, "shard_experts": "optimizer", "embedding": "replicated"},
    ),
    "copies, gathered one by one": (
        (4, 1, 1),
        {"replicate": 2, "fuse_dense": False, "schedule": "none"},
    ),
}


@functools.cache
def trainer_of(
    shape: tuple[int, int, int], accumulation: int = 1, replicate: int = 1, **comm: Any
) -> FusedTrainer:
    config = dataclasses.replace(CONFIG, gradient_accumulation_steps=accumulation)
    config = spread_over(config, *shape, **comm)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, replicate=replicate))
    return FusedTrainer(config, mesh_of(*shape, replicas=replicate))


def train(trainer: FusedTrainer, steps: int) -> tuple[list[dict[str, Any]], TrainState]:
    """Metrics of steps with room for all tokens, and the state after them."""
    state, metrics = trainer.init(), []
    parts = trainer.config.gradient_accumulation_steps
    place = NamedSharding(trainer.model.mesh, ACCUMULATED_BATCH)
    for number in range(steps):
        tokens = np.random.default_rng(number).integers(0, MODEL.vocab_size, (BATCH, SEQUENCE + 1))
        tokens = tokens.astype(np.int32).reshape(parts, -1, SEQUENCE + 1)
        state, values = trainer.step(state, jax.device_put(tokens, place), full_capacity=True)
        metrics.append(jax.device_get(values))
        assert metrics[-1]["ok"]
    return metrics, state


def test_a_device_holds_its_share_of_the_experts() -> None:
    """Of weights and both moments; biases and all else are as without."""
    shape = 2, 1, 2
    whole, split = (trainer_of(shape, shard_experts=n).state_shape for n in ("none", "weights"))
    for part in ("params", "m", "v"):
        leaves = jax.tree_util.tree_leaves_with_path(getattr(split, part))
        others = jax.tree.leaves(getattr(whole, part))
        for (path, leaf), other in zip(leaves, others, strict=True):
            own, full = (np.prod(s.sharding.shard_shape(s.shape)) for s in (leaf, other))
            assert own * (2 if is_expert(path) else 1) == full, path


def test_a_device_holds_its_share_of_a_copy() -> None:
    """Two copies over eight devices: four devices split dense parameters, and experts; all eight
    the embedding.
    """
    state = trainer_of((4, 1, 2), replicate=2, shard_experts="weights").state_shape
    for part in ("params", "m", "v"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(state, part)):
            own, full = np.prod(leaf.sharding.shard_shape(leaf.shape)), np.prod(leaf.shape)
            all_split = is_expert(path) and leaf.ndim > 3
            split = 8 if "embedding" in str(path) else 4
            assert own == full // split or (own == full and not all_split), path


@pytest.mark.slow
def test_copies_of_the_state_change_no_number() -> None:
    """Nor do accumulation steps, after the last of which alone the copies add their gradients."""
    one, _ = train(trainer_of(ONE, 2), 2)
    copies, _ = train(trainer_of((4, 1, 1), 2, replicate=2, shard_experts="weights"), 2)
    assert_trees_close(copies, one, 1e-5)


def test_weights_gathered_a_layer_ahead_change_no_number() -> None:
    """Nor do accumulation steps, whose reduced gradients add up."""
    one, _ = train(trainer_of(ONE, 2), 2)
    split, _ = train(trainer_of((2, 1, 1), 2, shard_experts="weights", chunk_bytes=3000), 2)
    assert_trees_close(split, one, 1e-5)


@pytest.mark.slow
def test_weights_kept_for_the_backward_pass_change_no_number() -> None:
    one, _ = train(trainer_of(ONE, 2), 2)
    split, _ = train(trainer_of((2, 1, 1), 2, shard_experts="optimizer", schedule="fixed"), 2)
    assert_trees_close(split, one, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fifty_steps_have_the_losses_of_one_device(layout: str) -> None:
    shape, comm = LAYOUTS[layout]
    losses, expected = (
        [float(values["loss"]) for values in train(trainer, 50)[0]]
        for trainer in (trainer_of(shape, **comm), trainer_of(ONE))
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
def test_every_layout_restores_every_other(tmp_path: Path) -> None:
    """Bit for bit, each array where the new layout has it."""
    trainers = {name: trainer_of(shape, **comm) for name, (shape, comm) in LAYOUTS.items()}
    for number, (name, trainer) in enumerate(trainers.items()):
        state = trainer.init()
        state = dataclasses.replace(state, m=jax.tree.map(lambda x: x + 1, state.params))
        saved = trainer.prepare_state_for_save(state)
        expected = on_host(saved)
        folder = tmp_path / str(number)
        with Checkpoints(folder, CheckpointConfig()) as checkpoints:
            checkpoints.save(1, saved, {}, trainer.config.to_json())
        for other in trainers.values():
            with Checkpoints(folder, CheckpointConfig()) as checkpoints:
                restored, _ = restore_checkpoint(other, checkpoints, 1)
            assert differing(expected, on_host(other.prepare_state_for_save(restored))) == [], name
            where = jax.tree.map(
                lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim),
                restored,
                other.state_shape,
            )
            assert all(jax.tree.leaves(where))


def test_evaluation_gathers_what_is_split() -> None:
    tokens = np.random.default_rng(3).integers(0, MODEL.vocab_size, (BATCH, SEQUENCE + 1))
    weights, nll = np.ones((BATCH, SEQUENCE), np.float32), []
    for trainer in (trainer_of(ONE), trainer_of((2, 1, 1), shard_experts="weights")):
        place = NamedSharding(trainer.model.mesh, ROWS)
        batch = jax.device_put(tokens.astype(np.int32), place), jax.device_put(weights, place)
        nll += trainer.evaluate_batches(trainer.init(), [batch])
    np.testing.assert_allclose(nll[1], nll[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tiers": TiersConfig(experts="host", optimizer="host")},
            "must be none with experts on other tiers",
        ),
        (
            {"model": ModelConfig(), "init_from": "folder", "lora": LoraConfig(rank=2)},
            "must be none with lora.rank",
        ),
    ],
    ids=["tiers", "lora"],
)
def test_what_cannot_split_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^comm.shard_experts = 'weights': {words}"):
        dataclasses.replace(spread_over(CONFIG, 2, 1, 2, shard_experts="weights"), **changes)


def test_gathering_one_by_one_is_refused() -> None:
    words = "^shard_experts = 'optimizer': must be none with fuse_dense = False"
    with pytest.raises(ValueError, match=words):
        spread_over(CONFIG, 2, 1, 2, shard_experts="optimizer", fuse_dense=False, schedule="none")
