"""Layout of a multi-task training step: which device runs which images of which task.

If every device gets the same number of images, tasks of different cost leave devices idle. Elastic
training gives heavy tasks several devices, which divide their batch, and lets light tasks share a
device (SE-MoE, arXiv:2205.10034v1, section 4.1; MoESys, section 5.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from jmoe.config import check
from jmoe.config.vision import LayoutKind


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as text in MB or GB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.2f} MB"


@dataclass(frozen=True)
class TaskLoad:
    """Cost of a task per step. image_s: seconds (or any other unit) per image. num_bytes: the
    task's own parameters with gradients and optimizer state, on each device that runs the task.
    """

    name: str
    batch_size: int
    image_s: float = 1.0
    num_bytes: int = 0

    def __post_init__(self) -> None:
        check(
            self.batch_size > 0,
            f"tasks.{self.name}.batch_size",
            self.batch_size,
            "must be greater than 0",
        )
        check(
            self.image_s > 0, f"tasks.{self.name}.image_s", self.image_s, "must be greater than 0"
        )
        check(
            self.num_bytes >= 0,
            f"tasks.{self.name}.num_bytes",
            self.num_bytes,
            "must not be negative",
        )

    @property
    def batch_s(self) -> float:
        """Return the time of the task's whole batch on one device, in the unit of `image_s`."""
        return self.batch_size * self.image_s


@dataclass(frozen=True)
class TaskImageRange:
    """The images `start` (included) to `stop` (excluded) of the batch of task number `task`."""

    task: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TaskLayout:
    """Assignment of images to devices: device d runs the shares in `shares[d]` one after the other,
    in every step.

    shared_bytes: bytes on every device for the parameters that all tasks share.
    """

    tasks: tuple[TaskLoad, ...]
    shares: tuple[tuple[TaskImageRange, ...], ...]
    shared_bytes: int = 0

    @property
    def images_per_device(self) -> tuple[int, ...]:
        """Return the number of images of each device."""
        return tuple(sum(share.size for share in shares) for shares in self.shares)

    @property
    def seconds_per_device(self) -> tuple[float, ...]:
        """Return the load of each device, in the unit of `TaskLoad.image_s`."""
        return tuple(
            sum(share.size * self.tasks[share.task].image_s for share in shares)
            for shares in self.shares
        )

    @property
    def bytes_per_device(self) -> tuple[int, ...]:
        """Return the bytes that each device needs for shared parameters and for its own tasks."""
        own = [{share.task for share in shares} for shares in self.shares]
        return tuple(
            self.shared_bytes + sum(self.tasks[task].num_bytes for task in tasks) for tasks in own
        )

    @property
    def largest_micro_batch(self) -> int:
        """Return the largest micro-batch size that divides the number of images of every device."""
        return reduce(math.gcd, self.images_per_device)

    def devices_of(self, task: int) -> tuple[int, ...]:
        """Return the devices that run images of task number `task`."""
        return tuple(
            d for d, shares in enumerate(self.shares) if any(share.task == task for share in shares)
        )

    @property
    def imbalance(self) -> float:
        """Return the largest load of a device divided by the mean load."""
        seconds = self.seconds_per_device
        return max(seconds) * len(seconds) / sum(seconds)

    def idle_fractions(self) -> tuple[float, ...]:
        """Return the fraction of the step that each device waits for the slowest device."""
        slowest = max(self.seconds_per_device)
        return tuple(1 - seconds / slowest for seconds in self.seconds_per_device)

    def describe_lines(self) -> list[str]:
        """Return the layout as text, one line per device, with bytes if they are known."""
        width, slowest = 32, max(self.seconds_per_device)
        lines = []
        for device, (shares, seconds) in enumerate(
            zip(self.shares, self.seconds_per_device, strict=True)
        ):
            bar = "#" * max(1, round(width * seconds / slowest))
            runs = " + ".join(
                f"{self.tasks[share.task].name} {share.start}:{share.stop}" for share in shares
            )
            size = (
                f"  {size_text(self.bytes_per_device[device])}"
                if any(self.bytes_per_device)
                else ""
            )
            idle = f"{self.idle_fractions()[device]:4.0%} idle"
            lines.append(f"device {device:<3} {bar:<{width}} {idle}{size}  {runs}")
        return lines


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device: total bytes (None: unlimited), and bytes for parameters that all tasks
    share.
    """

    device_bytes: int | None = None
    shared_bytes: int = 0

    def fits(self, need_bytes: int) -> bool:
        """Return True if `need_bytes` bytes of tasks' own parameters fit on a device."""
        return self.device_bytes is None or self.shared_bytes + need_bytes <= self.device_bytes

    def check_fits(self, tasks: Sequence[TaskLoad]) -> None:
        """Raise `ValueError`, naming the tasks, if the tasks do not fit on one device together."""
        need = sum(task.num_bytes for task in tasks)
        names = " and ".join(task.name for task in tasks)
        constraint = f"must be at least {self.shared_bytes + need} for {names}"
        check(self.fits(need), "machine.device_bytes", self.device_bytes, constraint)


