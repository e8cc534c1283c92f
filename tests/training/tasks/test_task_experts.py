"""Experts of layers routed by task lie where their tasks run: which, in how many bytes, how they
are moved and saved.

Legend: R devices, N layers routed by task, E experts of a layer, S slots of a device in a layer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import VisionTrainConfig
from jmoe.configs.ufo import ufo_tiny
from jmoe.data.image_batches import ImageBatches
from jmoe.mesh import BATCH
from jmoe.training.tasks.experts import (
    NONE,
    has_same_slots,
    task_experts_of,
    task_slots,
    with_task_experts,
)
from jmoe.training.tasks.layouts import allocated_bytes_per_device, plan_task_layout
from jmoe.training.tasks.step import ShardedVision, VisionTrainer
from tests.arrays import differing, on_host
from tests.model_configs import mesh_of
from tests.vision_tasks import CLASSES, CONFIG, TASKS

TINY = dataclasses.replace(ufo_tiny, layout="elastic")
# Three tasks share expert 0 of the first of two layers, and each has its own in the last. No path
# names 2 of the first.
PATHS = {"large": (0, 0), "middle": (1, 1), "small": (0, 2), "other": (0, 3)}
ELASTIC = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, mlp_only_layers=(0,), task_layers=(1, 2)),
    tasks={
        name: dataclasses.replace(task, path=PATHS[name]) for name, task in CONFIG.tasks.items()
    },
    layout="elastic",
)


def slots_of(num_devices: int, config: VisionTrainConfig = TINY, step: int = 0) -> Any:
    return task_slots(config, plan_task_layout(config, num_devices, step=step))


def sharded(num_devices: int) -> ShardedVision:
    return ShardedVision(
        ELASTIC, CLASSES, mesh_of(num_devices, 1, 1), slots_of(num_devices, ELASTIC)
    )


def test_a_device_has_what_its_tasks_name() -> None:
    slots = slots_of(4)
    assert slots.experts_RNS.tolist() == [
        [[0, 2], [0, NONE]],  # glyphs; expert 2 of the first layer is nobody's
        [[1, 3], [1, NONE]],
        [[0, NONE], [2, NONE]],
        [[0, NONE], [3, NONE]],
    ]
    assert slots.homes == ((0,), (1,), (2,), (3,))
    assert slots.is_first_holder_RNS[:, 0].tolist() == [
        [True, True],
        [True, True],
        [False, False],
        [False, False],
    ]
    assert slots_of(2).num_slots == 3 and slots_of(2).homes == ((0,), (1,), (1,), (1,))
    assert slots_of(1) is None and slots_of(4, ufo_tiny) is None
    for devices in (2, 3, 5, 8):
        slots = slots_of(devices)
        for layer in range(2):
            assert set(slots.experts_RNS[:, layer].ravel().tolist()) - {NONE} == {0, 1, 2, 3}
        for number, task in enumerate(TINY.tasks.values()):
            for device in slots.homes[number]:
                assert (slots.slot_RNE[device, np.arange(2), list(task.path)] != NONE).all()


def test_gradients_are_summed_over_the_devices_of_a_task_alone() -> None:
    """On eight devices glyphs have four, digits two; all but digits share expert 0 of the first
    layer.
    """
    sums = {
        tuple(layers): (groups, slot.tolist())
        for layers, groups, slot in slots_of(8).reduction_rounds()
    }
    groups, slot = sums[0,]
    assert groups == [[0, 1, 2, 3, 6, 7], [4, 5]] and slot == [0] * 8
    groups, slot = sums[1,]
    assert groups == [[0, 1, 2, 3], [4, 5], [6], [7]] and slot == [0] * 8
    ((layers, groups, _),) = slots_of(4).reduction_rounds()
    assert layers == [0] and groups == [[0, 2, 3], [1]]


def test_a_task_that_has_ended_keeps_its_path_on_one_device() -> None:
    tasks = TINY.tasks | {"digits": dataclasses.replace(TINY.tasks["digits"], num_steps=5)}
    config = dataclasses.replace(TINY, tasks=tasks)
    before, after = slots_of(4, config), slots_of(4, config, step=5)
    assert before.homes[1] == (1,) and len(after.homes[1]) == 1
    assert (after.slot_RNE[after.homes[1][0], [0, 1], [1, 1]] != NONE).all()
    assert has_same_slots(before, slots_of(4)) and not has_same_slots(before, after)
    assert has_same_slots(None, None) and not has_same_slots(None, after)


@pytest.mark.parametrize("num_devices", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_saved_is_the_same_on_all_devices_bit_for_bit(num_devices: int) -> None:
    """Three devices divide no dimension of an expert: all of them save all of it."""
    model = sharded(num_devices)
    saved = jax.jit(model.initial_saved_state)()
    marked = jax.tree.map(lambda w: w.at[0, 0, 0].set(-0.0), task_experts_of(saved.m))
    saved = dataclasses.replace(saved, m=with_task_experts(saved.m, marked))
    used = model.from_saved(saved)
    local = task_experts_of(used.params)["w_up"].addressable_data(0)
    assert local.shape[:2] == (2, slots_of(num_devices, ELASTIC).num_slots)
    again = model.to_saved(used)
    expected, actual = on_host((saved.params, saved.m)), on_host((again.params, again.m))
    assert differing(expected, actual) == []
    signs = [np.signbit(task_experts_of(m)["w_up"]) for m in (expected[1], actual[1])]
    assert signs[0].any() and np.array_equal(*signs)
    for form, shape in ((again, model.saved_shape), (used, model.state_shape)):
        placed = [leaf.sharding for leaf in jax.tree.leaves(task_experts_of(shape.params))]
        assert [leaf.sharding for leaf in jax.tree.leaves(task_experts_of(form.params))] == placed


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_a_device_has_as_many_bytes_as_the_plan_says(num_devices: int) -> None:
    config = dataclasses.replace(TINY, comm=dataclasses.replace(TINY.comm, fuse_dense=True))
    layout = plan_task_layout(config, num_devices)
    counts = dict.fromkeys(config.tasks, 8)
    state = VisionTrainer(config, counts, mesh_of(num_devices, 1, 1), layout).state_shape
    leaves = jax.tree.leaves((state.params, state.m, state.v))
    state_bytes = sum(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    experts = [
        leaf
        for tree in (state.params, state.m, state.v)
        for leaf in jax.tree.leaves(task_experts_of(tree))
    ]
    expert_bytes = sum(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in experts)
    slots = task_slots(config, layout)
    assert slots is not None and slots.num_slots < 4
    assert expert_bytes == 12 * 2 * slots.num_slots * config.model.parameters_per_expert
    every = sum(4 * np.prod(leaf.shape) for leaf in leaves) - sum(
        4 * np.prod(leaf.shape) for leaf in experts
    )
    gradients = state_bytes - expert_bytes  # of what is split the whole is in use
    assert state_bytes < every + 12 * 2 * 4 * config.model.parameters_per_expert
    planned = allocated_bytes_per_device(config, layout)
    rest = planned - 16 * 2 * slots.num_slots * config.model.parameters_per_expert
    assert rest == pytest.approx(gradients + every / 3, rel=0.02)


def test_copies_of_an_expert_stay_equal() -> None:
    num_devices = 4
    layout = plan_task_layout(ELASTIC, num_devices)
    trainer = VisionTrainer(ELASTIC, CLASSES, mesh_of(num_devices, 1, 1), layout)
    batches, state = ImageBatches(TASKS, ELASTIC, layout, 0, num_devices), trainer.init()
    first = on_host(task_experts_of(trainer.prepare_state_for_save(state).params))
    place = NamedSharding(trainer.model.mesh, BATCH)
    for _ in range(3):
        state, metrics = trainer.step(
            state, jax.tree.map(lambda a: jax.device_put(a, place), next(batches))
        )
        assert metrics["ok"]
    slots = slots_of(num_devices, ELASTIC)
    moved = on_host(task_experts_of(trainer.prepare_state_for_save(state).params))
    for name, w in task_experts_of(state.params).items():
        parts = [
            np.asarray(part.data)
            for part in sorted(w.addressable_shards, key=lambda s: s.index[1].start)
        ]
        for device, layer, slot in np.argwhere(slots.experts_RNS != NONE):
            expert = slots.experts_RNS[device, layer, slot]
            np.testing.assert_array_equal(parts[device][layer, slot], moved[name][layer, expert])
        for device, layer, slot in np.argwhere(slots.experts_RNS == NONE):
            assert not np.any(parts[device][layer, slot])
        for task in PATHS.values():
            assert all(
                np.any(moved[name][layer, e] != first[name][layer, e])
                for layer, e in enumerate(task)
            )


def test_an_expert_that_is_not_there_is_never_asked_for() -> None:
    """Every image is on a device with its task's experts, in training and in evaluation."""
    for num_devices in (2, 3, 8):
        layout, slots = plan_task_layout(ELASTIC, num_devices), slots_of(num_devices, ELASTIC)
        for device, shares in enumerate(layout.shares):
            for share in shares:
                assert device in slots.homes[share.task]
        for number, task in enumerate(ELASTIC.tasks.values()):
            have = slots.slot_RNE[list(slots.homes[number])]
            assert (have[:, [0, 1], list(task.path)] != NONE).all()
    assert jnp.asarray(slots.slot_RNE).dtype == jnp.int32
