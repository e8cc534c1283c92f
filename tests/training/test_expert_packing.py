"""Experts packed while a run goes on: the loss as if nothing had happened, what is measured, who
may not.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import CheckpointConfig, CommConfig, MachineConfig, TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh, mesh_shape
from jmoe.run.checkpoint import Checkpoints
from jmoe.training import expert_packing
from jmoe.training.expert_packing import (
    PackingController,
    initial_packing,
    move_state,
    time_exchange_and_experts,
)
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.resume import restore_checkpoint
from jmoe.training.state import TrainState
from tests import model_configs
from tests.arrays import differing, on_host
from tests.model_configs import OPTIMIZER, spread_over

SHAPE = (1, 2, 2)
SEQUENCE, BATCH = 16, 8
MODEL = dataclasses.replace(
    model_configs.MODEL, num_hidden_layers=2, first_k_dense_replace=0, num_experts_per_tok=2
)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=dataclasses.replace(OPTIMIZER, learning_rate=0.001),
    batch_size=BATCH,
    sequence_length=SEQUENCE,
    compute_dtype="float32",
    machine=MachineConfig(host_bytes=10**13),
)
STEPS = 30


def config_of(**comm: Any) -> TrainConfig:
    return spread_over(CONFIG, *SHAPE, **comm)


@functools.cache
def trainer_of(config: TrainConfig, shape: tuple[int, int, int]) -> FusedTrainer:
    return FusedTrainer(config, make_mesh(shape, jax.devices()[:4]))


def trainer_at(controller: PackingController) -> FusedTrainer:
    config, shape = controller.current_config_and_shape()
    return trainer_of(config, shape)


def step(trainer: FusedTrainer, state: TrainState, number: int) -> tuple[TrainState, float]:
    """Take a step on the tokens of its number, with room for all at once: one program less to
    compile.
    """
    tokens = (
        np.random.default_rng(number)
        .integers(0, MODEL.vocab_size, (1, BATCH, SEQUENCE + 1))
        .astype(np.int32)
    )
    placed = jax.device_put(tokens, NamedSharding(trainer.model.mesh, ACCUMULATED_BATCH))
    state, values = trainer.step(state, placed, full_capacity=True)
    assert values["ok"]
    return state, float(values["loss"])


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of a run without packing."""
    trainer, losses = trainer_of(config_of(packing=1), SHAPE), []
    state = trainer.init()
    for number in range(STEPS):
        state, loss = step(trainer, state, number)
        losses.append(loss)
    return losses


def times(monkeypatch: pytest.MonkeyPatch, all_to_all_s: float, ffn_s: float) -> None:
    monkeypatch.setattr(
        expert_packing, "time_exchange_and_experts", lambda *_: (all_to_all_s, ffn_s)
    )


