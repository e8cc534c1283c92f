"""The folder that a preparation writes: on a file system that all its processes share, or in an
object store (fsspec).

A file appears under its name whole or not at all: by a rename, or by the store's own put. Names are
relative, with slashes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jmoe.data.shards import TEMPORARY, remove_stale_temporaries, replace_content_durably
from jmoe.data.temporary_folder import temporary_folder
from jmoe.memory.direct_io import fsync

# a store is asked for each of so many names, and lists the folder for more
MAX_SINGLE_LOOKUPS = 4


class OutputFolder(Protocol):
    """The operations of a folder of shards; OSError that names it if one fails."""

    def entries(self) -> set[str]:
        """Return the names of the files and folders at its top; empty if it does not exist."""

    def read(self, name: str) -> bytes:
        """Return a file's content. Raises FileNotFoundError."""

    def read_all(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return {name: content} of the files that exist."""

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Return {name: bytes} of the files that exist."""

    def write(self, name: str, content: bytes) -> None:
        """Replace a file's content."""

    def write_new(self, name: str, content: bytes) -> None:
        """Write a file, unless it exists or another process writes it at the same time."""

    def staging(self, names: Sequence[str]) -> contextlib.AbstractContextManager[Path]:
        """Yield a folder of this machine. The files `names`, which the block writes into it, are in
        this folder once the block has ended.
        """

    def local_copy(self, names: Sequence[str]) -> Path:
        """Return a folder of this machine that has the files `names`."""

    def make_durable(self) -> None:
        """Return once the names of all files written are durable; delete what killed writers left
        an hour ago.
        """


def open_output_folder(location: str) -> OutputFolder:
    """Return the folder at a path, or at the URL of an object store.

    Raises ValueError that names `--out` if the store's package is missing.
    """
    if "://" not in location:
        return LocalFolder(Path(location).expanduser().resolve())
    _, path = open_file_system(location, "--out")
    if location.startswith(("file://", "local://")):
        return LocalFolder(Path(path).resolve())
    return StoredFolder(location.rstrip("/"))


def open_file_system(url: str, field: str) -> tuple[Any, str]:
    """Return (the fsspec file system, the path in it) of a URL.

    Raises ValueError that names the field if fsspec or the store's package is missing.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ValueError(
            f"{field} = {url!r}: needs fsspec: pip install 'jmoe[ray]', or fsspec and the"
            " package of the store, such as s3fs or gcsfs"
        ) from error
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # a store's package is missing, or no such store
        raise ValueError(f"{field} = {url!r}: {error}") from error
    return fs, path


@dataclass(frozen=True)
class LocalFolder:
    """A folder at a path that all processes of the preparation see."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def entries(self) -> set[str]:
        if self.path.is_file():
            return {self.path.name}
        return {path.name for path in self.path.iterdir()} if self.path.exists() else set()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_all(self, names: Sequence[str]) -> dict[str, bytes]:
        contents = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                contents[name] = self.read(name)
        return contents

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        sizes = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes[name] = (self.path / name).stat().st_size
        return sizes

    def write(self, name: str, content: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        replace_content_durably(self.path / name, content)

    def write_new(self, name: str, content: bytes) -> None:
        target = self.path / name
        new = target.with_name(f".{name}.{secrets.token_hex(8)}{TEMPORARY}")
        self.write(new.name, content)
        try:
            os.link(new, target)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            replace_content_durably(target, content)
        finally:
            new.unlink(missing_ok=True)

    @contextlib.contextmanager
    def staging(self, names: Sequence[str]) -> Iterator[Path]:
        yield self.path  # whose files appear by renames

    def local_copy(self, names: Sequence[str]) -> Path:
        return self.path

    def make_durable(self) -> None:
        remove_stale_temporaries(self.path)
        fsync(self.path)


@dataclass(frozen=True)
class StoredFolder:
    """A folder in an object store, whose put replaces an object as a whole."""

    url: str

    def __str__(self) -> str:
        return self.url

    def entries(self) -> set[str]:
        with self._using_store() as (fs, root), contextlib.suppress(FileNotFoundError):
            return {Path(path).name for path in fs.ls(root, detail=False)}
        return set()

    def read(self, name: str) -> bytes:
        with self._using_store() as (fs, root):
            content: bytes = fs.cat_file(f"{root}/{name}")
        return content

    def read_all(self, names: Sequence[str]) -> dict[str, bytes]:
        present = list(self.sizes(names))
        if not present:
            return {}
        with self._using_store() as (fs, root):
            contents = fs.cat([f"{root}/{name}" for name in present])  # many at a time
            return {name: contents[f"{root}/{name}"] for name in present}

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        with self._using_store() as (fs, root):
            if len(names) > MAX_SINGLE_LOOKUPS:
                listed = fs.find(root, detail=True)
            else:
                listed = {}
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        listed[f"{root}/{name}"] = fs.info(f"{root}/{name}")
            wanted = {name: listed.get(f"{root}/{name}") for name in names}
        return {name: int(info["size"]) for name, info in wanted.items() if info is not None}

    def write(self, name: str, content: bytes) -> None:
        with self._using_store() as (fs, root):
            fs.pipe_file(f"{root}/{name}", content)

    def write_new(self, name: str, content: bytes) -> None:
        with self._using_store() as (fs, root), contextlib.suppress(FileExistsError):
            fs.pipe_file(f"{root}/{name}", content, mode="create")

    @contextlib.contextmanager
    def staging(self, names: Sequence[str]) -> Iterator[Path]:
        with temporary_folder() as folder:
            yield folder
            with self._using_store() as (fs, root):
                for name in names:
                    fs.put_file(f"{folder}/{name}", f"{root}/{name}")

    def local_copy(self, names: Sequence[str]) -> Path:
        return _download(self, tuple(names))

    def make_durable(self) -> None:
        """Do nothing: a put returns once the store has the object."""

    @contextlib.contextmanager
    def _using_store(self) -> Iterator[tuple[Any, str]]:
        """Yield (the file system, the folder's path in it); its errors become OSError."""
        fs, root = open_file_system(self.url, "--out")
        fs.invalidate_cache()  # of listings: other processes write too
        try:
            yield fs, root
        except FileNotFoundError as error:
            raise FileNotFoundError(f"--out = {self.url!r}: not in the store: {error}") from error
        except Exception as error:  # each store has errors of its own
            raise OSError(f"--out = {self.url!r}: the store refuses: {error!r}") from error


@functools.lru_cache(1)
def _download(folder: StoredFolder, names: tuple[str, ...]) -> Path:
    """Return a new folder with copies of the files, which is deleted when the process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    local = stack.enter_context(temporary_folder())
    for name, content in folder.read_all(names).items():
        (local / name).parent.mkdir(exist_ok=True)
        (local / name).write_bytes(content)
    return local
