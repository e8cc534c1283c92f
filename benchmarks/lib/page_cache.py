"""Files dropped from the page cache, and what a process has read from disk since."""

import os
from pathlib import Path


def evict_from_page_cache(path: Path) -> None:
    """Drop the pages of a file, or of a folder's files, from the page cache."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def disk_read_bytes() -> int:
    """Return the bytes that this process has read from disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])
