"""File format of one process's shards of a training state, written and read through a memory map.

    magic, version, bytes of JSON, bytes of shards, CRC-32 of JSON, CRC-32 of shards | JSON | shards

`jmoe.run.snapshots` allocates the file at its full size, fills it in place, and renames it once it
is complete.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from functools import partial
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.run.checkpoint_contents import (
    CRC_BLOCK_BYTES,
    names_leaves_and_structure,
    shape_with_sharding,
)
from jmoe.types import Json, JsonObject, PyTree

MAGIC, VERSION = b"jmoesnap", 1
# per leaf of a state: [name, dtype, shape, shards]; see `layout_of_shards`
ShardLayout = list[list[Json]]
_HEADER = struct.Struct("!8sIQQII")


def layout_of_shards(state: PyTree) -> ShardLayout:
    """Return [name, dtype, shape, shards] for every leaf. shards: [[start, stop] per dimension] of
    each distinct shard of this process.

    state: tree of arrays, or of `jax.ShapeDtypeStruct` with shardings.
    """
    names, leaves, _ = names_leaves_and_structure(state)
    return [
        [
            name,
            str(leaf.dtype),
            list(leaf.shape),
            [_slices_to_bounds(index) for index in _own_shard_indices(leaf)],
        ]
        for name, leaf in zip(names, leaves, strict=True)
    ]


def total_shard_bytes(layout: ShardLayout) -> int:
    """Return the total size in bytes of the shards that a result of `layout_of_shards` lists."""
    return sum(
        np.dtype(dtype).itemsize * sum(_num_elements(bounds) for bounds in shards)
        for _, dtype, _, shards in layout
    )


def snapshot_file_bytes(layout: ShardLayout, description: JsonObject) -> int:
    """Return the size in bytes of the file that `write_snapshot` makes for this layout and
    description.
    """
    return _HEADER.size + len(_description_bytes(layout, description)) + total_shard_bytes(layout)


def allocate_file(path: Path, size_bytes: int) -> NDArray[np.uint8]:
    """Return a new file of `size_bytes`, memory-mapped. Raises `OSError` if the file system has too
    little free space.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # writing to an unallocated page of a full file system would kill the process (SIGBUS)
        os.posix_fallocate(fd, 0, size_bytes)
        return np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
    finally:
        os.close(fd)


def write_snapshot(
    file: NDArray[np.uint8], state: PyTree, layout: ShardLayout, description: JsonObject
) -> None:
    """Fill `file` with this process's shards of `state` and with the description as JSON.

    file: bytes of the size that `snapshot_file_bytes` returns. layout: `layout_of_shards(state)`.
    """
    text = _description_bytes(layout, description)
    begin = position = _HEADER.size + len(text)
    for leaf in names_leaves_and_structure(state)[1]:
        shards = {
            str(_slices_to_bounds(_explicit_slices(shard.index, leaf.shape))): shard.data
            for shard in leaf.addressable_shards
        }
        for index in _own_shard_indices(leaf):
            piece = (
                np.ascontiguousarray(shards[str(_slices_to_bounds(index))])
                .reshape(-1)
                .view(np.uint8)
            )
            file[position : position + piece.size] = piece
            position += piece.size
    header = (
        MAGIC,
        VERSION,
        len(text),
        position - begin,
        zlib.crc32(text),
        _crc32(file[begin:position]),
    )
    file[:begin] = np.frombuffer(_HEADER.pack(*header) + text, np.uint8)


def read_description(path: Path) -> JsonObject:
    """Return a snapshot's JSON description, with its `layout`. Does not read the shards.

    Raises `ValueError` with a clause (such as "is damaged: …") if header, size or description do
    not match.
    """
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
        if len(start) < _HEADER.size or not start.startswith(MAGIC):
            raise ValueError("is damaged: it has no header")
        _, version, text_bytes, payload_bytes, crc, _ = _HEADER.unpack(start)
        if version != VERSION:
            raise ValueError(f"has version {version}; this jmoe reads {VERSION}")
        size, wanted = os.fstat(file.fileno()).st_size, _HEADER.size + text_bytes + payload_bytes
        if size != wanted:
            raise ValueError(f"is damaged: it has {size:,} of {wanted:,} bytes")
        text = file.read(text_bytes)
    if zlib.crc32(text) != crc:
        raise ValueError("is damaged: its description has changed since it was written")
    description: JsonObject = json.loads(text)
    return description


