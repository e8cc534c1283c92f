"""A real FUSE file system without what some lack, as a context manager: python -m tests.fuse FOLDER
PLACE LACKS...

The program speaks the kernel's protocol over /dev/fuse and passes every call on to a folder, so
that nothing needs to be installed. A file that is deleted while it is open stays in its folder,
under another name, as with libfuse and NFS.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

# hard links; opening past the page cache; chmod; mappings that are shared; flushing a folder; names
# that differ in case or have characters of their own, as on vfat; times finer than its two seconds.
# Symbolic links are always lacking.
Lack = Literal[
    "links", "O_DIRECT", "modes", "shared_mappings", "fsync_of_folders", "names", "fine_times"
]
REFUSED_IN_NAMES = frozenset('\\:*?"<>|')
ROOT = Path(__file__).resolve().parent.parent
HEADER = struct.Struct("<IIQQIIII")
ANSWER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
SET_ATTRIBUTES, TRANSFER, DIRECT_IO = struct.Struct("<II6Q8I"), struct.Struct("<QQIIQII"), 1
MODE, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW = (1 << bit for bit in (0, 3, 4, 5, 7, 8))
BUFFER_BYTES, MAX_WRITE_BYTES, VALID_S = 1 << 20, 1 << 17, 1
UNANSWERED = (2, 36, 42)  # forget, interrupt, forget many


@contextlib.contextmanager
def fuse(folder: Path, place: Path, *lacks: Lack) -> Iterator[Path]:
    """Mount at `place` what passes calls on to `folder`; skip the test where that is not
    allowed.
    """
    for path in (folder, place):
        path.mkdir()
    command = [sys.executable, "-m", "tests.fuse", str(folder), str(place), *lacks]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        while not os.path.ismount(place):
            if server.poll() is not None:
                assert server.stderr is not None
                pytest.skip(
                    "cannot mount a FUSE file system here:"
                    f" {server.stderr.read().strip().splitlines()[-1]}"
                )
            time.sleep(0.02)
        yield place
    finally:
        if os.path.ismount(place):
            subprocess.run(["umount", "-l", place], check=True)
        server.kill()
        server.communicate()


class Server:
    """Answers the kernel's calls, one at a time. Nodes are paths below the folder, by number; 1
    is the folder.
    """

    def __init__(self, folder: str, lacks: list[str]) -> None:
        self.folder, self.lacks = folder, lacks
        self.paths, self.nodes = {1: folder}, {folder: 1}
        self.open: Counter[str] = Counter()
        self.files: dict[int, int] = {}  # node of each descriptor
        self.calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: lambda node, name: self._entry(self._below(node, name)),
            3: lambda node, _: self._attributes_answer(self.paths[node]),
            4: self._set_attributes,
            9: self._mkdir,
            10: self._unlink,
            11: lambda node, name: self._forget(self._below(node, name), os.rmdir),
            12: lambda node, data: self._rename(node, data[:8], data[8:]),
            45: lambda node, data: self._rename(node, data[:8], data[16:]),
            13: self._link,
            14: lambda node, data: self._open(node, struct.unpack_from("<I", data)[0]),
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: self._release,
            20: lambda _, data: self._done(os.fsync, struct.unpack_from("<Q", data)[0]),
            25: lambda *_: b"",
            26: self._init,
            27: lambda *_: struct.pack("<QII", 0, 0, 0),
            28: self._read_folder,
            29: lambda *_: b"",
            30: self._flush_folder,
            35: self._create,
        }

    def serve(self, device: int) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(device, BUFFER_BYTES)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                continue  # the caller was interrupted before its call was read
            _, operation, unique, node, *_ = HEADER.unpack_from(request)
            if operation in UNANSWERED:
                continue
            code, content = 0, b""
            try:
                content = self.calls[operation](node, request[HEADER.size :])
            except KeyError:
                code = errno.ENOSYS
            except OSError as error:
                code = error.errno or errno.EIO
            with contextlib.suppress(FileNotFoundError):  # the caller was interrupted
                os.write(device, ANSWER.pack(ANSWER.size + len(content), -code, unique) + content)

    def _init(self, _: int, data: bytes) -> bytes:
        _, _, readahead, _ = struct.unpack_from("<4I", data)
        return struct.pack(
            "<4I2H2I2H8I", 7, 31, readahead, 0, 12, 9, MAX_WRITE_BYTES, 1, 0, 0, *[0] * 8
        )

    def _refuse(self, lack: Lack, code: int) -> None:
        if lack in self.lacks:
            raise OSError(code, os.strerror(code))

    def _done(self, call: Callable[..., object], *arguments: object) -> bytes:
        call(*arguments)
        return b""

    def _below(self, node: int, name: bytes) -> str:
        text = os.fsdecode(name.rstrip(b"\0"))
        if "names" in self.lacks:
            if REFUSED_IN_NAMES & {*text} or text.endswith((" ", ".")):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            there = (one for one in os.listdir(self.paths[node]) if one.lower() == text.lower())
            text = next(there, text)
        return os.path.join(self.paths[node], text)

    def _node(self, path: str) -> int:
        if path not in self.nodes:
            self.nodes[path] = max(self.paths) + 1
            self.paths[self.nodes[path]] = path
        return self.nodes[path]

    def _forget(self, path: str, remove: Callable[[str], object]) -> bytes:
        remove(path)
        self.nodes.pop(path, None)
        return b""

    def _attributes(self, path: str) -> bytes:
        s = os.lstat(path)
        tick_ns = 2 * 10**9 if "fine_times" in self.lacks else 1
        times = [t // tick_ns * tick_ns for t in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        whole, parts = [t // 10**9 for t in times], [t % 10**9 for t in times]
        rest = (s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0)
        return ATTRIBUTES.pack(s.st_ino, s.st_size, s.st_blocks, *whole, *parts, *rest)

    def _attributes_answer(self, path: str) -> bytes:
        return struct.pack("<QII", VALID_S, 0, 0) + self._attributes(path)

    def _entry(self, path: str) -> bytes:
        attributes = self._attributes(path)
        return struct.pack("<4Q2I", self._node(path), 0, VALID_S, VALID_S, 0, 0) + attributes

    def _set_attributes(self, node: int, data: bytes) -> bytes:
        valid, _, _, size_bytes, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = (
            SET_ATTRIBUTES.unpack_from(data)
        )
        path = self.paths[node]
        if valid & MODE:
            self._refuse("modes", errno.EPERM)
            os.chmod(path, stat.S_IMODE(mode))
        if valid & SIZE:
            os.truncate(path, size_bytes)
        if valid & (ATIME | MTIME | ATIME_NOW | MTIME_NOW):
            now, old = time.time_ns(), os.stat(path)
            accessed = (
                now
                if valid & ATIME_NOW
                else atime * 10**9 + atime_ns
                if valid & ATIME
                else old.st_atime_ns
            )
            changed = (
                now
                if valid & MTIME_NOW
                else mtime * 10**9 + mtime_ns
                if valid & MTIME
                else old.st_mtime_ns
            )
            os.utime(path, ns=(accessed, changed))
        return self._attributes_answer(path)

    def _mkdir(self, node: int, data: bytes) -> bytes:
        path = self._below(node, data[8:])
        os.mkdir(path, struct.unpack_from("<I", data)[0])
        return self._entry(path)

    def _unlink(self, node: int, name: bytes) -> bytes:
        path = self._below(node, name)
        if not self.open[path]:
            return self._forget(path, os.unlink)
        return self._move(
            path, os.path.join(self.paths[node], f".fuse_hidden{self.nodes[path]:08x}")
        )

    def _rename(self, node: int, target: bytes, names: bytes) -> bytes:
        old, new = names.rstrip(b"\0").split(b"\0")
        return self._move(self._below(node, old), self._below(struct.unpack("<Q", target)[0], new))

    def _move(self, old: str, new: str) -> bytes:
        os.rename(old, new)
        self.nodes.pop(new, None)
        for path in [path for path in self.nodes if path == old or path.startswith(old + "/")]:
            node, moved = self.nodes.pop(path), new + path[len(old) :]
            self.nodes[moved], self.paths[node] = node, moved
            self.open[moved] = self.open.pop(path, 0)
        return b""

    def _link(self, node: int, data: bytes) -> bytes:
        self._refuse("links", errno.EPERM)
        path = self._below(node, data[8:])
        os.link(self.paths[struct.unpack_from("<Q", data)[0]], path)
        return self._entry(path)

    def _open(self, node: int, flags: int) -> bytes:
        if flags & os.O_DIRECT:
            self._refuse("O_DIRECT", errno.EINVAL)
        file = os.open(self.paths[node], flags & ~os.O_DIRECT & ~os.O_NOFOLLOW)
        self.files[file] = node
        self.open[self.paths[node]] += 1
        return struct.pack("<QII", file, DIRECT_IO if "shared_mappings" in self.lacks else 0, 0)

    def _create(self, node: int, data: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<4I", data)
        path = self._below(node, data[16:])
        if flags & os.O_DIRECT:
            self._refuse("O_DIRECT", errno.EINVAL)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | (flags & os.O_EXCL), stat.S_IMODE(mode)))
        return self._entry(path) + self._open(self._node(path), flags & ~(os.O_CREAT | os.O_EXCL))

    def _read(self, _: int, data: bytes) -> bytes:
        file, first, size_bytes, *_ = TRANSFER.unpack_from(data)
        return os.pread(file, size_bytes, first)

    def _write(self, _: int, data: bytes) -> bytes:
        file, first, size_bytes, *_ = TRANSFER.unpack_from(data)
        return struct.pack("<II", os.pwrite(file, data[TRANSFER.size :][:size_bytes], first), 0)

    def _release(self, _: int, data: bytes) -> bytes:
        (file,) = struct.unpack_from("<Q", data)
        os.close(file)
        path = self.paths[self.files.pop(file)]
        self.open[path] -= 1
        if not self.open[path] and os.path.basename(path).startswith(".fuse_hidden"):
            self._forget(path, os.unlink)
        return b""

    def _read_folder(self, node: int, data: bytes) -> bytes:
        _, first, size_bytes, *_ = TRANSFER.unpack_from(data)
        content = b""
        for number, name in list(enumerate(sorted([".", "..", *os.listdir(self.paths[node])])))[
            first:
        ]:
            text = os.fsencode(name)
            entry = struct.pack("<QQII", 1, number + 1, len(text), 0) + text
            if len(content) + len(entry) + 7 > size_bytes:
                break
            content += entry + b"\0" * (-len(entry) % 8)
        return content

    def _flush_folder(self, *_: object) -> bytes:
        self._refuse("fsync_of_folders", errno.EINVAL)
        return b""

    def _statfs(self, node: int, _: bytes) -> bytes:
        s = os.statvfs(self.paths[node])
        room = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree)
        return struct.pack("<5Q10I", *room, s.f_bsize, s.f_namemax, s.f_frsize, *[0] * 7)


def main(folder: str, place: str, *lacks: str) -> None:
    """Mount, and serve until the file system is unmounted."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"jmoe-test", os.fsencode(place), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
    Server(folder, list(lacks)).serve(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
