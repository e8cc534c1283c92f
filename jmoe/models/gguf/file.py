"""The metadata and tensors of a GGUF file, or of all parts of a split one, by the package gguf.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jmoe.memory.direct_io import name_file_in_errors
from jmoe.models.gguf.formats import GgufTensor, block_bytes
from jmoe.models.safetensors_io import StoredTensor
from jmoe.runtime import first_missing_package
from jmoe.types import Json

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# how gguf's types of plain numbers are called in safetensors files
PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16", "I32": "I32"}


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
    parts = part_files(file.resolve())
    read = [_read_part(part, part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    tensors: dict[str, StoredTensor] = {}
    for _, own in read:
        tensors |= own
    return GgufFile(file, read[0][0], tensors)


@lru_cache(maxsize=64)
def _read_part(
    file: Path, size: int, mtime_ns: int
) -> tuple[dict[str, Json], dict[str, StoredTensor]]:
    """Return (metadata, tensors) of one file of this size and time of its last change."""
    from gguf import GGUFReader

    try:
        with name_file_in_errors(file):
            reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: is no GGUF file or is damaged: {error}") from error
    tensors: dict[str, StoredTensor] = {}
    for entry in reader.tensors:
        kind, shape = entry.tensor_type.name, tuple(int(n) for n in reversed(entry.shape.tolist()))
        at = (file, int(entry.data_offset), (size, mtime_ns))
        if at[1] + int(entry.n_bytes) > size:
            raise ValueError(f"{file}: tensor {entry.name!r} ends after the file: it is truncated")
        if kind in PLAIN:
            tensor = StoredTensor(entry.name, at[0], PLAIN[kind], shape, at[1], at[2])
        else:
            values, num_bytes = block_bytes(kind)
            row = (*shape[:-1], shape[-1] // values * num_bytes)
            tensor = GgufTensor(entry.name, at[0], "U8", row, at[1], at[2], kind)
        tensors[entry.name] = tensor
    return {name: field.contents() for name, field in reader.fields.items()}, tensors
