"""Validation of an option against a fixed set of names."""

from collections.abc import Collection
from typing import TypeVar

from moe.spec.errors import spec_error

Name = TypeVar("Name", bound=str)


def require_one_of(place: str, value: object, names: Collection[Name]) -> Name | None:
    """Return `value` if it is one of `names`, or None. Raises SpecError for any other value."""
    if value is None:
        return None
    for name in names:
        if value == name:
            return name
    rule = f"must be {' or '.join(names)}" if len(names) == 2 else f"must be one of {', '.join(names)}"
    raise spec_error("not_a_choice", place, value, rule, "correct it or omit it")
