"""Plans as files: what they were made for, and whether it is the same still."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe.plan.cluster import Cluster
from moe.plan.plan import MadeFor, Plan
from moe.spec import JobSpec, Problem, SpecError
from moe.spec.problems import problems_of

PLANNER = "1"
"""Changes with what the same spec and cluster are planned to."""


def made_for(spec: JobSpec, cluster: Cluster) -> MadeFor:
    """What a plan depends on: the spec but for its name, labels and storage, and the cluster's facts."""
    calibration = cluster.calibration
    return MadeFor(
        spec=_digest(
            spec.model_dump(mode="json", exclude={"name", "labels", "storage", "retry", "checkpoint"})
        ),
        cluster=_digest(cluster.model_dump(mode="json", exclude={"calibration"})),
        calibration=None if calibration is None else _digest(calibration.model_dump(mode="json")),
        planner=PLANNER,
    )


def save(plan: Plan, path: str | Path) -> None:
    """Writes a plan as JSON, the same bytes for the same plan."""
    Path(path).write_text(text_of(plan), encoding="utf-8")


def text_of(plan: Plan) -> str:
    return plan.model_dump_json(indent=1) + "\n"


def load(path: str | Path, spec: JobSpec | None = None, cluster: Cluster | None = None) -> Plan:
    """The plan in a file. Raises SpecError where it is none, and where it was made for another spec or cluster than
    those given; OSError where it cannot be read."""
    name = Path(path).name
    try:
        plan = Plan.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        raise SpecError(problems_of(error)) from None
    if spec is not None and cluster is not None and (found := differences(plan, made_for(spec, cluster))):
        raise SpecError(
            Problem(
                name, None, f"was made for another {' and another '.join(found)}", "plan anew: shardyard plan"
            )
        )
    return plan


def differences(plan: Plan, now: MadeFor | None) -> list[str]:
    """What differs between what a plan was made for and what there is now, in words."""
    made = plan.made_for
    if made is None or now is None:
        return ["planner, which told nothing of what it planned for"]
    return [part for part in MadeFor.model_fields if getattr(made, part) != getattr(now, part)]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


__all__ = ["differences", "load", "made_for", "save", "text_of"]
