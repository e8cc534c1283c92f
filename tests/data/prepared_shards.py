"""What the tests of prepared shards share."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jmoe.data.prepare import main

UNIT_MB = ("--unit-mb", "0.004")


def run(*arguments: object) -> int:
    return main(list(map(str, arguments)))


def files_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a prepared folder, but the plan, which has times."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "plan.json"
    }
