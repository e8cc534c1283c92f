"""A memory limit for processes, by a cgroup."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """Yield the file of a new memory cgroup that takes process ids; page cache counts, no swap."""
    first = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if first else CGROUPS) / f"jmoe-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit_bytes))
        if not first:
            (group / "memory.swap.max").write_text("0")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()
