"""Immutable records on NVMe: equal-sized, page-aligned blocks of one file, read with O_DIRECT.

A pack is a folder with a data file and `manifest.json`, which names the data file and holds its
layout and the checksum of each record. The manifest is written last, by rename, after the data is
durable: a folder without a manifest holds no pack. A lock (`pack.lock`) lets one process at a time
pack a folder. `offload/residency.py` packs a served checkpoint's experts.

Legend:
  M  records in host memory
  N  records of a pack
  R  bytes of a record
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.memory.buffers import PAGE_BYTES, Allocate, Slots, allocate_slots
from jmoe.memory.checksum import checksum
from jmoe.memory.closing import Closing
from jmoe.memory.direct_io import (
    NOT_SUPPORTED,
    check_buffer,
    fsync,
    is_byte_addressable,
    make_folder_durably,
    map_file,
    name_free_space_in_errors,
    open_direct_if_possible,
    read_fully_at,
    set_size_and_reserve_space,
    write_fully_at,
)
from jmoe.memory.record_layout import RecordLayout
from jmoe.types import JsonObject

MANIFEST = "manifest.json"
LOCK = "pack.lock"
FORMAT = 2

Fill = Callable[[int, dict[str, np.ndarray]], None]

log = logging.getLogger("jmoe")


class PackError(ValueError):
    """A folder holds no usable pack: none, an incomplete or damaged one, or other records."""


@dataclass(frozen=True)
class HostRecords:
    """Records in host memory: `slots_MR[m]` holds record `owned[m]`, of `num_records` in all.

    host_bytes: bytes of host memory, 0 if a file is mapped. check: called with a record number
    before the record is read; raises if the record is damaged.
    """

    layout: RecordLayout
    slots_MR: Slots
    num_records: int
    owned: tuple[int, ...]
    host_bytes: int
    check: Callable[[int], None] | None = None

    @classmethod
    def allocate_and_fill(
        cls,
        layout: RecordLayout,
        num_records: int,
        fill: Fill,
        owned: Iterable[int] | None = None,
        allocate: Allocate = allocate_slots,
    ) -> Self:
        """Return newly allocated records, each written by `fill` (see `RecordStore.open_or_pack`).

        owned: record numbers, None for all.
        """
        records = tuple(range(num_records) if owned is None else owned)
        slots_MR = allocate(len(records), layout.record_bytes)
        for index, record_R in zip(records, slots_MR, strict=True):
            fill(index, layout.views(record_R))
        return cls(layout, slots_MR, num_records, records, len(records) * layout.record_bytes)

    @cached_property
    def _slot_by_record(self) -> dict[int, int]:
        return {index: slot for slot, index in enumerate(self.owned)}

    def slot_of(self, index: int) -> int:
        """Return m such that `slots_MR[m]` holds the record; raise `ValueError` if the process does
        not own it.
        """
        check(
            index in self._slot_by_record,
            "index",
            index,
            "must be one of the records that this process owns",
        )
        return self._slot_by_record[index]


class RecordStore(Closing):
    """A pack open for reading; its methods are thread-safe.

    `RecordStore.open_or_pack` opens a folder's pack, or makes it first; `RecordStore.open` only
    opens. io: how records are read: "O_DIRECT", "mapped" if the file is memory (tmpfs, DAX), or
    "buffered: REASON" if the file system refuses O_DIRECT.
    """

    def __init__(
        self, path: Path, layout: RecordLayout, sums_N: NDArray[np.uint64], repair: Fill | None
    ) -> None:
        """Open the data file; callers use `open` or `open_or_pack`."""
        self.path, self.layout, self.num_records = path, layout, sums_N.size
        self.owned = tuple(range(self.num_records))
        self._sums_N, self._repair = sums_N, repair
        self._fd, self.io = _open_for_reading(path)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        layout: RecordLayout,
        num_records: int,
        *,
        fingerprint: str,
        repair: Fill | None = None,
    ) -> Self:
        """Return the pack in `folder`, opened.

        fingerprint: identifies the source of the records. repair: a function that writes a damaged
        record again, like `fill` of `open_or_pack`; any thread may call it. Raises `PackError` if
        the folder has no complete pack with this layout, number of records and fingerprint.
        """
        folder = Path(folder)
        expected = make_manifest(layout, num_records, fingerprint)
        for last_try in (False, True):
            manifest = read_manifest(folder)
            check_manifest(folder, manifest, expected)
            path = folder / str(manifest.get("file"))
            try:
                store = cls(path, layout, _read_checksums(folder, manifest), repair)
            except FileNotFoundError as error:
                if last_try:
                    raise PackError(
                        f"{folder}: {path.name}, which the manifest names, is missing"
                    ) from error
                continue  # another process may have replaced the pack between the two opens
            size_bytes = os.fstat(store._fd).st_size
            if size_bytes != num_records * layout.record_bytes:
                store.close()
                raise PackError(
                    f"{path}: {size_bytes} bytes, expected {num_records} records of"
                    f" {layout.record_bytes} bytes"
                )
            return store
        raise AssertionError("unreachable")

    @classmethod
    def open_or_pack(
        cls,
        folder: str | Path,
        layout: RecordLayout,
        num_records: int,
        fill: Fill,
        *,
        fingerprint: str,
        lock_limit_s: float = 3600.0,
        repair: Fill | None = None,
    ) -> Self:
        """Return the pack in `folder`, opened; make it first unless a complete one with this
        fingerprint exists.

        fill(index, views) writes record `index` into writable, zeroed arrays by name; it is called
        once per record, in order. fingerprint: identifies the source of the records; a pack with
        another one is replaced. If the process dies, the folder keeps its previous state. Processes
        that pack the same folder wait for each other for up to `lock_limit_s`, and all but the
        first find the pack done. repair: see `open`.

        Raises `OSError` (ENOSPC) naming the bytes needed and free if they do not suffice, before
        anything is written, or if the disk fills up later. Raises `TimeoutError` if another process
        holds the lock too long.
        """
        check(num_records > 0, "num_records", num_records, "must be greater than 0")
        folder = Path(folder)
        with contextlib.suppress(PackError):  # before any write: the folder may be read-only
            return cls.open(folder, layout, num_records, fingerprint=fingerprint, repair=repair)
        make_folder_durably(folder)
        with folder_lock(folder, lock_limit_s):
            with contextlib.suppress(PackError):  # another process made it meanwhile
                return cls.open(folder, layout, num_records, fingerprint=fingerprint, repair=repair)
            _remove_leftovers(folder)
            path = folder / f"records-{secrets.token_hex(8)}.bin"
            try:
                sums_N = _write_records(path, layout, num_records, fill)
                manifest = make_manifest(layout, num_records, fingerprint) | {"file": path.name}
                write_manifest(
                    folder,
                    manifest
                    | {"sums": sums_N.tobytes().hex(), "sums_digest": _hash_checksums(sums_N)},
                )
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            _remove_leftovers(folder)  # the pack that was replaced
            return cls.open(folder, layout, num_records, fingerprint=fingerprint, repair=repair)

    def read_into(self, index: int, record_R: NDArray[np.uint8]) -> None:
        """Read one record into `record_bytes` writable bytes at a page-aligned address, and check
        it.

        A damaged or unreadable record is rebuilt by `repair` and written back to the file. A file
        that its file server no longer knows (ESTALE) is opened again. Raises `OSError` naming file
        and record if the file is too short or the repair fails.
        """
        if not 0 <= index < self.num_records:
            raise ValueError(f"index = {index}: must be in [0, {self.num_records})")
        check_buffer(record_R, self.layout.record_bytes)
        try:
            self._read(index, record_R)
            if checksum(record_R) == self._sums_N[index]:
                return
            why = "its content is not what was written"
        except OSError as error:
            if self._repair is None or self._has_wrong_size():
                raise
            why = str(error.strerror)
        self._repair_record(index, record_R, why)

    def _read(self, index: int, record_R: NDArray[np.uint8]) -> None:
        """Read one record unchecked; open the file again if the file server has forgotten it."""
        where = index * self.layout.record_bytes, self.path, f"reading record {index}"
        try:
            read_fully_at(self._fd, record_R, *where)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            again, _ = _open_for_reading(self.path)
            os.dup2(again, self._fd, inheritable=False)  # at once for all threads
            os.close(again)
            read_fully_at(self._fd, record_R, *where)

    def _has_wrong_size(self) -> bool:
        """Return True if the file's size is not that of its records; False if it is unreadable."""
        try:
            return os.fstat(self._fd).st_size != self.num_records * self.layout.record_bytes
        except OSError:
            return False

    def map_records(self) -> HostRecords:
        """Return all records, mapped without a copy, valid while the store is open.

        Each record is checked, and repaired if damaged, before its first use.
        """
        slots_MR = map_file(self.path, self.num_records * self.layout.record_bytes).reshape(
            self.num_records, -1
        )
        checked = np.zeros(self.num_records, np.bool_)

        def check_record(index: int) -> None:
            # reading beyond the end of a mapped file kills the process (SIGBUS)
            if (size_bytes := os.fstat(self._fd).st_size) < slots_MR.nbytes:
                why = f"the file ends after {size_bytes} of {slots_MR.nbytes} bytes"
                raise OSError(errno.EIO, f"reading record {index}: {why}", str(self.path))
            if checked[index]:
                return
            if checksum(slots_MR[index]) != self._sums_N[index]:
                self._repair_record(
                    index, self.layout.zeros(), "its content is not what was written"
                )
                if checksum(slots_MR[index]) != self._sums_N[index]:
                    raise OSError(
                        errno.EIO, f"record {index}: damaged, and cannot be mended", str(self.path)
                    )
            checked[index] = True

        return HostRecords(self.layout, slots_MR, self.num_records, self.owned, 0, check_record)

    def _repair_record(self, index: int, record_R: NDArray[np.uint8], why: str) -> None:
        """Fill `record_R` by `repair`, and write it to the file; a failed write only logs a
        warning.

        Raises `OSError` if there is no repair function or the source has changed.
        """
        damaged = f"record {index}: damaged, {why}"
        if self._repair is None:
            raise OSError(errno.EIO, damaged, str(self.path))
        record_R[:] = 0
        try:
            self._repair(index, self.layout.views(record_R))
        except (OSError, ValueError) as error:
            raise OSError(
                errno.EIO, f"{damaged}, and its source cannot be read: {error}", str(self.path)
            ) from error
        if checksum(record_R) != self._sums_N[index]:
            raise OSError(errno.EIO, f"{damaged}, and its source has changed", str(self.path))
        try:
            fd = os.open(
                self.path,
                os.O_WRONLY | os.O_CLOEXEC | (os.O_DIRECT if self.io == "O_DIRECT" else 0),
            )
            try:
                write_fully_at(fd, record_R, index * self.layout.record_bytes)
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            log.warning(
                "%s: %s; read from its source, but not mended: %s", self.path, damaged, error
            )
        else:
            log.warning("%s: %s; mended from its source", self.path, damaged)

    def close(self) -> None:
        """Close the file; no thread may be reading."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_for_reading(path: Path) -> tuple[int, str]:
    """Return (descriptor, how it reads), after a test read with O_DIRECT."""
    if is_byte_addressable(path.parent):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), "mapped"
    fd, direct = open_direct_if_possible(path, os.O_RDONLY)
    if not direct:
        return fd, "buffered: the file system refuses O_DIRECT"
    try:
        os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return (
            os.open(path, os.O_RDONLY | os.O_CLOEXEC),
            "buffered: O_DIRECT reads of 4096 bytes are refused",
        )
    return fd, "O_DIRECT"


def make_manifest(layout: RecordLayout, num_records: int, fingerprint: str) -> JsonObject:
    """Return the manifest of a folder with `num_records` records of this layout and fingerprint."""
    return {
        "format": FORMAT,
        "layout": layout.describe_arrays(),
        "record_bytes": layout.record_bytes,
        "num_records": num_records,
        "fingerprint": fingerprint,
    }


def read_manifest(folder: Path) -> JsonObject:
    """Return the folder's manifest; raise `PackError` if there is none or it is unreadable."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise PackError(f"{folder}: no {MANIFEST}, so no complete pack") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PackError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise PackError(f"{path}: must be a JSON object")
    return manifest


