"""A row of the papers' tables, and the program that gives its figures."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.lib.report import JsonObject

Result = JsonObject


@dataclass(frozen=True)
class Program:
    """A program that gives figures of the papers.

    command: writes `result`, a file of benchmarks/results, from the repository's root. quick:
    Python's arguments for a smoke test within `limit_s` seconds; None if that needs root, a model
    or hours, as `no_quick` says.
    """

    name: str
    command: str
    result: str
    quick: str | None = None
    limit_s: int = 120
    no_quick: str = ""

    def committed(self) -> Result:
        """Return the committed result."""
        loaded: Result = json.loads((RESULTS / self.result).read_text())
        return loaded


@dataclass(frozen=True)
class Row:
    """A table, figure or section of a paper beside ours.

    item: as the paper numbers it, `Table 1`. paper_has: the paper's figures, with their machines.
    program: the name of the program whose result holds ours. ours: a function from that result to
    our figures in words. compared: whether both are the same quantity, or how they differ.

    A drawing or an algorithm without figures has no program, but `held_by`: the file of the tests
    that hold jmoe to what the paper draws; `compared` then says what they hold.
    """

    item: str
    shows: str
    paper_has: str
    compared: str
    program: str = ""
    ours: Callable[[Result], str] | None = None
    held_by: str = ""

    def __post_init__(self) -> None:
        measured = bool(self.program) and self.ours is not None
        if measured == bool(self.held_by):
            raise ValueError(f"{self.item}: must have a program with figures, or held_by")
        if self.held_by and not (ROOT / self.held_by).is_file():
            raise ValueError(f"{self.item}: held_by = {self.held_by!r}: must be a test file")


def matching_row(rows: list[Result], **wanted: Any) -> Result:
    """Return the first row that has these values."""
    return next(
        row for row in rows if all(row.get(name) == value for name, value in wanted.items())
    )
