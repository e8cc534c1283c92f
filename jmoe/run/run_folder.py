"""The output folder of a run: one run at a time works in it, and it knows which run it is.

Every process of the run holds `flock` on `run.lock`, which says who took it; the kernel frees the
lock when a process ends, however it ends. Where a file system has no locks, or keeps them to one
host (others than local ones, NFS 4 and Lustre with `flock`), a later start writes its name there,
and the earlier one finds it before its next save and stops. `run.json` has the name of the run,
which marks what is its own outside of the folder, and the starts that led to its state. A copy of
the folder is another run; a clone of its disk has the name, but not the starts that follow.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import jax

from jmoe.cluster import distributed
from jmoe.data.shards import replacing
from jmoe.memory.direct_io import NOT_SUPPORTED

LOCK, IDENTITY = "run.lock", "run.json"
# SLURM and Kubernetes end a job 30 s after they said so; NFS keeps a dead host's lock for 90 s
WAIT_S = 120.0
KEPT_STARTS = 100  # of which `run.json` knows
NO_LOCKS = (errno.ENOLCK, *NOT_SUPPORTED)  # the file system has none


class RunFolder:
    """Context manager that keeps other runs out of `output_dir`, which is made if it is missing.

    Every process of the run enters it. Another run that is in the folder is waited for, at most
    `wait_s`; then `OSError` on every process says who it is.
    """

    def __init__(self, output_dir: Path, *, wait_s: float = WAIT_S) -> None:
        self.path = output_dir
        self._wait_s = wait_s
        self._file: BinaryIO | None = None
        self._owner: dict[str, Any] = {}
        self._made = False

    def __enter__(self) -> Self:
        self._owner = json.loads(
            distributed.from_rank_0("output folder", self._take, 2 * self._wait_s + 60)
        )
        if self._file is None:
            self._join()
        return self

    def __exit__(self, *_: object) -> None:
        came_to_nothing = self._made and set(os.listdir(self.path)) <= {LOCK, IDENTITY}
        if came_to_nothing:
            for name in os.listdir(self.path):
                (self.path / name).unlink()
        if self._file is not None:
            # NFS and FUSE keep a deleted file in the folder for as long as it is open
            self._file.close()
        if came_to_nothing:
            # another process of the run still has it open, or another run begins
            with contextlib.suppress(OSError):
                self.path.rmdir()

    @property
    def run(self) -> str:
        """Return the run's name, which no other run has."""
        return str(self._owner["run"])

    @property
    def starts(self) -> list[str]:
        """Return what names the starts of this run in this folder, the present one last."""
        return [*self._owner["starts"], self._owner["token"]]

    def note_start(self) -> None:
        """Add the present start to `run.json`, when the run has its state; called by process 0."""
        _write_identity(self.path, self.run, self.starts)

    def check(self) -> None:
        """Raise `OSError` if another run has taken the folder, where the file system could not
        prevent it.

        A lock that somebody has removed or emptied is written again, and held.
        """
        deadline_s = time.monotonic() + 5.0
        while not (other := self._read()) and time.monotonic() < deadline_s:
            self._lock_again()
            time.sleep(0.01)
        if other.get("token") != self._owner["token"]:
            raise OSError(
                f"output_dir = {str(self.path)!r}: was taken over by {_named(other)}; this run"
                " saves no more"
            )
        assert self._file is not None
        if not os.path.samestat(os.fstat(self._file.fileno()), (self.path / LOCK).stat()):
            self._lock_again()  # another process of the run has written it again

    def _lock_again(self) -> None:
        """Lock the file that is there now, made if it is missing; write who has it unless that
        stands there.
        """
        held = self._file
        try:
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError as error:
            raise OSError(
                f"output_dir = {str(self.path)!r}: was removed; this run saves no more"
            ) from error
        self._file = os.fdopen(fd, "r+b", buffering=0)
        if not self._flock(fcntl.LOCK_SH):  # a start is at it
            self._file.close()
            self._file = held
            return
        if not self._read():
            # at one place, whichever process comes first
            os.pwrite(fd, json.dumps(self._on_disk()).encode(), 0)
            os.fsync(fd)
        if held is not None:
            held.close()

    def _on_disk(self) -> dict[str, Any]:
        """Return what `run.lock` says."""
        return {name: value for name, value in self._owner.items() if name not in ("run", "starts")}

    def _take(self) -> str:
        """Lock the folder for process 0 alone, write who has it, and keep it for all of the run."""
        self._made = not self.path.is_dir()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / LOCK).open("ab").close()
        except OSError as error:
            raise OSError(
                f"output_dir = {str(self.path)!r}: must be a folder that can be written:"
                f" {error.strerror}"
            ) from error
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "token": secrets.token_hex(8),
        }
        deadline_s = time.monotonic() + self._wait_s
        said = False
        while not self._locked_by(owner):
            holder = _named(self._read())
            if time.monotonic() > deadline_s:
                raise OSError(
                    f"output_dir = {str(self.path)!r}: is in use by {holder}: "
                    "wait until that run has ended, or give another output_dir"
                )
            if not said:
                print(
                    f"{self.path} is in use by {holder}; waiting for it to end, at most"
                    f" {self._wait_s:g} s",
                    flush=True,
                )
                said = True
            time.sleep(0.1)
        run, starts = self._identify()
        return json.dumps(owner | {"run": run, "starts": starts})

    def _identify(self) -> tuple[str, list[str]]:
        """Return the name in `run.json` and the earlier starts; a new name if there is none, or
        this is a copy.

        A folder that lies elsewhere than noted has been moved if it still has the very file, and
        else is a copy.
        """
        folder = self.path.resolve()
        noted = _identity(folder)
        is_moved = noted.home != str(folder)
        is_copy = is_moved and (
            not noted.is_own_file or _identity(Path(noted.home)).run == noted.run
        )
        run, starts = noted.run, noted.starts
        if not run or is_copy:
            run, starts = f"{folder.name}-{secrets.token_hex(4)}", []
        if run != noted.run or is_moved:
            _write_identity(self.path, run, starts)
        return run, starts

    def _locked_by(self, owner: dict[str, Any]) -> bool:
        """Return whether the folder is this run's now; the lock becomes shared, for the run's other
        processes.

        That is no single step: who comes in between writes its own name, and one of the two then
        finds the other's.
        """
        with contextlib.ExitStack() as stack:
            file = self._file = stack.enter_context((self.path / LOCK).open("a+b", buffering=0))
            if self._flock(fcntl.LOCK_EX):
                file.truncate(0)
                file.write(json.dumps(owner).encode())
                os.fsync(file.fileno())
                if self._flock(fcntl.LOCK_SH) and self._read() == owner:
                    stack.pop_all()
                    return True
        self._file = None
        return False

    def _join(self) -> None:
        """Lock the folder that process 0 has taken for another process of the run, too."""
        deadline_s = time.monotonic() + 5.0  # a network file system may lag
        while self._read().get("token") != self._owner["token"]:
            if time.monotonic() > deadline_s:
                raise OSError(
                    f"output_dir = {str(self.path)!r}: process {jax.process_index()} does not see"
                    " what process 0 writes there: it must lie on a file system that all processes"
                    " share"
                )
            time.sleep(0.1)
        self._file = (self.path / LOCK).open("r+b", buffering=0)
        if not self._flock(fcntl.LOCK_SH):
            self.check()

    def _flock(self, kind: int) -> bool:
        """Return whether the lock was to be had; also True where the file system has no locks,
        which is said.
        """
        assert self._file is not None
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return False
                raise
            if kind == fcntl.LOCK_EX:
                print(
                    f"warning: {self.path} cannot be locked ({error.strerror}): start one run at a"
                    " time in it",
                    file=sys.stderr,
                    flush=True,
                )
        return True

    def _read(self) -> dict[str, Any]:
        try:
            owner = json.loads((self.path / LOCK).read_bytes())
        except (ValueError, FileNotFoundError):
            return {}
        return owner if isinstance(owner, dict) else {}


