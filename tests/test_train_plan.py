"""`train.py --plan` as a program: the examples of the docs, and a plan that does not fit."""

import json
import re
import shlex
from pathlib import Path

from tests.train_runs import Run

ROOT = Path(__file__).resolve().parent.parent


def test_the_example_of_the_docs_fits(run_python: Run) -> None:
    pages = [
        (ROOT / page).read_text().replace("\\\n", " ")
        for page in ("README.md", "docs/offloading.md")
    ]
    example = re.compile(r"^python train.py mixtral-8x7b --plan .*", re.MULTILINE)
    (line,) = {match for page in pages for match in example.findall(page)}
    assert all(line in page for page in pages)
    done = run_python(shlex.split(line)[1:], {}, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "per device, 8 devices; host and nvme per host, 1 host" in done.stdout
    assert "\nit fits\n" in done.stdout
    seconds = re.search(r"predicted step: ([0-9.]+) s", done.stdout)
    assert seconds is not None
    assert 1 < float(seconds[1]) < 60


def test_a_plan_that_does_not_fit_ends_with_1(run_python: Run, tmp_path: Path) -> None:
    command = (
        "train.py",
        "tiny",
        "--plan",
        "--machine.device-bytes",
        "220000000",
        "--output-dir",
        tmp_path / "run",
    )
    done = run_python(command, {}, timeout=240)
    assert done.returncode == 1
    assert "per device, 1 device; " in done.stdout
    assert "it does not fit" in done.stdout
    assert re.search(
        r"^device: 0.\d\d GB too much; the most is .*enough", done.stdout, re.MULTILINE
    ), done.stdout
    assert done.stderr == ""
    assert not (tmp_path / "run").exists()


def test_a_cluster_on_paper(run_python: Run) -> None:
    """As the sample file says, and a file with a mistake."""
    sample = ("--plan", "--mesh.expert-inter", "2", "--cluster", "launch/clusters/h100.toml")
    done = run_python(["train.py", "qwen3-30b-a3b", *sample, "--json"], {}, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["nodes"] for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert all(row["step_s"] > row["all_to_all_s"] > 0 and row["checkpoint_s"] > 0 for row in rows)
    wrong = run_python(
        ["train.py", "tiny", "--plan", "--cluster", "pyproject.toml"], {}, timeout=240
    )
    assert wrong.returncode == 1
    assert "train.py: cluster = 'pyproject.toml': build-system = " in wrong.stderr
