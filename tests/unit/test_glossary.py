"""Names in docs/glossary.md exist, and each term stands there once."""

import re
from importlib import import_module
from pathlib import Path

import pytest

GLOSSARY = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
ROWS = re.findall(r"^\| (\*\*.+?) \| .+ \| `([\w.]+)` \|$", GLOSSARY, re.MULTILINE)


def resolve(dotted_name: str) -> object:
    """A module, or an attribute of one; a dataclass's field counts."""
    parts = dotted_name.split(".")
    for num_parts in range(len(parts), 0, -1):
        try:
            value: object = import_module(".".join(parts[:num_parts]))
        except ModuleNotFoundError:
            continue
        for name in parts[num_parts:]:
            annotations = getattr(value, "__annotations__", {})
            value = annotations[name] if name in annotations else getattr(value, name)
        return value
    raise AssertionError(f"{dotted_name} is no module")


@pytest.mark.parametrize("dotted_name", sorted({name for _, name in ROWS}))
def test_what_it_names_exists(dotted_name: str) -> None:
    assert resolve(dotted_name) is not None


def test_each_row_is_read_and_has_a_term_of_its_own() -> None:
    assert len(ROWS) == GLOSSARY.count("\n| **")
    terms = [term for cell, _ in ROWS for term in re.findall(r"\*\*(.+?)\*\*", cell)]
    assert len(set(terms)) == len(terms)