ANY_MEMORY = DeviceMemory()


def plan_layout(
    tasks: Sequence[TaskLoad],
    num_devices: int,
    *,
    mode: LayoutKind = "elastic",
    memory: DeviceMemory = ANY_MEMORY,
) -> TaskLayout:
    """Return the assignment of images to devices.

    mode `even`: every device runs the same number of images of the joint batch. mode `elastic` with
    at least as many devices as tasks: each task gets one device, and every further device goes to
    the task with the largest load per device. mode `elastic` with fewer devices: tasks are assigned
    whole, the heaviest first, each to the least loaded device with enough memory. Raises
    `ValueError` if the tasks do not fit in the devices' memory, or if the images cannot be divided.
    """
    check(bool(tasks), "tasks", tuple(tasks), "must have at least one task")
    check(num_devices > 0, "num_devices", num_devices, "must be greater than 0")
    tasks = tuple(tasks)
    if mode == "even":
        shares = _even_shares(tasks, num_devices, memory)
    else:
        shares = _shares_of_divided_tasks(tasks, num_devices, memory) or _shares_of_whole_tasks(
            tasks, num_devices, memory
        )
    return TaskLayout(tasks, shares, memory.shared_bytes)


def _even_shares(
    tasks: tuple[TaskLoad, ...], num_devices: int, memory: DeviceMemory
) -> tuple[tuple[TaskImageRange, ...], ...]:
    """Return the shares of each device if every device runs equally many images of the joint batch.

    Raises `ValueError` if the batch or a device's memory does not allow it.
    """
    total = sum(task.batch_size for task in tasks)
    check(
        total % num_devices == 0,
        "batch_size",
        total,
        f"must be a multiple of {num_devices} devices",
    )
    each, shares = total // num_devices, []
    for device in range(num_devices):
        begin, own = device * each, []
        first = 0  # index of the task's first image in the joint batch
        for number, task in enumerate(tasks):
            start, stop = max(begin - first, 0), min(begin + each - first, task.batch_size)
            own += [TaskImageRange(number, start, stop)] if start < stop else []
            first += task.batch_size
        memory.check_fits([tasks[share.task] for share in own])
        shares.append(tuple(own))
    return tuple(shares)


def _shares_of_divided_tasks(
    tasks: tuple[TaskLoad, ...], num_devices: int, memory: DeviceMemory
) -> tuple[tuple[TaskImageRange, ...], ...] | None:
    """Return the shares of each device, with at least one device per task; None if there are fewer
    devices than tasks.

    Raises `ValueError` if there are more devices than images.
    """
    if num_devices < len(tasks):
        return None
    images = sum(task.batch_size for task in tasks)
    check(
        num_devices <= images,
        "num_devices",
        num_devices,
        f"must not exceed the {images} images of a step",
    )
    counts = [1] * len(tasks)
    for task in tasks:
        memory.check_fits([task])
    for _ in range(num_devices - len(tasks)):
        loads = [
            task.batch_s / count if count < task.batch_size else 0.0
            for task, count in zip(tasks, counts)
        ]
        counts[loads.index(max(loads))] += 1
    shares = []
    for number, (task, count) in enumerate(zip(tasks, counts, strict=True)):
        ends = [task.batch_size * i // count for i in range(count + 1)]
        shares += [
            (TaskImageRange(number, start, stop),) for start, stop in itertools.pairwise(ends)
        ]
    return tuple(shares)


def _shares_of_whole_tasks(
    tasks: tuple[TaskLoad, ...], num_devices: int, memory: DeviceMemory
) -> tuple[tuple[TaskImageRange, ...], ...]:
    """Return the shares of each device if every task runs on a single device.

    Tasks are assigned by load, the heaviest first (Graham's rule: at most 4/3 of the optimum). If a
    task then does not fit, the assignment is repeated by bytes, the largest first.
    """
    orders = (
        lambda task: (-task.batch_s, -task.num_bytes),
        lambda task: (-task.num_bytes, -task.batch_s),
    )
    for key in orders:
        own: list[list[int]] = [[] for _ in range(num_devices)]
        for number in sorted(range(len(tasks)), key=lambda number: key(tasks[number])):
            free = [d for d in own if memory.fits(sum(tasks[i].num_bytes for i in (*d, number)))]
            if not free:
                break
            min(free, key=lambda d: sum(tasks[i].batch_s for i in d)).append(number)
        else:
            return tuple(
                tuple(TaskImageRange(i, 0, tasks[i].batch_size) for i in sorted(d)) for d in own
            )
    need = max(
        math.ceil(sum(task.num_bytes for task in tasks) / num_devices),
        *(task.num_bytes for task in tasks),
    )
    constraint = (
        f"must be more for {len(tasks)} tasks on {num_devices} devices, at least"
        f" {memory.shared_bytes + need}"
    )
    raise ValueError(f"machine.device_bytes = {memory.device_bytes}: {constraint}")
