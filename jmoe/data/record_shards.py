"""Token shards as ArrayRecord files, which `python -m jmoe.data.prepare` writes: any program with
Google's array_record reads them.

Records 0 to N - 1 hold the ids of a shard, `RECORD_BYTES` bytes each but the last, little-endian;
record N is the shard's header as JSON (`shards.ShardHeader`). Windows of any length are cut from
them, as records end anywhere in a document. ArrayRecord stores a hash of every chunk, and compares
it when the chunk is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jmoe.data.input_file import RECORD_SHARD_SUFFIX
from jmoe.data.shards import (
    DTYPES,
    TEMPORARY,
    IdChecks,
    Ids,
    Shard,
    ShardHeader,
    open_shard,
    parse_header,
)
from jmoe.memory.direct_io import fsync, name_file_in_errors

RECORD_BYTES = 1 << 16
# One record a chunk, so that a window reads no other record; ids are hardly compressible.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_READER_OPTIONS = "readahead_buffer_size:0"
MANIFEST = "manifest.json"
PLAN = "plan.json"  # what a preparation is to write; its manifest comes last


def open_token_shard(path: Path) -> Shard:
    """Return the shard `path`, an ArrayRecord file or a memory-mapped one, told by its name.

    Checks only header and size. Raises ValueError if the file is not a shard, is truncated or is
    damaged.
    """
    return _open_records(path) if path.suffix == RECORD_SHARD_SUFFIX else open_shard(path)


def write_as_records(shard: Shard, path: Path) -> None:
    """Write a shard as an ArrayRecord file, flushed to disk, which replaces `path` atomically."""
    from array_record.python.array_record_module import ArrayRecordWriter

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    record_ids = RECORD_BYTES // DTYPES[shard.header.dtype].itemsize
    try:
        with _damage_as_value_error(path):
            writer = ArrayRecordWriter(str(temporary), _WRITER_OPTIONS)
            for start in range(0, len(shard.ids), record_ids):
                shard.blocks.check_ids(start, min(start + record_ids, len(shard.ids)))
                writer.write(shard.ids[start : start + record_ids].tobytes())
            writer.write(json.dumps(asdict(shard.header)).encode())
            writer.close()
        fsync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_manifest_hashes(folder: Path) -> dict[str, str]:
    """Return {file name: SHA-256 of its ids} of the shards that a folder's manifest lists; empty if
    `folder` is no output of `python -m jmoe.data.prepare`.

    Raises ValueError if the preparation was interrupted, the manifest is damaged, or a shard that
    it lists is missing.
    """
    if not (folder / PLAN).is_file():
        return {}
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        listed = {str(entry["file"]): str(entry["sha256"]) for entry in manifest["shards"]}
    except FileNotFoundError as error:
        raise ValueError(
            f"data.path = {str(folder)!r}: its preparation was interrupted; run the same"
            " python -m jmoe.data.prepare again, which goes on where it stopped"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST}: is damaged: {error!r}; copy it again") from error
    for name in listed:
        if not (folder / name).is_file():
            raise ValueError(
                f"data.path = {str(folder)!r}: lacks {name}, which its {MANIFEST} lists;"
                " copy the whole folder"
            )
    return listed


class _RecordIds:
    """The ids of a shard, read record by record."""

    def __init__(self, header: ShardHeader, read: Callable[[list[int]], list[bytes]]) -> None:
        self._read, self._count, self._dtype = read, header.count, DTYPES[header.dtype]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice, /) -> Ids:
        start, stop, step = part.indices(self._count)
        if stop <= start:
            return np.zeros(0, self._dtype)
        record_ids = RECORD_BYTES // self._dtype.itemsize
        first, last = start // record_ids, (stop - 1) // record_ids
        data = b"".join(self._read(list(range(first, last + 1))))
        ids = np.frombuffer(data, self._dtype)
        return ids[start - first * record_ids : stop - first * record_ids : step]


class _RecordChecks:
    """Checks of a shard of records, whose hashes are compared by every read anyway."""

    has_sums = True

    def __init__(self, path: Path, ids: _RecordIds, header: ShardHeader) -> None:
        self.path, self._ids = path, ids
        self.num_bytes = header.count * DTYPES[header.dtype].itemsize

    def check_ids(self, first: int, end: int) -> None:
        """Do nothing: reading the ids raises ValueError naming the file if they are damaged."""

    def check_all(self, header: ShardHeader) -> None:
        """Read all ids. Raises ValueError naming the file if the SHA-256 is wrong."""
        digest = hashlib.sha256()
        for start in range(0, len(self._ids), RECORD_BYTES):
            digest.update(self._ids[start : start + RECORD_BYTES].tobytes())
        if digest.hexdigest() != header.sha256:
            raise _damage_error(self.path, "its ids are not what was written")


def _open_records(path: Path) -> Shard:
    from array_record.python.array_record_module import ArrayRecordReader

    with name_file_in_errors(path), open(path, "rb"):
        pass  # array_record names no file that is missing or may not be read
    with _damage_as_value_error(path):
        reader: Any = ArrayRecordReader(str(path), _READER_OPTIONS)
        # a file that was cut has lost its index, and reads as one without records
        num_records = reader.num_records()
        if num_records < 2:
            raise _damage_error(path, "it was cut, or is no ArrayRecord file")
        header = parse_header(path, reader.read([num_records - 1])[0])
    ids_bytes = header.count * DTYPES[header.dtype].itemsize
    if num_records - 1 != -(-ids_bytes // RECORD_BYTES):
        raise _damage_error(path, f"its {num_records} records do not hold {header.count} tokens")

    def read(records: list[int]) -> list[bytes]:
        with _damage_as_value_error(path):
            data: list[bytes] = reader.read(records)
        for number, record in zip(records, data, strict=True):
            num_bytes = min(RECORD_BYTES, ids_bytes - number * RECORD_BYTES)
            if len(record) != num_bytes:
                why = f"its record {number} has {len(record)} bytes, not {num_bytes}"
                raise _damage_error(path, why)
        return data

    ids = _RecordIds(header, read)
    checks: IdChecks = _RecordChecks(path, ids, header)
    return Shard(header, ids, checks)


@contextlib.contextmanager
def _damage_as_value_error(path: Path) -> Iterator[None]:
    """Turn the errors of array_record into a ValueError that names the file."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise _damage_error(path, str(error)) from error


def _damage_error(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path}: this token shard is damaged: {why}; copy it again, or"
        f" delete it and run python -m jmoe.data.prepare again"
    )
