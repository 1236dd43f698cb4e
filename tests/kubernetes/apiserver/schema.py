"""OpenAPI schemas as API servers enforce them: pruning, unknown fields, defaults, types and CEL rules."""

import copy
import re
from functools import cache
from typing import Any

from tests.kubernetes.apiserver.rules import violated_rules

Schema = dict[str, Any]
Causes = list[tuple[str, str]]

_GO_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool}


def children(schema: Schema, value: Any) -> list[tuple[Any, str, Schema]]:
    """Parts of a value: key or index, path suffix, and schema; unknown fields are left out."""
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        extra = schema.get("additionalProperties")
        rest = extra if isinstance(extra, dict) else None
        return [
            (name, f".{name}", properties.get(name, rest)) for name in value if name in properties or rest is not None
        ]
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [(index, f"[{index}]", schema["items"]) for index in range(len(value))]
    return []


def is_open(schema: Schema) -> bool:
    """Whether any field is allowed."""
    if schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("additionalProperties") is True:
        return True
    return "properties" not in schema and "additionalProperties" not in schema


def unknown_fields(schema: Schema, value: Any, path: str = "") -> list[str]:
    """Paths of fields that the schema does not declare."""
    unknown = []
    if isinstance(value, dict) and not is_open(schema) and not isinstance(schema.get("additionalProperties"), dict):
        unknown = [f"{path}.{name}".lstrip(".") for name in value if name not in (schema.get("properties") or {})]
    for key, suffix, subschema in children(schema, value):
        unknown += unknown_fields(subschema, value[key], (path + suffix).lstrip("."))
    return unknown


def complete(schema: Schema, value: Any) -> Any:
    """Copy without unknown fields and with defaults."""
    if isinstance(value, dict):
        parts = {key: complete(subschema, value[key]) for key, _, subschema in children(schema, value)}
        if is_open(schema):
            parts = {**copy.deepcopy(value), **parts}
        for name, subschema in (schema.get("properties") or {}).items():
            if name not in parts and "default" in subschema:
                parts[name] = complete(subschema, copy.deepcopy(subschema["default"]))
        return parts
    if isinstance(value, list):
        return [complete(schema["items"], item) for item in value] if isinstance(schema.get("items"), dict) else value
    return value


def errors(schema: Schema, value: Any, old: Any = None, path: str = "") -> Causes:
    """Violations of a value; `old` is the same place before an update."""
    if value is None:
        return [] if schema.get("nullable", True) else [(path or "<nil>", "Invalid value: null")]
    if (wrong_type := _type_error(schema, value)) is not None:
        return [(path, wrong_type)]
    causes = [(path, message) for message in _violations(schema, value)]
    if isinstance(value, dict):
        missing = [name for name in schema.get("required") or () if name not in value]
        causes += [(f"{path}.{name}".lstrip("."), "Required value") for name in missing]
    causes += [(path, message) for message in violated_rules(schema, value, old)]
    for key, suffix, subschema in children(schema, value):
        causes += errors(subschema, value[key], _previous(schema, old, value, key), (path + suffix).lstrip("."))
    return causes


def _previous(schema: Schema, old: Any, value: Any, key: Any) -> Any:
    """Part of the old value that corresponds to a part of the new one."""
    if isinstance(old, dict):
        return old.get(key)
    if isinstance(old, list) and schema.get("x-kubernetes-list-type") == "map":
        names = schema.get("x-kubernetes-list-map-keys") or []
        return next((item for item in old if all(item.get(n) == value[key].get(n) for n in names)), None)
    return None


def _type_error(schema: Schema, value: Any) -> str | None:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return None
        return f'Invalid value: "{type(value).__name__}": must be of type integer or string'
    expected = schema.get("type")
    if isinstance(expected, list):
        expected = next((name for name in expected if name != "null"), None) if len(expected) <= 2 else None
    if expected is None:
        return None
    if expected in ("integer", "number"):
        is_number = isinstance(value, int if expected == "integer" else (int, float)) and not isinstance(value, bool)
        is_right = is_number or (expected == "integer" and isinstance(value, float) and value.is_integer())
    else:
        is_right = isinstance(value, _GO_TYPES[expected])
    if is_right:
        return None
    actual = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}.get(type(value), "number")
    return f'Invalid value: "{actual}": must be of type {expected}: "{actual}"'


def _violations(schema: Schema, value: Any) -> list[str]:
    messages = []
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(f'"{option}"' for option in schema["enum"])
        messages.append(f'Unsupported value: "{value}": supported values: {supported}')
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            messages.append(f"Invalid value: {value}: should be greater than or equal to {schema['minimum']}")
        if "maximum" in schema and value > schema["maximum"]:
            messages.append(f"Invalid value: {value}: should be less than or equal to {schema['maximum']}")
        if schema.get("format") == "int32" and not -(2**31) <= value < 2**31:
            messages.append(f"Invalid value: {value}: should be in the range of int32")
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            messages.append(f'Invalid value: "{value}": should be at least {schema["minLength"]} chars long')
        if "maxLength" in schema and len(value) > schema["maxLength"]:
            messages.append(f"Too long: may not be more than {schema['maxLength']} bytes")
        if "pattern" in schema and not _pattern(schema["pattern"]).search(value):
            messages.append(f"Invalid value: \"{value}\": should match '{schema['pattern']}'")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            messages.append(f"Invalid value: {len(value)}: should have at least {schema['minItems']} items")
        if "maxItems" in schema and len(value) > schema["maxItems"]:
            messages.append(f"Too many: {len(value)}: must have at most {schema['maxItems']} items")
    return messages


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)
