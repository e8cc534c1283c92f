"""Mutable records on NVMe: each version of a record is a file of its own.

The file of a version is immutable while the version is current, being read, or linked by a
checkpoint. A new version is written to another file, flushed, and then renamed; after a crash the
folder has an intact version of every record. Names are `INDEX.COUNTER.TOKEN`: the counter rises
with every write, and every `open` draws a random token, so two files with the same name have the
same content. A checkpoint is a set of hard links to the current versions (`pin_versions`): it
copies no bytes, and later writes cannot change it.

Legend:
  R  bytes of a record
"""

import contextlib
import errno
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.memory.checksum import checksum, matches_checksum
from jmoe.memory.closing import Closing
from jmoe.memory.direct_io import (
    Io,
    check_buffer,
    check_hard_links,
    choose_io,
    fsync,
    make_folder_durably,
    map_file,
    read_file_start,
    remove_folder,
    try_hard_link,
    write_file_durably,
)
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import (
    LOCK,
    MANIFEST,
    Fill,
    PackError,
    check_manifest,
    folder_lock,
    make_manifest,
    read_manifest,
    write_manifest,
)
from jmoe.memory.slot_table import checked_record_ids

SEAL = "seal"
PINS = "pins"
SYNC_EVERY = 16  # most versions that are replaced between two syncs of the folder


def layout_with_seal(layout: RecordLayout) -> RecordLayout:
    """Return a record's layout plus a seal: uint64 (index, counter, token, checksum)."""
    check(
        SEAL not in {f.name for f in layout.fields},
        "layout",
        layout.describe_arrays(),
        f"must not name {SEAL!r}",
    )
    return RecordLayout.from_arrays(
        {f.name: (f.shape, f.dtype) for f in layout.fields} | {SEAL: ((4,), np.uint64)}
    )


@dataclass(frozen=True, order=True)
class Version:
    """The name of one version of record `index`; the version with the higher counter is newer."""

    index: int
    counter: int
    token: int

    @property
    def name(self) -> str:
        """Return the file name `INDEX.COUNTER.TOKEN`, with the token in 8 hexadecimal digits."""
        return f"{self.index}.{self.counter}.{self.token:08x}"

    @classmethod
    def from_name(cls, name: str) -> Self:
        version = cls.parse_or_none(name)
        assert version is not None, name
        return version

    @classmethod
    def parse_or_none(cls, name: str) -> Self | None:
        """Return the version whose file has this name; None if the name is of another form."""
        parts = name.split(".")
        try:
            version = cls(int(parts[0]), int(parts[1]), int(parts[2], 16))
        except (ValueError, IndexError):
            return None
        return version if version.name == name else None


def write_seal(version: Version, layout: RecordLayout, record_R: NDArray[np.uint8]) -> None:
    """Write the version and the checksum into the seal of `record_R`; layout: the result of
    `layout_with_seal`.
    """
    seal = layout.views(record_R)[SEAL]
    seal[:] = (version.index, version.counter, version.token, 0)
    seal[3] = checksum(record_R)


def read_version_file(
    path: Path, layout: RecordLayout, record_R: NDArray[np.uint8], io: Io
) -> None:
    """Read the file of a version into `record_R`, and check its seal.

    layout: the result of `layout_with_seal`. Raises `OSError` naming file and record if the file is
    short, unreadable or damaged.
    """
    with _name_record_in_errors(path):
        read_file_start(path, record_R, io)
    check_seal(path, layout, record_R)


@contextlib.contextmanager
def _name_record_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        index = Version.from_name(path.name).index
        raise OSError(error.errno, f"record {index}: {error.strerror}", str(path)) from error


def check_seal(path: Path, layout: RecordLayout, record_R: NDArray[np.uint8]) -> None:
    """Raise `OSError` naming file and record if the seal does not fit the bytes or the file's name.

    layout: the result of `layout_with_seal`.
    """
    version = Version.from_name(path.name)
    *name, value = (int(word) for word in layout.views(record_R)[SEAL])
    (seal,) = (f for f in layout.fields if f.name == SEAL)
    zeroed_word = seal.offset_bytes // seal.dtype.itemsize + 3  # the checksum itself counts as 0
    if name != [version.index, version.counter, version.token] or not matches_checksum(
        value, record_R, zeroed_word
    ):
        why = (
            f"record {version.index}: damaged, its content is not what was written; a checkpoint"
            " may have it"
        )
        raise OSError(errno.EIO, why, str(path))


