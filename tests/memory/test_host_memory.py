"""What a machine and its cgroups leave, and whom they have killed, read from trees like those that
Linux shows.
"""

from pathlib import Path

from jmoe.memory.host_memory import available_bytes, count_oom_kills

GB = 2**30


def machine(root: Path, available_gb: int, membership: str) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:   {available_gb * 2**20} kB\n"
    )
    (root / "proc" / "self" / "cgroup").write_text(membership)
    return root


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def left(root: Path) -> int:
    return available_bytes(root / "proc", root / "cgroup")


def test_without_limits(tmp_path: Path) -> None:
    machine(tmp_path, 8, "0::/\n")
    assert left(tmp_path) == 8 * GB
    group(tmp_path / "cgroup", {"memory.max": "max\n", "memory.current": "5"})
    assert left(tmp_path) == 8 * GB


def test_version_2_with_a_limit_above(tmp_path: Path) -> None:
    machine(tmp_path, 8, "0::/job/step\n")
    stat = f"anon 1\ninactive_file {GB // 2}\nactive_file {GB // 2}\n"
    used = {"memory.current": str(3 * GB), "memory.stat": stat}  # a third of it is page cache
    group(tmp_path / "cgroup" / "job", {"memory.max": str(4 * GB), **used})
    group(tmp_path / "cgroup" / "job" / "step", {"memory.max": "max", **used})
    assert left(tmp_path) == 2 * GB


def test_version_1_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The path is the host's; what is mounted is the container's own."""
    machine(tmp_path, 8, "5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n")
    files = {"memory.limit_in_bytes": str(3 * GB), "memory.usage_in_bytes": str(2 * GB)}
    stat = f"inactive_file 1\ntotal_inactive_file 0\ntotal_active_file {GB}\n"
    group(tmp_path / "cgroup" / "memory", files | {"memory.stat": stat})
    assert left(tmp_path) == 2 * GB
    group(tmp_path / "cgroup" / "memory", {"memory.limit_in_bytes": str(GB // 2)})
    assert left(tmp_path) == 0  # over its limit


def test_this_machine() -> None:
    assert 0 < available_bytes() < 2**60
    assert available_bytes(Path("/nowhere")) > 0


def test_processes_killed_for_lack_of_memory(tmp_path: Path) -> None:
    """The innermost cgroup is the process's own; a container sees it at the mount."""
    proc, cgroups = (
        machine(tmp_path, 8, "4:cpu,memory:/docker/abc\n0::/job/step\n") / "proc",
        (tmp_path / "cgroup"),
    )
    assert count_oom_kills(proc, cgroups) == {}
    (proc / "vmstat").write_text("pgmajfault 7\noom_kill 9\n")
    group(cgroups / "job", {"memory.events": "oom 5\noom_kill 5\n"})
    group(cgroups / "job" / "step", {"memory.events": "low 0\noom 1\noom_kill 2\n"})
    group(cgroups / "memory", {"memory.oom_control": "oom_kill_disable 0\noom_kill 3\n"})
    assert count_oom_kills(proc, cgroups) == {
        cgroups / "memory" / "memory.oom_control": 3,
        cgroups / "job" / "step" / "memory.events": 2,
        proc / "vmstat": 9,
    }
    assert next(reversed(count_oom_kills(proc, cgroups))) == proc / "vmstat"
