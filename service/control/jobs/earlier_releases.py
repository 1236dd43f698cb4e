"""Reads rows of older releases leniently."""

import json
from typing import Any

from pydantic import ValidationError

from moe.plan import Plan
from moe.spec import JobSpec
from moe.spec.former_defaults import with_former_defaults

_MISSING = object()


def read_stored_spec(text: str) -> JobSpec:
    """The stored spec, without fields unknown to this release, and with what its release did by default. Raises
    ValidationError if this release cannot run it."""
    fields: Any = with_former_defaults(json.loads(text))
    while True:  # every round removes at least one key
        try:
            return JobSpec.model_validate(fields)
        except ValidationError as error:
            unknown = [entry["loc"] for entry in error.errors() if entry["type"] == "extra_forbidden"]
            removals = [_remove_key(fields, location) for location in unknown]
            if not any(removals):
                raise


def read_stored_plan(text: str | None) -> Plan | None:
    """The stored plan, or None if this release must plan again."""
    if text is None:
        return None
    try:
        return Plan.model_validate_json(text)
    except ValidationError:
        return None


def is_of_module(spec: str) -> bool:
    """Whether a stored spec is of a user's module."""
    model = json.loads(spec).get("model")
    return isinstance(model, dict) and model.get("kind") == "module"


def _remove_key(fields: Any, location: tuple[int | str, ...]) -> bool:
    """Remove the key at a pydantic error location, which includes union tags."""
    container = fields
    for part in location[:-1]:
        if isinstance(container, dict):
            container = container.get(part, container)  # a union's tag is not a key
        elif isinstance(container, list) and isinstance(part, int) and part < len(container):
            container = container[part]
    return isinstance(container, dict) and container.pop(location[-1], _MISSING) is not _MISSING
