"""Files of code that the documents and the docstrings name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("moe", "service", "tests", "benchmarks")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
"""CHANGELOG.md is left out: it tells of what was."""
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(each.relative_to(ROOT)) for each in ROOT.glob("docs/**/*.md")),
]


def unknown(text: str) -> list[str]:
    """Names of Python files between backticks that no file ends in."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = re.findall(r"(?<![\w./*-])[\w./]+\.py\b", quoted)
    return [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in FILES)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_are_there(document: str) -> None:
    assert unknown((ROOT / document).read_text()) == []


def test_files_that_a_docstring_names_are_there() -> None:
    found = {path: names for path in FILES if (names := unknown((ROOT / path).read_text()))}
    assert found == {}
