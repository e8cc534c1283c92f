"""Read optional files of a checkpoint folder."""

import errno
import stat
from pathlib import Path

from jmoe.memory.direct_io import name_file_in_errors


def has_file(path: Path) -> bool:
    """Return whether `path` is a file; False if nothing has this name.

    Raises ValueError for a directory or a dangling link: loading would silently yield a different
    model without the file. Download caches are folders of links, which dangle once the folder is
    moved without its targets.
    """
    try:
        mode = path.stat().st_mode  # asked once: another process may make the file meanwhile
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        if not path.is_symlink():
            return False
        kind = "a link to a file that is not there"
    else:
        if stat.S_ISREG(mode):
            return True
        kind = "a folder" if stat.S_ISDIR(mode) else "no plain file"
    raise ValueError(f"{path}: is {kind}: it must be a file, or not be there")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises ValueError naming the file if it is not UTF-8."""
    try:
        with name_file_in_errors(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from error
