"""Measures the host memory that this process can still allocate, cgroup limits included."""

import os
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still allocate without swapping.

    This is the minimum over the machine and the process's cgroups; page cache counts as free. proc,
    cgroups: the mount points of Linux's procfs and cgroupfs. Without procfs the result is the
    machine's total memory.
    """
    if not (proc / "meminfo").is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    left = [int(lines["MemAvailable"].split()[0]) * 1024]
    membership = proc / "self" / "cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _limits(cgroups, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            left += _limits(
                cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            )
    return max(0, min(left))


def _limits(root: Path, path: str, limit: str, usage: str, prefix: str) -> list[int]:
    """Return the bytes left in the cgroup at `path` and in each of its parents that has a limit.

    Inside a container `path` may lie outside the mount; missing folders are skipped.
    """
    inside = Path(path.lstrip("/"))
    left = []
    for folder in (root / inside, *(root / parent for parent in inside.parents)):
        if (
            not (folder / limit).is_file()
            or (allowed := (folder / limit).read_text().strip()) == "max"
        ):
            continue
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(stat[f"{prefix}inactive_file"]) + int(stat[f"{prefix}active_file"])
        left.append(int(allowed) - int((folder / usage).read_text()) + cached)
    return left
