"""What a step of a checkpoint consists of, for its manifest: files with their sums, arrays by name."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

CRC_BLOCK_BYTES = 1 << 22


def files_of(folder: Path) -> Iterator[Path]:
    """All files below a folder."""
    return (path for path in sorted(folder.glob("**/*")) if path.is_file())


def crc32(path: Path) -> int:
    """The CRC-32 of a file's content."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(CRC_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def fsync(path: Path) -> None:
    """Make a file, or what a folder lists, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def named_leaves(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Names (`params.layers.w`), leaves and structure: steps are saved flat, so containers may change their type."""
    paths, structure = jax.tree.flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path, _ in paths]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"state has several arrays of the same name: {', '.join(twice)}")
    return names, [leaf for _, leaf in paths], structure


def entry_of(leaf: Any) -> list[Any]:
    """The dtype and shape of an array."""
    return [str(leaf.dtype), list(leaf.shape)]


def in_words(entry: list[Any] | None) -> str:
    """The same to print."""
    return "absent" if entry is None else f"{entry[0]}{entry[1]}"


def placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """The same with a sharding: on the first device if it has none."""
    sharding = leaf.sharding if leaf.sharding is not None else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
