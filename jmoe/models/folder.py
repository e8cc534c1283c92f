"""Files that a model's folder may have or lack."""

import os
from pathlib import Path


def has_file(path: Path) -> bool:
    """Return whether there is such a file.

    Raises `ValueError` for a folder of this name and a link that leads nowhere: a model without the
    file is another model. Caches of downloads are folders of links, which lead nowhere once the
    folder is moved alone.
    """
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    kind = "a link to a file that is not there"
    if path.exists():
        kind = "a folder" if path.is_dir() else "no plain file"
    raise ValueError(f"{path}: is {kind}: it must be a file, or not be there")


def read_text(path: Path) -> str:
    """Return the text of a file; `ValueError` naming one that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from error
