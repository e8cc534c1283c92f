"""Read and write safetensors files piece by piece.

All headers are checked before any tensor is read. Files are read into small buffers rather than
mapped: mapped pages would count as this process's memory.
Format: https://huggingface.co/docs/safetensors (8 bytes of length, JSON header, tensors).
"""

import hashlib
import itertools
import json
import math
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jmoe.config import check
from jmoe.memory.closing import Closing
from jmoe.memory.direct_io import fsync, name_file_in_errors
from jmoe.memory.identity import sampled_content_hash
from jmoe.models.folder import has_file
from jmoe.types import Json, JsonObject

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
MAX_HEADER_BYTES = 100_000_000
SHOWN = 200  # characters of a bad entry
STAGING_BYTES = 1 << 22


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor on disk.

    dtype: the format's name of the dtype, e.g. "BF16".
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in bytes, from the start of the file
    stamp: tuple[int, int]  # the file's size and mtime (ns) when its header was read

    def matrix_offsets(self) -> list[int]:
        """Return the file offset, in bytes, of each matrix of a tensor; a tensor of stacked experts
        has many.
        """
        if len(self.shape) < 3 or self.dtype not in DTYPES:
            return [self.offset]
        return [self.entry(i).offset for i in range(self.shape[0])]

    def entry(self, index: int) -> "StoredTensor":
        """Return the slice at `index` of the first dimension, such as one expert, as a tensor."""
        entry_bytes = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        return replace(self, shape=self.shape[1:], offset=self.offset + index * entry_bytes)

    def error(self, problem: str) -> ValueError:
        """Return a ValueError that names the file and the tensor."""
        return ValueError(f"{self.file}: tensor {self.name!r} {problem}")


def _size_and_mtime(descriptor: int) -> tuple[int, int]:
    """Return (size in bytes, mtime in ns) of an open file; a writer changes at least one of
    them.
    """
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name. Raises ValueError naming a damaged or truncated
    file.
    """
    with name_file_in_errors(file), file.open("rb") as stream:
        size, _ = stamp = _size_and_mtime(stream.fileno())
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{file}: is no safetensors file or is truncated ({size} bytes)")
        try:
            entries = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: its safetensors header is no JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{file}: its safetensors header is no table")
    entries.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        dtype, shape, first, last = _parse_header_entry(file, name, entry)
        tensor = tensors[name] = StoredTensor(name, file, dtype, shape, 8 + length + first, stamp)
        if dtype in DTYPES and last - first != math.prod(shape) * DTYPES[dtype].itemsize:
            raise tensor.error(f"has {last - first} bytes, not those of {dtype}{list(shape)}")
        if 8 + length + last > size:
            raise tensor.error(
                f"ends at byte {8 + length + last}, the file has {size}: it is truncated"
            )
        spans.append((first, last, name))
    end = _end_of_gapless_tensors(tensors, spans)
    if 8 + length + end != size:
        raise ValueError(f"{file}: has {size} bytes, its header describes {8 + length + end}")
    return tensors


def _parse_header_entry(
    file: Path, name: str, entry: Json
) -> tuple[str, tuple[int, ...], int, int]:
    """Return (dtype, shape, first byte, end byte) of a tensor's entry in a header.

    Raises ValueError if one of them is missing or malformed.
    """
    try:
        dtype, shape, (first, last) = (
            str(entry["dtype"]),
            tuple(entry["shape"]),
            entry["data_offsets"],
        )
        if (
            not all(type(number) is int and number >= 0 for number in (*shape, first, last))
            or first > last
        ):
            raise ValueError("sizes and offsets are integers, none below 0")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: tensor {name!r} has no dtype, shape and data_offsets: {str(entry)[:SHOWN]}"
        ) from error
    return dtype, shape, first, last


def _end_of_gapless_tensors(
    tensors: Mapping[str, StoredTensor], spans: list[tuple[int, int, str]]
) -> int:
    """Return the end of the last tensor; raise ValueError if tensors overlap or leave bytes between
    them.

    spans: (first byte, end byte, name) of each tensor.
    """
    begin = end = 0
    for first, last, name in sorted(spans):
        if first != end and (first, last) != (begin, end):  # two names may share the same bytes
            problem = (
                "overlaps the one before it"
                if first < end
                else f"leaves {first - end} bytes before it"
            )
            raise tensors[name].error(f"{problem}: tensors must lie one behind the other")
        begin, end = first, last
    return end


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder by name: those of `model.safetensors`, or of the index's
    files.

    Raises ValueError naming the file that is missing, truncated or inconsistent with the index.
    """
    if has_file(folder / SINGLE):
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not has_file(index):
        raise ValueError(f"{folder}: has neither {SINGLE} nor {INDEX}")
    try:
        with name_file_in_errors(index):
            places = json.loads(index.read_text())["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: has no weight_map of tensors to files") from error
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        plain = isinstance(name, str) and name != "" and Path(name).name == name
        check(
            plain,
            f"{index}: a file of weight_map",
            name,
            "must be the name of a file beside the index",
        )
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: is missing, but {INDEX} names it")
        for tensor in read_header(folder / name).values():
            if tensor.name in tensors:
                raise tensor.error(f"is in {tensors[tensor.name].file.name} too")
            tensors[tensor.name] = tensor
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(
                f"{folder / file}: tensor {name!r} is missing, but {INDEX} places it there"
            )
    return tensors