def check_version_file(
    path: Path, layout: RecordLayout, record_R: NDArray[np.uint8], io: Io
) -> None:
    """Read the file of a version as `read_version_file` does, and check that its size is that of a
    record.
    """
    size_bytes = path.stat().st_size
    if size_bytes != layout.record_bytes:
        index = path.name.partition(".")[0]
        why = f"record {index}: damaged, has {size_bytes} of {layout.record_bytes} bytes"
        raise OSError(errno.EIO, why, str(path))
    read_version_file(path, layout, record_R, io)


@dataclass
class VersionStats:
    """Counters since the start.

    writes: versions written. written_bytes: their bytes, seals included. recycled: writes into the
    file of a replaced version instead of a new file.
    """

    writes: int = 0
    written_bytes: int = 0
    recycled: int = 0


class MappedVersion(NamedTuple):
    """A version's file as read-only memory; call `close` after the last read."""

    record_R: NDArray[np.uint8]
    close: Callable[[], None]


def remove_store(folder: Path, fingerprint: str) -> bool:
    """Remove the store in `folder` if it has this fingerprint and is not open; return whether it
    was removed.

    Only files of a store are removed, the manifest last, so that an interrupted removal can be
    repeated.
    """
    try:
        manifest = read_manifest(folder)
        if (manifest.get("kind"), manifest.get("fingerprint")) != ("versions", fingerprint):
            return False
        with folder_lock(folder, 0):
            for pins in (folder / PINS).iterdir() if (folder / PINS).is_dir() else ():
                if is_pins_folder(pins):
                    remove_versions(pins)
            remove_versions(folder)
            (folder / MANIFEST).unlink()
            (folder / LOCK).unlink()
    except (PackError, TimeoutError, NotADirectoryError):
        return False
    for place in (folder / PINS, folder):
        with contextlib.suppress(OSError):  # the folder is not empty
            place.rmdir()
    return True


def is_pins_folder(folder: Path) -> bool:
    """Return True if the folder's name is that of a step's pins, complete or unfinished."""
    return (
        folder.name.removesuffix(".tmp").isdigit() and folder.is_dir() and not folder.is_symlink()
    )


def remove_versions(folder: Path) -> None:
    """Remove the version files in a folder, and the folder if it is then empty."""
    for entry in list(folder.iterdir()):
        if Version.parse_or_none(entry.name) or entry.name.startswith("new-"):
            entry.unlink()
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()


