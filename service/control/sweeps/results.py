"""Values that members of a sweep are compared by, from their recorded steps."""

import json
import math
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection

from moe.train.best_score import held_out_value
from service.control.store.events import newest_by_step
from service.control.store.sweeps import MemberRow
from service.control.sweeps.states import MEMBER_DELETED
from service.wire.launch import Result
from service.wire.states import OVER, State

MAX_LOOKED_AT = 20
"""Newest records with the metric that are searched for a finite value."""


@dataclass(frozen=True)
class MetricValue:
    """A metric's last finite value, and the step that recorded it."""

    step: int
    value: float


def last_value(tx: Connection, job_number: int, metric: str) -> MetricValue | None:
    """Last finite value of a metric of a job; None without one."""
    key, _, name = metric.partition(".")
    for row in newest_by_step(tx, job_number, "metric", key, MAX_LOOKED_AT):
        data = json.loads(row.data)
        value = _value(data.get(key), key, name or None)
        if value is not None:
            return MetricValue(int(data["step"]), value)
    return None


def _value(recorded: Any, key: str, name: str | None) -> float | None:
    if key == "held_out":
        return held_out_value(recorded, name) if isinstance(recorded, dict) else None
    if key == "numbers":
        recorded = recorded.get(name) if isinstance(recorded, dict) else None
    is_number = isinstance(recorded, int | float) and not isinstance(recorded, bool)
    return float(recorded) if is_number and math.isfinite(recorded) else None


def value_of_member(tx: Connection, member: MemberRow, metric: str) -> MetricValue | None:
    """The stored value of a member whose job holds no resources, else its last one."""
    if (stored := read_stored(member)) is not None:
        return stored.value
    return None if member.state is None else last_value(tx, member.job_number, metric)


@dataclass(frozen=True)
class StoredValue:
    """A member's last value; valid while its job has done no further step."""

    at_step: int
    value: MetricValue | None

    def to_text(self) -> str:
        value = None if self.value is None else {"step": self.value.step, "value": self.value.value}
        return json.dumps({"at_step": self.at_step, "value": value})


def read_stored(member: MemberRow) -> StoredValue | None:
    """The member's stored value, if it is its last one."""
    if member.value is None:
        return None
    data = json.loads(member.value)
    value = None if data["value"] is None else MetricValue(**data["value"])
    is_last = member.step is None or member.step == data["at_step"]
    return StoredValue(data["at_step"], value) if is_last else None


def is_at_rung(member: MemberRow) -> bool:
    """Whether the member's run has paused at the step of its rung."""
    if member.state != State.PAUSED or member.pause_at is None or member.paused_result is None:
        return False
    try:
        result = Result.model_validate_json(member.paused_result)
    except ValidationError:
        return False
    return result.outcome == "paused" and result.step >= member.pause_at


def is_settled(member: MemberRow) -> bool:
    """Whether the member records nothing further, unless it is resumed."""
    return member.state is not None and (member.state in OVER or is_at_rung(member))


def state_of(member: MemberRow) -> str:
    """State of the member's job, also once it is deleted."""
    return member.state or MEMBER_DELETED
