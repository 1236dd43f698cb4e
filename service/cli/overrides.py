"""Overrides of a job's fields: `--set train.num_steps=4000`."""

from copy import deepcopy
from typing import Any

from moe.spec import parse_text
from moe.spec.routers import for_router
from service.cli.failures import Misuse


def apply_overrides(fields: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """The plain spec with each `PATH=VALUE` (YAML) applied in order. Raises Misuse, SpecError."""
    spec = deepcopy(fields)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        *parents, last = path.split(".")
        if not equals or not all((*parents, last)):
            raise Misuse(f"--set (={assignment!r}) must be PATH=VALUE; write it as --set train.num_steps=4000")
        section: Any = spec
        for depth, key in enumerate(parents, start=1):
            if section.get(key) is None:
                section[key] = {}
            section = section[key]
            if not isinstance(section, dict):
                parent_path = ".".join(parents[:depth])
                raise Misuse(
                    f"--set (={assignment!r}) names a field of {parent_path} (={section!r}), which has no fields; "
                    f"set it as a whole, as in --set '{parent_path}={{...}}'"
                )
        section[last] = parse_text(text, f"--set {path}")
    return spec


def fork_spec(fields: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """As `apply_overrides`, for a stored spec, in which every field is explicit: if the router changes,
    router-specific fields are reset to its defaults."""
    fork = apply_overrides(fields, assignments)
    before, after = _layer(fields), _layer(fork)
    if before is None or after is None or after.get("router") == before.get("router"):
        return fork
    moe_fields = for_router(after.get("router"), before)
    return apply_overrides({**fields, "model": {**fields["model"], "moe": moe_fields}}, assignments)


def _layer(spec: dict[str, Any]) -> dict[str, Any] | None:
    model = spec.get("model")
    moe = model.get("moe") if isinstance(model, dict) else None
    return moe if isinstance(moe, dict) else None
