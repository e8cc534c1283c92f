"""Elastic layouts: every image of a step is run once, heavy tasks get devices, light ones share
one within memory.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmoe.planning.elastic import DeviceMemory, TaskImageRange, TaskLayout, TaskLoad, plan_layout

PAPER = tuple(TaskLoad(str(i), size) for i, size in enumerate((512, 256, 128, 128)))
loads = st.builds(
    TaskLoad,
    name=st.just("task"),
    batch_size=st.integers(1, 64),
    image_s=st.sampled_from([0.5, 1.0, 2.0]),
    num_bytes=st.integers(0, 10),
)
tasks_of = st.lists(loads, min_size=1, max_size=6)


def counts(layout: TaskLayout) -> list[int]:
    return [len(layout.devices_of(task)) for task in range(len(layout.tasks))]


def assert_covers(layout: TaskLayout) -> None:
    """Every image of every task is on one device."""
    for number, task in enumerate(layout.tasks):
        images = [
            i
            for shares in layout.shares
            for share in shares
            if share.task == number
            for i in range(share.start, share.stop)
        ]
        assert sorted(images) == list(range(task.batch_size))


def test_the_paper_s_layouts() -> None:
    assert counts(plan_layout(PAPER, 8)) == [4, 2, 1, 1]
    assert plan_layout(PAPER, 8).idle_fractions() == (0,) * 8
    assert counts(plan_layout(PAPER, 4)) == [1, 1, 1, 1]
    assert plan_layout(PAPER, 4).idle_fractions() == (0, 0.5, 0.75, 0.75)
    two = plan_layout([TaskLoad("a", 1), TaskLoad("b", 1), TaskLoad("c", 2)], 2)
    assert two.shares == (
        (TaskImageRange(2, 0, 2),),
        (TaskImageRange(0, 0, 1), TaskImageRange(1, 0, 1)),
    )
    assert plan_layout(PAPER, 1).images_per_device == (1024,)
    assert plan_layout(PAPER, 4).largest_micro_batch == 128


@given(tasks_of, st.integers(1, 12))
def test_every_image_is_run_once(tasks: list[TaskLoad], num_devices: int) -> None:
    if num_devices <= sum(task.batch_size for task in tasks):
        assert_covers(plan_layout(tasks, num_devices))
    each = [TaskLoad(task.name, task.batch_size * num_devices, task.image_s) for task in tasks]
    even = plan_layout(each, num_devices, mode="even")
    assert_covers(even)
    assert len(set(even.images_per_device)) == 1


@given(tasks_of, st.integers(1, 12))
def test_another_device_never_makes_the_slowest_slower(tasks: list[TaskLoad], more: int) -> None:
    num_devices = len(tasks) + more
    if num_devices <= sum(task.batch_size for task in tasks):
        per_device = [
            max(
                task.batch_s / count
                for task, count in zip(tasks, counts(plan_layout(tasks, n)), strict=True)
            )
            for n in (num_devices - 1, num_devices)
        ]
        assert per_device[1] <= per_device[0]


@given(tasks_of, st.integers(1, 6))
def test_memory_is_kept_to(tasks: list[TaskLoad], num_devices: int) -> None:
    """With room for the largest task beside an even part of the others, one order always packs
    them.
    """
    num_devices = min(num_devices, len(tasks))
    total, largest = sum(task.num_bytes for task in tasks), max(task.num_bytes for task in tasks)
    room = total // num_devices + largest
    layout = plan_layout(tasks, num_devices, memory=DeviceMemory(room))
    assert_covers(layout)
    for shares in layout.shares:
        assert sum(tasks[number].num_bytes for number in {share.task for share in shares}) <= room


def test_bytes_decide_where_loads_would_leave_no_room() -> None:
    tasks = [
        TaskLoad("heavy", 8, num_bytes=1),
        TaskLoad("large", 1, num_bytes=4),
        TaskLoad("wide", 2, num_bytes=3),
    ]
    layout = plan_layout(tasks, 2, memory=DeviceMemory(4))
    assert {frozenset(share.task for share in shares) for shares in layout.shares} == {
        frozenset({1}),
        frozenset({0, 2}),
    }
    with pytest.raises(
        ValueError, match="device_bytes = 3: must be more for 3 tasks on 2 devices, at least 4"
    ):
        plan_layout(tasks, 2, memory=DeviceMemory(3))
    with pytest.raises(
        ValueError, match=r"machine\.device_bytes = 3: must be at least 4 for large"
    ):
        plan_layout(tasks, 3, memory=DeviceMemory(3))
    with pytest.raises(
        ValueError, match=r"machine\.device_bytes = 5: must be at least 6 for large"
    ):
        plan_layout(tasks, 3, memory=DeviceMemory(5, shared_bytes=2))
    with pytest.raises(
        ValueError, match="device_bytes = 7: must be at least 10 for heavy and large and wide"
    ):
        plan_layout(tasks, 1, mode="even", memory=DeviceMemory(7, shared_bytes=2))
    assert plan_layout(tasks, 3, memory=DeviceMemory(6, shared_bytes=2)).bytes_per_device == (
        3,
        6,
        5,
    )


@given(tasks_of, st.integers(1, 6))
def test_packing_keeps_graham_s_bound(tasks: list[TaskLoad], num_devices: int) -> None:
    num_devices = min(num_devices, len(tasks) - 1)
    if num_devices > 0:
        lower = max(
            sum(task.batch_s for task in tasks) / num_devices, *(task.batch_s for task in tasks)
        )
        assert max(plan_layout(tasks, num_devices).seconds_per_device) <= 2 * lower


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: plan_layout([], 2), "tasks = "),
        (lambda: plan_layout(PAPER, 0), "num_devices = 0: must be greater than 0"),
        (
            lambda: plan_layout([TaskLoad("a", 2)], 3),
            "num_devices = 3: must not exceed the 2 images",
        ),
        (
            lambda: plan_layout(PAPER, 3, mode="even"),
            "batch_size = 1024: must be a multiple of 3 devices",
        ),
        (lambda: TaskLoad("a", 0), r"tasks\.a\.batch_size = 0"),
        (lambda: TaskLoad("a", 1, image_s=0), r"tasks\.a\.image_s = 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(call, match) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=match):
        call()


def test_lines_name_devices_tasks_and_idle_time() -> None:
    lines = plan_layout([TaskLoad("digits", 4), TaskLoad("fonts", 2)], 2).describe_lines()
    assert len(lines) == 2
    assert "digits 0:4" in lines[0]
    assert "50% idle  fonts 0:2" in lines[1]
    tasks = [TaskLoad("digits", 4, num_bytes=2_000_000), TaskLoad("fonts", 2)]
    lines = plan_layout(tasks, 2, memory=DeviceMemory(shared_bytes=1_500_000)).describe_lines()
    assert "0% idle  3.50 MB  digits 0:4" in lines[0]
    assert "50% idle  1.50 MB  fonts 0:2" in lines[1]
