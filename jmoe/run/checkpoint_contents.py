"""Manifest of a checkpoint's step: file names with sizes and CRC-32 sums, array names with dtypes
and shapes. Used by `jmoe.run.checkpoint` and the snapshots.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jmoe.types import Json, JsonObject, PyTree

CRC_BLOCK_BYTES = 1 << 22
CRC = "crc32"  # key of the manifest's own sum
WRITER = re.compile(r"state/ocdbt\.process_(\d+)/")  # rank of the process that wrote it
PACKING = "packing"  # key of the run's expert packing, missing in older manifests


def files_in_folder(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("**/*")) if path.is_file())


def file_crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(CRC_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def split_files_over_readers(files: Mapping[str, Sequence[int]], readers: int) -> list[list[str]]:
    """Return, for each of `readers` processes, the file names that it verifies; every file is in
    exactly one list.

    files: [size in bytes, CRC-32] by name. A file of arrays goes to the process that will read it,
    if as many processes restore as saved, or else to one that will read most of it; other files are
    divided by size. The restore then reads the verified files from the page cache.
    """
    wrote = {name: int(named[1]) for name in files if (named := WRITER.match(name))}
    writers = max(wrote.values(), default=0) + 1
    own: list[list[str]] = [[] for _ in range(readers)]
    sizes = [0] * readers
    for name in sorted(files, key=lambda name: (name not in wrote, -files[name][0], name)):
        first, last = 0, readers - 1
        if name in wrote:
            first = wrote[name] * readers // writers
            last = max(first, (wrote[name] + 1) * readers // writers - 1)
        reader = min(range(first, last + 1), key=lambda reader: sizes[reader])
        own[reader].append(name)
        sizes[reader] += files[name][0]
    return [sorted(names) for names in own]


def write_step_manifest(path: Path, manifest: JsonObject) -> None:
    """Write a step's manifest as JSON, with a CRC-32 sum of the manifest itself."""
    path.write_text(json.dumps(manifest | {CRC: _manifest_crc32(manifest)}, sort_keys=True))


def read_step_manifest(path: Path) -> JsonObject:
    """Return a step's manifest without its own CRC-32 sum.

    Raises `ValueError` if the content is malformed or the sum does not match. Manifests of older
    versions have no sum.
    """
    manifest = json.loads(path.read_text())
    if not isinstance(manifest, dict) or manifest.keys() - {CRC, PACKING} != {
        "step",
        "files",
        "arrays",
    }:
        raise ValueError(f"{path}: must have a step, files and arrays")
    crc = manifest.pop(CRC, None)
    if crc is not None and crc != _manifest_crc32(manifest):
        raise ValueError(f"{path}: its content has changed since it was written")
    tables = [manifest["files"], manifest["arrays"]]
    packing = manifest.get(PACKING, 1)
    if not isinstance(packing, int) or packing < 1:
        raise ValueError(f"{path}: {PACKING} = {packing!r}: must be a positive integer")
    if not all(
        isinstance(table, dict) and all(_is_size_and_crc32(entry) for entry in table.values())
        for table in tables
    ):
        raise ValueError(f"{path}: must have sizes and sums of files, dtypes and shapes of arrays")
    return manifest


def _manifest_crc32(manifest: JsonObject) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _is_size_and_crc32(entry: Json) -> bool:
    return isinstance(entry, list) and len(entry) == 2


def names_leaves_and_structure(tree: PyTree) -> tuple[list[str], list[Any], PyTree]:
    """Return (names such as `params.layers.w`, leaves, tree structure).

    Checkpoints store a flat dict by name, so that container types may change between versions.
    Raises `ValueError` if two leaves have the same name.
    """
    paths, structure = jax.tree.flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path, _ in paths]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"state has several arrays of the same name: {', '.join(twice)}")
    return names, [leaf for _, leaf in paths], structure


def dtype_and_shape(leaf: jax.Array | jax.ShapeDtypeStruct) -> list[Json]:
    return [str(leaf.dtype), list(leaf.shape)]


def dtype_and_shape_text(entry: list[Json] | None) -> str:
    """Return a manifest entry (dtype and shape) as text, or `absent` for None."""
    return "absent" if entry is None else f"{entry[0]}{entry[1]}"


def shape_with_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the leaf's `jax.ShapeDtypeStruct` with its sharding; leaves without one go on the
    first device.
    """
    sharding = (
        leaf.sharding
        if leaf.sharding is not None
        else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
