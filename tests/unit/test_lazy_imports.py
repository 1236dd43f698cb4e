"""Imports inside functions of benchmarks, examples and tests find their names, which the type checker does not
check."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("moe", "service", "benchmarks", "examples", "tests")
OTHER_COMMITS = "benchmarks/side.py"
"""It imports what earlier commits have, too."""


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@cache
def names_in(file: Path) -> set[str]:
    """Names that a module's code binds anywhere, and its strings, as a `__getattr__` may serve those."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Constant(value=str(name)):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update((alias.asname or alias.name).partition(".")[0] for alias in aliases)
    return names


def missing_names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.module.split(".")[0] not in OURS:
            continue
        module = file_of(node.module)
        for alias in node.names:
            is_name = module is not None and alias.name in names_in(module)
            folder = ROOT.joinpath(*node.module.split("."), alias.name)
            if not is_name and file_of(f"{node.module}.{alias.name}") is None and not folder.is_dir():
                yield f"{file.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}"


@pytest.mark.slow
def test_every_imported_name_of_ours_exists() -> None:
    files = [file for folder in OURS[2:] for file in sorted((ROOT / folder).rglob("*.py"))]
    missing = [line for file in files if file != ROOT / OTHER_COMMITS for line in missing_names(file)]
    assert missing == []
