"""What a power cut leaves of a folder: its flushes are recorded, and what was not flushed is lost.

A process that is killed leaves the page cache, so no kill shows a missing flush. Here every flush,
rename, link and deletion below a folder is recorded while a program runs in this process. Before
each of them the folder is noted down as two kinds of cut would leave it:

- "content": every name is there, but of a file only what was flushed; of one that was changed
  since, half is new.
- "names": folders list what they did when they were flushed last, and content is lost as well.

Afterwards each of these folders is built in the place of the real one, for a test to open.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")
Tree = dict[str, "int | Tree"]  # name -> a file's number, or a folder


@dataclass(frozen=True)
class Image:
    """A folder after a cut. before: the call that did not happen; promise: what the program had
    been promised.
    """

    kind: str
    before: str
    promise: Any
    tree: Tree
    contents: dict[int, bytes]


class PowerCut:
    """The images of one folder; `promise` is set by the program as it is promised more."""

    def __init__(self, root: Path) -> None:
        self.root, self.promise, self.images = root.resolve(), None, list[Image]()
        self._lock = threading.RLock()
        self._numbers: dict[tuple[int, int], int] = {}  # of the inodes in use; they are used again
        self._next = 0
        self._flushed: dict[int, bytes] = {}
        self._last: dict[int, bytes] = {}  # content of files that have no name any more
        self._listed: dict[int, dict[str, int]] = {}  # folders as they were flushed

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Take what is there for flushed, then record."""
        self.root.mkdir(exist_ok=True)
        for folder, _, names in os.walk(self.root, topdown=False):
            for name in names:
                self._flush(Path(folder) / name)
            self._flush(Path(folder))
        patches = [
            mock.patch(f"os.{name}", self._hook(name, getattr(os, name)))
            for name in ("fsync", "fdatasync")
        ]
        for name in ("rename", "replace", "link", "unlink", "remove", "rmdir"):
            patches.append(mock.patch(f"os.{name}", self._hook(name, getattr(os, name))))
        for patch in patches:
            patch.start()
        try:
            yield
            with self._lock:
                self._cut("the end")
        finally:
            for patch in reversed(patches):
                patch.stop()

    def check(self, test: Callable[[Image], None], images: list[Image] | None = None) -> int:
        """Call `test` with the folder as each image (or each of these) has it; returns how many
        there were.
        """
        images = self.images if images is None else images
        aside = self.root.with_name(f"{self.root.name}.aside")
        self.root.rename(aside)
        try:
            for image in images:
                self._build(image)
                try:
                    test(image)
                except BaseException as error:
                    error.add_note(
                        f"after a power cut that loses {image.kind}, before {image.before}"
                    )
                    raise
                shutil.rmtree(self.root)
        finally:
            shutil.rmtree(self.root, ignore_errors=True)
            aside.rename(self.root)
        return len(images)

    def _hook(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            paths = [
                self._path(argument, options)
                for argument in arguments[: 2 if name in _OF_TWO else 1]
            ]
            if not any(path.is_relative_to(self.root) for path in paths):
                return real(*arguments, **options)
            with self._lock:
                self._cut(
                    f"{name} of"
                    f" {' and '.join(str(path.relative_to(self.root.parent)) for path in paths)}"
                )
                gone = (
                    paths[-1]
                    if name in ("unlink", "remove", "rename", "replace", "rmdir")
                    else None
                )
                if gone is not None:
                    self._forget(gone, replaced=name in ("rename", "replace"))
                result = real(*arguments, **options)
                if name in ("fsync", "fdatasync"):
                    self._flush(paths[0])
                return result

        return call

    def _path(self, argument: Any, options: dict[str, Any]) -> Path:
        if isinstance(argument, int):
            return Path(os.readlink(f"/proc/self/fd/{argument}"))
        folder = options.get("dir_fd", options.get("src_dir_fd"))
        base = Path.cwd() if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}"))
        path = base / os.fsdecode(argument)
        return path.parent.resolve() / path.name

    def _number(self, status: os.stat_result) -> int:
        key = status.st_dev, status.st_ino
        if key not in self._numbers:
            self._numbers[key] = self._next
            self._next += 1
        return self._numbers[key]

    def _forget(self, path: Path, replaced: bool) -> None:
        """A name is about to go: if it is the last one of its file, that keeps its content for
        folders that list it.
        """
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISDIR(status.st_mode) and replaced:
            return
        if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1:
            number = self._number(status)
            if stat.S_ISREG(status.st_mode):
                self._last[number] = path.read_bytes()
            del self._numbers[status.st_dev, status.st_ino]

    def _flush(self, path: Path) -> None:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            self._listed[self._number(status)] = _standing(
                lambda: {name: self._number((path / name).lstat()) for name in os.listdir(path)}
            )
        else:
            self._flushed[self._number(status)] = path.read_bytes()

    def _cut(self, before: str) -> None:
        tree, now = _standing(lambda: self._walk(self.root))
        contents = {
            number: self._left(number, content) for number, content in (self._last | now).items()
        }
        listed = self._as_listed(self._number(self.root.stat()), contents)
        for kind, found in (("content", tree), ("names", listed)):
            used = dict(_files(found, contents))
            image = Image(kind, before, self.promise, found, used)
            same = [
                other
                for other in self.images[-2:]
                if other.kind == kind and other.promise == image.promise
            ]
            if not any(
                other.tree == image.tree and other.contents == image.contents for other in same
            ):
                self.images.append(image)

    def _walk(self, folder: Path) -> tuple[Tree, dict[int, bytes]]:
        tree: Tree = {}
        contents: dict[int, bytes] = {}
        for name in os.listdir(folder):
            path = folder / name
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                tree[name], below = self._walk(path)
                contents |= below
            else:
                number = self._number(status)
                tree[name] = number
                contents[number] = path.read_bytes()
        return tree, contents

    def _as_listed(self, number: int, contents: dict[int, bytes]) -> Tree:
        """A folder as it was flushed: names of files, of folders that were flushed themselves,
        and of empty ones.
        """
        return {
            name: child if child in contents else self._as_listed(child, contents)
            for name, child in self._listed.get(number, {}).items()
        }

    def _left(self, number: int, content: bytes) -> bytes:
        flushed = self._flushed.get(number)
        if flushed is None:
            return bytes(len(content))
        half = len(content) // 2
        return (
            content
            if content == flushed
            else content[:half] + flushed.ljust(len(content), b"\0")[half : len(content)]
        )

    def _build(self, image: Image) -> None:
        made: dict[int, Path] = {}

        def build(folder: Path, tree: Tree) -> None:
            folder.mkdir()
            for name, entry in tree.items():
                path = folder / name
                if isinstance(entry, dict):
                    build(path, entry)
                elif entry in made:
                    os.link(made[entry], path)
                else:
                    path.write_bytes(image.contents[entry])
                    made[entry] = path

        build(self.root, image.tree)


def _standing(look: Callable[[], T]) -> T:
    """What `look` finds in a folder. Threads of C++ rename files unseen: where one has gone, it
    looks again.
    """
    for _ in range(1000):
        with contextlib.suppress(FileNotFoundError):
            return look()
    raise RuntimeError("the folder does not stand still")


_OF_TWO = ("rename", "replace", "link")


def _files(tree: Tree, contents: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
    for entry in tree.values():
        if isinstance(entry, dict):
            yield from _files(entry, contents)
        else:
            yield entry, contents[entry]
