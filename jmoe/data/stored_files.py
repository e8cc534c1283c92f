"""Text files as they are stored: plain, compressed with gzip or zstd, or as Parquet, told by their
first bytes.

`open_text` returns the text of each as one stream of bytes; records of a Parquet file are lines of
JSON. Nothing is held in memory but one piece.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from jmoe.memory.direct_io import name_file_in_errors

Storage = Literal["plain", "gzip", "zstd", "parquet"]

_MAGIC: dict[Storage, bytes] = {
    "gzip": b"\x1f\x8b",
    "zstd": b"\x28\xb5\x2f\xfd",
    "parquet": b"PAR1",
}
_SUFFIXES: dict[Storage, tuple[str, ...]] = {
    "gzip": (".gz", ".gzip"),
    "zstd": (".zst", ".zstd"),
    "parquet": (".parquet", ".pq"),
}
STORED_SUFFIXES = frozenset(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
ROWS = 1024  # of a Parquet file, read at once
# fields of samples with objects whose keys differ from record to record
FREE_FORM = ("tools", "tool_calls", "documents", "chat_template_kwargs")
MAX_WINDOW_BYTES = 1 << 31  # of zstd --ultra --long=31


def detect_storage(path: Path) -> Storage:
    """Return how a file is stored, by its first bytes. A file that cannot be read counts as plain:
    the reader of its text names the fault.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4)
            tail = _last_bytes(file, 4)
    except OSError:
        return "plain"
    for storage, magic in _MAGIC.items():
        # text may begin with PAR1; Parquet ends with it too
        if head.startswith(magic) and (storage != "parquet" or tail == magic):
            return storage
    return "plain"


def _last_bytes(file: BinaryIO, count: int) -> bytes:
    file.seek(max(0, file.seek(0, io.SEEK_END) - count))
    return file.read(count)


def text_suffix(path: Path, storage: Storage) -> str:
    """Return the suffix that tells the kind of text in a file: that of NAME.jsonl.gz is `.jsonl`,
    that of a Parquet file too, as its records are read as lines of JSON.
    """
    if storage == "parquet":
        return ".jsonl"
    if storage != "plain" and path.suffix.lower() in _SUFFIXES[storage]:
        return Path(path.stem).suffix
    return path.suffix


def open_text(path: Path, storage: Storage) -> BinaryIO:
    """Return the stream of a stored file's text. It can be read from any position; going back
    starts from the beginning.

    Raises ValueError that names the file if a library is missing, and while reading if the file is
    damaged.
    """
    opener: Callable[[Path], BinaryIO] = {
        "gzip": _open_gzip,
        "zstd": _open_zstd,
        "parquet": _open_parquet,
    }[storage]
    stream = _RestartingStream(path, opener(path), lambda: opener(path))
    return cast("BinaryIO", io.BufferedReader(stream, 1 << 20))


class _RestartingStream(io.RawIOBase):
    """A stream that can be read from any position, over one that can only be read forwards."""

    def __init__(self, path: Path, stream: BinaryIO, open_stream: Callable[[], BinaryIO]) -> None:
        self._path, self._open = path, open_stream
        self._stream, self._position = stream, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            with name_file_in_errors(self._path):
                data = self._stream.read(len(buffer))
        except _damaged_file_error_types() as error:
            raise ValueError(f"{self._path}: damaged, or cut: {error}") from error
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        assert whence in (io.SEEK_SET, io.SEEK_CUR), whence
        if target < self._position:
            self._stream.close()
            self._stream, self._position = self._open(), 0
        skipped = bytearray(1 << 20)
        while self._position < target:
            if not self.readinto(memoryview(skipped)[: target - self._position]):
                break
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _damaged_file_error_types() -> tuple[type[Exception], ...]:
    """Return the errors that damaged files raise, with those of installed libraries."""
    errors: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    with contextlib.suppress(ImportError):
        import zstandard

        errors.append(zstandard.ZstdError)
    with contextlib.suppress(ImportError):
        import pyarrow

        errors.append(pyarrow.ArrowException)
    return tuple(errors)


def _open_gzip(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb"))


def _open_zstd(path: Path) -> BinaryIO:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(
            f"{path}: is compressed with zstd, which needs a library: pip install 'jmoe[data]', or"
            " unzstd FILE unpacks it"
        ) from error
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    file = path.open("rb")  # closed with the stream
    stream = unpacker.stream_reader(file, read_across_frames=True, closefd=True)
    return cast("BinaryIO", stream)


def _open_parquet(path: Path) -> BinaryIO:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: is Parquet, which needs a library: pip install 'jmoe[data]', or write its"
            " records as JSONL: pandas.read_parquet(FILE).to_json(OUT, orient='records',"
            " lines=True)"
        ) from error
    damage: tuple[type[Exception], ...] = (OSError, *_damaged_file_error_types())
    try:
        file = parquet.ParquetFile(path)
    except damage as error:
        raise ValueError(f"{path}: not readable Parquet: {error}") from error

    def lines() -> Iterator[bytes]:
        try:
            with file:
                for batch in file.iter_batches(batch_size=ROWS):
                    for record in batch.to_pylist():
                        # dates, decimals and the like are texts in JSON
                        own = _drop_parquet_nulls(record)
                        yield json.dumps(own, default=str).encode() + b"\n"
        except damage as error:
            raise ValueError(f"{path}: not readable Parquet: {error}") from error

    return _IteratorStream(lines())


def _drop_parquet_nulls(value: Any, *, inside: bool = False) -> Any:
    """Return a value of a Parquet file without the null keys of objects under the fields
    `FREE_FORM`.

    Parquet gives every record the same keys, so a key that a record lacks reads as null. inside:
    whether the value is under such a field.
    """
    if isinstance(value, dict):
        return {
            name: _drop_parquet_nulls(entry, inside=inside or name in FREE_FORM)
            for name, entry in value.items()
            if not (inside and entry is None)
        }
    if isinstance(value, list):
        return [_drop_parquet_nulls(entry, inside=inside) for entry in value]
    return value


class _IteratorStream(io.BytesIO):
    """A stream of the bytes of an iterator, to be read forwards."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        super().__init__()
        self._lines, self._left = lines, b""

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None and size > 0, size
        while len(self._left) < size and (line := next(self._lines, b"")):
            self._left += line
        data, self._left = self._left[:size], self._left[size:]
        return data