@dataclass(frozen=True)
class _Identity:
    """The content of `run.json`: the run, its folder, whether the run itself wrote this file,
    and its starts.
    """

    run: str = ""
    home: str = ""
    is_own_file: bool = False
    starts: list[str] = field(default_factory=list)


def _identity(folder: Path) -> _Identity:
    """Return what the run in an output folder has noted of itself; nothing if it has not."""
    path = folder / IDENTITY
    try:
        noted, status = json.loads(path.read_bytes()), path.stat()
        # Earlier versions do not say; of several names (`cp -al`) no more than one is the run's.
        is_own_file = noted.get("file", status.st_ino) == status.st_ino and status.st_nlink == 1
        return _Identity(
            str(noted["run"]), str(noted["output_dir"]), is_own_file, list(noted.get("starts", []))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Identity()


def _write_identity(folder: Path, run: str, starts: list[str]) -> None:
    """Write `run.json`; file: its number in the file system, which a copy of it does not have."""
    with replacing(folder / IDENTITY) as file:
        noted = {
            "run": run,
            "output_dir": str(folder.resolve()),
            "file": os.fstat(file.fileno()).st_ino,
        }
        file.write(json.dumps(noted | {"starts": starts[-KEPT_STARTS:]}).encode())


def _named(owner: dict[str, Any]) -> str:
    if not {"host", "pid", "since"} <= owner.keys():
        return "another run"
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
