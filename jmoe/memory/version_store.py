"""Records that change, on NVMe: one file per record version, never changed once it has its name.
Axes: R bytes.

A new version is written beside the old one, flushed, and gets its name by rename; what reads the
folder after a crash finds, of every record, one of its whole versions. Names are
`INDEX.COUNTER.TOKEN`: the counter rises with every write, the token is drawn at every `open`, so
two files of the same name have the same content. Hard links of the current versions (`pin`) are a
checkpoint: they cost no bytes, and no later write can touch them.
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
from jmoe.memory.checksum import checksum, is_checksum
from jmoe.memory.closing import Closing
from jmoe.memory.direct_io import (
    Io,
    check_buffer,
    check_links,
    fsync,
    io_of,
    link,
    make_folder,
    map_file,
    read_file,
    remove_folder,
    write_file,
)
from jmoe.memory.hot_set import record_ids
from jmoe.memory.record_store import (
    LOCK,
    MANIFEST,
    Fill,
    PackError,
    RecordLayout,
    check_manifest,
    locked,
    manifest_of,
    read_manifest,
    write_manifest,
)

SEAL = "seal"
PINS = "pins"
SYNC_EVERY = 16  # versions written between two syncs of the folder, at most


def sealed(layout: RecordLayout) -> RecordLayout:
    """Return the layout of a record's file: its arrays, and the seal (index, counter, token,
    checksum).
    """
    check(
        SEAL not in {f.name for f in layout.fields},
        "layout",
        layout.describe(),
        f"must not name {SEAL!r}",
    )
    return RecordLayout.from_arrays(
        {f.name: (f.shape, f.dtype) for f in layout.fields} | {SEAL: ((4,), np.uint64)}
    )


@dataclass(frozen=True, order=True)
class Version:
    """Names a version of record `index`; of two, the one with the higher counter is newer."""

    index: int
    counter: int
    token: int

    @property
    def name(self) -> str:
        return f"{self.index}.{self.counter}.{self.token:08x}"

    @classmethod
    def from_name(cls, name: str) -> Self:
        version = cls.parse(name)
        assert version is not None, name
        return version

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the version whose file has this name; None if it is no such name."""
        parts = name.split(".")
        try:
            version = cls(int(parts[0]), int(parts[1]), int(parts[2], 16))
        except (ValueError, IndexError):
            return None
        return version if version.name == name else None


def set_seal(version: Version, layout: RecordLayout, record_R: NDArray[np.uint8]) -> None:
    """Seal the record as this version; layout: a sealed one."""
    seal = layout.views(record_R)[SEAL]
    seal[:] = (version.index, version.counter, version.token, 0)
    seal[3] = checksum(record_R)


def read_sealed(path: Path, layout: RecordLayout, record_R: NDArray[np.uint8], io: Io) -> None:
    """Read the file of a version and check it; `OSError` naming file and record if it is not what
    was written.

    layout: a sealed one.
    """
    with _naming_the_record(path):
        read_file(path, record_R, io)
    check_seal(path, layout, record_R)


