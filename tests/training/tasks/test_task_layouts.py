"""Layouts within the memory of a device: bytes of parameters that tasks share, and of those that
are a task's own.
"""

import dataclasses
import math
from typing import Any

import jax
import pytest

from jmoe.config import CommConfig, MachineConfig, MeshConfig, TiersConfig, VisionTrainConfig
from jmoe.config.vision import ElasticConfig
from jmoe.configs.ufo import ufo_17b, ufo_tiny
from jmoe.training.tasks.layouts import (
    LayoutController,
    allocated_bytes_per_device,
    check_future_layouts,
    count_own_experts_by_task,
    device_memory_and_bytes_by_task,
    layout_plan_lines,
    plan_task_layout,
    slots_line,
)
from jmoe.training.tasks.step import ShardedVision
from tests.model_configs import mesh_of

ELASTIC = dataclasses.replace(ufo_tiny, layout="elastic")


def with_bytes(device_bytes: int, **changes: Any) -> VisionTrainConfig:
    return dataclasses.replace(ELASTIC, machine=MachineConfig(device_bytes=device_bytes), **changes)


def test_own_experts_are_those_that_no_other_task_names() -> None:
    assert count_own_experts_by_task(ELASTIC) == {
        "glyphs": 1,
        "digits": 2,
        "fonts": 1,
        "photographs": 1,
    }


def test_bytes_are_those_of_the_state_but_for_the_heads() -> None:
    sharded = ShardedVision(ELASTIC, dict.fromkeys(ELASTIC.tasks, 10), mesh_of(1, 1, 1))
    state = sharded.state_shape
    state_bytes = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((state.params, state.m, state.v))
    )
    heads_bytes = 12 * sum(head.size for head in jax.tree.leaves(state.params["heads"]))
    memory, own_bytes = device_memory_and_bytes_by_task(ELASTIC, 1)
    planned = (memory.shared_bytes + sum(own_bytes.values())) * 12 / 16  # without gradients
    assert planned == pytest.approx(state_bytes - heads_bytes, rel=1e-3)
    expert_bytes = 16 * ELASTIC.model.parameters_per_expert
    assert own_bytes == {
        name: count * expert_bytes for name, count in count_own_experts_by_task(ELASTIC).items()
    }
    half = dataclasses.replace(ELASTIC, compute_dtype="bfloat16")
    assert device_memory_and_bytes_by_task(half, 1)[1]["glyphs"] == expert_bytes * 18 // 16
    whole = dataclasses.replace(ELASTIC, comm=CommConfig(schedule="none", shard_dense=False))
    four = device_memory_and_bytes_by_task(whole, 4)[0].shared_bytes
    # two experts are nobody's, and lie on one device each
    assert four == memory.shared_bytes - expert_bytes
    assert device_memory_and_bytes_by_task(ELASTIC, 4)[0].shared_bytes < four


def test_memory_decides_who_shares_a_device() -> None:
    names = [
        [layout_names(plan_task_layout(config, 2), device) for device in (0, 1)]
        for config in (ELASTIC, with_bytes(4_600_000))
    ]
    assert names == [
        [{"glyphs"}, {"digits", "fonts", "photographs"}],
        [{"glyphs", "photographs"}, {"digits", "fonts"}],
    ]


def ending(**ends: int) -> VisionTrainConfig:
    tasks = {
        name: dataclasses.replace(task, num_steps=ends.get(name, 0))
        for name, task in ELASTIC.tasks.items()
    }
    return dataclasses.replace(ELASTIC, tasks=tasks)


def test_tasks_that_have_ended_leave_their_devices() -> None:
    config = ending(glyphs=10, fonts=20)
    names = [
        [layout_names(plan_task_layout(config, 4, step=step), device) for device in range(4)]
        for step in (9, 10, 20)
    ]
    assert names[0] == [{"glyphs"}, {"digits"}, {"fonts"}, {"photographs"}]
    assert names[1] == [{"digits"}, {"digits"}, {"fonts"}, {"photographs"}]
    assert names[2] == [{"digits"}, {"digits"}, {"digits"}, {"photographs"}]


