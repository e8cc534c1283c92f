"""The house rules that can be read off the source: floors, third-party imports, axis names."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module imports from its own package and from lower floors, never from a neighbour on its own.
FLOORS = {
    "kernels_pallas": 0,
    "jmoe.config": -1,
    "jmoe.planning": 0,
    "jmoe.runtime": 0,
    "jmoe.status": 0,
    "jmoe.command_line": 1,
    "jmoe.mesh": 1,
    "jmoe.collectives": 1,
    "jmoe.memory": 1,
    "jmoe.layers": 2,
    "jmoe.optim": 2,
    "jmoe.models": 3,
    "jmoe.offload": 4,
    "jmoe.data": 4,
    "jmoe.run": 5,
    "jmoe.training": 6,
    "jmoe.inference": 6,
    "jmoe.serving": 7,
    "jmoe.deploy": 7,
    "jmoe.inference.generate": 8,  # a program: it also takes runs of `train.py`
    "jmoe": 8,  # jmoe/__init__.py, what a researcher imports
    "jmoe.configs": 9,  # the folder configs, under the name that it is imported by
    "train": 10,
    "serve": 10,
}
# All that these may import beside the standard library and themselves.
ONLY = {
    "kernels_pallas": {"jax", "numpy"},
    "jmoe.config": set[str](),
    "jmoe.planning": {"jmoe.config", "numpy"},
    "jmoe.runtime": set[str](),  # runs before JAX may be imported
    "jmoe.status": set[str](),
    "jmoe.command_line": {"jmoe.config", "tyro"},  # answers before JAX is imported
    "jmoe.configs": {"jmoe.config"},
    "jmoe.inference.scheduler": {"jmoe.config", "jmoe.planning", "numpy"},
}
# Where a library may be imported, and nowhere else.
KEPT_TO = {
    "orbax": ("jmoe/memory/", "jmoe/run/checkpoint.py"),
    "tyro": ("jmoe/command_line.py",),
}
AXIS_NAMES = {"expert_inter", "expert_intra"}
AXIS_FILES = {"jmoe/mesh.py", "jmoe/config/parallel.py"}  # parallel: the fields of the same names


def sources() -> list[str]:
    """Every source file under the rules, as a path from the repository root."""
    folders = ("jmoe", "kernels_pallas", "configs")
    paths = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    paths += [ROOT / name for name in ("train.py", "serve.py") if (ROOT / name).exists()]
    return [p.relative_to(ROOT).as_posix() for p in paths]


def module_name(path: str) -> str:
    """`jmoe/layers/moe.py` -> `jmoe.layers.moe`; a package's `__init__.py` -> the package."""
    path = f"jmoe/{path}" if path.startswith("configs/") else path
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def longest_prefix(name: str, table: dict[str, int] | dict[str, set[str]]) -> str | None:
    """The longest dotted prefix of `name` that is a key of `table`. `jmoe` itself is no prefix of `jmoe.x`."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((p for p in prefixes if p in table and (p != "jmoe" or name == "jmoe")), None)


def is_ours(name: str) -> bool:
    return name.split(".")[0] in {key.split(".")[0] for key in FLOORS}


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also of those inside functions; `from a import b` is `a.b`."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def imported_unit(name: str) -> str | None:
    """The entry of FLOORS that an imported name belongs to; `jmoe.MoELayer` belongs to `jmoe`."""
    unit = longest_prefix(name, FLOORS)
    if unit is None and name.startswith("jmoe.") and name.count(".") == 1 and not is_module(name):
        return "jmoe"
    return unit


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def import_violations(path: str, tree: ast.AST) -> Iterator[str]:
    me = module_name(path)
    home = longest_prefix(me, FLOORS)
    if home is None:
        yield f"{path}: has no floor; give it one in tests/test_floors.py and in the README's tree"
        return
    only_key = longest_prefix(me, ONLY)
    for line, name in imports(path, tree):
        where, top = f"{path}:{line}", name.split(".")[0]
        if top in sys.stdlib_module_names:
            continue
        for library, homes in KEPT_TO.items():
            if top == library and not path.startswith(homes):
                yield f"{where}: {library} is imported only in {' and '.join(homes)}"
        if only_key and not any(name == n or name.startswith(n + ".") for n in {home, *ONLY[only_key]}):
            yield f"{where}: {only_key} may not import {name}"
            continue
        if not is_ours(name):
            continue
        unit = imported_unit(name)
        if unit is None:
            yield f"{where}: {name} has no floor"
        elif unit != home and FLOORS[unit] >= FLOORS[home]:
            yield f"{where}: floor {FLOORS[home]} ({home}) imports {name} of floor {FLOORS[unit]}"


def axis_violations(path: str, tree: ast.AST) -> Iterator[str]:
    aliases = {"PartitionSpec"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            aliases |= {a.asname for a in node.names if a.name == "PartitionSpec" and a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and path != "jmoe/mesh.py":
            f = node.func
            called = f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else ""
            if called in aliases:
                yield f"{path}:{node.lineno}: PartitionSpec( belongs in jmoe/mesh.py"
        if isinstance(node, ast.Constant) and node.value in AXIS_NAMES and path not in AXIS_FILES:
            yield f"{path}:{node.lineno}: axis name {node.value!r} belongs in jmoe/mesh.py"


def violations(path: str, source: str) -> list[str]:
    """Every broken rule in `source`, the text of the file at `path` (from the repository root)."""
    tree = ast.parse(source)
    found = (import_violations(path, tree), axis_violations(path, tree))
    return [line for part in found for line in part]


@pytest.mark.parametrize("path", sources())
def test_house_rules(path: str) -> None:
    assert violations(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("jmoe/config.py", "import jax", "jmoe.config may not import jax"),
        ("jmoe/config.py", "from jmoe.mesh import DATA", "jmoe.config may not import jmoe.mesh.DATA"),
        ("jmoe/planning/capacity.py", "import jax.numpy as jnp", "jmoe.planning may not import jax.numpy"),
        ("jmoe/runtime.py", "import jax", "jmoe.runtime may not import jax"),
        ("jmoe/mesh.py", "from jmoe.layers import moe", "imports jmoe.layers.moe of floor 2"),
        ("jmoe/collectives/all_to_all.py", "def f():\n    from jmoe import layers", "imports jmoe.layers of floor 2"),
        ("jmoe/memory/ring.py", "from jmoe.collectives.fusion import x", "(jmoe.memory) imports jmoe.collectives"),
        ("jmoe/layers/moe.py", "from jmoe import MoELayer", "imports jmoe.MoELayer of floor 8"),
        ("jmoe/layers/moe.py", "from ..models import decoder", "imports jmoe.models.decoder of floor 3"),
        ("jmoe/models/__init__.py", "from ..training import step", "imports jmoe.training.step of floor 6"),
        ("jmoe/training/step.py", "from jmoe.inference.engine import Engine", "of floor 6"),
        ("jmoe/inference/engine.py", "import jmoe.training.step", "of floor 6"),
        ("jmoe/inference/engine.py", "import jmoe.serving.http", "of floor 7"),
        ("jmoe/inference/scheduler.py", "import jax", "jmoe.inference.scheduler may not import jax"),
        ("jmoe/training/step.py", "from jmoe.configs import PRESETS", "imports jmoe.configs.PRESETS of floor 9"),
        ("jmoe/training/step.py", "import train", "imports train of floor 10"),
        ("jmoe/training/step.py", "import orbax.checkpoint as ocp", "orbax is imported only in jmoe/memory/"),
        ("jmoe/training/step.py", "import tyro", "tyro is imported only in jmoe/command_line.py"),
        ("jmoe/utils.py", "import os", "has no floor"),
        ("jmoe/training/step.py", "import jmoe.utils.text", "jmoe.utils.text has no floor"),
        ("kernels_pallas/matmul.py", "from jmoe.config import check", "kernels_pallas may not import jmoe.config"),
        ("kernels_pallas/matmul.py", "import flax", "kernels_pallas may not import flax"),
        ("configs/text.py", "from jmoe.layers import moe", "jmoe.configs may not import jmoe.layers.moe"),
        ("jmoe/layers/moe.py", "import jax\ns = jax.sharding.PartitionSpec('data')", "PartitionSpec( belongs"),
        ("jmoe/layers/moe.py", "from jax.sharding import PartitionSpec as P\ns = P('data')", "PartitionSpec( belongs"),
        ("jmoe/layers/moe.py", "axis = 'expert_inter'", "axis name 'expert_inter' belongs"),
    ],
)
def test_offender_is_found(path: str, source: str, complaint: str) -> None:
    found = violations(path, source)
    assert len(found) == 1, found
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jmoe/layers/moe.py", "from jmoe import mesh\nfrom jmoe.layers.router import Router\nimport kernels_pallas.x"),
        ("jmoe/layers/moe.py", "import jax\ndef spec(x) -> jax.sharding.PartitionSpec: ..."),
        ("jmoe/__init__.py", "from jmoe.layers.moe import MoELayer"),
        ("jmoe/mesh.py", "from jax.sharding import PartitionSpec as P\ns = P('expert_inter')"),
        ("jmoe/run/checkpoint.py", "import orbax.checkpoint"),
        ("kernels_pallas/grouped/api.py", "import jax.experimental.pallas\nfrom . import reference"),
        ("jmoe/command_line.py", "import tyro"),
        ("train.py", "from jmoe.configs import PRESETS\nfrom jmoe.training.step import f"),
    ],
)
def test_innocent_is_left_alone(path: str, source: str) -> None:
    assert violations(path, source) == []
