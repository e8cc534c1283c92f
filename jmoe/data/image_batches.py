"""Batches of images of several tasks, distributed over devices by an elastic `TaskLayout`.

Legend: R devices of this process, M micro-batches a device may have, B images of a micro-batch, P
pixels a side, C channels. Row i of a task's batch at step s depends only on the seed, the task and
s, never on the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jmoe.config import VisionTrainConfig
from jmoe.data.images import ImageSplit, ImageTask
from jmoe.planning.elastic import TaskLayout
from jmoe.types import JsonObject


class ImageBatch(NamedTuple):
    """Images with task number and label each. Rows of weight 0 are padding."""

    pixels: Any  # uint8 [R, M, B, P, P, C]
    task: Any  # int32 [R, M, B]
    label: Any  # int32 [R, M, B]
    weight: Any  # float32 [R, M, B]


def _shift_images(pixels: NDArray[np.uint8], shift: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return images [N, P, P, C] shifted by `shift` [N, 2] pixels, padded by repeating edge
    pixels.
    """
    side, most = pixels.shape[1], int(np.abs(shift).max(initial=0))
    padded = np.pad(pixels, ((0, 0), (most, most), (most, most), (0, 0)), mode="edge")
    rows = (np.arange(side) + most - shift[:, :1])[:, :, None]
    columns = (np.arange(side) + most - shift[:, 1:])[:, None, :]
    moved: NDArray[np.uint8] = padded[np.arange(len(pixels))[:, None, None], rows, columns]
    return moved


