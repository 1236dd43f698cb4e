"""Summaries of plans in events; the full plan is in the job."""

import json
from typing import Any

from pydantic import ValidationError

from moe.plan import Plan
from moe.plan.search.explain import layout_of


def in_short(plan: Plan) -> dict[str, Any]:
    """Summary of a plan for an event."""
    summary = {
        "num_workers": plan.num_workers,
        "layout": layout_of(plan),
        "predicted_step_s": plan.predicted.step_s,
        "memory_bytes": plan.memory.total,
    }
    return summary | ({"tried": [trial.model_dump(mode="json") for trial in plan.tried]} if plan.tried else {})


def change_of(plan: Plan, before: Plan | None) -> dict[str, Any]:
    """Data of a `plan` event; `before`: the previous plan, if different."""
    return {"plan": in_short(plan), "before": before and in_short(before)}


def recorded_plan(data: dict[str, Any]) -> Plan | None:
    """Plan in a record; None if invalid."""
    try:
        return Plan.model_validate_json(json.dumps(data.get("plan")))
    except ValidationError:
        return None
