"""A custom resource definition as a check of manifests.

It refuses unknown fields, which an API server would drop silently, and evaluates the definition's CEL rules.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import celpy
import jsonschema
from celpy.adapter import json_to_cel

Schema = dict[str, Any]

Kind = tuple[str, str]
"""apiVersion and kind."""


def version(definition: Schema, name: str) -> Schema:
    """Schema of one version of a definition."""
    (entry,) = [v for v in definition["spec"]["versions"] if v["name"] == name]
    return entry["schema"]["openAPIV3Schema"]


def errors(schema: Schema, manifest: Schema) -> list[str]:
    """Errors of a manifest with its defaults filled in, including unknown fields and broken rules."""
    complete = with_defaults(schema, manifest)
    validator = jsonschema.Draft202012Validator(close_schema(schema))
    # Rules are evaluated on valid values only, as the API server does it.
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(complete)] or list(
        broken_rules(schema, complete)
    )


def broken_rules(schema: Schema, value: Any, path: str = "$") -> Iterator[str]:
    """Messages of `x-kubernetes-validations` that a new object breaks; rules of transitions have no old one to see."""
    for validation in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in validation["rule"] and not _holds(validation["rule"], value):
            yield f"{path}: {validation.get('message') or validation['rule']}"
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for key, part in value.items():
            if isinstance(part_schema := properties.get(key, rest), dict):
                yield from broken_rules(part_schema, part, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from broken_rules(schema.get("items", {}), item, f"{path}[{i}]")


def _holds(rule: str, value: Any) -> bool:
    try:
        return bool(_program(rule).evaluate({"self": json_to_cel(value)}))
    except celpy.CELEvalError:  # such as a missing field: refused by the API server, too
        return False


@functools.cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def with_defaults(schema: Schema, value: Any) -> Any:
    """Value as the API server stores it, with the defaults of the schema."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        defaults = {key: copy.deepcopy(s["default"]) for key, s in properties.items() if "default" in s}
        extra = schema.get("additionalProperties")
        rest = extra if isinstance(extra, dict) else {}
        return {k: with_defaults(properties.get(k, rest), v) for k, v in {**defaults, **value}.items()}
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), item) for item in value]
    return value


def close_schema(schema: Schema, *, is_root: bool = True) -> Schema:
    """Schema that refuses unknown fields in every object with declared fields."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {k: close_schema(s, is_root=False) for k, s in schema["properties"].items()}
        # The root's metadata is described by Kubernetes itself, not by the definition.
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = close_schema(schema["additionalProperties"], is_root=False)
    if isinstance(schema.get("items"), dict):
        result["items"] = close_schema(schema["items"], is_root=False)
    if is_root:
        result["properties"] = {**result["properties"], "metadata": {"type": "object"}}
    return result
