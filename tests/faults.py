"""A disk that fails at one call: errors injected into what the program itself reads and writes
below a folder.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

READS = ("open", "preadv", "scandir", "listdir", "io.open")
WRITES = (
    "pwritev",
    "posix_fallocate",
    "ftruncate",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "link",
    "mkdir",
)
DELETIONS = ("unlink", "rmdir")


class FailingDisk:
    """Counts the calls below `folder` that come from a file of `programs`; the one of number `at`
    fails.

    for_ever: those after it fail too. calls: names of the calls so far, in order.
    """

    def __init__(
        self,
        folder: Path,
        programs: tuple[str, ...],
        at: int | None,
        code: int = errno.EIO,
        for_ever: bool = False,
    ) -> None:
        self.folder = str(folder)
        self.programs = programs
        self.at = at
        self.code = code
        self.for_ever = for_ever
        self.calls: list[str] = []
        self.raised = 0
        self._lock = threading.Lock()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Inject the errors."""
        patches = [
            mock.patch(f"os.{name}", self._hook(name, getattr(os, name)))
            for name in (*READS[:-1], *WRITES, *DELETIONS)
        ]
        patches.append(mock.patch("io.open", self._hook("io.open", io.open)))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()

    @property
    def failed(self) -> str | None:
        """The call that failed first."""
        return self.calls[self.at] if self.at is not None and self.at < len(self.calls) else None

    def _hook(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path = self._path(arguments[0] if arguments else ".", options)
            if not path.startswith(self.folder) or not self._is_ours():
                return real(*arguments, **options)
            with self._lock:
                number = len(self.calls)
                self.calls.append(name)
            late = self.at is not None and (
                number == self.at or (self.for_ever and number > self.at)
            )
            if late and (
                self.code != errno.ENOSPC or _takes_room(name, *arguments[1:2], *options.values())
            ):
                self.raised += 1
                named = () if isinstance(arguments[0], int) else (os.fspath(arguments[0]),)
                raise OSError(self.code, os.strerror(self.code), *named)
            return real(*arguments, **options)

        return call

    def _path(self, argument: Any, options: dict[str, Any]) -> str:
        try:
            if isinstance(argument, int):
                return os.readlink(f"/proc/self/fd/{argument}")
            folder = options.get("dir_fd")
            return os.path.join(
                os.readlink(f"/proc/self/fd/{folder}") if folder else "", os.fsdecode(argument)
            )
        except (OSError, TypeError):
            return ""

    def _is_ours(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if any(program in name for program in self.programs):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


def _takes_room(name: str, *how: Any) -> bool:
    """Whether a full disk would refuse it."""
    if name == "open":
        return bool(how[0] & os.O_CREAT)
    if name == "io.open":
        return any(isinstance(mode, str) and mode[0] in "wax" for mode in how)
    return name in WRITES