def test_a_layout_is_planned_anew_where_that_helps() -> None:
    controller = LayoutController(dataclasses.replace(ELASTIC, elastic=ElasticConfig(50, 1.3)), 2)
    assert [step for step in range(151) if controller.is_replan_due(step)] == [50, 100, 150]
    before, same = controller.layout_at_step(50), dict.fromkeys(ELASTIC.tasks, 1e-3)
    assert (
        controller.replan(50, same)
        == "the busiest device has 1.00 x the mean load: the layout stays (elastic.max_imbalance ="
        " 1.3)"
    )
    assert controller.replan(50, same | {"glyphs": 9e-3}).endswith(
        "the layout stays, as no other is better"
    )
    assert controller.layout_at_step(50) == before
    slow = {"glyphs": 1e-3, "digits": 4e-3, "fonts": 1e-3, "photographs": 1e-3}
    assert controller.replan(100, slow).endswith("another layout makes its step 1.25 x as fast")
    assert layout_names(controller.layout_at_step(100), 1) == {"glyphs", "fonts", "photographs"}
    assert not LayoutController(ELASTIC, 2).is_replan_due(50)


def test_devices_that_cannot_be_used_are_refused() -> None:
    controller = LayoutController(ELASTIC, 2)
    for number in (0, 1000):
        with pytest.raises(ValueError, match=f"devices = {number}: must be between 1 and"):
            controller.set_num_devices(0, number)
    with pytest.raises(ValueError, match="layout = 'even': must be elastic"):
        LayoutController(ufo_tiny, 2).set_num_devices(0, 1)
    controller.set_num_devices(0, 1)
    assert len(controller.layout_at_step(0).shares) == 1
    few = dataclasses.replace(ELASTIC, gradient_accumulation_steps=16)
    with pytest.raises(
        ValueError, match="gradient_accumulation_steps = 16: must divide the 8 images"
    ):
        check_future_layouts(dataclasses.replace(few, tasks=ending(glyphs=10, digits=10).tasks), 4)


def layout_names(layout: Any, device: int) -> set[str]:
    return {layout.tasks[share.task].name for share in layout.shares[device]}


def test_what_does_not_fit_is_named_with_what_it_needs() -> None:
    with pytest.raises(
        ValueError, match="device_bytes = 3000000: must be more for 4 tasks on 2 devices"
    ) as few:
        plan_task_layout(with_bytes(3_000_000), 2)
    least = int(str(few.value).rpartition(" ")[2])
    assert 3_000_000 < least <= min(plan_task_layout(ELASTIC, 2).bytes_per_device) + 10**6
    with pytest.raises(
        ValueError, match=r"machine\.device_bytes = 3000000: must be at least \d+ for glyphs"
    ):
        plan_task_layout(with_bytes(3_000_000, layout="even"), 2)
    with pytest.raises(
        ValueError, match="gradient_accumulation_steps = 3: must divide the 64 images"
    ):
        plan_task_layout(dataclasses.replace(ELASTIC, gradient_accumulation_steps=3), 2)


def test_seventeen_billion_parameters_are_planned() -> None:
    """A device for each task, or experts split over the mesh; on two devices there is no room."""
    sharded = ShardedVision(ufo_17b, dict.fromkeys(ufo_17b.tasks, 10), mesh_of(1, 1, 1))
    heads = 40 * 10 * ufo_17b.model.hidden_size
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(sharded.shapes)) - heads
    total, active = ufo_17b.model.total_and_active_parameters()
    assert parameters == pytest.approx(total, rel=1e-4)
    assert (round(total / 1e9, 1), round(active / 1e9, 2)) == (17.0, 0.63)
    on_h100 = dataclasses.replace(ufo_17b, machine=MachineConfig("h100"))
    lines = layout_plan_lines(dataclasses.replace(on_h100, mesh=MeshConfig(data=40)))
    assert len(lines) == 41 and lines[0].endswith(" GB  face-0 0:64")
    split = layout_plan_lines(dataclasses.replace(on_h100, mesh=MeshConfig(expert_intra=8)))
    assert len(split) == 8 and all("GB  " in line for line in split)
    with pytest.raises(
        ValueError, match="device_bytes = 80000000000: must be more for 40 tasks on 2 devices"
    ):
        layout_plan_lines(dataclasses.replace(on_h100, mesh=MeshConfig(data=2)))
    with pytest.raises(
        ValueError, match=r"machine\.device_bytes = 80000000000: must be at least \d+ for face-0"
    ):
        layout_plan_lines(dataclasses.replace(on_h100, mesh=MeshConfig(expert_intra=2)))


