"""README and docs: generated pages are up to date, links lead somewhere, figures are measured,
code runs.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.arrays import assert_trees_close

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    *WRITTEN,
    "CHANGELOG.md",
    "launch/README.md",
    *(
        f"docs/benchmarks/{path.name}"
        for path in sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
    ),
]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_of_benchmarks_are_what_the_results_say(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(["benchmarks/lib/render.py", "--check"])
    assert done.returncode == 0, done.stderr


def test_the_index_of_benchmarks_is_one_screen_with_a_link_to_each_result() -> None:
    index = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(index.splitlines()) <= 70
    linked = re.findall(r"\(benchmarks/(\w+)\.md\)", index)
    assert sorted(linked) == sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", ["decoding_cpu", "training_peers_cpu", "native_cpu"])
def test_a_page_begins_with_the_newest_measurement_and_folds_the_others(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    runs = [result, *(value for key, value in result.items() if key.endswith("_processor"))]
    shown, *folded = (ROOT / "docs" / "benchmarks" / f"{name}.md").read_text().split("<details>")
    assert f"date {max(run['date'] for run in runs)}" in shown
    assert len(folded) == len(runs) - 1 == sum("</details>" in part for part in folded)


def test_no_page_shows_the_error_of_a_shell() -> None:
    for name in PAGES:
        found = re.search(
            r"Could not resolve host|No such file or directory|Traceback \(most",
            (ROOT / name).read_text(),
        )
        assert found is None, f"{name}: {found}"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_opens_with_a_command(name: str) -> None:
    """Or with code, within a screen."""
    text = (ROOT / name).read_text()
    assert text.startswith("# ")
    block, *_ = re.findall(r"```(?:python)?\n(.*?)```", text, flags=re.DOTALL)
    assert len(text.partition(block)[0].splitlines()) <= (15 if name == "README.md" else 8)
    assert re.match(r"python |make |sbatch |import ", block)


def test_every_picture_says_which_command_made_it() -> None:
    """In a paragraph of its own, beside the picture."""
    pictures = {path.name for path in (ROOT / "docs").glob("*.png")}
    for name in PAGES:
        paragraphs = (ROOT / name).read_text().split("\n\n")
        for number, paragraph in enumerate(paragraphs):
            if shown := re.match(r"!\[.*\]\([./\w]*?(\w+\.png)\)$", paragraph):
                beside = "\n".join(paragraphs[max(number - 2, 0) : number + 2])
                assert re.search(
                    r"(Drawn by|drawn from the results by|A browser on) `(python|make) ", beside
                ), f"{name}: {shown}"
                pictures.discard(shown[1])
    assert not pictures, "no page shows these"


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


def test_every_case_from_the_field_names_tests_that_exist() -> None:
    """A letter's cases are in order; what a case says is held by a test, or by several."""
    rows = re.findall(
        r"^\| ([A-C])(\d+) \| [^|]+ \| [^|]+ \| (.*) \|$",
        (ROOT / "docs" / "field_cases.md").read_text(),
        re.MULTILINE,
    )
    numbers = {letter: [int(n) for a, n, _ in rows if a == letter] for letter in "ABC"}
    left_out = {"A": {7}, "B": {3}, "C": {7}}
    for letter, last in (("A", 14), ("B", 21), ("C", 15)):
        assert numbers[letter] == [n for n in range(1, last + 1) if n not in left_out[letter]]
    functions: dict[str, set[str]] = {}
    for letter, number, named in rows:
        tests = named.split(", ")
        for test in tests:
            match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
            assert match is not None, f"{letter}{number}: {test}"
            file, name = match.groups()
            if file not in functions:
                tree = ast.parse((ROOT / file).read_text())
                functions[file] = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            assert name in functions[file], f"{letter}{number}: {test}"


