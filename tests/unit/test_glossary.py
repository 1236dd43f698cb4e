"""Names in docs/glossary.md exist, and each term is there once."""

import pkgutil
import re
from pathlib import Path

import pytest

GLOSSARY = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
ROWS = re.findall(r"^\| (\*\*.+?) \| .+ \| `([\w.]+)` \|$", GLOSSARY, re.MULTILINE)


@pytest.mark.parametrize("dotted_name", sorted({name for _, name in ROWS}))
def test_a_name_exists(dotted_name: str) -> None:
    """A module, an attribute of one, or a dataclass's field."""
    try:
        pkgutil.resolve_name(dotted_name)
    except AttributeError:
        owner, _, field = dotted_name.rpartition(".")
        assert field in pkgutil.resolve_name(owner).__annotations__


def test_each_row_is_read_and_has_a_term_of_its_own() -> None:
    assert len(ROWS) == GLOSSARY.count("\n| **")
    terms = [term for cell, _ in ROWS for term in re.findall(r"\*\*(.+?)\*\*", cell)]
    assert len(set(terms)) == len(terms)
