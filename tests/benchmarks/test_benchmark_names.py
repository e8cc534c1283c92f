"""Every name of jmoe that a benchmark uses exists: no test runs most benchmarks, and a rename would
break them unnoticed.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks import BENCHMARKS, ROOT

PACKAGES = ("jmoe", "kernels_pallas", "benchmarks", "configs")
OTHER_LIBRARIES = {"_replace", "_exit", "_grouped_mm", "_experts_implementation"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a definition, an assignment or an import binds, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


@cache
def names_in(module: str) -> frozenset[str]:
    file, folder = file_of(module), ROOT.joinpath(*module.split("."))
    submodules = {path.stem for path in folder.iterdir()} if folder.is_dir() else set()
    return frozenset(submodules).union(bound_names(parsed(file)) if file else ())


@cache
def private_names() -> frozenset[str]:
    files = [file for package in PACKAGES for file in ROOT.joinpath(package).rglob("*.py")]
    return frozenset(name for file in files for name in bound_names(parsed(file)))


def own_imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (local name, module, name in the module) of each name imported from this project."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                yield alias.asname or alias.name, str(node.module), alias.name


def attributes_of(module: str, name: str) -> frozenset[str]:
    """Return the names that `module.name` may have as attributes: those bound in its file and, for
    a class, in the files of its bases.
    """
    if file_of(f"{module}.{name}"):
        return names_in(f"{module}.{name}")
    file = file_of(module)
    assert file is not None
    defined = [node for node in parsed(file).body if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in defined if node.name == name for base in node.bases}
    inherited = [names_in(m) for local, m, _ in own_imports(parsed(file)) if local in bases]
    return names_in(module).union(*inherited)


def missing_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of this project that a program uses and that nothing defines."""
    imports = {local: (module, name) for local, module, name in own_imports(tree)}
    for module, name in imports.values():
        if name not in names_in(module):
            yield f"{module}.{name}"
    for node in ast.walk(tree):
        owner, attribute = None, ""
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner, attribute = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("patch.object"):
            owner, attribute = node.args[0], ast.literal_eval(node.args[1])
        if isinstance(owner, ast.Name) and owner.id in imports:
            module, name = imports[owner.id]
            ours = attribute.startswith("_") or file_of(f"{module}.{name}") is not None
            if name in names_in(module) and ours and attribute not in attributes_of(module, name):
                yield f"{owner.id}.{attribute}"
        elif attribute.startswith("_") and not attribute.startswith("__"):
            known = attribute in private_names() or attribute in OTHER_LIBRARIES
            if not known:
                yield attribute


@pytest.mark.parametrize(
    "file", sorted(BENCHMARKS.rglob("*.py")), ids=lambda file: str(file.relative_to(BENCHMARKS))
)
def test_names_exist(file: Path) -> None:
    assert list(missing_names(parsed(file))) == []


def test_a_missing_name_is_found() -> None:
    tree = ast.parse(
        "from jmoe.inference import runner\nfrom jmoe.inference.runner import gone\n"
        "runner._gone(engine._gone_too)"
    )
    assert sorted(missing_names(tree)) == [
        "_gone_too",
        "jmoe.inference.runner.gone",
        "runner._gone",
    ]