def check_manifest(folder: Path, manifest: JsonObject, expected: JsonObject) -> None:
    """Raise `PackError` naming the fields in which a manifest differs from `expected`."""
    differ = [key for key in expected if manifest.get(key) != expected[key]]
    if differ:
        was = {key: manifest.get(key) for key in differ}
        raise PackError(
            f"{folder}: holds {was}, expected { {key: expected[key] for key in differ} }"
        )


def write_manifest(folder: Path, manifest: JsonObject) -> None:
    """Replace the folder's manifest atomically and durably."""
    fsync(folder)  # the data file's name must be durable before the manifest's
    path = folder / f"{MANIFEST}.tmp"
    path.write_text(json.dumps(manifest, indent=1))
    fsync(path)
    path.replace(folder / MANIFEST)
    fsync(folder)


def _read_checksums(folder: Path, manifest: JsonObject) -> NDArray[np.uint64]:
    """Return uint64 [N], the records' checksums; raise `PackError` if missing or damaged."""
    try:
        sums_N = np.frombuffer(bytes.fromhex(manifest["sums"]), np.uint64)
    except (KeyError, TypeError, ValueError) as error:
        raise PackError(f"{folder}: {MANIFEST} has no checksums of the records") from error
    if sums_N.size != manifest["num_records"] or _hash_checksums(sums_N) != manifest.get(
        "sums_digest"
    ):
        raise PackError(f"{folder}: the checksums in {MANIFEST} are damaged")
    return sums_N


