"""History of a job's steps, thinned, with the newest record of each step."""

import json
import statistics
from collections.abc import Iterable
from typing import Any

from moe.records import StepRecord
from service.control.report.curve_store import CurveStore
from service.control.report.curves import WITHOUT_NUMBER
from service.control.report.event_text import time_text
from service.control.store.database import Database
from service.control.store.events import EventRow, events_by_id, first_by_step, newest_events, sampled_by_step

NEWEST_STEPS = 200


def measured_step(database: Database, job_number: int, attempt: int, tokens_per_step: int) -> dict[str, Any] | None:
    """Median duration of the newest steps of `attempt` as a `Measurement`; None before the second step. The oldest
    step found is skipped, as it may include warm-up."""
    with database.read() as tx:
        rows = newest_events(tx, job_number, "metric", attempt, NEWEST_STEPS)
    step_seconds = (StepRecord.read(json.loads(row.data)).step_s for row in rows[:-1])
    seconds = [step_s for step_s in step_seconds if step_s is not None and step_s > 0]
    if not seconds:
        return None
    step_s = statistics.median(seconds)
    return {"num_steps": len(seconds), "step_s": step_s, "tokens_per_s": tokens_per_step / step_s}


def measured_load_skew(database: Database, job_number: int) -> float | None:
    """Expert load skew: rows of the busiest expert over the mean, mean over layers, median over the newest steps;
    None without records."""
    with database.read() as tx:
        rows = newest_events(tx, job_number, "metric", None, NEWEST_STEPS)
    steps = (StepRecord.read(json.loads(row.data)) for row in rows)
    skews = [[skew for layer in step.layers if (skew := layer.max_over_mean) is not None] for step in steps]
    means = [statistics.fmean(layer_skews) for layer_skews in skews if layer_skews]
    return statistics.median(means) if means else None


def metric_history(
    database: Database, curves: CurveStore, job_number: int, name: str | None, since_step: int, max_points: int
) -> list[dict[str, Any]]:
    """At most `max_points` points, in order: spread evenly over all steps; with `name`, only that value, of a number
    including its extremes."""
    ids = None
    with curves.read(job_number) as columns:
        if name is None:
            ids = columns.step_ids(since_step, None, max_points)
        elif name in columns.names:
            ids = columns.curve_ids(name, since_step, max_points)
        elif name in WITHOUT_NUMBER:
            ids = columns.text_ids(name, since_step, None, max_points)
    with database.read() as tx:
        if ids is None:
            ids = sampled_by_step(tx, job_number, "metric", since_step, max_points, name)
        rows = events_by_id(tx, job_number, ids)
    return _points(rows, name)


def metric_page(
    database: Database, job_number: int, name: str | None, since_step: int, limit: int
) -> tuple[list[dict[str, Any]], int | None]:
    """(points of the first `limit` steps from `since_step` on, first step of the next page or None)."""
    with database.read() as tx:
        ids = first_by_step(tx, job_number, "metric", since_step, limit + 1, name)
        rows = events_by_id(tx, job_number, ids)
    steps = sorted(json.loads(row.data)["step"] for row in rows)
    next_step = steps[limit] if len(steps) > limit else None
    points = _points(rows, name)
    return [point for point in points if next_step is None or point["step"] < next_step], next_step


def _points(rows: Iterable[EventRow], name: str | None) -> list[dict[str, Any]]:
    points = []
    for row in rows:
        data = json.loads(row.data)
        step = data["step"]
        if name is not None:
            outer, _, inner = name.partition(".")
            if name in data:
                data = {name: data[name]}
            elif isinstance(data.get(outer), dict) and inner in data[outer]:
                data = {name: data[outer][inner]}
            else:
                continue
        else:
            for long_field in ("samples", "label_loads"):  # only by name
                data.pop(long_field, None)
        points.append({"step": step, "time": time_text(row.time), "attempt": row.attempt, **data})
    return sorted(points, key=lambda point: int(point["step"]))
