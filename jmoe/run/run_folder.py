"""Exclusive use of a run's output folder, and the run's identity.

Every process of the run holds `flock` on `run.lock`, whose content names the owner; the kernel
frees the lock when a process ends for any reason. Some file systems have no locks, or locks that
other hosts do not see (all but local ones, NFS 4 and Lustre mounted with `flock`). There, a later
run writes its name into the file, and the earlier run detects that before its next save and stops.

`run.json` holds the run's name, which marks the run's files outside the folder, and the starts that
led to the run's state. A copy of the folder counts as another run. A clone of the whole disk has
the same name, but lacks the starts that follow.
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
from typing import BinaryIO, Self

import jax

from jmoe.cluster.coordinator import result_from_rank_0
from jmoe.data.shards import replacing_file
from jmoe.memory.direct_io import NOT_SUPPORTED
from jmoe.types import JsonObject

LOCK, IDENTITY = "run.lock", "run.json"
# SLURM and Kubernetes end a job 30 s after SIGTERM; NFS keeps a dead host's lock for 90 s
WAIT_S = 120.0
KEPT_STARTS = 100  # most starts in `run.json`
NO_LOCKS = (errno.ENOLCK, *NOT_SUPPORTED)  # errors of a file system without locks


class RunFolder:
    """Context manager that keeps other runs out of `output_dir`, which is made if it is missing.

    Every process of the run must enter it. If another run uses the folder, the context waits at
    most `wait_s` seconds, then raises `OSError` on every process, naming the other run.
    """

    def __init__(self, output_dir: Path, *, wait_s: float = WAIT_S) -> None:
        self.path = output_dir
        self._wait_s = wait_s
        self._file: BinaryIO | None = None
        self._owner: JsonObject = {}
        self._made = False

    def __enter__(self) -> Self:
        self._owner = json.loads(
            result_from_rank_0("output folder", self._lock_and_describe_run, 2 * self._wait_s + 60)
        )
        if self._file is None:
            self._lock_shared()
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
    def run_name(self) -> str:
        """Return the run's name, which is unique."""
        return str(self._owner["run"])

    @property
    def start_tokens(self) -> list[str]:
        """Return the tokens that identify the starts of this run, oldest first; the last is the
        current start.
        """
        return [*self._owner["starts"], self._owner["token"]]

    def note_start(self) -> None:
        """Add the current start to `run.json`. Process 0 calls this once the run has its state."""
        _write_identity(self.path, self.run_name, self.start_tokens)

    def check_still_owned(self) -> None:
        """Raise `OSError` if another run has taken over the folder, which is possible on a file
        system without locks.

        A lock file that was removed or emptied is written and locked again.
        """
        deadline_s = time.monotonic() + 5.0
        while not (other := self._read_owner()) and time.monotonic() < deadline_s:
            self._lock_again()
            time.sleep(0.01)
        if other.get("token") != self._owner["token"]:
            raise OSError(
                f"output_dir = {str(self.path)!r}: was taken over by {_owner_text(other)}; this run"
                " saves no more"
            )
        assert self._file is not None
        if not os.path.samestat(os.fstat(self._file.fileno()), (self.path / LOCK).stat()):
            self._lock_again()  # another process of the run has made a new lock file

    def _lock_again(self) -> None:
        """Lock the current lock file, creating it if it is missing, and write the owner if the file
        is empty.
        """
        held = self._file
        try:
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError as error:
            raise OSError(
                f"output_dir = {str(self.path)!r}: was removed; this run saves no more"
            ) from error
        self._file = os.fdopen(fd, "r+b", buffering=0)
        if not self._try_flock(fcntl.LOCK_SH):  # another run is starting
            self._file.close()
            self._file = held
            return
        if not self._read_owner():
            # every process of the run writes the same bytes at the same place
            os.pwrite(fd, json.dumps(self._owner_on_disk()).encode(), 0)
            os.fsync(fd)
        if held is not None:
            held.close()

    def _owner_on_disk(self) -> JsonObject:
        """Return the owner as `run.lock` stores it: without the run's name and its starts."""
        return {name: value for name, value in self._owner.items() if name not in ("run", "starts")}

    def _lock_and_describe_run(self) -> str:
        """Lock the folder for this run, on process 0; return the owner, the run's name and its
        starts as JSON. Raises `OSError` if the folder cannot be written, or another run uses it for
        longer than `wait_s`.
        """
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
        while not self._try_lock(owner):
            holder = _owner_text(self._read_owner())
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
        run, starts = self._name_and_starts()
        return json.dumps(owner | {"run": run, "starts": starts})

    def _name_and_starts(self) -> tuple[str, list[str]]:
        """Return (name, earlier starts) of the run; a new name and no starts if `run.json` is
        missing or the folder is a copy.

        A folder at another path than `run.json` notes was moved if it still contains the original
        file, and was copied otherwise.
        """
        folder = self.path.resolve()
        noted = _read_identity(folder)
        is_moved = noted.home != str(folder)
        is_copy = is_moved and (
            not noted.is_own_file or _read_identity(Path(noted.home)).run == noted.run
        )
        run, starts = noted.run, noted.starts
        if not run or is_copy:
            run, starts = f"{folder.name}-{secrets.token_hex(4)}", []
        if run != noted.run or is_moved:
            _write_identity(self.path, run, starts)
        return run, starts

    def _try_lock(self, owner: JsonObject) -> bool:
        """Return True if this run now has the folder; the lock is then shared, for the run's other
        processes.

        Changing an exclusive lock into a shared one is not atomic: a run that comes in between
        writes its own name, and one of the two then reads the other's name.
        """
        with contextlib.ExitStack() as stack:
            file = self._file = stack.enter_context((self.path / LOCK).open("a+b", buffering=0))
            if self._try_flock(fcntl.LOCK_EX):
                file.truncate(0)
                file.write(json.dumps(owner).encode())
                os.fsync(file.fileno())
                if self._try_flock(fcntl.LOCK_SH) and self._read_owner() == owner:
                    stack.pop_all()
                    return True
        self._file = None
        return False

    def _lock_shared(self) -> None:
        """Take the shared lock; for processes other than 0. Waits until this process sees the
        `run.lock` that process 0 wrote, and raises `OSError` if it does not within 5 s.
        """
        deadline_s = time.monotonic() + 5.0  # a network file system may lag
        while self._read_owner().get("token") != self._owner["token"]:
            if time.monotonic() > deadline_s:
                raise OSError(
                    f"output_dir = {str(self.path)!r}: process {jax.process_index()} does not see"
                    " what process 0 writes there: it must lie on a file system that all processes"
                    " share"
                )
            time.sleep(0.1)
        self._file = (self.path / LOCK).open("r+b", buffering=0)
        if not self._try_flock(fcntl.LOCK_SH):
            self.check_still_owned()

    def _try_flock(self, kind: int) -> bool:
        """Return True if the lock was taken, or if the file system has no locks (with a
        warning).
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

    def _read_owner(self) -> JsonObject:
        try:
            owner = json.loads((self.path / LOCK).read_bytes())
        except (ValueError, FileNotFoundError):
            return {}
        return owner if isinstance(owner, dict) else {}


@dataclass(frozen=True)
class _RunIdentity:
    """Content of `run.json`: the run's name, its folder, whether this very file was written by the
    run, and its starts.
    """

    run: str = ""
    home: str = ""
    is_own_file: bool = False
    starts: list[str] = field(default_factory=list)


def _read_identity(folder: Path) -> _RunIdentity:
    """Return the content of `run.json` in `folder`; an empty `_RunIdentity` if it is missing or
    damaged.
    """
    path = folder / IDENTITY
    try:
        noted, status = json.loads(path.read_bytes()), path.stat()
        # Earlier versions lack "file"; of several hard links (`cp -al`) at most one is the run's.
        is_own_file = noted.get("file", status.st_ino) == status.st_ino and status.st_nlink == 1
        return _RunIdentity(
            str(noted["run"]), str(noted["output_dir"]), is_own_file, list(noted.get("starts", []))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _RunIdentity()


def _write_identity(folder: Path, run: str, starts: list[str]) -> None:
    """Write `run.json` with the file's own inode number, which a copy of the file does not have."""
    with replacing_file(folder / IDENTITY) as file:
        noted = {
            "run": run,
            "output_dir": str(folder.resolve()),
            "file": os.fstat(file.fileno()).st_ino,
        }
        file.write(json.dumps(noted | {"starts": starts[-KEPT_STARTS:]}).encode())


def _owner_text(owner: JsonObject) -> str:
    if not {"host", "pid", "since"} <= owner.keys():
        return "another run"
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
