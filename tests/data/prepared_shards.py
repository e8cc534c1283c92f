"""What the tests of prepared shards share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jmoe.data.prepare import main
from jmoe.data.shards import TEMPORARY

UNIT_MB = ("--unit-mb", "0.004")


def run(*arguments: object) -> int:
    return main(list(map(str, arguments)))


def files_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a prepared folder, but the plan, which has times, and
    what killed writers left.
    """
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "plan.json" and path.suffix != TEMPORARY
    }


def download(url: str, target: Path) -> dict[str, str]:
    """Return the hashes of the files in a store."""
    fsspec = pytest.importorskip("fsspec")
    fs, root = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    for path in fs.find(root):
        local = target / path.removeprefix(root).lstrip("/")
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(fs.cat_file(path))
    return files_of(target)
