"""The papers' tables and figures beside ours, as docs/papers.md has them."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.paper.tables import lina, moesys, se_moe, simulated
from benchmarks.paper.tables.programs import PROGRAMS
from benchmarks.paper.tables.row import Program, Row

# Heading of each table, and its rows.
PAPERS: dict[str, tuple[Row, ...]] = {
    "MoESys": moesys.ROWS,
    "SE-MoE": se_moe.ROWS,
    "Lina": lina.ROWS,
    "Simulators behind rows of more nodes than two": simulated.ROWS,
}
BY_NAME = {program.name: program for program in PROGRAMS}
HEAD = "| the paper | shows | the paper has | here | the same quantity? | given by |"


def here(row: Row) -> str:
    """Return our figures in words; of a row without figures that jmoe is tested to do the same."""
    if row.ours is None:
        return "tested, no figures"
    return row.ours(BY_NAME[row.program].committed())


def rows_of(program: Program) -> Iterator[tuple[str, Row]]:
    """Yield (paper, row) of each row whose figures a program gives."""
    for paper, rows in PAPERS.items():
        yield from ((paper, row) for row in rows if row.program == program.name)


def given_by(row: Row) -> str:
    """Return a link to the result of a row's program, or to the tests that hold its drawing."""
    if row.held_by:
        return f"[tests](../{row.held_by})"
    return f"[`{row.program}`](benchmarks/{Path(BY_NAME[row.program].result).stem}.md)"


def table(paper: str) -> Iterator[str]:
    """Yield the table of a paper."""
    yield HEAD
    yield "|" + "---|" * (HEAD.count("|") - 1)
    for row in PAPERS[paper]:
        cells = row.item, row.shows, row.paper_has, here(row), row.compared, given_by(row)
        yield f"| {' | '.join(cells)} |"
