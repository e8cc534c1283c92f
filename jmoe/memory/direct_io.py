"""File input and output of whole records, with O_DIRECT if the file system allows it.

On file systems whose files are memory (tmpfs, DAX) files are mapped instead. The record stores in
this folder use this; deploy, data and run use `fsync` and the folder functions.

Legend:
  R  bytes of a record
"""

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jmoe.memory.buffers import PAGE_BYTES

Io = Literal["O_DIRECT", "buffered", "mapped"]
# errors of file systems that lack an operation
NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
# errors of a folder that is not writable
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def name_file_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name `path` in an `OSError` of the block that names no file, such as that of a read."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def choose_io(folder: Path) -> Io:
    """Return how to read and write the files in a folder.

    "mapped" on a file system whose files are memory (tmpfs, or a DAX mount), where a system call
    would only copy; "buffered" if the file system refuses O_DIRECT; otherwise "O_DIRECT". Creates
    and deletes a probe file.
    """
    if is_byte_addressable(folder):
        return "mapped"
    probe = folder / f".direct-{os.getpid()}"
    try:
        fd, direct = open_direct_if_possible(probe, os.O_RDWR | os.O_CREAT)
        os.close(fd)
    finally:
        probe.unlink(missing_ok=True)
    return "O_DIRECT" if direct else "buffered"


def open_direct_if_possible(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file with O_DIRECT, or without if the file system refuses; return (descriptor, whether
    O_DIRECT).
    """
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666), True
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o666), False


def set_size_and_reserve_space(fd: int, size_bytes: int) -> None:
    """Set a file's size, and reserve its disk space if the file system can.

    FUSE, vfat and old NFS cannot reserve space. Raises `OSError` (ENOSPC) if the disk is full.
    """
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    os.ftruncate(fd, size_bytes)


def is_byte_addressable(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return True if the folder's files are memory that can be mapped (tmpfs, ramfs or DAX).

    mounts: the kernel's table of mounts; if it does not exist, the answer is False.
    """
    if not mounts.is_file():
        return False
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        if mount.split()[2] == wanted:
            return kind in ("tmpfs", "ramfs") or bool(
                {"dax", "dax=always"} & set(options.split(","))
            )
    return False


def read_file_start(path: Path, record_R: NDArray[np.uint8], io: Io) -> None:
    """Fill `record_R` from the beginning of a file.

    Raises `OSError` naming the file if it is too short or unreadable.
    """
    if io == "mapped":
        np.copyto(record_R, map_file(path, record_R.nbytes))
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if io == "O_DIRECT" else 0))
    try:
        read_fully_at(fd, record_R, 0, path, "reading")
    finally:
        os.close(fd)


def map_file(path: Path, num_bytes: int) -> NDArray[np.uint8]:
    """Return the first `num_bytes` bytes of a file, read-only and mapped without a copy.

    The mapping lives as long as the array or a view of it. A write to the file changes the array;
    deleting or renaming the file does not. Raises `OSError` naming the file if it is too short.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if (size_bytes := os.fstat(fd).st_size) < num_bytes:
            raise OSError(
                errno.EIO,
                f"reading: the file ends after {size_bytes} of {num_bytes} bytes",
                str(path),
            )
        memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
    return np.frombuffer(memory, np.uint8)


def write_file_durably(path: Path, record_R: NDArray[np.uint8], io: Io) -> None:
    """Write `record_R` as the whole content of a file, in place if the file exists, and flush it to
    the device.

    Disk space is reserved before the first byte is written, so that a full disk fails early. Raises
    `OSError` (ENOSPC) naming the bytes needed and free.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if io == "O_DIRECT" else 0)
    fd = os.open(path, flags, 0o666)
    try:
        with name_free_space_in_errors(path, f"{path.name} needs {record_R.nbytes} bytes"):
            if os.fstat(fd).st_size != record_R.nbytes:
                set_size_and_reserve_space(fd, record_R.nbytes)
            if io == "mapped":
                with mmap.mmap(fd, record_R.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE) as memory:
                    np.copyto(np.frombuffer(memory, np.uint8), record_R)
                    memory.flush()
            else:
                write_fully_at(fd, record_R, 0)
                os.fdatasync(fd)
    finally:
        os.close(fd)


