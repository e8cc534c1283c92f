"""Layouts within the memory of a device: bytes of parameters that tasks share, and of those that are a task's own."""

import dataclasses
from typing import Any

import jax
import pytest

from jmoe.config import CommConfig, MachineConfig, VisionTrainConfig
from jmoe.configs.ufo import ufo_tiny
from jmoe.training.task_layouts import copies_line, layout_of, memory_of, own_experts
from jmoe.training.vision_step import ShardedVision
from tests.model_configs import mesh_of

ELASTIC = dataclasses.replace(ufo_tiny, layout="elastic")


def with_bytes(device_bytes: int, **changes: Any) -> VisionTrainConfig:
    return dataclasses.replace(ELASTIC, machine=MachineConfig(device_bytes=device_bytes), **changes)


def test_own_experts_are_those_that_no_other_task_names() -> None:
    assert own_experts(ELASTIC) == {"glyphs": 1, "digits": 2, "fonts": 1, "photographs": 1}


def test_bytes_are_those_of_the_state_but_for_the_heads() -> None:
    sharded = ShardedVision(ELASTIC, dict.fromkeys(ELASTIC.tasks, 10), mesh_of(1, 1, 1))
    state = sharded.state_shape
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.params, state.m, state.v)))
    heads_bytes = 12 * sum(head.size for head in jax.tree.leaves(state.params["heads"]))
    memory, own_bytes = memory_of(ELASTIC, 1)
    planned = (memory.shared_bytes + sum(own_bytes.values())) * 12 / 16  # without gradients
    assert planned == pytest.approx(state_bytes - heads_bytes, rel=1e-3)
    expert_bytes = 16 * ELASTIC.model.expert_parameters
    assert own_bytes == {name: count * expert_bytes for name, count in own_experts(ELASTIC).items()}
    half = dataclasses.replace(ELASTIC, compute_dtype="bfloat16")
    assert memory_of(half, 1)[1]["glyphs"] == expert_bytes * 18 // 16
    whole = dataclasses.replace(ELASTIC, comm=CommConfig(schedule="none", shard_dense=False))
    assert memory_of(ELASTIC, 4)[0].shared_bytes < memory_of(whole, 4)[0].shared_bytes == memory.shared_bytes


def test_memory_decides_who_shares_a_device() -> None:
    names = [
        [layout_names(layout_of(config, 2), device) for device in (0, 1)] for config in (ELASTIC, with_bytes(5_200_000))
    ]
    assert names == [
        [{"glyphs"}, {"digits", "fonts", "photographs"}],
        [{"glyphs", "photographs"}, {"digits", "fonts"}],
    ]


def layout_names(layout: Any, device: int) -> set[str]:
    return {layout.tasks[share.task].name for share in layout.shares[device]}


def test_what_does_not_fit_is_named_with_what_it_needs() -> None:
    with pytest.raises(ValueError, match="device_bytes = 3000000: must be more for 4 tasks on 2 devices") as few:
        layout_of(with_bytes(3_000_000), 2)
    least = int(str(few.value).rpartition(" ")[2])
    assert 3_000_000 < least <= min(layout_of(ELASTIC, 2).num_bytes) + 10**6
    with pytest.raises(ValueError, match=r"machine\.device_bytes = 3000000: must be at least \d+ for glyphs"):
        layout_of(with_bytes(3_000_000, layout="even"), 2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps = 3: must divide the 64 images"):
        layout_of(dataclasses.replace(ELASTIC, gradient_accumulation_steps=3), 2)


def test_copies_that_devices_keep_are_said() -> None:
    layout = layout_of(ELASTIC, 4)
    every = layout.shared_bytes + sum(task.num_bytes for task in layout.tasks)
    assert f"does not run: {every / 1e6:,.2f} MB in all" in copies_line(ELASTIC, layout)
    assert copies_line(with_bytes(every - 1), layout).endswith(f", more than machine.device_bytes = {every - 1}")
    assert copies_line(with_bytes(every), layout).endswith("MB in all")
    assert copies_line(ELASTIC, layout_of(ELASTIC, 1)) == ""
