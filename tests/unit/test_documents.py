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


DENIALS = re.compile(
    r"[Nn]othing[^.]{0,30} (has )?(ran|run) on a GPU|^\W*No line of this has run on a GPU", re.M
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_document_denies_a_run_on_a_gpu_that_was_measured(document: str) -> None:
    assert (ROOT / "benchmarks/results/layer_gpu.json").is_file()
    assert DENIALS.findall((ROOT / document).read_text()) == []


def test_results_and_commands_that_the_readme_names_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"benchmarks/results/[\w./-]+\.json", text):
        assert (ROOT / path).is_file(), path
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"`make ([a-z][\w-]*)`", text):
        assert target in targets, target
