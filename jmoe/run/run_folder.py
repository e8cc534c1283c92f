"""The output folder of a run: one run at a time works in it, and it knows which run it is.

Every process of the run holds `flock` on `run.lock`, which says who took it; the kernel frees the lock when a process
ends, however it ends. Where a file system has no locks, or keeps them to one host (others than local ones, NFS 4 and
Lustre with `flock`), a later start writes its name there, and the earlier one finds it before its next save and stops.
`run.json` has the name of the run, which marks what is its own outside of the folder; a copy of it is another run.
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
from pathlib import Path
from typing import Any, BinaryIO, Self

import jax

from jmoe.data.shards import write_atomic
from jmoe.run import distributed

LOCK, IDENTITY = "run.lock", "run.json"
WAIT_S = 120.0  # SLURM and Kubernetes end a job 30 s after they said so; NFS keeps a dead host's lock for 90 s
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # the file system has none


class RunFolder:
    """Context manager that keeps other runs out of `output_dir`, which is made if it is missing.

    Every process of the run enters it. Another run that is in the folder is waited for, at most `wait_s`; then
    `OSError` on every process says who it is.
    """

    def __init__(self, output_dir: Path, *, wait_s: float = WAIT_S) -> None:
        self.path = output_dir
        self._wait_s = wait_s
        self._file: BinaryIO | None = None
        self._owner: dict[str, Any] = {}
        self._made = False

    def __enter__(self) -> Self:
        self._owner = json.loads(distributed.from_rank_0("output folder", self._take, 2 * self._wait_s + 60))
        if self._file is None:
            self._join()
        return self

    def __exit__(self, *_: object) -> None:
        if self._made and set(os.listdir(self.path)) <= {LOCK, IDENTITY}:  # the run came to nothing
            for name in os.listdir(self.path):
                (self.path / name).unlink()
            self.path.rmdir()
        if self._file is not None:
            self._file.close()

    @property
    def run(self) -> str:
        """Return the run's name, which no other run has."""
        return str(self._owner["run"])

    def check(self) -> None:
        """Raise `OSError` if another run has taken the folder, where the file system could not prevent it."""
        other = self._read()
        if other.get("token") != self._owner["token"]:
            raise OSError(f"output_dir = {str(self.path)!r}: was taken over by {_named(other)}; this run saves no more")

    def _take(self) -> str:
        """Lock the folder for process 0 alone, write who has it, and keep it for all of the run."""
        self._made = not self.path.is_dir()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / LOCK).open("ab").close()
        except OSError as error:
            raise OSError(
                f"output_dir = {str(self.path)!r}: must be a folder that can be written: {error.strerror}"
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
                    f"{self.path} is in use by {holder}; waiting for it to end, at most {self._wait_s:g} s", flush=True
                )
                said = True
            time.sleep(0.1)
        return json.dumps(owner | {"run": self._identify()})

    def _identify(self) -> str:
        """Return the name in `run.json`; a new one if there is none, or it belongs to a run of which this is a copy."""
        folder = self.path.resolve()
        run, home = _identity(folder)
        if not run or (Path(home) != folder and _identity(Path(home))[0] == run):
            run = f"{folder.name}-{secrets.token_hex(4)}"
        if (run, str(folder)) != _identity(folder):
            write_atomic(self.path / IDENTITY, json.dumps({"run": run, "output_dir": str(folder)}).encode())
        return run

    def _locked_by(self, owner: dict[str, Any]) -> bool:
        """Return whether the folder is this run's now; the lock becomes shared, for the run's other processes.

        That is no single step: who comes in between writes its own name, and one of the two then finds the other's.
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
                    f"output_dir = {str(self.path)!r}: process {jax.process_index()} does not see what process 0 "
                    "writes there: it must lie on a file system that all processes share"
                )
            time.sleep(0.1)
        self._file = (self.path / LOCK).open("r+b", buffering=0)
        if not self._flock(fcntl.LOCK_SH):
            self.check()

    def _flock(self, kind: int) -> bool:
        """Return whether the lock was to be had; also True where the file system has no locks, which is said."""
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
                    f"warning: {self.path} cannot be locked ({error.strerror}): start one run at a time in it",
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


def _identity(folder: Path) -> tuple[str, str]:
    """Return (name, folder) of the run in an output folder, as it has noted them; ("", "") if it has not."""
    try:
        noted = json.loads((folder / IDENTITY).read_bytes())
        return str(noted["run"]), str(noted["output_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


def _named(owner: dict[str, Any]) -> str:
    if not {"host", "pid", "since"} <= owner.keys():
        return "another run"
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
