"""JSON Schema of job specs, and paths and property names of the API."""

from collections.abc import Mapping
from typing import Any

from benchmarks.digests.item import Item, Items


def without_prose(schema: Any) -> Any:
    """A schema without titles and descriptions; properties of these names stay."""
    if isinstance(schema, Mapping):
        return {
            key: {name: without_prose(part) for name, part in value.items()}
            if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping)
            else without_prose(value)
            for key, value in schema.items()
            if not (key in ("description", "title", "markdownDescription") and isinstance(value, str))
        }
    return [without_prose(part) for part in schema] if isinstance(schema, list) else schema


def properties(schema: Any) -> Any:
    """Names of properties only."""
    return sorted(schema.get("properties", {})) if isinstance(schema, Mapping) else []


def items(quick: bool) -> Items:
    """One item for each definition of the spec, and for each path and schema of the API."""
    from moe.spec import json_schema

    schema = without_prose(json_schema())
    for name, definition in schema.pop("$defs").items():
        yield Item(f"spec: {name}", definition)
    yield Item("spec: the job", schema)


def of_api(document: Mapping[str, Any]) -> Items:
    """Items of an OpenAPI document."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = {
                "parameters": sorted(
                    (parameter["in"], parameter["name"], parameter.get("required", False))
                    for parameter in operation.get("parameters", ())
                ),
                "body": sorted(operation.get("requestBody", {}).get("content", {})),
                "answers": sorted(operation.get("responses", {})),
            }
            yield Item(f"API: {method.upper()} {path}", content)
    for name, definition in document.get("components", {}).get("schemas", {}).items():
        yield Item(f"API: {name}", [name for name in properties(definition) if name != "code"])
