"""Damage to files that the files themselves do not show."""

import math
from pathlib import Path

from jmoe.models.safetensors_io import DTYPES, read_headers


def poison(folder: Path, token: int, name: str = "model.embed_tokens.weight") -> None:
    """Make the embedding of one token, or the row of another tensor, NaN: what has seen it has no
    numbers any more.
    """
    tensor = read_headers(folder)[name]
    row_bytes = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset + token * row_bytes)
        file.write(b"\xff" * row_bytes)  # in every format of floating point


def flip(file: Path, at_byte: int, bit: int = 0) -> None:
    """Flip one bit of a file, in place."""
    with file.open("r+b") as stream:
        stream.seek(at_byte)
        (byte,) = stream.read(1)
        stream.seek(at_byte)
        stream.write(bytes([byte ^ 1 << bit]))


def flip_everywhere(file: Path) -> None:
    """Flip a bit in every page of a file, in place, since a server may have it open."""
    content = bytearray(file.read_bytes())
    for page in range(0, len(content), 4096):
        content[page + 7] ^= 0x40
    with file.open("r+b") as stream:
        stream.write(content)
