"""Router specs, one class per router.

A layer's spec is flat: its router's fields are written next to its own; those of other routers are refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from moe.spec.errors import Problem, SpecError, spec_error
from moe.spec.routers.expert_choice import ExpertChoiceSpec
from moe.spec.routers.gshard import GShardTop2Spec
from moe.spec.routers.router import AuxiliaryLoss, BalancedSpec, GatedTopKSpec, RouterSpec, Scope, TokenChoiceSpec
from moe.spec.routers.sigmoid import SigmoidTopKSpec
from moe.spec.routers.sinkhorn import SinkhornTopKSpec
from moe.spec.routers.softmax import SoftmaxTopKSpec
from moe.spec.routers.sparsemixer import SparseMixerSpec
from moe.spec.routers.switch import SwitchTop1Spec

DEFAULT = GShardTop2Spec()

ROUTERS: dict[str, type[RouterSpec]] = {
    router.model_fields["router"].default: router
    for router in (
        GShardTop2Spec,
        SwitchTop1Spec,
        SoftmaxTopKSpec,
        SigmoidTopKSpec,
        SinkhornTopKSpec,
        SparseMixerSpec,
        ExpertChoiceSpec,
    )
}
"""Router specs by name. External routers are added here and to `moe.routing.ROUTERS`."""


def router_fields() -> set[str]:
    """Names of all routers' fields, and `router`."""
    return {field for router in ROUTERS.values() for field in router.model_fields}


def router_spec(plain: Any) -> Any:
    """Parse plain data. Raises SpecError with every problem."""
    if not isinstance(plain, dict):
        return plain
    name = plain.get("router", DEFAULT.router)
    if not isinstance(name, str) or name not in ROUTERS:
        *first, last = map(repr, ROUTERS)
        raise spec_error("not_a_choice", "router", name, f"must be {', '.join(first)} or {last}", "use one of them")
    if foreign := sorted(plain.keys() - ROUTERS[name].model_fields.keys()):
        raise SpecError(
            Problem("unknown_key", field, plain[field], f"is not a field of the router {name}",
                    f"omit it, or use {' or '.join(_owners(field))}")
            for field in foreign
        )  # fmt: skip
    return ROUTERS[name](**plain)


def _owners(field: str) -> list[str]:
    return [name for name, router in ROUTERS.items() if field in router.model_fields]


def for_router(router: Any, preset_fields: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's layer fields, without those of its router if another router is requested."""
    if router in (None, preset_fields.get("router", DEFAULT.router)):
        return dict(preset_fields)
    fields = router_fields()
    return {name: value for name, value in preset_fields.items() if name not in fields}


def flatten_schema(schema: dict[str, Any]) -> None:
    """Add all routers' fields to a layer's JSON Schema."""
    if "properties" not in schema:  # serialization schema
        return
    by_field: dict[str, dict[str, dict[str, Any]]] = {}
    for name, router in ROUTERS.items():
        for field, schema_of_field in router.model_json_schema()["properties"].items():
            by_field.setdefault(field, {})[name] = schema_of_field
    del by_field["router"]
    description = " ".join(f"`{name}`: {(router.__doc__ or '').splitlines()[0]}" for name, router in ROUTERS.items())
    schema["properties"]["router"] = {
        "default": DEFAULT.router, "description": description, "enum": [*ROUTERS], "title": "Router", "type": "string",
    }  # fmt: skip
    schema["properties"].update({field: _common_schema(schemas) for field, schemas in by_field.items()})


def _common_schema(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Schema of a field of several routers, with their defaults if different."""
    first, *rest = schemas.values()
    if all(schema == first for schema in rest):
        return first
    defaults = ", ".join(f"{json.dumps(schema.get('default'))} for `{name}`" for name, schema in schemas.items())
    common = {key: value for key, value in first.items() if key != "default"}
    return {**common, "description": f"{first.get('description', '')} By default {defaults}."}


__all__ = [
    "DEFAULT", "ROUTERS", "AuxiliaryLoss", "BalancedSpec", "ExpertChoiceSpec", "GShardTop2Spec", "GatedTopKSpec",
    "RouterSpec", "Scope", "SigmoidTopKSpec", "SinkhornTopKSpec", "SoftmaxTopKSpec", "SparseMixerSpec",
    "SwitchTop1Spec", "TokenChoiceSpec", "for_router", "router_fields", "router_spec", "flatten_schema",
]  # fmt: skip
