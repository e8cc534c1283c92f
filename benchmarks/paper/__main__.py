"""The papers' tables and figures, ours beside theirs; the last line of a run is one JSON object.

    python -m benchmarks.paper                       lists them, with their figures and ours
    python -m benchmarks.paper moesys-table-3        runs the command that makes it
    python -m benchmarks.paper lina-step
        draws its figures from the committed result first, if it has any
    python -m benchmarks.paper --all --quick
        smoke tests of all, and the committed figures beside the papers'

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
from benchmarks.paper.index import PLACES, Place

DRAWN = ROOT / "runs" / "papers"  # figures of single places


def comparison(place: Place) -> JsonObject:
    """Return the paper's figures and those of the committed result."""
    row = {"name": place.name, "paper": place.paper, "place": place.place, "shows": place.shows}
    row |= {
        "paper_has": place.paper_has,
        "here": place.here(),
        "result": place.result,
        "command": place.command,
    }
    return row | ({"lacking": place.lacking} if place.lacking else {})


def smoke_test(place: Place) -> JsonObject:
    """Run a place's smoke test, if it has one."""
    row = comparison(place)
    if place.quick is None:
        return row | {"ran": False}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = run_part(shlex.split(place.quick), place.limit_s, environment, ROOT)
    done.pop("result", None)
    return row | {"ran": True} | done


def draw(place: Place) -> Path | None:
    """Draw a place's figures from its result; return the picture's path, None without figures."""
    from benchmarks.paper import pictures  # which needs matplotlib

    if place.name not in pictures.PANELS:
        return None
    DRAWN.mkdir(parents=True, exist_ok=True)
    return pictures.draw([place], DRAWN / f"{place.name}.png")


def chosen(names: list[str]) -> list[Place]:
    """Return the places of these names; `ValueError` naming those that there are not."""
    by_name = {place.name: place for place in PLACES}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"{', '.join(unknown)}: must be among {', '.join(by_name)}")
    return [by_name[name] for name in names]


def main() -> int:
    """List the places, run one, or smoke test some."""
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
        places = list(PLACES) if a.all else chosen(a.names)
    except ValueError as error:
        parser.error(str(error))
    if a.quick:
        rows = [report.progress(smoke_test(place)) for place in places]
        failed = [row["name"] for row in rows if "failed" in row]
        report.finish(
            {"benchmark": "the papers' tables and figures", "failed": failed, "rows": rows}
        )
        return 1 if failed else 0
    if not places:
        for place in PLACES:
            lacking = f"\n    lacking: {place.lacking}" if place.lacking else ""
            print(f"{place.name}: {place.paper}, {place.place}: {place.shows}")
            print(
                f"    paper: {place.paper_has}\n    here: {place.here()}\n    "
                f"{place.command}{lacking}"
            )
        return 0
    for place in places:
        if path := draw(place):
            print(f"{place.name}: drawn from benchmarks/results/{place.result}: {path}", flush=True)
        if "DIR" in place.command or "FILE" in place.command or ", " in place.command:
            parser.error(f"{place.name}: needs what you have: {place.command}")
        command = place.command.replace("python ", f"{shlex.quote(sys.executable)} ", 1)
        status = subprocess.run(command, shell=True, cwd=ROOT, check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
