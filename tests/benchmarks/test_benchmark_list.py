"""`python -m benchmarks`: lists every program, runs one by name; and every path in a text leads
to a program.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import BENCHMARKS, RESULTS, ROOT
from benchmarks.__main__ import programs, summary
from benchmarks.lib.catalogue import replace_moved_program_paths

RunPython = Callable[..., subprocess.CompletedProcess[str]]
PATH = re.compile(r"(?<!tests/)\bbenchmarks/[\w/]+\.py\b")
TEXTS = [
    *ROOT.glob("*.md"),
    ROOT / "Makefile",
    *BENCHMARKS.rglob("*.py"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docs/benchmarks/*.md"),
]


def test_every_program_is_in_a_folder_and_says_what_it_measures(run_python: RunPython) -> None:
    assert {path.name for path in BENCHMARKS.glob("*.py")} == {"__init__.py", "__main__.py"}
    listed = run_python(["-m", "benchmarks"]).stdout
    assert len(programs()) > 45
    for name, path in programs().items():
        assert re.search(rf"^{name} +{re.escape(summary(path))}$", listed, re.MULTILINE)
        assert 20 < len(summary(path)) <= 100 and summary(path).endswith("."), name


def test_a_program_runs_by_name_with_its_options(run_python: RunPython) -> None:
    done = run_python(["-m", "benchmarks", "lib/render", "--check"])
    assert done.returncode == 0, done.stderr
    done = run_python(["-m", "benchmarks", "lib/gpu", "--only", "kernls"])
    assert done.returncode == 2 and "--only: kernls: must be among floors" in done.stderr


def test_an_unknown_name_is_refused(run_python: RunPython) -> None:
    done = run_python(["-m", "benchmarks", "train/stop"])
    assert done.returncode == 1
    assert done.stderr == "train/stop: must be a benchmark. `python -m benchmarks` lists them.\n"


@pytest.mark.parametrize("path", sorted(TEXTS), ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_of_benchmarks_lead_to_them(path: Path) -> None:
    for found in PATH.findall(path.read_text()):
        assert (ROOT / found).is_file(), found


def test_the_programs_that_wrote_the_results_are_found() -> None:
    """A result names its program by the path of its day."""
    written = {found for path in RESULTS.glob("*.json") for found in PATH.findall(path.read_text())}
    assert any(not (ROOT / found).is_file() for found in written)
    for found in written:
        assert (ROOT / replace_moved_program_paths(found)).is_file(), found
