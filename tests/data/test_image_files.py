"""Your own images: a folder for each class, or a file of paths and labels; what is wrong with
them is said.
"""

from pathlib import Path

import numpy as np
import pytest

from jmoe.config import VisionModelConfig
from jmoe.config.vision import ImagesConfig
from jmoe.data.images import ImageTask, load_task
from tests.image_files import folder_of

MODEL = VisionModelConfig(image_size=8, patch_size=4, position="learned", num_experts=0)


def load(source: Path) -> ImageTask:
    return load_task("mine", str(source), MODEL, ImagesConfig())


def broken(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    folder_of(tmp_path, {"cat": 5, "dog": 10})
    task = load(tmp_path)
    assert task.classes == ("cat", "dog")
    assert task.train.pixels.shape == (12, 8, 8, 1)
    assert np.bincount(task.held_out.labels).tolist() == [1, 2]
    assert load(tmp_path).fingerprint == task.fingerprint
    seen = {image.tobytes() for image in task.train.pixels}
    assert not any(image.tobytes() in seen for image in task.held_out.pixels)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"tasks\.mine\.source = 'nowhere': must be one of digits, .* or a folder"
    ):
        load(Path("nowhere"))
    folder_of(tmp_path, {"cat": 3})
    with pytest.raises(ValueError, match="has only 1 class, cat: must have at least two"):
        load(tmp_path)
    (tmp_path / "dog").mkdir()
    with pytest.raises(ValueError, match="class 'dog' is empty: must have images"):
        load(tmp_path)
    (tmp_path / "dog" / "whole.png").write_bytes((tmp_path / "cat" / "0.png").read_bytes())
    with pytest.raises(ValueError, match="class 'dog' has 1 images: must have at least two"):
        load(tmp_path)
    (tmp_path / "dog" / "broken.png").write_bytes((tmp_path / "cat" / "0.png").read_bytes())
    broken(tmp_path / "dog" / "broken.png")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        load(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="has no folder: must have one for each class"):
        load(empty)


@pytest.mark.parametrize(("name", "separator"), [("mine.csv", ","), ("mine.TSV", "\t")])
def test_a_file_of_paths_and_labels_is_as_good_as_a_folder(
    tmp_path: Path, name: str, separator: str
) -> None:
    folder_of(tmp_path / "all", {"cat": 5, "dog": 4})
    rows = [
        (f"all/{label}/{i}.png", label)
        for label, count in (("cat", 5), ("dog", 4))
        for i in range(count)
    ]
    rows[-1] = (str(tmp_path / rows[-1][0]), rows[-1][1])  # absolute
    lines = [separator.join(row) for row in [("path", "label"), *rows]]
    (tmp_path / name).write_text("\ufeff" + "\r\n".join(lines) + "\r\n\r\n", encoding="utf-8")
    task = load(tmp_path / name)
    assert task.classes == ("cat", "dog")
    assert np.bincount(task.train.labels).tolist() == [4, 3] and np.bincount(
        task.held_out.labels
    ).tolist() == [1, 1]

    def labelled(task: ImageTask) -> set[tuple[bytes, int]]:
        both = (task.train, task.held_out)
        return {
            (pixels.tobytes(), int(label))
            for split in both
            for pixels, label in zip(*split, strict=True)
        }

    assert labelled(task) == labelled(load(tmp_path / "all"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["cat/0.png,cat", "dog/0.png,dog"],
            r"line 1 is \['cat/0.png', 'cat'\]: the first must be \['path', 'label'\]",
        ),
        (["path,label"], "lists no images"),
        ([], "lists no images"),
        (
            ["path,label", "cat/0.png,cat", "cat/1.png"],
            r"line 3 is \['cat/1.png'\]: must have a path and a label",
        ),
        (
            ["path,label", "cat/0.png,"],
            r"line 2 is \['cat/0.png', ''\]: must have a path and a label",
        ),
        (["path,label", "cat/0.png,cat,3"], r"line 2 is \[.*\]: must have a path and a label"),
        (
            ["path,label", "cat/0.png,cat", "cat/9.png,cat"],
            r"line 3: path 'cat/9.png' is missing: there is no file /",
        ),
        (["path,label", "cat,cat"], "line 2: path 'cat' is missing"),
        (
            ["path,label", "cat/0.png,cat", "./cat/0.png,dog"],
            r"line 3: path './cat/0.png' is that of line 2",
        ),
        (["path,label", "cat/0.png,cat", "cat/1.png,cat"], "has only 1 class, cat"),
        (
            ["path,label", "cat/0.png,cat", "dog/0.png,dog", "dog/1.png,dog"],
            "class 'cat' has 1 images",
        ),
        (
            ["path,label", '"cat/0.png,cat'],
            "cannot be read as text in UTF-8, separated: unexpected end of data",
        ),
        (
            ["path,label", "cat/0.png,\udcff"],
            "cannot be read as text in UTF-8, separated: .* can't decode byte 0xff",
        ),
        (
            [
                "path,label",
                "",
                "cat/0.png,cat",
                "cat/1.png,cat",
                "dog/0.png,dog",
                "dog/broken.png,dog",
            ],
            r"line 6: .*broken\.png cannot be read as an image",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    folder_of(tmp_path, {"cat": 2, "dog": 2})
    (tmp_path / "dog" / "broken.png").write_bytes((tmp_path / "dog" / "0.png").read_bytes())
    broken(tmp_path / "dog" / "broken.png")
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"tasks\.mine\.source = '.*mine\.csv':? .*{message}"):
        load(file)


def test_a_file_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"tasks\.mine\.source = '.*none\.csv': cannot be read.*No such file"
    ):
        load(tmp_path / "none.csv")
