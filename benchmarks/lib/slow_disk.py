"""A disk that is as slow as asked for, to this process and those it starts. Needs root and cgroup
v1's blkio.
"""

import os
from pathlib import Path
from types import TracebackType

GROUPS = Path("/sys/fs/cgroup/blkio")
GROUP = GROUPS / "jmoebench"


def _disk_device_number(folder: Path) -> str:
    """Return MAJOR:MINOR of the whole disk that holds this folder."""
    device = folder.stat().st_dev
    found = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    whole = found.parent if (found / "partition").exists() else found
    return (whole / "dev").read_text().strip()


class SlowDisk:
    """`with SlowDisk(folder, 500_000_000):` limits the folder's disk, in bytes/s each way."""

    def __init__(self, folder: Path, bytes_per_s: int) -> None:
        self.folder, self.bytes_per_s = folder, bytes_per_s

    def __enter__(self) -> "SlowDisk":
        if os.geteuid() != 0 or not (GROUPS / "blkio.throttle.read_bps_device").exists():
            raise OSError(
                f"a limited disk needs root and the controller blkio of cgroup v1 at {GROUPS}"
            )
        GROUP.mkdir(exist_ok=True)
        for way in ("read", "write"):
            (GROUP / f"blkio.throttle.{way}_bps_device").write_text(
                f"{_disk_device_number(self.folder)} {self.bytes_per_s}"
            )
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        GROUP.rmdir()
