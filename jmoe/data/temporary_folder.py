"""Temporary folders of a preparation, which the next one deletes if their process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "jmoe-temporary-"
# Its owner holds a lock on this file, which the kernel frees when the process dies. The file has
# this name only once it is locked.
LOCK, NEW_LOCK = ".lock", ".lock.new"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder of this machine, which is deleted when the block ends.

    Folders of killed processes are deleted first. On a file system without locks those stay.
    """
    _delete_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with (folder / NEW_LOCK).open("x") as lock:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / NEW_LOCK).rename(folder / LOCK)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _delete_abandoned_folders() -> None:
    """Delete the folders whose lock nobody holds; those of other users are left."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        # gone, of another user, or in use
        with contextlib.suppress(OSError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
