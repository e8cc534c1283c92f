"""The metadata and tensors of a GGUF file, or of all parts of a split one, by the package gguf.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmoe.memory.direct_io import name_file_in_errors
from jmoe.models.gguf.formats import GgufTensor, block_values_and_bytes
from jmoe.models.safetensors_io import DTYPES, StoredTensor
from jmoe.runtime import first_missing_package
from jmoe.types import Json

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
PLAIN = ("F32", "F16", "BF16", "I32")  # types of plain numbers, with the names of safetensors


@dataclass(frozen=True)
class GgufFile:
    """A model's metadata by key, and its tensors by name; quantized ones are rows of bytes."""

    path: Path
    metadata: dict[str, Json]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def part_files(file: Path) -> list[Path]:
    """Return the files of a split model, of which `file` is one, or `file` alone.

    Raises ValueError naming a part that is missing.
    """
    part = PART.search(file.name)
    if part is None:
        return [file]
    stem, count = file.name[: part.start()], int(part[2])
    files = [file.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    for other in files:
        if not other.is_file():
            raise ValueError(f"{other}: is missing, a part of the model of {file.name}")
    return files


def read_gguf(file: Path) -> GgufFile:
    """Return what a file, and the other parts of a split model, hold.

    Raises ValueError naming a file that is damaged or holds a type of numbers that is not read.
    """
    if first_missing_package(["gguf"]) is not None:
        raise ValueError(f"{file}: GGUF needs the package gguf: pip install 'jmoe[gguf]'")
    parts = part_files(_follow_links_to_part(file))
    read = [_read_part(part, part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    tensors: dict[str, StoredTensor] = {}
    for _, own in read:
        tensors |= own
    metadata = read[0][0]
    count = metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise ValueError(
            f"{file}: split.tensors.count is {count}, and its {len(parts)} files hold"
            f" {len(tensors)} tensors: they are not of one model"
        )
    return GgufFile(file, metadata, tensors)


def _follow_links_to_part(file: Path) -> Path:
    """Return the first path along the links of `file` whose name numbers a part of a split model,
    or else the file at their end.

    A download cache links `NAME-00001-of-00002.gguf` to a file whose name is a hash.
    """
    file = file.absolute()
    while file.is_symlink() and not PART.search(file.name):
        file = file.parent / file.readlink()
    return file


@lru_cache(maxsize=64)
def _read_part(
    file: Path, size: int, mtime_ns: int
) -> tuple[dict[str, Json], dict[str, StoredTensor]]:
    """Return (metadata, tensors) of one file of this size and time of its last change."""
    try:
        with name_file_in_errors(file):
            reader = _open_reader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        entries = [(entry, _shape_of(entry)) for entry in reader.tensors]
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{file}: is no GGUF file or is damaged: {error}") from error
    if reader.byte_order != "I":
        raise ValueError(f"{file}: is in the other byte order: convert it with gguf-convert-endian")
    tensors: dict[str, StoredTensor] = {}
    for entry, shape in entries:
        kind, stamp = entry.tensor_type.name, (size, mtime_ns)
        at = reader.data_offset + int(entry.field.parts[-1][0])
        tensor: StoredTensor
        if kind in PLAIN:
            tensor = StoredTensor(entry.name, file, kind, shape, at, stamp)
        else:
            values, block = block_values_and_bytes(kind)
            row = (*shape[:-1], shape[-1] // values * block)
            tensor = GgufTensor(entry.name, file, "U8", row, at, stamp, kind)
        num_bytes = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        if at + num_bytes > size:
            raise ValueError(f"{file}: tensor {entry.name!r} ends after the file: it is truncated")
        tensors[entry.name] = tensor
    return metadata, tensors


def _shape_of(entry: "ReaderTensor") -> tuple[int, ...]:
    shape = tuple(int(n) for n in reversed(entry.shape.tolist()))
    if not shape or math.prod(shape) == 0:
        raise ValueError(f"tensor {entry.name!r} has shape {list(shape)}")
    return shape


def _open_reader(file: Path) -> "GGUFReader":
    """Return gguf's reader of a file.

    Raises ValueError where the file ends before what its counts announce: gguf's own reader goes on
    with empty arrays, for as many items as a damaged count says.
    """
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **options: Any) -> Any:
            items = super()._get(offset, dtype, count, *args, **options)
            if len(items) < int(count):
                raise ValueError(f"it ends within the {int(count)} items at byte {int(offset)}")
            return items

    return BoundedReader(file)
