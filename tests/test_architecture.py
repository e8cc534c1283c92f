"""The house rules that can be read off the source: floors, circles, one name for one thing,
mirrored tests, words.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the lowest floor on. A module imports from its own unit and from lower floors, never from its
# neighbours.
FLOORS = (
    ("kernels_pallas.formats",),
    (
        "kernels_pallas",
        "jmoe.types",
        "jmoe.config",
        "jmoe.runtime",
        "jmoe.status",
        "jmoe.ray_cluster",
    ),
    ("jmoe.planning", "jmoe.command_line", "jmoe.configs"),
    ("jmoe.mesh", "jmoe.collectives", "jmoe.memory"),
    ("jmoe.layers", "jmoe.optim"),
    ("jmoe.models",),
    ("jmoe.offload", "jmoe.data", "jmoe.cluster"),
    ("jmoe.run",),
    ("jmoe.training", "jmoe.inference"),
    ("jmoe.serving", "jmoe.deploy"),
    ("jmoe", "jmoe.programs"),  # jmoe: what a researcher imports
    ("train", "serve", "jmoe.commands"),
)
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}
# All that these may import beside the standard library and themselves: what runs before JAX does,
# and pure functions.
NOTHING = ("kernels_pallas.formats", "jmoe.status", "jmoe.runtime", "jmoe.ray_cluster")
ONLY: dict[str, set[str]] = {unit: set() for unit in NOTHING}
ONLY |= {"jmoe.config": {"kernels_pallas.formats"}}
ONLY |= {"jmoe.planning": {"jmoe.config", "numpy"}}
ONLY |= {"jmoe.command_line": {"jmoe.config", "jmoe.runtime", "tyro"}}
ONLY |= {"jmoe.configs": {"jmoe.config"}, "kernels_pallas": {"jax", "numpy"}}
ONLY |= {"jmoe.inference.scheduler": {"jmoe.config", "jmoe.planning", "jmoe.inference", "numpy"}}
# Rooms of one floor: the steps of text models know nothing of image tasks, nor the fused step of
# streamed experts.
NEVER = {"jmoe.training.streamed": {"jmoe.training.tasks"}}
NEVER |= {"jmoe.training.fused": {"jmoe.training.tasks", "jmoe.training.streamed"}}
KEPT_TO = {"orbax": ("jmoe.memory.", "jmoe.run.checkpoint"), "tyro": ("jmoe.command_line",)}
KEPT_TO |= {"ray": ("jmoe.ray_cluster",)}
# What the field calls otherwise (docs/architecture.md, glossary).
FORBIDDEN = {
    "keeping",
    "pulled",
    "Arrived",
    "Beside",
    "Ahead",
    "Sums",
    "worst_case",
    "two_level",
    "levels",
    "settle",
}
FORBIDDEN |= {
    "Owned",
    "Ends",
    "Seen",
    "Speeds",
    "Meter",
    "Front",
    "meet",
    "start_anew",
    "FORGET_FROM",
    "STEP_SAYS",
}
FORBIDDEN |= {"found", "given"}
THROUGH = """cluster.coordinator collectives.rows data.corpus_inputs data.held_out data.progress data.text_options programs.service inference.mesh.programs inference.stats inference.teacher kernels.groups
kernels.saved layers.experts layers.norm memory.closing models.block models.functional
models.lazy_checkpoint models.tensor_names models.vision offload.gradient_writer offload.residency offload.saved_experts planning.state_bytes
run.checkpoint_contents runtime serving.answer serving.chat_sequences serving.errors serving.metrics serving.grammar_worker serving.request_body
serving.schemas serving.tool_schemas
serving.service serving.vocabulary training.evaluation training.fused.distilling training.gradient_reduction
training.session training.sharded_model training.streamed.experts training.streamed.layers training.streamed.programs
training.streamed.runner training.streamed.text training.task training.tasks.losses training.tasks.report
training.fused.gradient_buckets
training.tasks.streamed_model training.tasks.summary training.tasks.task training.update"""


def sources() -> Iterator[tuple[str, Path]]:
    paths = [
        path
        for folder in ("jmoe", "kernels_pallas", "configs")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    for path in [
        path for path in [*paths, ROOT / "train.py", ROOT / "serve.py"] if not path.is_symlink()
    ]:
        parts = [
            part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"
        ]
        yield ".".join(["jmoe"] * (parts[0] == "configs") + parts), path


SOURCES = dict(sources())


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def unit_of(name: str, units: Iterable[str]) -> str:
    fitting = [
        unit for unit in units if name == unit or (unit != "jmoe" and name.startswith(f"{unit}."))
    ]
    return max(fitting, key=len, default="")


def imports(tree: ast.Module) -> set[str]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return {
        f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".")
        for node in nodes
        for alias in node.names
    }


def defined(tree: ast.Module) -> list[str]:
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in names if name[0] != "_" and name != "main"]


def violations(module: str, tree: ast.Module) -> Iterator[str]:
    home, narrow, room = unit_of(module, FLOOR), unit_of(module, ONLY), unit_of(module, NEVER)
    assert home, module
    for name in sorted(imports(tree)):
        top, unit = name.split(".")[0], unit_of(name, FLOOR)
        if not module.startswith(KEPT_TO.get(top, "")):
            yield f"may not import {top}"
        if (
            narrow
            and top not in sys.stdlib_module_names
            and not unit_of(name, {narrow, *ONLY[narrow]})
        ):
            yield f"may import only {ONLY[narrow]}, not {name}"
        if room and unit_of(name, NEVER[room]):
            yield f"may not import {name}"
        if unit not in ("", home) and FLOOR[unit] >= FLOOR[home]:
            yield f"imports {name} of floor {FLOOR[unit]}, and is on floor {FLOOR[home]}"
    for node in ast.walk(tree):
        yield from FORBIDDEN & {getattr(node, key, None) for key in ("name", "arg", "id", "attr")}
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        axis = isinstance(node, ast.Constant) and node.value in ("expert_inter", "expert_intra")
        if (called == "PartitionSpec" or axis) and module not in (
            "jmoe.mesh",
            "jmoe.config.parallel",
        ):
            yield "PartitionSpec( and names of axes belong in jmoe/mesh.py"
        if (
            called == "add_residual"
            and ".feed_forward(" in ast.unparse(node)
            and module != "jmoe.models.block"
        ):
            yield "Block.apply_dense composes a dense block"


@pytest.mark.parametrize("module", SOURCES)
def test_house_rules(module: str) -> None:
    assert list(violations(module, tree_of(module))) == []


def test_offenders_are_found() -> None:
    source = ast.parse(
        "def f(levels):\n    import tyro, jmoe.models.decoder\naxis = 'expert_inter'"
    )
    assert len(list(violations("jmoe.planning.memory_plan", source))) == 6
    source = ast.parse("import jmoe.training.tasks.losses\nfrom jmoe.programs.generate import main")
    assert len(list(violations("jmoe.training.streamed.step", source))) == 2
    source = ast.parse("y = add_residual(x, block.feed_forward(x, dtype))")
    assert list(violations("jmoe.deploy.layerwise", source)) == [
        "Block.apply_dense composes a dense block"
    ]


def stray_strings(tree: ast.Module) -> list[int]:
    """The lines of strings that are statements and no docstrings: parts of a text that lacks the
    parentheses around it.
    """
    found = []
    for node in ast.walk(tree):
        blocks = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
        documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        for n, block in enumerate(blocks):
            statements = block if isinstance(block, list) else []
            for statement in statements[documented and n == 0 :]:
                value = statement.value if isinstance(statement, ast.Expr) else None
                text = isinstance(value, ast.Constant) and isinstance(value.value, str)
                if text or isinstance(value, ast.JoinedStr):
                    found.append(statement.lineno)
    return found


def test_no_text_is_cut() -> None:
    broken = ast.parse('def f():\n    """Text."""\n    yield "a "\n    "b"\n    f"{c}"')
    assert stray_strings(broken) == [4, 5]
    files = [path for folder in ("jmoe", "kernels_pallas", "benchmarks") for path in
             (ROOT / folder).rglob("*.py")]  # fmt: skip
    assert {
        str(f): lines for f in files if (lines := stray_strings(ast.parse(f.read_text())))
    } == {}


def test_no_imports_go_round_in_a_circle() -> None:
    names = {module: imports(tree_of(module)) for module in SOURCES}
    TopologicalSorter(
        {m: {*ns, *(n.rpartition(".")[0] for n in ns)} - {m} for m, ns in names.items()}
    ).prepare()


def test_a_run_starts_without_matplotlib() -> None:
    """Every rank would wait for its import (`python -X importtime`), and only process 0 draws,
    at the end.
    """
    reached, ahead = set[str](), ["train"]
    while ahead:
        module = ahead.pop()
        if module in SOURCES and module not in reached:
            at_once = [
                node
                for node in tree_of(module).body
                if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            names = imports(ast.Module(at_once, []))
            ahead += [*names, *(name.rpartition(".")[0] for name in names)]
        reached.add(module)
    assert {"jmoe.training.tasks.session", "jmoe.run.summary"} <= reached
    assert not {name for name in reached if name.split(".")[0] == "matplotlib"}


def test_no_two_public_things_have_one_name() -> None:
    names = Counter(
        name for module in SOURCES if module.startswith("jmoe") for name in defined(tree_of(module))
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_no_two_test_files_have_one_name() -> None:
    """Of two, pytest imports one and refuses the other."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})


def test_every_module_is_mirrored() -> None:
    """By a test file of its name or folder, or one beside that imports it; THROUGH: by the tests
    of what uses it.
    """
    tests = defaultdict(set)
    for path in (ROOT / "tests").rglob("*.py"):
        names = imports(ast.parse(path.read_text()))
        names |= {name.rpartition(".")[0] for name in names}
        tests[path.parent.relative_to(ROOT / "tests").parts] |= {path.stem, *names}
    for module in (module for module in SOURCES if defined(tree_of(module))):
        *folders, name = (
            module.replace("kernels_pallas", "kernels").removeprefix("jmoe.").split(".")
        )
        beside = tests[(*folders, name)] | tests[(*folders,)] | tests[(*folders[:-1],)]
        mirrors = {module, f"test_{name}", *(f"test_{folder}" for folder in folders)} & beside
        assert mirrors or ".".join([*folders, name]) in THROUGH.split(), (
            f"{module} has no test file"
        )
