"""A folder with a folder of random images for each class."""

from pathlib import Path

import numpy as np
from PIL import Image


def folder_of(path: Path, classes: dict[str, int]) -> str:
    rng = np.random.default_rng(0)
    for name, count in classes.items():
        (path / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 255, (10, 12, 3), np.uint8)).save(
                path / name / f"{i}.png"
            )
    return str(path)