def _hash_checksums(sums_N: NDArray[np.uint64]) -> str:
    return hashlib.blake2b(sums_N.tobytes(), digest_size=16).hexdigest()


def _write_records(
    path: Path, layout: RecordLayout, num_records: int, fill: Fill
) -> NDArray[np.uint64]:
    """Write the data file; return uint64 [N], the checksums of its records."""
    sums_N = np.zeros(num_records, np.uint64)
    total_bytes = num_records * layout.record_bytes
    free_bytes = shutil.disk_usage(path.parent).free
    needs = f"{num_records} records need {total_bytes} bytes"
    if total_bytes > free_bytes:
        raise OSError(errno.ENOSPC, f"{needs}, {free_bytes} are free", str(path.parent))
    record_R = layout.zeros()
    views = layout.views(record_R)
    fd, _ = open_direct_if_possible(path, os.O_WRONLY | os.O_CREAT)
    try:
        with name_free_space_in_errors(path, needs):
            set_size_and_reserve_space(fd, total_bytes)
        for index in range(num_records):
            record_R[:] = 0
            fill(index, views)
            sums_N[index] = checksum(record_R)
            with name_free_space_in_errors(path, needs):
                write_fully_at(fd, record_R, index * layout.record_bytes)
        with name_free_space_in_errors(path, needs):
            os.fsync(fd)
    finally:
        os.close(fd)
    return sums_N


def _remove_leftovers(folder: Path) -> None:
    """Delete data files that the manifest does not name; the caller holds the lock."""
    try:
        named = read_manifest(folder).get("file")
    except PackError:
        named = None
    for path in folder.glob("records-*.bin"):
        if path.name != named:
            path.unlink()


@contextlib.contextmanager
def folder_lock(folder: Path, limit_s: float, name: str = LOCK) -> Iterator[None]:
    """Return a context manager that holds the folder's lock, which the kernel frees if the process
    dies.

    If the file system has no locks, a warning says so and the block runs unlocked. Raises
    `TimeoutError` if another process holds the lock for `limit_s` seconds.
    """
    path = folder / name
    deadline_s = time.monotonic() + limit_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"{path}: another process has held it for more than {limit_s} s"
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, *NOT_SUPPORTED):
                    raise
                log.warning(
                    "%s: cannot be locked (%s): let one process at a time work there",
                    folder,
                    error.strerror,
                )
                break
        yield