def weights_identity(stored: Mapping[str, StoredTensor]) -> str:
    """Return a hash of all tensors' headers and sampled contents, equal for all copies of the
    files.

    See `sampled_content_hash`.
    """
    files = {tensor.file.name: tensor.file for tensor in stored.values()}
    marks: dict[Path, list[int]] = {file: [] for file in files.values()}
    for tensor in stored.values():
        marks[tensor.file] += tensor.matrix_offsets()
    headers = sorted([t.name, t.dtype, t.shape, t.file.name, t.offset] for t in stored.values())
    return hashlib.sha256(
        json.dumps([headers, sampled_content_hash(files, marks)]).encode()
    ).hexdigest()


class TensorReader(Closing):
    """Reads ranges of tensors through one small buffer, which every read overwrites; a context
    manager.

    Raises ValueError naming the tensor if its file has changed since its header was read: the
    arrays would otherwise mix two models.
    """

    def __init__(self) -> None:
        self._staging = np.empty(STAGING_BYTES, np.uint8)
        self._files: dict[Path, int] = {}

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def read_chunks(
        self, tensor: StoredTensor, start: int, end: int, *, trailing: int = 1
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (first row, end row, values [rows, elements of a row]) for rows start..end, about 4
        MB each.

        trailing: the number of last dimensions that make up a row.

        All pieces but the last have an even number of rows, so pairs of rows stay together. Each
        piece is overwritten by the next one.
        """
        dtype, row = DTYPES[tensor.dtype], math.prod(tensor.shape[len(tensor.shape) - trailing :])
        row_bytes = row * dtype.itemsize
        step = max(2, STAGING_BYTES // max(1, row_bytes) // 2 * 2)
        if self._staging.size < step * row_bytes:
            self._staging = np.empty(step * row_bytes, np.uint8)
        for first in range(start, end, step):
            last = min(first + step, end)
            part = self._staging[: (last - first) * row_bytes]
            self._read_into(tensor, tensor.offset + first * row_bytes, part)
            yield first, last, part.view(dtype).reshape(last - first, row)

    def _read_into(self, tensor: StoredTensor, offset: int, part: np.ndarray) -> None:
        if tensor.file not in self._files:
            self._files[tensor.file] = os.open(tensor.file, os.O_RDONLY)
        view, done = part.data, 0
        while done < len(view):
            with name_file_in_errors(tensor.file):
                count = os.preadv(self._files[tensor.file], [view[done:]], offset + done)
            if count == 0:
                raise tensor.error(
                    f"ends at byte {offset + done}: the file was cut while it was read"
                )
            done += count
        if _size_and_mtime(self._files[tensor.file]) != tensor.stamp:
            raise tensor.error(
                "has changed since its header was read: start again, once nobody writes to the"
                " folder"
            )


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; `data()` returns its elements in row-major order."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors_file(file: Path, tensors: Sequence[NewTensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            data = np.ascontiguousarray(tensor.data())
            assert data.shape == tensor.shape and data.dtype == tensor.dtype, tensor.name
            stream.write(data.reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())


def write_safetensors(folder: Path, tensors: Sequence[NewTensor], max_shard_bytes: int) -> None:
    """Write tensors to `model.safetensors`, or to several shards with an index.

    A shard has at most `max_shard_bytes`, or one larger tensor. Readers see the old files until one
    atomic operation: the rename of the new single file or index, or, where shards replace a single
    file, its deletion. An error before that leaves the folder unchanged.
    """
    shards: list[list[NewTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.num_bytes for t in shards[-1]) + tensor.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    names = _unused_file_names(folder, len(shards))
    old = [path for path in (folder / SINGLE, folder / INDEX) if path.exists()]
    old += folder.glob("model-*-of-*.safetensors")
    written = [*names, *([INDEX] if len(names) > 1 else [])]
    placed: list[Path] = []
    for leftover in folder.glob(".model*.safetensors*.new"):  # a killed writer left it
        leftover.unlink()
    try:
        for name, shard in zip(names, shards, strict=True):
            write_safetensors_file(folder / f".{name}.new", shard)
        if len(names) > 1:
            places = {
                tensor.name: name
                for name, shard in zip(names, shards, strict=True)
                for tensor in shard
            }
            total_bytes = sum(tensor.num_bytes for tensor in tensors)
            index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
            _write_durably(folder / f".{INDEX}.new", json.dumps(index, indent=2) + "\n")
            for name in names:  # readers do not see them before the index names them
                (folder / f".{name}.new").rename(folder / name)
                placed.append(folder / name)
            fsync(folder)
    except BaseException:
        for path in [*(folder / f".{name}.new" for name in written), *placed]:
            path.unlink(missing_ok=True)
        raise
    (folder / f".{written[-1]}.new").rename(folder / written[-1])
    fsync(folder)
    for path in old:
        if path.name not in written:
            path.unlink()
    fsync(folder)


def _unused_file_names(folder: Path, count: int) -> list[str]:
    """Return `count` file names that no existing file has, or `model.safetensors` if `count`
    is 1.
    """
    if count == 1:
        return [SINGLE]
    for mark in itertools.chain([""], (f"{number}-" for number in itertools.count(2))):
        names = [f"model-{mark}{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if not any((folder / name).exists() for name in names):
            return names
    raise AssertionError


def replace_text_durably(path: Path, text: str) -> None:
    """Replace the content of a file atomically and durably; an error leaves the old content.

    Several processes may replace the same file at a time: the last one's content stays.
    """
    new = unused_name_beside(path)
    try:
        _write_durably(new, text)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def unused_name_beside(path: Path) -> Path:
    """Return a hidden name in the folder of `path`, which no other process or thread takes."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
