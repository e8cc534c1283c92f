"""Labelled images of one task, from installed packages or from the user's files.

Legend: N images, P pixels a side, C channels. Nothing is downloaded: glyphs are rendered from
matplotlib's fonts, digits are scikit-learn's (UCI ML, 8 x 8 pixels), photographs are scikit-image's
and scikit-learn's.
"""

from __future__ import annotations

import hashlib
import importlib
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from jmoe.config.vision import ImagesConfig, VisionModelConfig
from jmoe.data.image_files import SEPARATORS, SourceImage, user_images

FONTS = (
    *(
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSans-Oblique",
        "DejaVuSansMono",
        "DejaVuSerif",
        "DejaVuSerif-Bold",
    ),
    *(
        "DejaVuSerif-Italic",
        "STIXGeneral",
        "STIXGeneralBol",
        "STIXGeneralItalic",
        "cmb10",
        "cmr10",
        "cmss10",
        "cmtt10",
    ),
)
GLYPHS = string.ascii_uppercase + string.digits
PHOTOGRAPHS = (
    "astronaut",
    "brick",
    "camera",
    "chelsea",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "rocket",
)
PATCHES = 100  # per photograph
PATCH_PIXELS = 32  # side length before resizing


class ImageSplit(NamedTuple):
    """Pixels uint8 [N, P, P, C] and labels int32 [N]."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int32]


@dataclass(frozen=True)
class ImageTask:
    """The images of a task. `train` and `held_out` are disjoint."""

    name: str
    classes: tuple[str, ...]
    train: ImageSplit
    held_out: ImageSplit

    @property
    def fingerprint(self) -> str:
        """A hash (16 hex digits) of all pixels, labels and class names."""
        digest = hashlib.sha256("\0".join(self.classes).encode())
        for split in (self.train, self.held_out):
            for array in split:
                digest.update(str(array.shape).encode() + array.tobytes())
        return digest.hexdigest()[:16]


def load_task(name: str, source: str, model: VisionModelConfig, images: ImagesConfig) -> ImageTask:
    """Return the images of `source` (a built-in task, a folder or a file), resized to the model's
    image size.

    Of every class, a fraction `images.held_out_fraction` of the groups of images is held out, the
    same in every run. Raises ValueError that names `tasks.NAME.source`, and for a file the line,
    for an unreadable image, an empty class, or fewer than two classes.
    """
    setting = f"tasks.{name}.source = {source!r}"
    make, place = BUILT_IN.get(source), Path(source).expanduser()
    if make is None and not place.is_dir() and place.suffix.lower() not in SEPARATORS:
        built_in, files = ", ".join(BUILT_IN), " or ".join(SEPARATORS)
        raise ValueError(
            f"{setting}: must be one of {built_in}, or a folder with a folder for each class, or a"
            f" {files} file"
        )
    classes, all_images = make(setting) if make is not None else user_images(place, setting)
    if len(classes) < 2:
        raise ValueError(
            f"{setting}: has only {len(classes)} class, {', '.join(classes)}: must have at least"
            " two"
        )
    groups: list[dict[int, list[SourceImage]]] = [{} for _ in classes]
    for image in all_images:
        groups[image.label].setdefault(image.group, []).append(image)
    train: list[SourceImage] = []
    held_out: list[SourceImage] = []
    for label, own in enumerate(groups):
        if len(own) < 2:
            raise ValueError(
                f"{setting}: class {classes[label]!r} has {len(own)} images: must have at least two"
            )
        order = np.random.default_rng(label).permutation(sorted(own))
        cut = min(len(own) - 1, max(1, round(images.held_out_fraction * len(own))))
        held_out += [image for group in order[:cut] for image in own[int(group)]]
        train += [image for group in order[cut:] for image in own[int(group)]]
    return ImageTask(name, tuple(classes), _load_split(train, model), _load_split(held_out, model))


def _load_split(images: Sequence[SourceImage], model: VisionModelConfig) -> ImageSplit:
    side, mode = model.image_size, "L" if model.channels == 1 else "RGB"
    pixels = [
        np.asarray(image.read().convert(mode).resize((side, side), Image.Resampling.BILINEAR))
        for image in images
    ]
    shape = (len(images), side, side, model.channels)
    return ImageSplit(
        np.stack(pixels).reshape(shape), np.array([image.label for image in images], np.int32)
    )


# Images from installed packages


def _import_vision_extra(module: str, setting: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed = "needs the extra 'vision', pip install 'jmoe[vision]'"
        raise ValueError(f"{setting}: {needed}: {error}") from error


def _digit_images(setting: str) -> tuple[list[str], list[SourceImage]]:
    """Return (class names, images) of scikit-learn's 1,797 handwritten digits. Raises ValueError
    beginning with `setting` if scikit-learn is missing.
    """
    data = _import_vision_extra("sklearn.datasets", setting).load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)
    images = [
        SourceImage(partial(Image.fromarray, p), int(y), i)
        for i, (p, y) in enumerate(zip(pixels, data.target, strict=True))
    ]
    return [str(digit) for digit in range(10)], images


def _draw_character(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    image = Image.new("L", (32, 32))
    ImageDraw.Draw(image).text((16, 16), character, fill=255, font=font, anchor="mm")
    return image


def _render_characters(label_of: Callable[[int, int], int]) -> list[SourceImage]:
    """Return every character of `GLYPHS` in every font of `FONTS` at three sizes.

    label_of: maps (font index, character index) to the class. The three sizes of a character in a
    font form one group.
    """
    import matplotlib  # imported late: slow, and otherwise used only for plots

    folder, images = Path(matplotlib.get_data_path()) / "fonts" / "ttf", []
    for number, name in enumerate(FONTS):
        for size in (20, 23, 26):
            font = ImageFont.truetype(str(folder / f"{name}.ttf"), size)
            for index, character in enumerate(GLYPHS):
                group = number * len(GLYPHS) + index
                images.append(
                    SourceImage(
                        partial(_draw_character, font, character), label_of(number, index), group
                    )
                )
    return images


def _images_labelled_by_glyph(setting: str) -> tuple[list[str], list[SourceImage]]:
    return list(GLYPHS), _render_characters(lambda font, character: character)


def _images_labelled_by_font(setting: str) -> tuple[list[str], list[SourceImage]]:
    return list(FONTS), _render_characters(lambda font, character: font)


def _photograph_patches(setting: str) -> tuple[list[str], list[SourceImage]]:
    """Return (class names, images): non-overlapping square patches of photographs. The class is the
    photograph. Raises ValueError beginning with `setting` if a package is missing.
    """
    photographs = _import_vision_extra("skimage.data", setting)
    samples = _import_vision_extra("sklearn.datasets", setting).load_sample_images().images
    named = {name: getattr(photographs, name)() for name in PHOTOGRAPHS} | dict(
        zip(("china", "flower"), samples)
    )
    images = []
    for label, pixels in enumerate(named.values()):
        image, side = Image.fromarray(pixels), PATCH_PIXELS
        corners = [
            (x, y)
            for y in range(0, image.height - side, side)
            for x in range(0, image.width - side, side)
        ]
        rng = np.random.default_rng(label)
        chosen = rng.permutation(len(corners))[:PATCHES]
        for group in sorted(chosen.tolist()):
            x, y = corners[group]
            images.append(
                SourceImage(partial(image.crop, (x, y, x + side, y + side)), label, group)
            )
    return list(named), images


BUILT_IN: dict[str, Callable[[str], tuple[list[str], list[SourceImage]]]] = {
    "digits": _digit_images,
    "glyphs": _images_labelled_by_glyph,
    "fonts": _images_labelled_by_font,
    "photographs": _photograph_patches,
}
