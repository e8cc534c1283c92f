"""README and docs: the generated page is up to date, links lead somewhere, the code of the layer runs."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "launch/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_benchmarks_page_is_what_the_results_say(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(["benchmarks/lib/render.py", "--check"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{name}: {target}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


@pytest.mark.slow
def test_the_first_code_says_how_to_have_its_devices(run_python) -> None:  # type: ignore[no-untyped-def]
    """As a reader types it, with what the comment puts before the program's name."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0]
    words = re.search(r"# 8 devices; fake ones on a CPU: (.*) \.venv/bin/python\n", code)
    assert words is not None
    changes: dict[str, str | None] = {"JAX_NUM_CPU_DEVICES": None, "NPROC": None, "XLA_FLAGS": None}
    done = run_python(["-c", code], changes | dict(word.split("=") for word in words[1].split()))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_readmes_commands_run_as_written(run_python, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """`make` leaves .venv and nothing else on the path; the training command for two steps, in a folder of the test."""
    (block,) = re.findall(r"```\n(source .*?)```", (ROOT / "README.md").read_text().replace("\\\n", " "), re.DOTALL)
    commands = [line.partition("   #")[0].split() for line in block.splitlines()]
    assert commands[0] == ["source", ".venv/bin/activate"]
    assert {words[0] for words in commands[1:]} == {"python", "make"}
    (train,) = [words for words in commands if words[0] == "python" and "--plan" not in words]
    options = [word.strip("'") for word in train[1:]] + ["--num-steps", "1", "--evaluation.no-at-start"]
    options[options.index("runs/mine")] = str(tmp_path / "run")
    done = run_python([*options, "--sequence-length", "32", "--batch-size", "2", "--model.vocab-size", "512"])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize(("name", "blocks"), [("README.md", 1), ("docs/layer.md", 5)])
def test_the_layers_code_runs(name: str, blocks: int) -> None:
    """The pieces of a page are one program, as a reader would type them."""
    pieces = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)
    assert len(pieces) == blocks
    names: dict[str, Any] = {}
    for code in pieces:
        exec(compile(code, name, "exec"), names)
    if name == "README.md":
        assert names["y"].shape == (4, 128, 512)
        return
    assert names["next_y"].shape == (1, 128)
    np.testing.assert_allclose(names["y"], names["one_device"](names["x"])[0], atol=1e-6)
    w_up = names["layer"].experts.w_up[...]
    assert {shard.data.nbytes for shard in w_up.addressable_shards} == {w_up.nbytes // 4}
