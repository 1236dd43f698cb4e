"""Reduction of objects to the fields that are read, so that tens of thousands fit in memory."""

import json
from functools import lru_cache
from typing import Any

from service.control.kubernetes.resource import Object

FieldTree = dict[str, Any]
"""Fields that stay, each with the tree of its own fields, or None where its whole value stays. Lists are entered."""

_SHARED_VALUES = 4096


def prune(value: Object, fields: FieldTree) -> Object:
    """Copy of an object with these fields alone. Equal parts of different objects are one: do not change them."""
    pruned: Object = {}
    for name, subtree in fields.items():
        if name in value:
            pruned[name] = _prune_field(value[name], subtree)
    return pruned


def _prune_field(value: Any, subtree: FieldTree | None) -> Any:
    # Fields of metadata, spec and status are shared one by one: one that changes leaves the others shared.
    if isinstance(value, dict) and subtree is not None:
        return {name: _share(_select(value[name], subtree[name])) for name in subtree if name in value}
    return _share(_select(value, subtree))


def _select(value: Any, subtree: FieldTree | None) -> Any:
    if subtree is None:
        return value
    if isinstance(value, list):
        return [_select(item, subtree) for item in value]
    if isinstance(value, dict):
        return {name: _select(value[name], subtree[name]) for name in subtree if name in value}
    return value


def _share(value: Any) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    return _decode(json.dumps(value, separators=(",", ":")))


@lru_cache(maxsize=_SHARED_VALUES)
def _decode(text: str) -> Any:
    return json.loads(text)
