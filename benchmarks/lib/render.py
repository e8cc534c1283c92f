"""Write docs/benchmarks.md and a page for each file of benchmarks/results.

    python benchmarks/lib/render.py            writes the pages
    python benchmarks/lib/render.py --check    fails if a page is not up to date

A page says what was measured, by which command, on which machine, and has a table for each list of
rows. Columns with one value in all rows stand above the table. No figure is written by hand.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from benchmarks import DOCS, RESULTS, ROOT
from benchmarks.lib.catalogue import AREAS, TITLES, replace_moved_program_paths
from benchmarks.lib.report import JsonObject
from benchmarks.paper.index import PAPERS
from benchmarks.paper.index import table as table_of_paper
from benchmarks.paper.pictures import PICTURES

PAGES = DOCS / "benchmarks"
HEAD = """# Benchmarks

```
python -m benchmarks     # every program, and what it measures; with a name and options it runs one
```
The newest first. Compare ratios of one run. The [papers' tables](papers.md) are apart.

| area | what was measured | machine | date |
|---|---|---|---|
"""
# The first pattern that a result's machine contains names it in the index.
MACHINES = {
    "H100": "one H100",
    "compiled": "compiled without a GPU",
    "AMX": "two cores, Intel Xeon (AMX)",
    "Zen 4": "two cores, AMD EPYC (Zen 4)",
    "EPYC": "two cores, AMD EPYC",
    "two CPU cores": "two cores",
}
OTHER_MACHINES = "amx_processor", "slower_processor"
ABOUT = (
    "benchmark",
    "command",
    "commands",
    "date",
    "machine",
    "versions",
    "notes",
    "note",
    "options",
)
MAX_CELL = 60  # characters
WIDE, SHORT = 12, 6  # columns, rows


def format_number(value: object) -> str:
    """Return a value as tables show it: four significant digits, thousands separated."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if isinstance(value, int) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_cell(value: object) -> str:
    """Return a value as the text of a table's cell; a long list of numbers as its range."""
    if isinstance(value, list):
        shown = ", ".join(map(format_cell, value))
        if len(shown) <= MAX_CELL or not all(isinstance(part, int | float) for part in value):
            return shown
        return f"{len(value)} values, {format_cell(min(value))} to {format_cell(max(value))}"
    if isinstance(value, dict):
        return "; ".join(f"{name} {format_cell(part)}" for name, part in value.items())
    return format_number(value).replace("|", "\\|")


def flatten_row(row: JsonObject, prefix: str = "") -> JsonObject:
    """Return one level of names and values; the names of nested values are joined."""
    cells: JsonObject = {}
    for name, value in row.items():
        cells |= (
            flatten_row(value, f"{prefix}{name} ")
            if isinstance(value, dict)
            else {f"{prefix}{name}".strip(): value}
        )
    return cells


def table_lines(rows: list[JsonObject]) -> Iterator[str]:
    """Yield a table of rows, transposed if wide and short; columns of one value stand above it."""
    rows = [flatten_row(row) for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: {json.dumps(row.get(name)) for row in rows} for name in columns}
    same = [name for name in columns if len(rows) > 1 and len(values[name]) == 1]
    if same:
        yield (
            "All rows: "
            + ", ".join(f"{name} {format_cell(rows[0][name])}" for name in same)
            + ".\n"
        )
    shown = [name for name in columns if name not in same]
    grid = [[name.replace("_", " ") for name in shown]]
    grid += [[format_cell(row[name]) if name in row else "" for name in shown] for row in rows]
    if len(shown) > WIDE and len(rows) < SHORT:
        grid = [list(column) for column in zip(*grid, strict=True)]
    for number_of_line, line in enumerate(grid):
        yield "| " + " | ".join(line) + " |"
        if not number_of_line:
            yield "|" + "---|" * len(line)
    yield ""


def is_list_of_rows(value: object) -> TypeGuard[list[JsonObject]]:
    """Return whether a value is a list of objects that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def heading_lines(result: JsonObject) -> Iterator[str]:
    """Yield how the result was made, on which machine, and its notes."""
    for name in ("command", "commands"):
        lines = result.get(name, [])
        if lines:
            yield (
                "```\n"
                + "\n".join([lines] if isinstance(lines, str) else map(str, lines))
                + "\n```\n"
            )
    facts = [
        f"{name} {format_cell(result[name])}"
        for name in ("machine", "date", "versions", "options")
        if name in result
    ]
    if facts:
        yield "; ".join(facts).removeprefix("machine ") + ".\n"
    notes = result.get("notes", result.get("note", []))
    notes = [notes] if isinstance(notes, str) else notes
    notes = (
        [f"{name}: {text}" for name, text in notes.items()] if isinstance(notes, dict) else notes
    )
    yield from (f"- {note}" for note in notes)
    if notes:
        yield ""


def runs_of_result(result: JsonObject) -> list[JsonObject]:
    """Return the measurements of a result on each of its machines, the newest first.

    The parts of OTHER_MACHINES are the same measurement again; of one day, the faster machine goes
    first.
    """
    first = {name: value for name, value in result.items() if name not in OTHER_MACHINES}
    faster, slower = (result.get(name) for name in OTHER_MACHINES)
    found = [run for run in (faster, first, slower) if run is not None]
    return sorted(found, key=lambda run: str(run.get("date", "")), reverse=True)


def date_of(part: object, run: JsonObject) -> str:
    """Return the day of a part of a measurement, as text that sorts by time."""
    return str(
        part.get("date", run.get("date", "")) if isinstance(part, dict) else run.get("date", "")
    )


def body_lines(result: JsonObject, level: int) -> Iterator[str]:
    """Yield the newest measurement of a result, and the older ones folded."""
    newest, *older = runs_of_result(result)
    yield from measurement_lines(newest, level)
    for run in older:
        where = [str(run[name]) for name in ("machine", "date") if name in run]
        yield f"<details>\n<summary>Also measured: {'; '.join(where)}</summary>\n"
        yield from measurement_lines(run, level)
        yield "</details>\n"


def measurement_lines(run: JsonObject, level: int) -> Iterator[str]:
    """Yield what was run, its single values, and a table or section for each of its parts."""
    yield from heading_lines(run)
    values = {
        name: value
        for name, value in run.items()
        if name not in ABOUT and not isinstance(value, dict) and not is_list_of_rows(value)
    }
    if values:
        yield from (
            f"- {name.replace('_', ' ')}: {format_cell(value)}" for name, value in values.items()
        )
        yield ""
    parts = [
        (name, value) for name, value in run.items() if name not in ABOUT and name not in values
    ]
    for name, value in sorted(parts, key=lambda part: date_of(part[1], run), reverse=True):
        if name != "rows":
            yield f"{'#' * level} {name.replace('_', ' ')}\n"
        if is_list_of_rows(value):
            yield from table_lines(value)
        elif any(map(is_list_of_rows, value.values())):
            yield from body_lines(value, level + 1)
        else:
            yield from table_lines([value])


def papers_page_lines() -> Iterator[str]:
    """Yield the page of the papers' tables and figures, ours beside theirs."""
    yield "# The papers' tables and figures\n"
    yield "```"
    yield "python -m benchmarks.paper                  # prints them; with a name runs that program"
    yield "python -m benchmarks.paper --all --quick    # smoke tests, without root, in minutes"
    yield "```\n"
    yield (
        "One table for each paper: every table and every figure of it, its figures, ours, and the"
        " program that gives ours. `make docs` writes the page from the results. SE-MoE and MoESys"
        " are [arXiv 2205.10034](https://arxiv.org/abs/2205.10034), first and third version; Lina"
        " is of USENIX ATC '23. The papers measured on up to 128 A100. Ours are measured on two CPU"
        " cores unless they say *estimated* (from programs compiled for GPUs) or *simulated*, so"
        " compare ratios. `benchmarks/peers/setup.py` makes the environments of the peers.\n"
    )
    yield "Both pictures are drawn from the results by `python -m benchmarks.paper.pictures`.\n"
    yield from (
        f"![figures of {name[7:-4]}, drawn from the results]({name})\n" for name in PICTURES
    )
    for paper in PAPERS:
        yield f"## {paper}\n"
        yield from table_of_paper(paper)
        yield ""


def result_page_lines(path: Path, result: JsonObject) -> Iterator[str]:
    """Yield the page of one result file."""
    yield f"# {TITLES[path.stem][1]}\n"
    link = f"../../{path.relative_to(ROOT)}"
    yield f"All figures as JSON: [`{path.name}`]({link}). All results: [index](../benchmarks.md).\n"
    yield from body_lines(result, 2)


def machine_of(run: JsonObject) -> str:
    """Return a few words on the machine of a measurement; `ValueError` if `MACHINES` has none."""
    described = str(run.get("machine") or run.get("device") or "")
    if not described:
        return "none: computed from a model"
    for part, words in MACHINES.items():
        if part in described:
            return words
    raise ValueError(f"machine = {described!r}: must contain one of {', '.join(MACHINES)}")


def index_page_lines(results: dict[Path, JsonObject]) -> Iterator[str]:
    """Yield docs/benchmarks.md: a row for each result, by area, the newest first."""
    yield HEAD.rstrip()
    newest = {path: runs_of_result(result)[0] for path, result in results.items()}
    by_date = sorted(results, key=lambda path: str(newest[path].get("date", "")), reverse=True)
    for path in sorted(by_date, key=lambda path: AREAS.index(TITLES[path.stem][0])):
        area, title = TITLES[path.stem]
        run = newest[path]
        link = f"[{title}](benchmarks/{path.stem}.md)"
        yield f"| {area} | {link} | {machine_of(run)} | {run.get('date', '')} |"


def render_pages() -> dict[Path, str]:
    """Return every page by its path."""
    files = sorted(RESULTS.glob("*.json"))
    results = {path: json.loads(replace_moved_program_paths(path.read_text())) for path in files}
    made = {
        PAGES / f"{path.stem}.md": result_page_lines(path, result)
        for path, result in results.items()
    }
    made |= {
        DOCS / "benchmarks.md": index_page_lines(results),
        DOCS / "papers.md": papers_page_lines(),
    }
    return {path: "\n".join(lines).rstrip() + "\n" for path, lines in made.items()}


def main() -> None:
    """Write the pages and remove those without a result; --check fails if that would change any."""
    made, written = render_pages(), [DOCS / "benchmarks.md", *PAGES.glob("*.md")]
    stale = [path for path in written if path not in made]
    if "--check" in sys.argv[1:]:
        changed = [
            path for path, text in made.items() if not path.exists() or path.read_text() != text
        ]
        names = ", ".join(str(path.relative_to(ROOT)) for path in changed + stale)
        sys.exit(f"{names}: must be what the results say: run `make docs`" if names else 0)
    PAGES.mkdir(exist_ok=True)
    for path, text in made.items():
        path.write_text(text)
    for path in stale:
        path.unlink()


if __name__ == "__main__":
    main()
