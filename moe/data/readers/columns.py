"""Columns of records by name: `text`, or `translation.de` for a key of an object."""

from collections.abc import Mapping
from typing import Final

MISSING: Final = object()
"""Value of a column that a record lacks."""


def value_at(values: Mapping[str, object], column: str) -> object:
    """Value of a column; MISSING if there is none. A key with a dot in its name comes before an object's key."""
    if column in values:
        return values[column]
    first, dot, rest = column.partition(".")
    inner = values.get(first)
    return value_at(inner, rest) if dot and isinstance(inner, dict) else MISSING


def holds(name: str, column: str) -> bool:
    """Whether the top-level column `name` is `column`, or an object with it."""
    return column == name or column.startswith(f"{name}.")
