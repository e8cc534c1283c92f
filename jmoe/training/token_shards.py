"""Token shards: one file of uint16 / uint32 token ids behind a JSON header, memory-mapped when read.

Layout, little-endian: 8 bytes magic `JMOETOK1`, uint32 length of the header, the header as UTF-8 JSON, zeros up to
the next multiple of 4096 bytes, then `count` ids. The ids read `eot document eot document ... eot`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import numpy as np
from numpy.typing import NDArray

MAGIC = b"JMOETOK1"
ALIGNMENT_BYTES = 4096
TEMPORARY = ".jmoe-tmp"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says about itself.

    dtype: `uint16` or `uint32`; count: ids in the file; vocab_size: every id is below it; eot: the end-of-text id;
    tokenizer: fingerprint of the tokenizer.json that made the ids; split: `train` or `held_out`; text_bytes: UTF-8
    bytes of the text behind the ids; sha256: of the ids, as stored.
    """

    dtype: str
    count: int
    vocab_size: int
    eot: int
    tokenizer: str
    split: str
    text_bytes: int
    sha256: str


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` with `content`: readers see the old file or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            _publish(file, temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _publish(file: BinaryIO, temporary: str, path: Path) -> None:
    file.flush()
    os.fchmod(file.fileno(), 0o644)  # mkstemp gives 0600; other users of a cluster read the same cache
    os.fsync(file.fileno())
    os.replace(temporary, path)


def remove_stale_temporaries(directory: Path) -> None:
    """Remove what killed writers left: temporary files that nobody has written to for an hour."""
    for path in directory.glob(f".*{TEMPORARY}"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()


class ShardWriter:
    """Context manager that writes one shard; the file appears under its name only when the block ends well."""

    def __init__(self, path: Path, *, vocab_size: int, eot: int, tokenizer: str, split: str) -> None:
        self._path = path
        self._dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        self._vocab_size, self._eot, self._tokenizer, self._split = vocab_size, eot, tokenizer, split
        self._digest = hashlib.sha256()
        self.count = 0
        self.text_bytes = 0
        self.header: ShardHeader | None = None

    def __enter__(self) -> Self:
        handle, self._temporary = tempfile.mkstemp(
            dir=self._path.parent, prefix=f".{self._path.name}.", suffix=TEMPORARY
        )
        self._file = os.fdopen(handle, "wb")
        self._file.write(bytes(ALIGNMENT_BYTES))
        self.append([self._eot], text_bytes=0)
        return self

    def append(self, ids: list[int], *, text_bytes: int) -> None:
        """Add ids that encode `text_bytes` bytes of text (end-of-text tokens: none)."""
        data = np.asarray(ids, dtype=DTYPES[self._dtype]).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.count += len(ids)
        self.text_bytes += text_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._file.close()
            if self.header is None:
                Path(self._temporary).unlink(missing_ok=True)

    def _finish(self) -> None:
        header = ShardHeader(
            dtype=self._dtype,
            count=self.count,
            vocab_size=self._vocab_size,
            eot=self._eot,
            tokenizer=self._tokenizer,
            split=self._split,
            text_bytes=self.text_bytes,
            sha256=self._digest.hexdigest(),
        )
        text = json.dumps(asdict(header)).encode()
        prefix = MAGIC + struct.pack("<I", len(text)) + text
        assert len(prefix) <= ALIGNMENT_BYTES, len(prefix)
        self._file.seek(0)
        self._file.write(prefix)
        _publish(self._file, self._temporary, self._path)
        self.header = header


def _parse_header(path: Path, text: bytes) -> ShardHeader:
    try:
        values: Any = json.loads(text.decode())
    except ValueError as error:
        raise ValueError(f"{path}: the header of this token shard is no JSON: {error}") from error
    given = values if isinstance(values, dict) else {}
    missing = [f.name for f in fields(ShardHeader) if type(given.get(f.name)) is not (int if f.type == "int" else str)]
    if missing:
        raise ValueError(f"{path}: the header of this token shard lacks {', '.join(missing)}")
    header = ShardHeader(**{f.name: given[f.name] for f in fields(ShardHeader)})
    if header.dtype not in DTYPES:
        raise ValueError(f"{path}: dtype = {header.dtype!r}: must be one of {', '.join(DTYPES)}")
    if header.count < 1 or not 0 <= header.eot < header.vocab_size:
        raise ValueError(
            f"{path}: count = {header.count}, eot = {header.eot}, vocab_size = {header.vocab_size}: "
            "count must be positive and eot below vocab_size"
        )
    return header


def open_shard(path: Path) -> tuple[ShardHeader, NDArray[np.unsignedinteger[Any]]]:
    """(header, memory-mapped ids [count]); `ValueError` when the file is foreign or truncated.

    Only the header and the size are checked, so opening costs the same for terabytes.
    """
    with open(path, "rb") as file:
        start = file.read(len(MAGIC) + 4)
        if len(start) < len(MAGIC) + 4 or start[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path}: not a token shard: it does not begin with {MAGIC.decode()}")
        (length,) = struct.unpack("<I", start[len(MAGIC) :])
        text = file.read(length)
        size_bytes = os.fstat(file.fileno()).st_size
    if len(text) < length:
        raise ValueError(f"{path}: this token shard is truncated inside its header ({size_bytes} bytes)")
    header = _parse_header(path, text)
    offset = -(-(len(start) + length) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    expected_bytes = offset + header.count * DTYPES[header.dtype].itemsize
    if size_bytes != expected_bytes:
        what = "is truncated" if size_bytes < expected_bytes else "has foreign data at its end"
        raise ValueError(
            f"{path}: this token shard {what}: {size_bytes} bytes, but its header says {header.count} tokens, "
            f"i.e. {expected_bytes} bytes"
        )
    mapped = np.memmap(path, dtype=DTYPES[header.dtype], mode="r", offset=offset, shape=(header.count,))
    # A plain view: slicing np.memmap itself costs several microseconds a window.
    return header, cast("NDArray[np.unsignedinteger[Any]]", mapped.view(np.ndarray))
