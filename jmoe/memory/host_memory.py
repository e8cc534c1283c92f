"""Reads from the kernel how much memory this process can still allocate, and how many processes
were killed for lack of memory, in its cgroups and on the machine. Standard library only.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _CgroupFileNames:
    """Names of a cgroup's files in one version of cgroups, and the prefix of the fields of
    `memory.stat` that include its children.
    """

    limit: str
    usage: str
    events: str
    prefix: str


V1 = _CgroupFileNames(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_"
)
V2 = _CgroupFileNames("memory.max", "memory.current", "memory.events", "")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that this process can still allocate without swapping.

    This is the minimum over the machine and the process's cgroups; page cache counts as free. proc,
    cgroups: the mount points of Linux's procfs and cgroupfs. Without procfs the result is the
    machine's total memory.
    """
    if not (proc / "meminfo").is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    left = [int(lines["MemAvailable"].split()[0]) * 1024]
    for files, folders in _memory_cgroups(proc, cgroups):
        left += _cgroup_bytes_left(files, folders)
    return max(0, min(left))


def count_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> dict[Path, int]:
    """Return how many processes the kernel has killed for lack of memory, by the file that counts
    them: the file of this process's cgroup first, then the machine's. Empty without such files.
    """
    counts: dict[Path, int] = {}
    for files, folders in _memory_cgroups(proc, cgroups):
        innermost = [folder / files.events for folder in folders if folder.is_dir()][:1]
        counts |= _read_oom_kill_counts(innermost)
    return counts | _read_oom_kill_counts([proc / "vmstat"])


def _read_oom_kill_counts(paths: list[Path]) -> dict[Path, int]:
    fields = {}
    for path in paths:
        with contextlib.suppress(OSError):  # absent, or hidden from this process
            values = dict(line.split() for line in path.read_text().splitlines())
            if "oom_kill" in values:  # Linux 4.13 or newer
                fields[path] = int(values["oom_kill"])
    return fields


def _memory_cgroups(proc: Path, cgroups: Path) -> Iterator[tuple[_CgroupFileNames, list[Path]]]:
    """Yield each memory cgroup of this process as its files' names, its folder and the folders of
    its parents.

    Inside a container the folders may lie outside the mount, and then do not exist.
    """
    membership = proc / "self" / "cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        inside = Path(path.lstrip("/"))
        if controllers == "":
            yield V2, [cgroups / part for part in (inside, *inside.parents)]
        elif "memory" in controllers.split(","):
            yield V1, [cgroups / "memory" / part for part in (inside, *inside.parents)]


def _cgroup_bytes_left(files: _CgroupFileNames, folders: list[Path]) -> list[int]:
    """Return the bytes left in each of the folders' cgroups that has a limit."""
    left = []
    for folder in folders:
        limit = folder / files.limit
        if not limit.is_file() or (allowed := limit.read_text().strip()) == "max":
            continue
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(stat[f"{files.prefix}inactive_file"])
        cached += int(stat[f"{files.prefix}active_file"])
        left.append(int(allowed) - int((folder / files.usage).read_text()) + cached)
    return left