@pytest.mark.slow
def test_a_run_that_packs_and_goes_back_has_the_losses_of_one_that_does_not(
    alone: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert axis shrinks, then the other; a slower step takes the last one back."""
    times(monkeypatch, 0.02, 0.01)
    controller = PackingController(config_of(packing="auto"), SHAPE, 1)
    trainer, meshes, losses = trainer_at(controller), [], []
    state = trainer.init()
    for number in range(STEPS):
        if controller.is_packing_choice_due(number):
            decision, measured = controller.measure_and_choose_packing(number, trainer)
            assert measured.keys() == {"all_to_all_s", "ffn_s", "step_s"}
            after = trainer_at(controller)
            if after is not trainer:
                state = move_state(state, trainer, after)
            trainer = after
            meshes.append((number, mesh_shape(trainer.model.mesh), decision.experts_per_device))
        state, loss = step(trainer, state, number)
        losses.append(loss)
        controller.note_step(
            1.5 if controller.packing == 4 else 1.0, compiled=number in (0, 10, 14, 18)
        )
    assert meshes == [(10, (2, 1, 2), 4), (14, (4, 1, 1), 8), (18, (2, 1, 2), 4)]
    assert controller.done
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_a_move_changes_no_bit_and_frees_what_it_leaves() -> None:
    """Also of an embedding table that is kept in stripes."""
    before = trainer_of(config_of(packing=1, embedding="rows"), SHAPE)
    after = trainer_of(config_of(packing=2, embedding="rows"), (2, 1, 2))
    state = before.init()
    state = dataclasses.replace(state, m=jax.tree.map(lambda x: x + 1, state.params))
    expected = on_host(before.prepare_state_for_save(state))
    there = move_state(state, before, after)
    assert differing(expected, on_host(after.prepare_state_for_save(there))) == []
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params["moe_layers"]))
    where = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim), there, after.state_shape
    )
    assert all(jax.tree.leaves(where))
    assert after.model.hierarchy == before.model.hierarchy != (before.model.mesh.axis_names,)


@pytest.mark.parametrize(
    "comm", [{"exchange": "dedup", "schedule": "pipelined"}, {"packing": 4}], ids=str
)
def test_what_is_measured(comm: dict[str, Any]) -> None:
    """Each of the kinds of exchange that make more than one all-to-all, and none where a device
    has all experts.
    """
    packed = comm.get("packing", 1)
    config = config_of(**comm)
    trainer = trainer_of(
        config, PackingController(config, SHAPE, packed).current_config_and_shape()[1]
    )
    sent_s, experts_s = time_exchange_and_experts(trainer)
    assert experts_s > 0 and (sent_s > 0) == (packed == 1)


@pytest.mark.parametrize(
    ("device_bytes", "options", "words"),
    [
        (320_000, {"memory_dir": "/dev/shm"}, "; experts cannot move to host memory: checkpoint."),
        (250_000, {}, "would be lacking"),
    ],
)
def test_memory_that_forbids_is_named(
    monkeypatch: pytest.MonkeyPatch, device_bytes: int, options: dict[str, Any], words: str
) -> None:
    times(monkeypatch, 0.02, 0.01)
    config = config_of(packing="auto")
    small = MachineConfig(device_bytes=device_bytes, host_bytes=10**12)
    saving = dataclasses.replace(config.checkpoint, **options)
    config = dataclasses.replace(config, machine=small, checkpoint=saving)
    controller = PackingController(config, SHAPE, 1)
    trainer = trainer_of(config_of(packing=1), SHAPE)
    decision, _ = controller.measure_and_choose_packing(10, trainer)
    assert (decision.experts_per_device, decision.done) == (2, True)
    assert "it stays at 2 experts a device: twice as many need " in decision.reason
    assert words in decision.reason


def test_experts_that_exceed_the_devices_move_to_host_memory_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times(monkeypatch, 0.02, 0.01)
    small = MachineConfig(device_bytes=320_000, host_bytes=10**12)
    config = dataclasses.replace(config_of(packing="auto"), machine=small)
    controller = PackingController(config, SHAPE, 1)
    trainer, tiers = trainer_of(config_of(packing=1), SHAPE), []
    for number, step_s in ((10, 1.0), (14, 2.0)):
        controller.note_step(step_s, compiled=False)
        decision, _ = controller.measure_and_choose_packing(number, trainer)
        tiers.append(controller.current_config_and_shape()[0].tiers.experts)
        assert controller.is_offloaded == ("in host memory" in decision.reason)
    assert tiers == ["host", "device"] and controller.done


def test_when_it_decides() -> None:
    auto = PackingController(config_of(packing="auto"), SHAPE, 1)
    assert not auto.is_packing_choice_due(10)  # a run that has resumed there
    for _ in range(4):
        auto.note_step(1.0, compiled=True)
    assert [number for number in range(19) if auto.is_packing_choice_due(number)] == [10, 14, 18]
    for config, shape in (
        (config_of(packing=2), SHAPE),
        (config_of(packing="auto"), (4, 1, 1)),
        (
            dataclasses.replace(
                config_of(packing="auto"), model=dataclasses.replace(MODEL, num_experts=0)
            ),
            SHAPE,
        ),
    ):
        assert PackingController(config, shape, 1).done


def test_a_checkpoint_says_its_packing_and_goes_on_under_another(tmp_path: Path) -> None:
    packed = trainer_of(config_of(packing=2), (2, 1, 2))
    state = packed.init()
    expected, folder = on_host(packed.prepare_state_for_save(state)), tmp_path / "checkpoints"
    auto = dataclasses.replace(config_of(packing="auto"), output_dir=str(tmp_path))
    assert initial_packing(auto, 4, 4) == 1
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, packed.prepare_state_for_save(state), {}, auto.to_json(), packing=2)
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        assert checkpoints.newest_packing() == 2
        alone = trainer_of(config_of(packing=1), SHAPE)
        there, _ = restore_checkpoint(alone, checkpoints, 1)
    assert differing(expected, on_host(alone.prepare_state_for_save(there))) == []
    assert initial_packing(auto, 4, 4) == 2
    assert initial_packing(dataclasses.replace(auto, comm=CommConfig(packing=4)), 4, 4) == 4
    # the mesh has no expert axis to shrink
    assert initial_packing(spread_over(auto, 4, 1, 1, packing="auto"), 4, 4) == 1