def read_fully_at(
    fd: int, record_R: NDArray[np.uint8], first_byte: int, path: Path, action: str
) -> None:
    """Fill `record_R` from byte `first_byte` of an open file on.

    action: for error messages, such as "reading record 3". Raises `OSError` naming the action, the
    byte and the file if the file is too short or unreadable.
    """
    memory, done_bytes = record_R.data, 0
    while done_bytes < record_R.nbytes:
        try:
            count = os.preadv(fd, [memory[done_bytes:]], first_byte + done_bytes)
        except OSError as error:
            raise OSError(
                error.errno, f"{action} (at byte {first_byte}): {error.strerror}", str(path)
            ) from error
        if count == 0:
            why = f"{action} (at byte {first_byte}): the file ends after {done_bytes} bytes of it"
            raise OSError(errno.EIO, why, str(path))
        done_bytes += count


def write_fully_at(fd: int, record_R: NDArray[np.uint8], first_byte: int) -> None:
    """Write `record_R` to an open file from byte `first_byte` on."""
    memory, done_bytes = record_R.data, 0
    while done_bytes < record_R.nbytes:
        done_bytes += os.pwritev(fd, [memory[done_bytes:]], first_byte + done_bytes)


def check_buffer(record_R: NDArray[np.uint8], record_bytes: int) -> None:
    """Raise `ValueError` unless `record_R` is `record_bytes` writable bytes at a page-aligned
    address.
    """
    if record_R.nbytes != record_bytes or not record_R.flags.writeable:
        raise ValueError(f"record_R: must be {record_bytes} writable bytes, has {record_R.nbytes}")
    if record_R.ctypes.data % PAGE_BYTES:
        raise ValueError(f"record_R: must begin at a multiple of {PAGE_BYTES} bytes")


def fsync(path: Path) -> None:
    """Make a file's content durable, or a folder's entries (created, renamed and deleted names).

    Some network and FUSE file systems cannot flush a folder; this is ignored. Other errors name the
    path.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in NOT_SUPPORTED and path.is_dir():
            return
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Make everything in a folder durable, before a rename publishes the folder."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def try_hard_link(source: Path, target: Path) -> bool:
    """Create a hard link `target` to `source`; return False if that is not possible.

    That is the case if the source does not exist, if the target is on another file system, or if
    the file system has no (more) links.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (
            errno.ENOENT,
            errno.EXDEV,
            errno.EPERM,
            errno.EMLINK,
            *NOT_SUPPORTED,
        ):
            raise
        return False
    return True


def check_hard_links(folder: Path, file: Path) -> None:
    """Raise `OSError` naming the folder unless its file system supports hard links.

    file: an existing file in the folder, to link to.
    """
    probe = folder / ".link"
    probe.unlink(missing_ok=True)  # left by a process that was killed
    try:
        if not try_hard_link(file, probe):
            why = (
                "this file system has no hard links, which checkpoints of records need: give"
                " tiers.path a local disk"
            )
            raise OSError(errno.EOPNOTSUPP, why, str(folder))
    finally:
        probe.unlink(missing_ok=True)


def make_folder_durably(folder: Path) -> None:
    """Create a folder and its missing parents, with durable names, unless the folder exists."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        fsync(path.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder with all its content; an `OSError` names the folder."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise OSError(error.errno, f"deleting: {error.strerror}", str(folder)) from error


@contextlib.contextmanager
def name_free_space_in_errors(path: Path, needs: str) -> Iterator[None]:
    """Return a context manager that adds the bytes needed and free to an `OSError` of writing
    `path`.

    needs: a text such as "NAME needs N bytes".
    """
    try:
        yield
    except OSError as error:
        free_bytes = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno, f"{error.strerror}: {needs}, {free_bytes} are free", str(path.parent)
        ) from error
