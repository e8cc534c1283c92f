"""Writing over a model that is there: at every moment the folder holds one whole model, the old
one or the new one.
"""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jmoe.models.safetensors_io import (
    NewTensor,
    TensorReader,
    read_headers,
    replace_text_durably,
    write_safetensors,
)

SHAPE = (10, 10)
TENSOR_BYTES = 400
# files -> bytes of one at most
FILES = {1: 10 * TENSOR_BYTES, 2: 3 * TENSOR_BYTES, 3: 2 * TENSOR_BYTES}


def write(folder: Path, value: float, files: int) -> None:
    """Five tensors that are `value` everywhere, in so many files."""
    array = np.full(SHAPE, value, np.float32)
    write_safetensors(
        folder,
        [NewTensor(f"t{i}", array.dtype, SHAPE, lambda: array) for i in range(5)],
        FILES[files],
    )


def model(folder: Path) -> set[float]:
    """The values of all tensors; fails unless all five are there."""
    headers = read_headers(folder)
    assert sorted(headers) == [f"t{i}" for i in range(5)]
    with TensorReader() as reader:
        parts = [
            part.copy()
            for tensor in headers.values()
            for *_, part in reader.read_chunks(tensor, 0, SHAPE[0])
        ]
    return {float(value) for value in np.unique(np.concatenate(parts))}


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("way", ["in place", "by a rename"])
def test_a_model_that_is_replaced_while_it_is_read_is_named(
    tmp_path: Path, files: int, way: str
) -> None:
    """Also a file that has not been opened yet: half of each model would be served, or packed as
    the one before.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    write(tmp_path / "model", 1.0, files)
    write(tmp_path / "other", 2.0, files)
    tensors = read_headers(tmp_path / "model")
    with TensorReader() as reader:
        assert {
            float(part[0, 0]) for _, _, part in reader.read_chunks(tensors["t0"], 0, SHAPE[0])
        } == {1.0}
        for path in (tmp_path / "other").iterdir():
            if way == "in place":
                shutil.copyfile(path, tmp_path / "model" / path.name)
            else:
                path.rename(tmp_path / "model" / path.name)
        read, error = set[float](), ""
        try:
            for tensor in tensors.values():
                read |= {
                    float(part[0, 0]) for _, _, part in reader.read_chunks(tensor, 0, SHAPE[0])
                }
        except ValueError as refused:
            error = str(refused)
    assert read <= {1.0}
    assert (
        read == {1.0} and (way, files) == ("by a rename", 1)
        if not error
        else "has changed since its header" in error
    )


TRANSITIONS = [(before, after) for before in FILES for after in FILES]


@pytest.mark.parametrize(("before", "after"), TRANSITIONS)
def test_no_moment_without_a_whole_model(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[float]] = []
    write(tmp_path, 1.0, before)
    for name in ("rename", "unlink"):
        real = getattr(Path, name)

        def looking(path: Path, *args: Any, real: Any = real, **options: Any) -> Any:
            seen.append(model(tmp_path))
            result = real(path, *args, **options)
            seen.append(model(tmp_path))
            return result

        monkeypatch.setattr(Path, name, looking)
    write(tmp_path, 2.0, after)
    assert model(tmp_path) == {2.0}
    assert seen[0] == {1.0} and seen[-1] == {2.0}
    assert seen == sorted(seen, key=min) and all(len(values) == 1 for values in seen)
    assert len(list(tmp_path.iterdir())) == (1 if after == 1 else after + 1)


@pytest.mark.parametrize(("before", "after"), TRANSITIONS)
def test_a_full_disk_leaves_the_old_model_and_nothing_else(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1.0, before)
    files = sorted(path.name for path in tmp_path.iterdir())
    real, failures = os.fsync, 0
    for failing in range(after + (after > 1)):  # every file, and the index
        calls = 0

        def full(descriptor: int, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls > failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, 2.0, after)
        failures += 1
        monkeypatch.setattr(os, "fsync", real)
        assert sorted(path.name for path in tmp_path.iterdir()) == files
        assert model(tmp_path) == {1.0}
    assert failures
    (tmp_path / ".model-00001-of-00002.safetensors.new").write_text("of a writer that was killed")
    write(tmp_path, 3.0, after)
    assert model(tmp_path) == {3.0} and not list(tmp_path.glob(".*"))


def test_writers_of_one_text(tmp_path: Path) -> None:
    """One of them wins, none fails, and nothing else stays."""
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: replace_text_durably(tmp_path / "x", f"é{i}" * 99), range(64)))
    text = (tmp_path / "x").read_text(encoding="utf-8")
    assert text in [f"é{i}" * 99 for i in range(64)]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
