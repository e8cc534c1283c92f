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
    done = run_python(["benchmarks/render.py", "--check"])
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
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


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
