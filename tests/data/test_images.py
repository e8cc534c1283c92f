"""Images of tasks: what packages carry, and how rows reach devices."""

import numpy as np
import pytest

from jmoe.config import TaskConfig, VisionModelConfig, VisionTrainConfig
from jmoe.config.parallel import CommConfig
from jmoe.config.vision import ImagesConfig
from jmoe.data.image_batches import ImageBatch, ImageBatches, held_out_batches
from jmoe.data.images import GLYPHS, ImageTask, load_task
from jmoe.planning.elastic import TaskLoad, plan_layout
from tests.image_files import folder_of

MODEL = VisionModelConfig(image_size=8, patch_size=4, position="learned", num_experts=0)


def load(source: str) -> ImageTask:
    return load_task("mine", source, MODEL, ImagesConfig())


def test_glyphs_of_a_font_are_all_held_out_or_none() -> None:
    task = load("glyphs")
    assert task.classes == tuple(GLYPHS)
    assert len(task.train.labels) % 3 == len(task.held_out.labels) % 3 == 0  # three sizes of each
    assert (np.bincount(task.held_out.labels) > 0).all()


def test_digits_are_real_handwriting() -> None:
    pytest.importorskip("sklearn", reason="needs the extra 'vision'")
    task = load("digits")
    assert len(task.train.labels) + len(task.held_out.labels) == 1797
    assert task.classes == tuple("0123456789")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[ImageTask]:
    paths = [folder_of(tmp_path_factory.mktemp(name), {"a": 6, "b": 6}) for name in ("x", "y")]
    return [load_task(f"task{i}", path, MODEL, ImagesConfig()) for i, path in enumerate(paths)]


def rows_of(
    tasks: list[ImageTask], mode: str, num_devices: int, processes: int = 1
) -> list[tuple[bytes, int, int]]:
    """The images, tasks and labels that all devices have in the third step."""
    config = VisionTrainConfig(
        model=MODEL,
        tasks={"task0": TaskConfig("x", batch_size=8), "task1": TaskConfig("y", batch_size=4)},
        comm=CommConfig(schedule="none"),
        layout=mode,  # type: ignore[arg-type]
    )
    loads = [TaskLoad(name, task.batch_size) for name, task in config.tasks.items()]
    layout, each = plan_layout(loads, num_devices, mode=config.layout), num_devices // processes
    rows = []
    for process in range(processes):
        batches = ImageBatches(tasks, config, layout, process * each, (process + 1) * each)
        batches.set_state(ImageBatches(tasks, config, layout, 0, 1).get_state() | {"next_step": 2})
        rows += flatten_by_path(next(batches))
        assert batches.get_state()["next_step"] == 3
    return rows


def flatten_by_path(batch: ImageBatch) -> list[tuple[bytes, int, int]]:
    pixels = batch.pixels.reshape(-1, *batch.pixels.shape[3:])
    each = zip(pixels, batch.task.ravel(), batch.label.ravel(), batch.weight.ravel(), strict=True)
    return [
        (image.tobytes(), int(task), int(label)) for image, task, label, weight in each if weight
    ]


def test_the_same_images_whatever_the_layout(tasks: list[ImageTask]) -> None:
    expected = sorted(rows_of(tasks, "even", 1))
    assert len(expected) == 12
    for mode, devices, processes in (
        ("even", 4, 2),
        ("elastic", 2, 1),
        ("elastic", 3, 3),
        ("elastic", 1, 1),
    ):
        assert sorted(rows_of(tasks, mode, devices, processes)) == expected


def test_other_images_are_refused(tasks: list[ImageTask]) -> None:
    config = VisionTrainConfig(
        model=MODEL, tasks={"a": TaskConfig("x")}, comm=CommConfig(schedule="none")
    )
    batches = ImageBatches(tasks[:1], config, plan_layout([TaskLoad("a", 16)], 1), 0, 1)
    with pytest.raises(ValueError, match="the data has changed"):
        batches.set_state({"next_step": 1, "images": "others"})


def test_every_held_out_image_is_evaluated_once(tasks: list[ImageTask]) -> None:
    for homes in ([(0, 1), (0, 1)], [(1,), (0, 1)]):
        batches = list(held_out_batches(tasks, homes, 2, 2))
        rows = [row for batch in batches for row in flatten_by_path(batch)]
        assert len(rows) == len(set(rows)) == sum(len(task.held_out.labels) for task in tasks)
        assert {row[1] for row in rows} == {0, 1}
        for number, devices in enumerate(homes):
            used = [
                np.any((batch.task == number) & (batch.weight > 0), axis=(1, 2))
                for batch in batches
            ]
            assert np.flatnonzero(np.any(used, axis=0)).tolist() == list(devices)