@contextlib.contextmanager
def _naming_the_record(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        index = Version.from_name(path.name).index
        raise OSError(error.errno, f"record {index}: {error.strerror}", str(path)) from error


def check_seal(path: Path, layout: RecordLayout, record_R: NDArray[np.uint8]) -> None:
    """Raise `OSError` naming file and record unless these bytes are what was written; layout: a
    sealed one.
    """
    version = Version.from_name(path.name)
    *name, value = (int(word) for word in layout.views(record_R)[SEAL])
    (seal,) = (f for f in layout.fields if f.name == SEAL)
    blank = seal.offset_bytes // seal.dtype.itemsize + 3  # the checksum's own place
    if name != [version.index, version.counter, version.token] or not is_checksum(
        value, record_R, blank
    ):
        why = (
            f"record {version.index}: damaged, its content is not what was written; a checkpoint"
            " may have it"
        )
        raise OSError(errno.EIO, why, str(path))


def check_sealed(path: Path, layout: RecordLayout, record_R: NDArray[np.uint8], io: Io) -> None:
    """Read the file of a version as `read_sealed` does, and check its size too."""
    size_bytes = path.stat().st_size
    if size_bytes != layout.record_bytes:
        index = path.name.partition(".")[0]
        why = f"record {index}: damaged, has {size_bytes} of {layout.record_bytes} bytes"
        raise OSError(errno.EIO, why, str(path))
    read_sealed(path, layout, record_R, io)


@dataclass
class VersionStats:
    """writes: versions written; written_bytes: with their seals; recycled: writes into the file
    of a dead version.
    """

    writes: int = 0
    written_bytes: int = 0
    recycled: int = 0


class MappedVersion(NamedTuple):
    """The memory of a version's file, read-only; `close` says that nobody reads it any more."""

    record_R: NDArray[np.uint8]
    close: Callable[[], None]


def remove_store(folder: Path, fingerprint: str) -> bool:
    """Remove the store in `folder` if it has this fingerprint and nobody has it open; return
    whether it was.

    Only what a store has made is removed, its manifest last, so that an interrupted removal can go
    on.
    """
    try:
        manifest = read_manifest(folder)
        if (manifest.get("kind"), manifest.get("fingerprint")) != ("versions", fingerprint):
            return False
        with locked(folder, 0):
            for pins in (folder / PINS).iterdir() if (folder / PINS).is_dir() else ():
                if is_pins(pins):
                    remove_versions(pins)
            remove_versions(folder)
            (folder / MANIFEST).unlink()
            (folder / LOCK).unlink()
    except (PackError, TimeoutError, NotADirectoryError):
        return False
    for place in (folder / PINS, folder):
        with contextlib.suppress(OSError):  # somebody else has something there
            place.rmdir()
    return True


def is_pins(folder: Path) -> bool:
    """Return whether this is, by its name, the pins of a step, or the beginning of them."""
    return (
        folder.name.removesuffix(".tmp").isdigit() and folder.is_dir() and not folder.is_symlink()
    )


def remove_versions(folder: Path) -> None:
    """Remove the versions in a folder, and the folder if nothing else is in it."""
    for entry in list(folder.iterdir()):
        if Version.parse(entry.name) or entry.name.startswith("new-"):
            entry.unlink()
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()


class VersionStore(Closing):
    """The records of `owned` in a folder, to read and to replace; its methods may be called from
    many threads.

    A folder belongs to one store at a time (a lock file, which a killed process loses). Processes
    that share out the records each have a folder of their own. Of one record, one write at a time.
    layout: the arrays given and a seal (index, counter, token, checksum), so `layout.record_bytes`
    may be a page more. io: see `direct_io.io_of`.
    """

    def __init__(
        self, folder: Path, layout: RecordLayout, num_records: int, owned: Iterable[int]
    ) -> None:
        """Read the folder; see `open`."""
        self.path, self.layout, self.num_records, self.fingerprint = folder, layout, num_records, ""
        self.owned = tuple(sorted(set(record_ids(list(owned), num_records).tolist())))
        self.io = io_of(folder)
        self._is_owned = frozenset(self.owned)
        self._checked = set[Version]()  # that were mapped, and are what was written
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()  # no file is recycled while it is held
        self._held = contextlib.ExitStack()
        self._token = secrets.randbits(32)
        self._current: dict[int, Version] = {}
        self._reading: Counter[Version] = Counter()
        self._dead: list[Version] = []  # replaced, but perhaps still the durable one
        self._spare: list[Path] = []  # files to write into
        self._new = 0
        self._counter = 0
        # a later sync may succeed without what this one lost
        self._sync_error: OSError | None = None
        self._stats = VersionStats()
        self._scan()

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
        """Open the store in `folder`, which is made if it is empty or missing. owned: all records
        if not given.

        layout: without the seal. Raises `PackError` if the folder holds other records,
        `TimeoutError` if another process has it open, `OSError` if it may not be written to.
        """
        check(num_records > 0, "num_records", num_records, "must be greater than 0")
        folder, with_seal = Path(folder), sealed(layout)
        expected = manifest_of(with_seal, num_records, fingerprint) | {"kind": "versions"}
        make_folder(folder)
        with contextlib.ExitStack() as held:
            held.enter_context(locked(folder, lock_limit_s))
            try:
                manifest = read_manifest(folder)
            except PackError:
                if any(Version.parse(entry.name) for entry in folder.iterdir()):
                    raise
                (folder / PINS).mkdir(exist_ok=True)
                write_manifest(folder, expected)
                manifest = expected
            check_manifest(folder, manifest, expected)
            check_links(folder, folder / MANIFEST)
            store = cls(
                folder, with_seal, num_records, range(num_records) if owned is None else owned
            )
            store.fingerprint = fingerprint
            store._held = held.pop_all()
        return store

    def fill(self, fill: Fill) -> None:
        """Let `fill` write every owned record anew, into writable, zeroed arrays by name."""
        record_R = self.layout.zeros()
        for index in self.owned:
            record_R[:] = 0
            fill(index, self.layout.views(record_R))
            self.write(index, record_R)
        self.sync()

    def read_into(self, index: int, record_R: NDArray[np.uint8]) -> None:
        """Read the current version into `record_bytes` writable bytes at a page-aligned address.

        Raises `OSError` naming file and record where the file is short, unreadable, or not what was
        written.
        """
        self._check_owned(index)
        check_buffer(record_R, self.layout.record_bytes)
        version = self._begin_reading(index)
        try:
            self.read_version(self.path / version.name, record_R)
        finally:
            self._end_reading(version)

    def map_version(self, index: int) -> MappedVersion:
        """Return the current version's own memory; what is written meanwhile is another version,
        elsewhere.

        A version is checked when it is mapped for the first time. Errors as of `read_into`.
        """
        self._check_owned(index)
        version = self._begin_reading(index)
        path = self.path / version.name
        try:
            with _naming_the_record(path):
                record_R = map_file(path, self.layout.record_bytes)
            if version not in self._checked:
                check_seal(path, self.layout, record_R)
                self._checked.add(version)
        except OSError:
            self._end_reading(version)
            raise
        return MappedVersion(record_R, partial(self._end_reading, version))

    def _begin_reading(self, index: int) -> Version:
        """Return the current version, whose file is not written into until `_end_reading`."""
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
        """Read the file of a version, here or in a checkpoint, and check it; errors as of
        `read_into`.
        """
        read_sealed(
            path, self.layout, record_R, self.io if path.is_relative_to(self.path) else "buffered"
        )

    def write(self, index: int, record_R: NDArray[np.uint8]) -> None:
        """Make this the current version; it is whole on the device when this returns, and its name
        after `sync`.

        The seal in `record_R` is set. Every `SYNC_EVERY` writes sync themselves. When it raises
        `OSError`, nothing has changed, or a sync has failed: then this, `sync` and `pin` raise that
        error from now on.
        """
        self._check_owned(index)
        check_buffer(record_R, self.layout.record_bytes)
        self._check_synced()
        with self._lock:
            self._counter += 1
            version = Version(index, self._counter, self._token)
            self._new += not self._spare
            path, recycled = (
                (self._spare.pop(), 1) if self._spare else (self.path / f"new-{self._new}", 0)
            )
        set_seal(version, self.layout, record_R)
        try:
            write_file(path, record_R, self.io)
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
        """Make all that was written durable under its name; the files of dead versions may then
        be written into.
        """
        with self._sync_lock:
            self._check_synced()
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
                self._bury(version)

    def pin(self, name: str, only: Collection[int] | None = None) -> list[str]:
        """Link all current versions, or those of `only`, into a new folder under `pins`; return
        their names.

        Takes time by the number of records, none by their bytes. The folder gets its name when it
        is complete and durable.
        """
        self._check_synced()
        folder, half = self.path / PINS / name, self.path / PINS / f"{name}.tmp"
        for leftover in (half, folder):  # of a save that did not come to its end
            if leftover.exists():
                remove_folder(leftover)
        make_folder(half.parent)
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

    def restore(self, files: Mapping[int, Path], *, partial: bool = False) -> None:
        """Make these versions of the owned records the current ones, and forget all others.

        Files on the same file system are linked, others copied and checked. Killed at any time, it
        can be done again.
        partial: `files` may lack some records, which are then as if they had never been written.
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
                    target.unlink()  # a dead version's file keeps its name while it is written into
                if not link(source, target):
                    if record_R is None:
                        record_R = self.layout.zeros()
                    self.read_version(source, record_R)
                    copy = self.path / "new-0"
                    write_file(copy, record_R, self.io)
                    copy.rename(target)
            fsync(self.path)
            for entry in self.path.iterdir():
                if Version.parse(entry.name) and entry.name not in wanted:
                    entry.unlink()
            fsync(self.path)
            with self._lock:
                self._current, self._dead = {}, []
                self._checked.clear()
                self._scan()

    def stats(self) -> VersionStats:
        with self._lock:
            return replace(self._stats)

    def close(self) -> None:
        """Sync and give the folder free; no thread may be reading or writing. A sync's error is
        not raised twice.
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

    def _check_synced(self) -> None:
        if self._sync_error is not None:
            raise self._sync_error

    def _check_owned(self, index: int) -> None:
        if index not in self._is_owned:
            raise ValueError(
                f"index = {index}: must be one of the {len(self.owned)} records that {self.path}"
                " owns"
            )

    def _scan(self) -> None:
        """Make the newest version of every owned record the current one; all other files may be
        written into.
        """
        # a process killed before it did may have left a newest version without a durable name
        fsync(self.path)
        older: list[Version] = []
        for entry in self.path.iterdir():
            version = Version.parse(entry.name)
            if version is None:
                if entry.name.startswith("new-"):
                    entry.unlink()
                continue
            self._counter = max(self._counter, version.counter)
            if version.index not in self._is_owned:
                continue  # until `restore`, which says whose it is now
            other = self._current.get(version.index, version)
            if other != version:
                older.append(min(version, other))
            self._current[version.index] = max(version, other)
        self._spare = [
            path for path in (self.path / version.name for version in older) if self._is_free(path)
        ]

    def _bury(self, version: Version) -> None:
        """Keep the file of a dead version to write into, unless a checkpoint still has it."""
        with self._lock:
            if self._reading[version]:
                self._dead.append(version)
                return
            del self._reading[version]
            self._checked.discard(version)
        path = self.path / version.name
        # somebody took it away; the record has a newer one
        with contextlib.suppress(FileNotFoundError):
            if self._is_free(path):
                with self._lock:
                    self._spare.append(path)

    def _is_free(self, path: Path) -> bool:
        """Return whether only this folder has the file; if not, only the others have it from now
        on.
        """
        if path.stat().st_nlink == 1:
            return True
        path.unlink()
        return False