class VersionStore(Closing):
    """Reads and replaces the records `owned` in a folder; thread-safe, except for writes of one
    record.

    A folder belongs to one store at a time, by a lock file that the kernel frees if the process
    dies. Processes that split the records each have a folder. layout: the given arrays and a seal
    (`layout_with_seal`), so `layout.record_bytes` may be one page more. io: see
    `direct_io.choose_io`.
    """

    def __init__(
        self, folder: Path, layout: RecordLayout, num_records: int, owned: Iterable[int]
    ) -> None:
        """Scan the folder; callers use `open`."""
        self.path, self.layout, self.num_records, self.fingerprint = folder, layout, num_records, ""
        self.owned = tuple(sorted(set(checked_record_ids(list(owned), num_records).tolist())))
        self.io = choose_io(folder)
        self._is_owned = frozenset(self.owned)
        self._checked = set[Version]()  # mapped versions whose seal was checked
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()  # while held, no file is recycled
        self._held = contextlib.ExitStack()
        self._token = secrets.randbits(32)
        self._current: dict[int, Version] = {}
        self._reading: Counter[Version] = Counter()
        self._dead: list[Version] = []  # replaced; a crash before a sync may need them
        self._spare: list[Path] = []  # files to recycle
        self._new = 0
        self._counter = 0
        # kept, because a later sync may succeed although this one lost data
        self._sync_error: OSError | None = None
        self._stats = VersionStats()
        self._find_newest_versions()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        layout: RecordLayout,
        num_records: int,
        *,
        fingerprint: str,
        owned: Iterable[int] | None = None,
        lock_limit_s: float = 10.0,
    ) -> Self:
        """Return the store in `folder`, opened; an empty or missing folder becomes a new store.

        layout: without the seal. fingerprint: identifies the records' source. owned: None means all
        records. Raises `PackError` if the folder holds other records, `TimeoutError` if another
        process has it open for `lock_limit_s`, `OSError` if it is not writable or has no hard
        links.
        """
        check(num_records > 0, "num_records", num_records, "must be greater than 0")
        folder, with_seal = Path(folder), layout_with_seal(layout)
        expected = make_manifest(with_seal, num_records, fingerprint) | {"kind": "versions"}
        make_folder_durably(folder)
        with contextlib.ExitStack() as held:
            held.enter_context(folder_lock(folder, lock_limit_s))
            try:
                manifest = read_manifest(folder)
            except PackError:
                if any(Version.parse_or_none(entry.name) for entry in folder.iterdir()):
                    raise
                (folder / PINS).mkdir(exist_ok=True)
                write_manifest(folder, expected)
                manifest = expected
            check_manifest(folder, manifest, expected)
            check_hard_links(folder, folder / MANIFEST)
            store = cls(
                folder, with_seal, num_records, range(num_records) if owned is None else owned
            )
            store.fingerprint = fingerprint
            store._held = held.pop_all()
        return store

    def write_all_records(self, fill: Fill) -> None:
        """Write every owned record anew: `fill(index, views)` writes into zeroed arrays by name."""
        record_R = self.layout.zeros()
        for index in self.owned:
            record_R[:] = 0
            fill(index, self.layout.views(record_R))
            self.write(index, record_R)
        self.sync()

    def read_into(self, index: int, record_R: NDArray[np.uint8]) -> None:
        """Read the current version into `record_bytes` writable bytes at a page-aligned address.

        Raises `OSError` naming file and record if the file is short, unreadable or damaged,
        `ValueError` if the record has never been written or is not owned.
        """
        self._check_owned(index)
        check_buffer(record_R, self.layout.record_bytes)
        version = self._begin_reading(index)
        try:
            self.read_version(self.path / version.name, record_R)
        finally:
            self._end_reading(version)

    def map_version(self, index: int) -> MappedVersion:
        """Return the current version, mapped without a copy; later writes do not change it.

        A version is checked when it is first mapped. Raises like `read_into`.
        """
        self._check_owned(index)
        version = self._begin_reading(index)
        path = self.path / version.name
        try:
            with _name_record_in_errors(path):
                record_R = map_file(path, self.layout.record_bytes)
            if version not in self._checked:
                check_seal(path, self.layout, record_R)
                self._checked.add(version)
        except OSError:
            self._end_reading(version)
            raise
        return MappedVersion(record_R, partial(self._end_reading, version))

    def _begin_reading(self, index: int) -> Version:
        """Return the current version; its file is not recycled until `_end_reading`."""
        with self._lock:
            version = self._current.get(index)
            if version is None:
                raise ValueError(f"record {index} of {self.path}: has never been written")
            self._reading[version] += 1
            return version

    def _end_reading(self, version: Version) -> None:
        with self._lock:
            self._reading[version] -= 1

    def read_version(self, path: Path, record_R: NDArray[np.uint8]) -> None:
        """Read and check the file of a version, in this store or in a checkpoint; raises like
        `read_into`.
        """
        read_version_file(
            path, self.layout, record_R, self.io if path.is_relative_to(self.path) else "buffered"
        )

    def write(self, index: int, record_R: NDArray[np.uint8]) -> None:
        """Write a new current version; set the seal in `record_R`.

        On return the content is durable, but the file's name only after `sync`; a write calls
        `sync` itself once `SYNC_EVERY` replaced versions wait for it. If `write` raises `OSError`,
        the record keeps its old version; if a sync failed, `write`, `sync` and `pin_versions` raise
        its error from then on.
        """
        self._check_owned(index)
        check_buffer(record_R, self.layout.record_bytes)
        self._raise_sync_error()
        with self._lock:
            self._counter += 1
            version = Version(index, self._counter, self._token)
            self._new += not self._spare
            path, recycled = (
                (self._spare.pop(), 1) if self._spare else (self.path / f"new-{self._new}", 0)
            )
        write_seal(version, self.layout, record_R)
        try:
            write_file_durably(path, record_R, self.io)
            path.rename(self.path / version.name)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise OSError(
                error.errno, f"record {index}: {error.strerror}", error.filename or str(path)
            ) from error
        with self._lock:
            if index in self._current:
                self._dead.append(self._current[index])
            self._current[index] = version
            self._stats.writes += 1
            self._stats.recycled += recycled
            self._stats.written_bytes += record_R.nbytes
            due = len(self._dead) >= SYNC_EVERY
        if due:
            self.sync()

    def sync(self) -> None:
        """Make the names of all written versions durable; files of replaced versions may then be
        recycled.
        """
        with self._sync_lock:
            self._raise_sync_error()
            with self._lock:
                dead = list(self._dead)
            try:
                fsync(self.path)
            except OSError as error:
                self._sync_error = error
                raise
            with self._lock:
                del self._dead[: len(dead)]
            for version in dead:
                self._keep_for_recycling(version)

    def pin_versions(self, name: str, only: Collection[int] | None = None) -> list[str]:
        """Hard-link the current versions of all records, or of `only`, into the folder `pins/NAME`;
        return their names.

        Costs time per record, not per byte. The folder gets its name when it is complete and
        durable; an existing folder of this name is replaced.
        """
        self._raise_sync_error()
        folder, half = self.path / PINS / name, self.path / PINS / f"{name}.tmp"
        for leftover in (half, folder):  # left by a save that was interrupted
            if leftover.exists():
                remove_folder(leftover)
        make_folder_durably(half.parent)
        half.mkdir()
        with self._sync_lock:
            with self._lock:
                chosen = (
                    self._current
                    if only is None
                    else {index: self._current[index] for index in only}
                )
                names = [version.name for version in chosen.values()]
            for name in names:
                os.link(self.path / name, half / name)
        fsync(half)
        half.rename(folder)
        fsync(folder.parent)
        return names

    def restore_versions(self, files: Mapping[int, Path], *, partial: bool = False) -> None:
        """Make `files` the current versions of the owned records, and delete all other versions.

        Files on the same file system are hard-linked, others copied and checked. If the process is
        killed, the call can be repeated. partial: `files` may lack records, which then count as
        never written. Raises `ValueError` if records are lacking otherwise.
        """
        owned = [index for index in self.owned if index in files]
        lacking = [] if partial else [index for index in self.owned if index not in files]
        check(
            not lacking, "files", len(files), f"must name every owned record; lacks {lacking[:8]}"
        )
        record_R: NDArray[np.uint8] | None = None
        with self._sync_lock:
            wanted = {files[index].name for index in owned}
            for index in owned:
                source, target = files[index], self.path / files[index].name
                if target.exists():
                    if target.samefile(source):
                        continue
                    target.unlink()  # a recycled file keeps its old name while it is written
                if not try_hard_link(source, target):
                    if record_R is None:
                        record_R = self.layout.zeros()
                    self.read_version(source, record_R)
                    copy = self.path / "new-0"
                    write_file_durably(copy, record_R, self.io)
                    copy.rename(target)
            fsync(self.path)
            for entry in self.path.iterdir():
                if Version.parse_or_none(entry.name) and entry.name not in wanted:
                    entry.unlink()
            fsync(self.path)
            with self._lock:
                self._current, self._dead = {}, []
                self._checked.clear()
                self._find_newest_versions()

    def stats(self) -> VersionStats:
        with self._lock:
            return replace(self._stats)

    def close(self) -> None:
        """Sync and unlock the folder; no thread may be reading or writing.

        The error of an earlier sync is not raised again.
        """
        with self._held:
            if self._sync_error is None:
                self.sync()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except OSError:
            if error is None:
                raise

    def _raise_sync_error(self) -> None:
        """Raise the error of an earlier failed sync, if any."""
        if self._sync_error is not None:
            raise self._sync_error

    def _check_owned(self, index: int) -> None:
        if index not in self._is_owned:
            raise ValueError(
                f"index = {index}: must be one of the {len(self.owned)} records that {self.path}"
                " owns"
            )

    def _find_newest_versions(self) -> None:
        """Make the newest version of every owned record the current one; the other files may be
        recycled.
        """
        # a killed process may have left a newest version whose name is not durable
        fsync(self.path)
        older: list[Version] = []
        for entry in self.path.iterdir():
            version = Version.parse_or_none(entry.name)
            if version is None:
                if entry.name.startswith("new-"):
                    entry.unlink()
                continue
            self._counter = max(self._counter, version.counter)
            if version.index not in self._is_owned:
                continue  # another process may own it after `restore`
            other = self._current.get(version.index, version)
            if other != version:
                older.append(min(version, other))
            self._current[version.index] = max(version, other)
        self._spare = [
            path
            for path in (self.path / version.name for version in older)
            if self._keep_if_only_link_else_unlink(path)
        ]

    def _keep_for_recycling(self, version: Version) -> None:
        """Keep the file of a replaced version for recycling, unless a checkpoint links to it."""
        with self._lock:
            if self._reading[version]:
                self._dead.append(version)
                return
            del self._reading[version]
            self._checked.discard(version)
        path = self.path / version.name
        # another process removed it; the record has a newer version
        with contextlib.suppress(FileNotFoundError):
            if self._keep_if_only_link_else_unlink(path):
                with self._lock:
                    self._spare.append(path)

    def _keep_if_only_link_else_unlink(self, path: Path) -> bool:
        """Unlink the file in this folder and return False if it has another hard link; otherwise
        keep it and return True.
        """
        if path.stat().st_nlink == 1:
            return True
        path.unlink()
        return False
