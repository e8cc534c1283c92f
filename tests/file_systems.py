"""Folders on file systems as users have them: some that cannot be written to."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write below the folder; skip the test where that cannot be had."""
    if os.geteuid() != 0:
        folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in folders:
            path.chmod(0o555)
        try:
            yield
        finally:
            for path in folders:
                path.chmod(0o755)
        return
    mount(["--bind", str(folder)], folder)  # root may write whatever the mode says
    try:
        mount(["-o", "remount,bind,ro"], folder)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def full_disk(place: Path) -> Iterator[Callable[[], None]]:
    """A file system of 256 KiB at this folder; the function that is given fills it up."""
    mount(["-t", "tmpfs", "-o", "size=256k", "none"], place)

    def fill() -> None:
        with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    try:
        yield fill
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def mount(options: list[str], place: Path) -> None:
    """Mount, or skip the test where that is not allowed."""
    done = subprocess.run(
        ["mount", *options, str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
