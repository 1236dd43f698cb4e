"""Events for webhooks, stored in the same transaction as the change that they report."""

import base64
import json
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection

from moe.spec.errors import SpecError
from service.control.report.event_text import data_text, time_text
from service.control.report.saves import read_saves
from service.control.report.slack import slack_message
from service.control.store.clock import now_us
from service.control.store.deliveries import PENDING, insert_deliveries
from service.control.store.events import EventRow
from service.control.store.jobs import JobRow
from service.control.store.webhooks import WebhookRow, list_webhooks
from service.tracker.values import scores_of
from service.wire.states import State
from service.wire.webhooks import EventType, WebhookOptions, named_webhooks

TEST = "test"
"""Type of the event that a user sends by hand."""


def enqueue_state(tx: Connection, job: JobRow, event: EventRow, result: str | None = None) -> None:
    """Store a change of state for the webhooks that want it. `result`: the ended job's, as JSON."""
    if not (webhooks := list_webhooks(tx)):
        return
    change = json.loads(event.data)
    state = State(change["state"])
    saves, metric = read_saves(job.saves), json.loads(job.last_metric or "{}")
    committed = saves.committed
    data = {
        **change,
        "loss": metric.get("loss"),
        "checkpoint": None if committed is None else committed.model_dump(mode="json"),
        "scores": _scores(result),
    }
    _enqueue(tx, webhooks, job, event, "job.state", state, data)


def enqueue_checkpoints(tx: Connection, job: JobRow, events: Sequence[EventRow]) -> None:
    """Store committed checkpoints, of `events`, for the webhooks that want them."""
    checkpoints = [event for event in events if event.kind == "checkpoint"]
    if not checkpoints or not (webhooks := list_webhooks(tx)):
        return
    for event in checkpoints:
        _enqueue(tx, webhooks, job, event, "job.checkpoint", None, {"checkpoint": json.loads(event.data)})


def new_delivery_id() -> str:
    return "dlv-" + base64.b32encode(secrets.token_bytes(10)).decode().lower()


def body_of(options: WebhookOptions, type: str, time_us: int, data: dict[str, Any]) -> str:
    """Body of a delivery: JSON of the Standard Webhooks form, or Slack's."""
    if options.format == "slack":
        return data_text(slack_message(type, data))
    return data_text({"type": type, "timestamp": time_text(time_us), "data": data})


def read_options(row: WebhookRow) -> WebhookOptions | None:
    """Options of a stored webhook; None for those of a newer release."""
    try:
        return WebhookOptions.model_validate_json(row.options)
    except (ValidationError, SpecError):
        return None


def _enqueue(
    tx: Connection,
    webhooks: Sequence[WebhookRow],
    job: JobRow,
    event: EventRow,
    type: EventType,
    state: State | None,
    data: dict[str, Any],
) -> None:
    labels, time_us = json.loads(job.labels), now_us()
    rows, names = [], None
    for webhook in webhooks:
        options = read_options(webhook)
        if options is None or not options.wants(type, state, labels):
            continue
        if options.jobs == "named":
            names = named_webhooks(json.loads(job.spec)) if names is None else names
            if webhook.name not in names:
                continue
        facts = {
            "job": {
                "id": job.id, "name": job.name, "owner": job.owner, "labels": labels, "attempt": job.attempt,
                "step": job.step, "num_steps": job.num_steps, "created_at": time_text(job.created_at),
            },
            "event_id": event.id,
            **data,
        }  # fmt: skip
        rows.append(
            {
                "id": new_delivery_id(), "webhook_id": webhook.id, "type": type, "job_id": job.id,
                "body": body_of(options, type, event.time, facts), "created_at": time_us, "queued_at": time_us,
                "due_at": time_us, "state": PENDING, "attempts": 0,
            }
        )  # fmt: skip
    insert_deliveries(tx, rows)


def _scores(result: str | None) -> dict[str, float]:
    report = json.loads(result or "{}").get("report")
    return scores_of(report) if isinstance(report, dict) else {}
