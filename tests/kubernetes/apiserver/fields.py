"""Sets of fields of an object, as server-side apply owns them (structured merge)."""

import json
from typing import Any

from tests.kubernetes.apiserver.schema import Schema

Object = dict[str, Any]
Path = tuple[str, ...]
"""Path in the notation of `fieldsV1`: `f:` a field, `k:` an item by its keys, `v:` a value of a set."""

EXISTS = object()
"""Value of an item or map entry itself, beside its fields."""


def leaves(schema: Schema, value: Any, path: Path = ()) -> dict[Path, Any]:
    """Owned places of a value: scalars, atomic parts, and the existence of items and map entries."""
    if isinstance(value, dict) and value and not _is_atomic_map(schema):
        result: dict[Path, Any] = {}
        properties = schema.get("properties") or {}
        for name, item in value.items():
            place = (*path, f"f:{name}")
            if name not in properties and isinstance(item, dict):
                result[place] = EXISTS
            result |= leaves(subschema(schema, name), item, place)
        return result
    if isinstance(value, list):
        kind = schema.get("x-kubernetes-list-type")
        if kind == "map":
            result = {}
            for item in value:
                place = (*path, item_key(schema, item))
                result[place] = EXISTS
                result |= leaves(schema["items"], item, place)
            return result
        if kind == "set":
            return {(*path, f"v:{json.dumps(item)}"): EXISTS for item in value}
    return {path: value}


def subschema(schema: Schema, name: str) -> Schema:
    """Schema of a field or map entry; that of anything where none is declared."""
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    return properties.get(name) or (extra if isinstance(extra, dict) else {})


def _is_atomic_map(schema: Schema) -> bool:
    return schema.get("x-kubernetes-map-type") == "atomic"


def item_key(schema: Schema, item: Object) -> str:
    """Path element of an item of a list of type map; keys that are left out count with their defaults."""
    names = schema["x-kubernetes-list-map-keys"]
    properties = schema["items"].get("properties") or {}
    keys = {n: item.get(n, (properties.get(n) or {}).get("default")) for n in sorted(names)}
    return f"k:{json.dumps({n: v for n, v in keys.items() if v is not None}, separators=(',', ':'))}"


def is_item_key(path: Path) -> bool:
    """Whether a path is that of a field that tells an item from others."""
    return len(path) > 1 and path[-2].startswith("k:") and path[-1][2:] in json.loads(path[-2][2:])


def merge(schema: Schema, live: Any, applied: Any) -> Any:
    """Live value with the applied fields set in it."""
    if isinstance(live, dict) and isinstance(applied, dict) and not _is_atomic_map(schema):
        result = dict(live)
        for name, item in applied.items():
            result[name] = merge(subschema(schema, name), live[name], item) if name in live else item
        return result
    if isinstance(live, list) and isinstance(applied, list):
        kind = schema.get("x-kubernetes-list-type")
        if kind == "map":
            places = {item_key(schema, item): item for item in live}
            for item in applied:
                key = item_key(schema, item)
                places[key] = merge(schema["items"], places[key], item) if key in places else item
            return list(places.values())
        if kind == "set":
            return live + [item for item in applied if item not in live]
    return applied


def without(schema: Schema, value: Any, path: Path) -> Any:
    """Value without one place; parts that are empty afterwards go too."""
    head, rest = path[0], path[1:]
    if head.startswith("f:") and isinstance(value, dict):
        name = head[2:]
        if name not in value:
            return value
        others = {k: v for k, v in value.items() if k != name}
        if not rest:
            return others
        inner = without(subschema(schema, name), value[name], rest)
        return {**value, name: inner} if inner not in ({}, []) else others
    if head.startswith("k:") and isinstance(value, list):
        result = []
        for item in value:
            if item_key(schema, item) != head:
                result.append(item)
            elif rest:
                result.append(without(schema["items"], item, rest))
        return result
    if head.startswith("v:") and isinstance(value, list):
        return [item for item in value if f"v:{json.dumps(item)}" != head]
    return value


def encode(paths: set[Path]) -> Object:
    """`fieldsV1` of a set."""
    tree: Object = {}
    for path in sorted(paths):
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        if path and (path[-1][0] in "k" or any(other[: len(path)] == path and other != path for other in paths)):
            node["."] = {}
    return tree


def decode(tree: Object, path: Path = ()) -> set[Path]:
    """Set of a `fieldsV1`."""
    if not tree:
        return {path}
    result: set[Path] = set()
    for part, subtree in tree.items():
        result |= {path} if part == "." else decode(subtree, (*path, part))
    return result


def dotted(path: Path) -> str:
    """A path in the words of a conflict: `.spec.containers[name="a"].image`."""
    text = ""
    for part in path:
        if part.startswith("f:"):
            text += f".{part[2:]}"
        elif part.startswith("k:"):
            text += "[" + ",".join(f"{k}={json.dumps(v)}" for k, v in json.loads(part[2:]).items()) + "]"
        else:
            text += f"[={part[2:]}]"
    return text