def test_what_devices_keep_in_fact_is_said() -> None:
    layout = plan_task_layout(ELASTIC, 4)
    kept = allocated_bytes_per_device(ELASTIC, layout)
    every = plan_task_layout(ELASTIC, 1).bytes_per_device[0]
    assert max(layout.bytes_per_device) <= kept < 0.7 * every
    says = (
        f"every device has room for 2 of 4 experts in each of 2 layers: {kept / 1e6:,.2f} MB in all"
    )
    assert slots_line(ELASTIC, layout) == says
    assert (
        slots_line(with_bytes(kept - 1), layout)
        == f"{says}, more than machine.device_bytes = {kept - 1}"
    )
    assert slots_line(with_bytes(kept), layout) == says
    assert slots_line(ELASTIC, plan_task_layout(ELASTIC, 1)) == ""
    large = dataclasses.replace(ufo_17b, layout="elastic")
    own = plan_task_layout(large, 40)
    # a task each: nothing is padding
    assert (
        allocated_bytes_per_device(large, own)
        == own.bytes_per_device[0]
        == own.bytes_per_device[39]
    )


def test_experts_on_tiers_are_planned() -> None:
    """What the device has of them depends on the layers in use alone; the rest is on its tier."""
    # of three layers
    experts, of_expert = ELASTIC.model.num_experts, ELASTIC.model.parameters_per_expert
    here = device_memory_and_bytes_by_task(dataclasses.replace(ELASTIC, layout="even"), 1)[
        0
    ].shared_bytes
    for tiers, layers in (
        (TiersConfig(experts="host", optimizer="nvme"), 2),
        (TiersConfig(experts="nvme", optimizer="nvme", device_layers=1), 1),
        (TiersConfig(experts="device", optimizer="host"), 3),
    ):
        config = dataclasses.replace(ELASTIC, tiers=tiers)
        memory, own_bytes = device_memory_and_bytes_by_task(config, 1)
        assert here - memory.shared_bytes == experts * of_expert * (3 * 16 - 4 * layers - 8)
        assert set(own_bytes.values()) == {0}
    config = dataclasses.replace(
        ELASTIC, mesh=MeshConfig(2), tiers=TiersConfig(experts="host", optimizer="nvme")
    )
    total = 3 * experts * of_expert
    assert (
        layout_plan_lines(config)[-1]
        == "experts on tiers: a device has its part of 2 of 3 layers at one time; for each replica"
        f" of all experts: weights {4 * total / 1e6:.2f} MB (host), moments"
        f" {8 * total / 1e6:.2f} MB (nvme), gradients {4 * total / 1e6:.2f} MB (host)"
    )
    half = dataclasses.replace(
        config, tiers=dataclasses.replace(config.tiers, gradient_dtype="bfloat16")
    )
    assert (
        allocated_bytes_per_device(config, plan_task_layout(config, 2))
        - allocated_bytes_per_device(half, plan_task_layout(half, 2))
        == 2 * total // 3
    )
    few = dataclasses.replace(config, machine=MachineConfig(device_bytes=1_000_000))
    with pytest.raises(
        ValueError, match=r"machine\.device_bytes = 1000000: must be more for 4 tasks on 2 devices"
    ):
        plan_task_layout(few, 2)


def test_experts_on_tiers_that_tasks_alone_name_lie_where_these_run() -> None:
    """As many places on a device as its tasks name experts; all of a layer, where a task ends or
    tokens choose too.
    """
    tiers = TiersConfig(experts="host", optimizer="host")
    config = dataclasses.replace(ufo_17b, layout="elastic", tiers=tiers)
    layout = plan_task_layout(config, 20)
    # weights, a gradient before and after its sum over devices, the previous one, a bfloat16 copy
    place = config.model.parameters_per_expert * (4 * 2 + 2 * 4 + 4 + 2)
    counts = [len(shares) for shares in layout.shares]
    assert set(counts) == {1, 3}
    assert [num_bytes - layout.shared_bytes for num_bytes in layout.bytes_per_device] == [
        place * count for count in counts
    ]
    assert allocated_bytes_per_device(config, layout) == layout.shared_bytes + 3 * place
    assert slots_line(config, layout).startswith(
        "every device has room for 3 of 40 experts in each of 2 layers: "
    )
    ends = config.tasks | {"face-0": dataclasses.replace(config.tasks["face-0"], num_steps=5)}
    whole = dataclasses.replace(config, tasks=ends)
    assert (
        allocated_bytes_per_device(whole, plan_task_layout(whole, 20))
        - allocated_bytes_per_device(config, layout)
        == 37 * place
    )
    assert slots_line(whole, plan_task_layout(whole, 20)) == ""