def map_verified_snapshot(path: Path) -> NDArray[np.uint8]:
    """Return a snapshot's bytes, memory-mapped, after verifying all of them.

    Raises `ValueError` with a clause if the content is damaged.
    """
    read_description(path)
    file = np.memmap(path, np.uint8, mode="r")
    verify_snapshot(file)
    return file


def verify_snapshot(file: NDArray[np.uint8]) -> JsonObject:
    """Return the JSON description of a snapshot given as bytes, after verifying both CRC-32 sums.

    Raises `ValueError` with a clause if a sum does not match.
    """
    _, _, text_bytes, _, text_crc, crc = _HEADER.unpack(file[: _HEADER.size].tobytes())
    text = file[_HEADER.size : _HEADER.size + text_bytes].tobytes()
    if zlib.crc32(text) != text_crc or _crc32(file[_HEADER.size + text_bytes :]) != crc:
        raise ValueError("is damaged: its content has changed since it was written")
    description: JsonObject = json.loads(text)
    return description


def read_state(file: NDArray[np.uint8], abstract_state: PyTree) -> PyTree:
    """Return the state, as `jax.Array`s, whose shards of this process are in `file`.

    abstract_state: tree with shapes, dtypes and shardings; its layout must equal the file's.
    """
    _, _, text_bytes, *_ = _HEADER.unpack(file[: _HEADER.size].tobytes())
    position = _HEADER.size + text_bytes
    _, leaves, tree = names_leaves_and_structure(abstract_state)
    arrays = []
    for leaf in leaves:
        pieces = dict[str, np.ndarray]()
        for index in _own_shard_indices(leaf):
            shape = [stop - start for start, stop in _slices_to_bounds(index)]
            end = position + leaf.dtype.itemsize * _num_elements(_slices_to_bounds(index))
            # copy: the CPU backend may keep using the array's memory
            pieces[str(_slices_to_bounds(index))] = (
                np.array(file[position:end]).view(leaf.dtype).reshape(shape)
            )
            position = end
        arrays.append(
            jax.make_array_from_callback(
                leaf.shape, shape_with_sharding(leaf).sharding, partial(_shard_at, pieces, leaf)
            )
        )
    return jax.tree.unflatten(tree, arrays)


def _shard_at(
    pieces: dict[str, np.ndarray], leaf: jax.Array | jax.ShapeDtypeStruct, index: tuple[slice, ...]
) -> np.ndarray:
    return pieces[str(_slices_to_bounds(_explicit_slices(index, leaf.shape)))]


def _own_shard_indices(leaf: jax.Array | jax.ShapeDtypeStruct) -> list[tuple[slice, ...]]:
    """Return the slices of this process's distinct shards of an array, in the order of its
    devices.
    """
    indices = (
        shape_with_sharding(leaf).sharding.addressable_devices_indices_map(leaf.shape).values()
    )
    return list(
        {
            str(full): full for full in (_explicit_slices(index, leaf.shape) for index in indices)
        }.values()
    )


def _explicit_slices(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def _slices_to_bounds(index: tuple[slice, ...]) -> list[list[int]]:
    return [[part.start, part.stop] for part in index]


def _num_elements(bounds: list[list[int]]) -> int:
    return int(np.prod([stop - start for start, stop in bounds], dtype=np.int64))


def _description_bytes(layout: ShardLayout, description: JsonObject) -> bytes:
    return json.dumps(description | {"layout": layout}).encode()


def _crc32(array: NDArray[np.uint8]) -> int:
    crc = 0
    for begin in range(0, array.size, CRC_BLOCK_BYTES):
        crc = zlib.crc32(array[begin : begin + CRC_BLOCK_BYTES].data, crc)
    return crc
