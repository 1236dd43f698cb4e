"""Plan files, and digests of planner inputs."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from moe.plan.cluster.cluster import Cluster
from moe.plan.plan import MadeFor, Plan
from moe.spec import JobSpec, SpecError, spec_error
from moe.spec.problems import problems_of

PLANNER = "26"
"""Changes if the same spec and cluster get a different plan."""
_UNPLANNED_FIELDS = frozenset({"name", "labels", "storage", "start_from", "retry", "checkpoint"})
"""Spec fields that plans do not depend on."""


def made_for(spec: JobSpec, cluster: Cluster) -> MadeFor:
    """Digests of a plan's inputs: the spec and the cluster's facts."""
    calibration = cluster.calibration
    return MadeFor(
        spec=_digest_of_spec(spec),
        cluster=_digest(_facts(cluster)),
        calibration=None if calibration is None else _digest(calibration.model_dump(mode="json")),
        planner=PLANNER,
    )


def with_spec(plan: Plan, spec: JobSpec) -> Plan:
    """Return the plan as made for `spec`, which differs from its own spec only in fields that planning ignores."""
    if plan.made_for is None:
        return plan
    return plan.model_copy(update={"made_for": plan.made_for.model_copy(update={"spec": _digest_of_spec(spec)})})


def _digest_of_spec(spec: JobSpec) -> str:
    return _digest(_planned_fields(spec))


def _planned_fields(spec: JobSpec) -> dict[str, Any]:
    return {name: value for name, value in non_default_fields(spec.resolved).items() if name not in _UNPLANNED_FIELDS}


def _facts(cluster: Cluster) -> dict[str, Any]:
    return cluster.model_dump(mode="json", exclude={"calibration", "price_per_hour", "billing_unit"})


def non_default_fields(value: Any) -> Any:
    """Return a spec's fields that differ from their defaults, so that digests ignore defaults written out and fields
    added by later releases. Discriminators such as `kind` stay."""
    match value:
        case BaseModel():
            fields = type(value).model_fields.items()
            return {
                name: non_default_fields(item)
                for name, field in fields
                if (item := getattr(value, name)) != field.get_default(call_default_factory=True)
                or _is_discriminator(field)
            }
        case list() | tuple():
            return [non_default_fields(element) for element in value]
        case dict():
            return {key: non_default_fields(element) for key, element in value.items()}
        case _:
            return value


def _is_discriminator(field: FieldInfo) -> bool:
    """Whether the field is a discriminator: a literal with a single value."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def load(path: str | Path) -> Plan:
    """Read a plan from a JSON file. Raises SpecError if it is not a plan, OSError if it cannot be read."""
    name, text = Path(path).name, Path(path).read_bytes()
    try:
        return Plan.model_validate_json(text)
    except ValidationError as error:
        if any(detail["type"] == "json_invalid" for detail in error.errors()):
            raise spec_error("invalid_syntax", name, None, "is not a plan",
                             "name a file written by `shardyard plan` with --save or --json") from None  # fmt: skip
        if isinstance(data := json.loads(text), dict) and {"stored", "considered"} < data.keys():
            raise spec_error(
                "wrong_type", name, None, "is the plan of a module", "name the plan of a job, written by --save"
            ) from None
        raise SpecError([replace(problem, path=f"{name}: {problem.path}") for problem in problems_of(error)]) from None


def require_same(stored_plan: Plan, new_plan: Plan, name: str) -> None:
    """Raise SpecError if the plan stored in file `name` was made for different inputs from `new_plan`."""
    if parts := differences(stored_plan, new_plan):
        parts_in_words = " and another ".join(parts)
        raise spec_error("mismatch", name, None, f"was made for another {parts_in_words}", "plan again and save that")


def differences(plan: Plan, new_plan: Plan) -> list[str]:
    """Names of the inputs that differ."""
    origin, current = plan.made_for, new_plan.made_for
    if origin is None:
        return ["planner, which did not record its inputs"]
    parts = [part for part in MadeFor.model_fields if getattr(origin, part) != getattr(current, part)]
    parts += ["profile"] * (plan.profile != new_plan.profile)
    return parts + ["software"] * (plan.software != new_plan.software)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
