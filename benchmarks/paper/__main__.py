"""The papers' tables and figures, ours beside theirs; the last line of a run is one JSON object.

    python -m benchmarks.paper                       prints them, with the papers' figures and ours
    python -m benchmarks.paper moesys-table-3        runs the command of a program that gives ours
    python -m benchmarks.paper lina-order
        draws its figures from the committed result first, if it has any
    python -m benchmarks.paper --all --quick
        smoke tests of all programs, and the committed figures beside the papers'

A smoke test shows that a benchmark runs, not what it measures: figures come from
`benchmarks/results`, and XLA leaves most optimisations out, to compile sooner. One that fails or
runs into its limit is named with its last lines, and the rest goes on; the exit status is then 1.
What needs root, a model or hours is not run with --quick.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import os
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.lib import report
from benchmarks.lib.parts import run_part
from benchmarks.lib.report import JsonObject
from benchmarks.paper.index import BY_NAME, PAPERS, here, rows_of
from benchmarks.paper.tables.programs import PROGRAMS
from benchmarks.paper.tables.row import Program

DRAWN = ROOT / "runs" / "papers"  # figures of single programs
MADE_BY_HAND = "DIR", "FILE", "ENVIRONMENT"


def comparison(program: Program) -> JsonObject:
    """Return the papers' figures beside those of a program's committed result."""
    rows = [
        {"paper": paper, "item": row.item, "paper_has": row.paper_has, "here": here(row)}
        for paper, row in rows_of(program)
    ]
    return {
        "name": program.name,
        "command": program.command,
        "result": program.result,
        "rows": rows,
    }


def smoke_test(program: Program) -> JsonObject:
    """Run a program's smoke test, if it has one."""
    row = comparison(program)
    if program.quick is None:
        return row | {"ran": False, "why": program.no_quick}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = run_part(shlex.split(program.quick), program.limit_s, environment, ROOT)
    done.pop("result", None)
    return row | {"ran": True} | done


def draw(program: Program) -> Path | None:
    """Draw a program's figures from its result; return the picture's path, None without figures."""
    from benchmarks.paper import pictures  # which needs matplotlib

    if program.name not in pictures.PANELS:
        return None
    DRAWN.mkdir(parents=True, exist_ok=True)
    return pictures.draw([program], DRAWN / f"{program.name}.png")


def chosen(names: list[str]) -> list[Program]:
    """Return the programs of these names; `ValueError` naming the unknown ones."""
    if unknown := [name for name in names if name not in BY_NAME]:
        raise ValueError(f"{', '.join(unknown)}: must be among {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in names]


def print_tables() -> None:
    """Print every row of the papers: their figures, ours, and the program that gives ours."""
    for paper, rows in PAPERS.items():
        for row in rows:
            command = BY_NAME[row.program].command if row.program else f"pytest {row.held_by}"
            print(f"{paper}, {row.item}: {row.shows}")
            print(f"    paper: {row.paper_has}\n    here: {here(row)}")
            print(f"    the same quantity? {row.compared}\n    {row.program}: {command}")


def run_in_full(programs: list[Program]) -> int:
    """Draw each program's committed figures, then run its command; return the first exit status
    that is not 0. `ValueError` for a command with something to fill in.
    """
    for program in programs:
        if path := draw(program):
            print(f"{program.name}: drawn from benchmarks/results/{program.result}: {path}")
        if any(word in program.command for word in MADE_BY_HAND):
            raise ValueError(f"{program.name}: needs what you have: {program.command}")
        sys.stdout.flush()
        command = program.command.replace("python ", f"{shlex.quote(sys.executable)} ", 1)
        status = subprocess.run(command, shell=True, cwd=ROOT, check=False).returncode
        if status:
            return status
    return 0


def main() -> int:
    """Print the tables, run programs, or smoke test some."""
    parser = report.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="all of them; needs --quick")
    parser.add_argument("--quick", action="store_true", help="smoke tests")
    a = parser.parse_args()
    if a.all and not a.quick:
        parser.error("--all: needs --quick; the commands of a full run need root, models and hours")
    if a.all == bool(a.names) and a.quick:
        parser.error("--quick: needs names or --all, not both")
    try:
        programs = list(PROGRAMS) if a.all else chosen(a.names)
        if a.quick:
            rows = [report.progress(smoke_test(program)) for program in programs]
            failed = [row["name"] for row in rows if "failed" in row]
            report.finish(
                {"benchmark": "the papers' tables and figures", "failed": failed, "rows": rows}
            )
            return 1 if failed else 0
        if programs:
            return run_in_full(programs)
    except ValueError as error:
        parser.error(str(error))
    print_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
