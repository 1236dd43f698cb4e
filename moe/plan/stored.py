"""Plans as files: what they were made for, and whether it is the same still."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe.plan.cluster.cluster import Cluster
from moe.plan.plan import MadeFor, Plan
from moe.spec import JobSpec, Problem, SpecError
from moe.spec.base import Spec
from moe.spec.problems import problems_of

PLANNER = "4"
"""Changes with what the same spec and cluster are planned to."""


def made_for(spec: JobSpec, cluster: Cluster) -> MadeFor:
    """Key of a stored plan: the spec but for what it is called, where it begins and what it keeps, and the cluster's
    facts."""
    calibration = cluster.calibration
    free = {"name", "labels", "storage", "start_from", "retry", "checkpoint"}
    return MadeFor(
        spec=_digest(_without_later(spec.resolved, free)),
        cluster=_digest(cluster.model_dump(mode="json", exclude={"calibration"})),
        calibration=None if calibration is None else _digest(calibration.model_dump(mode="json")),
        planner=PLANNER,
    )


def _without_later(spec: JobSpec, free: set[str]) -> dict[str, Any]:
    """The spec as it was written before its parts had the fields that came later, where these say nothing."""
    written = spec.model_dump(mode="json", exclude=free)
    _drop_later(written, spec)
    return written


def _drop_later(written: dict[str, Any], part: Spec) -> None:
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, Spec):
            _drop_later(written.get(name, written), value)  # a router's part is written flat
        elif name in part.later and value == field.default:
            del written[name]


def load(path: str | Path, now: Plan | None = None) -> Plan:
    """The plan in a JSON file. Raises SpecError where it is none, or was made for something else than `now`, with what
    differs; OSError where it cannot be read."""
    name = Path(path).name
    try:
        plan = Plan.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        raise SpecError([replace(each, path=f"{name}: {each.path}") for each in problems_of(error)]) from None
    if now is not None and (found := differences(plan, now)):
        others = " and another ".join(found)
        raise SpecError(Problem(name, None, f"was made for another {others}", "plan anew, and keep that"))
    return plan


def differences(plan: Plan, now: Plan) -> list[str]:
    """Differences between what two plans were made for, in words."""
    made, wanted = plan.made_for, now.made_for
    if made is None:
        return ["planner, which told nothing of what it planned for"]
    found = [part for part in MadeFor.model_fields if getattr(made, part) != getattr(wanted, part)]
    return found if plan.profile == now.profile else [*found, "profile"]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
