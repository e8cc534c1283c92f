"""User-provided images of a task: a folder with one subfolder per class, or a CSV or TSV file of
paths and labels.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image

IMAGE_TYPES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
COLUMNS = ["path", "label"]


class SourceImage(NamedTuple):
    """A reference to an image that is not read yet.

    read: a function that returns the image at its original size. label: class index. group: all
    images of one class and group go to the same split, so that near-duplicates are never both
    trained on and held out.
    """

    read: Callable[[], Image.Image]
    label: int
    group: int


def read_image(path: Path, error_prefix: str) -> Image.Image:
    """Return the image, in mode L or RGB.

    Raises ValueError beginning with `error_prefix` if the image cannot be decoded without a
    warning.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(path) as image:
                return image.convert("RGB") if image.mode not in ("L", "RGB") else image.copy()
    except (OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError) as error:
        raise ValueError(f"{error_prefix}: {path} cannot be read as an image: {error}") from error


def user_images(source: Path, setting: str) -> tuple[list[str], list[SourceImage]]:
    """Return the class names, sorted, and references to all images; reads no image.

    Raises ValueError beginning with `setting` that names the folder, or the file and line, at
    fault.
    """
    return (
        _images_of_class_folders(source, setting)
        if source.is_dir()
        else _images_of_table(source, setting)
    )


def _images_of_class_folders(folder: Path, setting: str) -> tuple[list[str], list[SourceImage]]:
    classes = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not classes:
        raise ValueError(f"{setting}: has no folder: must have one for each class, with its images")
    images = []
    for label, name in enumerate(classes):
        paths = sorted(
            path for path in (folder / name).rglob("*") if path.suffix.lower() in IMAGE_TYPES
        )
        if not paths:
            raise ValueError(
                f"{setting}: class {name!r} is empty: must have images ({', '.join(IMAGE_TYPES)})"
            )
        images += [
            SourceImage(partial(read_image, path, setting), label, number)
            for number, path in enumerate(paths)
        ]
    return classes, images


def _images_of_table(file: Path, setting: str) -> tuple[list[str], list[SourceImage]]:
    """Return class names and images from a CSV or TSV file whose first line is path,label.

    Relative paths are relative to the file. Raises ValueError beginning with `setting` for a line
    at fault, a missing file, or a file listed twice.
    """
    rows = list(_read_table_rows(file, setting))
    classes = sorted({label for _, _, label in rows})
    number, line_of = {name: i for i, name in enumerate(classes)}, dict[Path, int]()
    images: list[SourceImage] = []
    for line, name, label in rows:
        path, error_prefix = (file.parent / name).resolve(), f"{setting}: line {line}"
        if path in line_of:
            raise ValueError(
                f"{error_prefix}: path {name!r} is that of line {line_of[path]}: must be listed"
                " once"
            )
        if not path.is_file():
            raise ValueError(f"{error_prefix}: path {name!r} is missing: there is no file {path}")
        line_of[path] = line
        images.append(
            SourceImage(partial(read_image, path, error_prefix), number[label], len(images))
        )
    return classes, images


def _read_table_rows(file: Path, setting: str) -> list[tuple[int, str, str]]:
    """Return (line number, path, label) of every nonempty line except the first. Raises ValueError
    beginning with `setting` for a line at fault, or if there is no such line.
    """
    rows: list[tuple[int, str, str]] = []
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter=SEPARATORS[file.suffix.lower()], strict=True)
            for cells in reader:
                cells, error_prefix = (
                    [cell.strip() for cell in cells],
                    f"{setting}: line {reader.line_num}",
                )
                if not rows and cells != COLUMNS:
                    raise ValueError(f"{error_prefix} is {cells}: the first must be {COLUMNS}")
                if cells and (len(cells) != len(COLUMNS) or not all(cells)):
                    raise ValueError(f"{error_prefix} is {cells}: must have a path and a label")
                rows += [(reader.line_num, cells[0], cells[1])] if cells else []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{setting}: cannot be read as text in UTF-8, separated: {error}"
        ) from error
    if len(rows) < 2:
        raise ValueError(
            f"{setting}: lists no images: must have a line path,label and then one for each image"
        )
    return rows[1:]