def test_the_changelog_begins_with_what_is_unreleased_and_tells_a_version_in_25_points() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, *versions = re.findall(
        r"^## \[(.*?)\](.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    assert unreleased[0] == "Unreleased"
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None and versions[0][0] == version[1]
    for name, body in versions:
        assert len(re.findall(r"^- ", body, re.MULTILINE)) <= 25, name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def measured() -> list[tuple[list[float], list[float], list[float]]]:
    """Return what each row of the README's table must have: jmoe, the peer, and how many times
    as fast jmoe is.
    """

    def load(name: str) -> Any:
        return json.loads((RESULTS / f"{name}.json").read_text())

    trained, decoded = load("gpu_training_olmoe"), load("gpu_decode_resident")
    theirs = float(
        re.search(r"on an H100 .*: ([\d,]+) tokens/s", trained["notes"])[1].replace(",", "")
    )  # type: ignore[index]
    peers = load("training_peers_cpu")["slower_processor"]
    trainers = [peers["buckets"]["8 experts"], peers["buckets"]["16 experts"], peers["32 experts"]]
    llama = load("llamacpp_cpu")["slower_processor"]["rows"][0]
    oversized = load("oversized_cpu")["slower_processor"]["rows"][0]
    counts, pressed = [llama["one"], llama["eight"]], oversized["tokens_per_s"]
    nvme = [
        row for row in load("training_tiers_cpu")["deepspeed"]["rows"] if row["place"] == "nvme"
    ]
    sent = [
        row
        for row in load("exchange_two_nodes_cpu")["rows"]
        if (row["mbit_per_s"], row["direction"]) == (100, "forward")
    ]
    flat, dedup = (
        [row for row in sent if row["exchange"] == kind and row["top_k"] > 1]
        for kind in ("flat", "dedup")
    )
    steps = sorted(
        load("order_two_nodes_cpu")["slower_processor"]["rows"], key=lambda row: row["mbit_per_s"]
    )
    ready, chunks = (
        [row for row in steps if row["variant"] == name] for name in ("ready", "chunks")
    )
    return [
        ([trained["tokens_per_s"]], [theirs], [trained["tokens_per_s"] / theirs]),
        (list(decoded["decode_tokens_per_s"].values()), [], []),
        (
            [row[1]["tokens_per_s"] for row in trainers],
            [row[0]["tokens_per_s"] for row in trainers],
            [row[1]["ratio"] for row in trainers],
        ),
        (
            [row["jmoe"] for row in counts],
            [row["llama.cpp"] for row in counts],
            [row["ratio"] for row in counts],
        ),
        ([pressed["jmoe"]], [pressed["llama.cpp"]], [pressed["ratio"]]),
        ([nvme[1]["step_s"]], [nvme[0]["step_s"]], [nvme[1]["ratio"]]),
        (
            [row["seconds"] for row in dedup],
            [row["seconds"] for row in flat],
            [1 / row["ratio_to_flat"] for row in dedup],
        ),
        (
            [row["seconds"] for row in chunks],
            [row["seconds"] for row in ready],
            [row["ratio_to_ready"] for row in chunks],
        ),
    ]


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    table = (
        (ROOT / "README.md").read_text().partition("## Measured\n")[2].partition("\n\nA ratio")[0]
    )
    rows = [line.split("|")[2:5] for line in table.strip().splitlines()[2:]]
    assert len(rows) == len(measured()) <= 8
    for cells, wanted in zip(rows, measured(), strict=True):
        for cell, figures in zip(cells, wanted, strict=True):
            shown = [
                float(number.replace(",", ""))
                for number in re.findall(r"\d[\d,]*\d(?:\.\d+)?|\d+(?:\.\d+)?", cell)
            ]
            assert shown == pytest.approx(figures, rel=0.006), cells


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
    """`make` leaves .venv and nothing else on the path; the training command for two steps, in a
    folder of the test.
    """
    (block,) = re.findall(
        r"```\n(source .*?)```", (ROOT / "README.md").read_text().replace("\\\n", " "), re.DOTALL
    )
    commands = [line.partition("   #")[0].split() for line in block.splitlines()]
    assert commands[0] == ["source", ".venv/bin/activate"]
    assert {words[0] for words in commands[1:]} == {"python", "make"}
    (train,) = [words for words in commands if words[0] == "python" and "--plan" not in words]
    options = [word.strip("'") for word in train[1:]] + [
        "--num-steps",
        "1",
        "--evaluation.no-at-start",
    ]
    options[options.index("runs/mine")] = str(tmp_path / "run")
    done = run_python(
        [*options, "--sequence-length", "32", "--batch-size", "2", "--model.vocab-size", "512"]
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize(("name", "blocks"), [("README.md", 1), ("docs/layer.md", 7)])
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


def test_the_router_of_the_layers_page_has_the_gradients_of_one_device() -> None:
    """With tokens that 8 devices do not divide, so that it is given a mask."""
    first, *_, router = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "layer.md").read_text().partition("\ncosine = ")[0] + "```",
        flags=re.DOTALL,
    )
    names: dict[str, Any] = {}
    for code in (first, router):
        exec(compile(code, "docs/layer.md", "exec"), names)
    x = names["x"].reshape(-1, 128)[:13]

    def gradients(parallel: Any) -> Any:
        own = names["CosineRouter"](nnx.Rngs(1))
        layer = names["MoELayer"](names["config"], parallel, router=own, rngs=nnx.Rngs(0))
        graph, params = nnx.split(layer)

        def loss(params: nnx.State) -> Any:
            y, metrics = nnx.merge(graph, params)(x)
            return (y**2).sum() + 100 * metrics.balance_loss + metrics.entropy, (y, metrics)

        grads, said = jax.jit(jax.grad(loss, has_aux=True))(params)
        return nnx.to_pure_dict(grads), said

    one, many = gradients(None), gradients(names["parallel"])
    assert_trees_close(many, one)
    assert np.abs(one[0]["router"]["w_DE"]).max() > 1e-4
