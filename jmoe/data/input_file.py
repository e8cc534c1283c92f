"""One input file: where it lies, how it is stored, and its text in UTF-8.

Byte positions refer to the UTF-8 form of a file: a compressed file is unpacked as it is read, a
file in another encoding is converted in memory, and records are lines of JSONL. A byte order mark
at the head of a file is no part of its text.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jmoe.data.stored_files import Storage, detect_storage, open_text, text_suffix
from jmoe.memory.direct_io import name_file_in_errors
from jmoe.types import Json

SHARD_SUFFIX = ".bin"
RECORD_SHARD_SUFFIX = ".array_record"
SHARD_SUFFIXES = (SHARD_SUFFIX, RECORD_SHARD_SUFFIX)
JSON_SUFFIX = ".json"  # an array of records, or JSONL
RECORD_SUFFIXES = (".jsonl", ".ndjson", JSON_SUFFIX)
MARK = "\ufeff"  # a byte order mark as text
PIECE_BYTES = 1 << 20  # approximate size of the pieces of longer documents
# Progress callback (activity, done, total): bytes, or a number of files if `total` is 0.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class InputFile:
    """One text file or token shard.

    name: path relative to the folder or glob that was given. size_bytes: size of its UTF-8 form,
    once the file has been checked.
    """

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int
    field: str | None = None  # name of a record's text field; None for plain text
    encoding: str = "utf-8"
    is_array: bool = False  # whether records are elements of a JSON array instead of lines
    storage: Storage = "plain"
    has_samples: bool = False  # whether records are samples for fine-tuning instead of texts
    has_preferences: bool = False  # whether these samples are preferences
    has_mark: bool = False  # whether the file begins with a byte order mark
    # size of the training prefix; the rest is held out, see `split_off_held_out`
    train_bytes: int = 0

    def open(self) -> BinaryIO:
        """Return a binary stream of the text in UTF-8, without a byte order mark; records are one a
        line.

        Errors of reading the stream name the file.
        """
        skipped_bytes = len(codecs.BOM_UTF8) if self.has_mark else 0
        in_place = self.storage == "plain" or not skipped_bytes
        if self.encoding == "utf-8" and not self.is_array and in_place:
            return self.open_uncompressed(skipped_bytes)
        with self.open_uncompressed() as file:
            text = file.read().decode(self.encoding).removeprefix(MARK)
        return io.BytesIO(_json_array_to_jsonl(text) if self.is_array else text.encode())

    def open_uncompressed(self, skipped_bytes: int = 0) -> BinaryIO:
        """Return a binary stream of the file's text in its own encoding, from byte `skipped_bytes`
        on if the file is not compressed.
        """
        if self.storage != "plain":
            return open_text(self.path, self.storage)
        return io.BufferedReader(_FileFromOffset(self.path, skipped_bytes), PIECE_BYTES)

    @property
    def suffix(self) -> str:
        """The suffix that tells the kind of text; see `text_suffix`."""
        return text_suffix(self.path, self.storage)

    def describe_line(self, number: int) -> str:
        """Return "FILE:LINE", or "FILE: record NUMBER" in a JSON array or a Parquet file. number:
        counted from 1.
        """
        by_record = self.is_array or self.storage == "parquet"
        return f"{self.path}: record {number}" if by_record else f"{self.path}:{number}"

    @property
    def random_rank(self) -> str:
        """A hash of the name: the file's pseudo-random rank, the same on every machine."""
        return hashlib.sha256(self.name.encode()).hexdigest()


class _FileFromOffset(io.FileIO):
    """A file from byte `first` on, whose errors name it. Positions count from there."""

    def __init__(self, path: Path, first: int) -> None:
        super().__init__(path)
        self._first = first
        self.seek(0)

    def readinto(self, buffer: Any) -> int | None:
        with name_file_in_errors(str(self.name)):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with name_file_in_errors(str(self.name)):
            return super().readall()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        offset += self._first if whence == os.SEEK_SET else 0
        return super().seek(offset, whence) - self._first

    def tell(self) -> int:
        return super().tell() - self._first


def make_input_file(path: Path, root: Path, field: str) -> InputFile:
    """Return the file `path` under the folder `root`. Raises ValueError naming one that cannot be
    read.
    """
    name, wrong = path.relative_to(root).as_posix(), f"data.path = {str(path)!r}: "
    try:
        name.encode()
        status = path.stat()
    except UnicodeError as error:
        raise ValueError(f"{wrong}must have a name in UTF-8; rename it") from error
    except OSError as error:
        raise ValueError(f"{wrong}{error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):  # reading it might block or never end
        raise ValueError(
            f"{wrong}must be a file, and is a pipe, a socket or a device; leave it out"
        )
    storage = detect_storage(path)
    has_records = text_suffix(path, storage) in RECORD_SUFFIXES
    return InputFile(
        path,
        name,
        status.st_size,
        status.st_mtime_ns,
        field if has_records else None,
        storage=storage,
    )


def _json_array_to_jsonl(array: str) -> bytes:
    """Return the elements of a JSON array as JSONL."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in parse_json_text(array))


def parse_json_text(text: str | bytes) -> Json:
    """Return the parsed JSON. Raises ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply to be read") from error