class ImageBatches:
    """Endless iterator of `ImageBatch` for devices `first` up to but excluding `last` of the
    layout.

    Each epoch of a task visits each of its images once, in a new order, shifted randomly by up to
    `images.max_shift` pixels.
    """

    def __init__(
        self,
        tasks: Sequence[ImageTask],
        config: VisionTrainConfig,
        layout: TaskLayout,
        first: int,
        last: int,
    ) -> None:
        self._tasks, self._config, self._step = tuple(tasks), config, 0
        self.set_layout(layout, first, last)
        digest = hashlib.sha256("".join(task.fingerprint for task in tasks).encode()).hexdigest()[
            :16
        ]
        self.fingerprint = digest

    def set_layout(self, layout: TaskLayout, first: int, last: int) -> None:
        """Switch to another layout and device range, from the next batch on."""
        self._layout, self._devices = layout, range(first, last)

    def peek_micro_batch(self, task_number: int) -> ImageBatch:
        """Return one micro-batch per device from a task's next batch, without advancing the
        iterator. Every device gets the same images.
        """
        images, size = self._task_batch(task_number, self._step), self.micro_batch
        rows = np.resize(np.arange(len(images.labels)), size)
        task, weight = np.full(size, task_number, np.int32), np.ones(size, np.float32)
        arrays = images.pixels[rows], task, images.labels[rows], weight
        return ImageBatch(*(np.stack([a[None]] * len(self._devices)) for a in arrays))

    def __iter__(self) -> Iterator[ImageBatch]:
        return self

    def __next__(self) -> ImageBatch:
        needed = {share.task for device in self._devices for share in self._layout.shares[device]}
        task_batches = {task: self._task_batch(task, self._step) for task in sorted(needed)}
        self._step += 1
        size = self.micro_batch
        most = max(self._layout.images_per_device) // size
        rows = [self._device_images(device, task_batches) for device in self._devices]
        parts = []
        for arrays in zip(*rows, strict=True):
            padded = [
                np.pad(a, ((0, most * size - len(a)), *((0, 0),) * (a.ndim - 1))) for a in arrays
            ]
            parts.append(np.stack(padded).reshape(len(rows), most, size, *padded[0].shape[1:]))
        return ImageBatch(*parts)

    @property
    def micro_batch(self) -> int:
        """Number of images that a device processes at once."""
        return self._layout.largest_micro_batch // self._config.gradient_accumulation_steps

    def _device_images(
        self, device: int, task_batches: dict[int, ImageSplit]
    ) -> tuple[np.ndarray, ...]:
        shares = self._layout.shares[device]
        pixels = np.concatenate(
            [task_batches[share.task].pixels[share.start : share.stop] for share in shares]
        )
        labels = np.concatenate(
            [task_batches[share.task].labels[share.start : share.stop] for share in shares]
        )
        task = np.concatenate([np.full(share.size, share.task, np.int32) for share in shares])
        return pixels, task, labels, np.ones(len(labels), np.float32)

    def _task_batch(self, task_number: int, step: int) -> ImageSplit:
        """Return the images and labels of a task's batch at a step, over all devices."""
        task, config = self._tasks[task_number], self._config
        size, images = list(config.tasks.values())[task_number].batch_size, len(task.train.labels)
        index = np.arange(step * size, (step + 1) * size)
        chosen = np.empty(size, np.int64)
        for epoch in np.unique(index // images):
            order = np.random.default_rng([config.seed, task_number, int(epoch)]).permutation(
                images
            )
            here = index // images == epoch
            chosen[here] = order[index[here] % images]
        pixels, labels = task.train.pixels[chosen], task.train.labels[chosen]
        most = config.images.max_shift
        if most:
            rng = np.random.default_rng([config.seed, task_number, step, 1])
            pixels = _shift_images(pixels, rng.integers(-most, most + 1, size=(size, 2)))
        return ImageSplit(pixels, labels)

    def get_state(self) -> JsonObject:
        """Return the JSON-serialisable position in the data, which is independent of the layout."""
        return {"next_step": self._step, "images": self.fingerprint}

    def set_state(self, state: JsonObject) -> None:
        """Continue at a position from `get_state`. Raises ValueError if the images have changed."""
        if state.get("images") != self.fingerprint:
            raise ValueError(
                "tasks: the saved position is in other images than this run's: the data has changed"
            )
        self._step = int(state["next_step"])

    def close(self) -> None:
        """Do nothing: no batch is prefetched."""


Homes = Sequence[Sequence[int]]  # by task number: the devices that may process its images


def held_out_batches(
    tasks: Sequence[ImageTask], homes: Homes, num_devices: int, micro_batch: int
) -> Iterator[ImageBatch]:
    """Yield every held-out image once, in batches of shape [num_devices, 1, micro_batch, ...].

    homes: for each task, the devices that may process its images. Rows of weight 0 are padding.
    """
    splits = {number: task.held_out for number, task in enumerate(tasks)}
    yield from _batch_all_images(splits, homes, num_devices, micro_batch)


def all_train_batches(
    tasks: Sequence[ImageTask],
    task_numbers: Sequence[int],
    homes: Homes,
    num_devices: int,
    micro_batch: int,
) -> Iterator[ImageBatch]:
    """Yield every training image of the tasks `task_numbers` once, unshifted, in batches like
    `held_out_batches`.
    """
    yield from _batch_all_images(
        {number: tasks[number].train for number in task_numbers}, homes, num_devices, micro_batch
    )


def _batch_all_images(
    splits: Mapping[int, ImageSplit], homes: Homes, num_devices: int, micro_batch: int
) -> Iterator[ImageBatch]:
    pixels = np.concatenate([split.pixels for split in splits.values()])
    labels = np.concatenate([split.labels for split in splits.values()])
    counts = [len(split.labels) for split in splits.values()]
    numbers = np.repeat(np.array(list(splits), np.int32), counts)
    own: list[list[int]] = [[] for _ in range(num_devices)]  # row numbers by device
    for number in splits:
        task_rows = np.flatnonzero(numbers == number)
        for device, part in zip(
            homes[number], np.array_split(task_rows, len(homes[number])), strict=True
        ):
            own[device] += part.tolist()
    for start in range(0, max(map(len, own)), micro_batch):
        some = [rows[start : start + micro_batch] for rows in own]
        index = np.array([rows + [0] * (micro_batch - len(rows)) for rows in some])
        weight = np.array(
            [[1.0] * len(rows) + [0.0] * (micro_batch - len(rows)) for rows in some], np.float32
        )
        yield ImageBatch(
            *(a[:, None] for a in (pixels[index], numbers[index], labels[index], weight))
        )
