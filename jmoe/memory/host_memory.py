"""How much host memory there is left to take, cgroup limits included."""

import os
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still take without swapping: what machine and cgroups
    leave at least.

    Page cache counts as free. proc, cgroups: where Linux shows them; elsewhere this is all of the
    machine's memory.
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
    """Return what the cgroup at `path` and those above leave. In a container `path` may lie
    outside of the mount.
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
