"""JSON merge patch (RFC 7396) and JSON patch (RFC 6902)."""

import copy
from typing import Any

from tests.kubernetes.apiserver.failure import Failure


def merge_patch(value: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(value) if isinstance(value, dict) else {}
    for name, item in patch.items():
        if item is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), item)
    return result


def json_patch(value: Any, operations: list[dict[str, Any]]) -> Any:
    """Raises Failure (422) for an operation that does not fit."""
    value = copy.deepcopy(value)
    for operation in operations:
        try:
            value = _operate(value, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            message = f"the server rejected our request due to an error in our request: {error!r}"
            raise Failure(422, "Invalid", message) from error
    return value


def _operate(value: Any, operation: dict[str, Any]) -> Any:
    name, path = operation["op"], _parts(operation["path"])
    if name == "test":
        if _get(value, path) != operation["value"]:
            raise ValueError(f"testing value {operation['path']} failed: test failed")
    elif name == "remove":
        _remove(value, path)
    elif name in ("add", "replace"):
        if name == "replace":
            _get(value, path)
        value = _set(value, path, operation["value"], insert=name == "add")
    elif name in ("move", "copy"):
        source = _parts(operation["from"])
        item = copy.deepcopy(_get(value, source))
        if name == "move":
            _remove(value, source)
        value = _set(value, path, item, insert=True)
    else:
        raise ValueError(f"Unexpected kind: {name}")
    return value


def _parts(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _get(value: Any, path: list[str]) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def _remove(value: Any, path: list[str]) -> None:
    parent = _get(value, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]


def _set(value: Any, path: list[str], item: Any, *, insert: bool) -> Any:
    if not path:
        return item
    parent = _get(value, path[:-1])
    if isinstance(parent, list):
        index = len(parent) if path[-1] == "-" else int(path[-1])
        if insert:
            parent.insert(index, item)
        else:
            parent[index] = item
    else:
        parent[path[-1]] = item
    return value
