"""Temporary folders are deleted at the end of their block, or by others once their process died."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from text_corpus import REPOSITORY

from jmoe.data.temporary_folder import temporary_folder

OTHER = """
import sys
from jmoe.data.temporary_folder import temporary_folder
with temporary_folder() as folder:
    (folder / "content").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@contextmanager
def folder_of_another_process() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_folder_is_deleted_when_its_block_ends(
    temporary: Path, error: type[Exception] | None
) -> None:
    try:
        with temporary_folder() as folder:
            assert folder.parent == temporary
            (folder / "content").touch()
            if error is not None:
                raise error
    except ValueError:
        pass
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_process_is_deleted_by_the_next(temporary: Path) -> None:
    with folder_of_another_process() as (process, left):
        process.kill()
        process.wait()
        assert (left / "content").stat().st_size == 1000
        with temporary_folder() as folder:
            assert list(temporary.iterdir()) == [folder]


def test_the_folder_of_a_running_process_stays(temporary: Path) -> None:
    with folder_of_another_process() as (process, used):
        with temporary_folder(), temporary_folder():
            assert (used / "content").stat().st_size == 1000
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert not list(temporary.iterdir())


def test_without_locks_nothing_is_deleted_by_others(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder() as first, temporary_folder():
        assert first.is_dir()
    assert not list(temporary.iterdir())
