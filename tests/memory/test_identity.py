"""The content of files as one hash: all of small ones, the marks and some blocks of large ones."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jmoe.memory.identity import BLOCK_BYTES, STRIDE_BYTES, WHOLE_BYTES, sampled_content_hash


def written(path: Path, content: bytes) -> Path:
    """A file with the time that all others have."""
    path.write_bytes(content)
    os.utime(path, (1, 1))
    return path


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    one = sampled_content_hash({"a": written(tmp_path / "one", content)})
    assert sampled_content_hash({"a": written(tmp_path / "copy", content)}) == one
    for at in (0, 5000, len(content) - 1):
        assert sampled_content_hash({"a": written(tmp_path / "other", flipped(content, at))}) != one
    assert sampled_content_hash({"b": tmp_path / "one"}) != one
    assert sampled_content_hash({"a": tmp_path / "one", "b": tmp_path / "one"}) != one


@pytest.mark.parametrize(
    ("at", "seen"),
    [
        (0, True),
        (lambda size: size - 1, True),
        (3 * STRIDE_BYTES + BLOCK_BYTES - 1, True),
        (2 * STRIDE_BYTES + 300_001, True),  # the mark
        (2 * STRIDE_BYTES + 300_000, False),  # what the docstring says is not seen
        (lambda size: size, True),  # a byte more
    ],
)
def test_blocks_of_a_large_file_count(
    tmp_path: Path, at: int | Callable[[int], int], seen: bool
) -> None:
    content = os.urandom(WHOLE_BYTES + 12_345)
    marks = [2 * STRIDE_BYTES + 300_001]
    first = at if isinstance(at, int) else at(len(content))
    one, other = written(tmp_path / "one", content), tmp_path / "other"
    written(other, flipped(content, first) if first < len(content) else content + b"?")
    same = sampled_content_hash({"a": one}, {one: marks}) == sampled_content_hash(
        {"a": other}, {other: marks}
    )
    assert same == (not seen)


def test_of_many_files_each_counts(tmp_path: Path) -> None:
    """More files than a thread reads at once."""
    files = {
        str(number): written(tmp_path / str(number), b"%d" % (number % 10)) for number in range(600)
    }
    before = sampled_content_hash(files)
    written(files["577"], b"8")
    assert sampled_content_hash(files) != before


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """One that is not there, and one that opens and then gives an error: here a folder."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sampled_content_hash({"a": tmp_path / "nowhere"})
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        sampled_content_hash({"a": tmp_path / "folder"})
